"""Pathfinder images as files, in the official layout.

``pathfinder32/curv_contour_length_14/`` holds ``imgs/<batch>/sample_<i>.png`` and ``metadata/<batch>.npy``, which is
plain text in spite of its name. Beside them is ``contours/<batch>.npz`` with the curves themselves, the fields of
`tost.data.lra.generate.pathfinder.paint.Pictures` other than the pixels.

A unit of work is a few hundred images with a seed of their own. A batch of a thousand has its metadata once it is done.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tost._io import atomic_path
from tost._text import grouped
from tost.data._pool import Tick, WorkerPool
from tost.data._random import mix
from tost.data.lra.generate.options import PathfinderFilesOptions
from tost.data.lra.generate.pathfinder.paint import make_pictures
from tost.data.lra.generate.pathfinder.settings import FOLDERS, PathfinderSettings, pathfinder_settings
from tost.data.prepare import Report

_PARTS = "parts"  # folder of the records of units until their batch is complete
_BATCH = 1000  # images of a folder, as in the release
_UNIT = 250  # images that are made together; divides the above
_RECORDS = ("labels", "margins", "markers", "targets", "distractors")


class _Unit(NamedTuple):
    folder: Path
    settings: PathfinderSettings
    seed: int
    number: int
    size: int

    @property
    def batch(self) -> int:
        return self.number * _UNIT // _BATCH

    @property
    def first(self) -> int:
        return self.number * _UNIT % _BATCH

    @property
    def record(self) -> Path:
        return self.folder / _PARTS / f"{self.number}.npz"


def prepare_pathfinder(
    options: PathfinderFilesOptions, out: Path, *, workers: int, report: Report
) -> dict[str, object]:
    """Generate Pathfinder images; see `tost.data.prepare.prepare`."""
    settings = pathfinder_settings(options.resolution, options.difficulty)
    folder = out / f"pathfinder{options.resolution}" / FOLDERS[options.difficulty]
    seed = mix(options.seed, settings.size, settings.contour_length)
    units = [
        _Unit(folder, settings, mix(seed, first // _UNIT), first // _UNIT, min(_UNIT, options.count - first))
        for first in range(0, options.count, _UNIT)
    ]
    batches = grouped(units, lambda unit: unit.batch)
    facts: dict[str, object] = {"images": options.count, "batches": len(batches), "folder": str(folder)}
    missing = [unit for unit in units if not _metadata(unit).is_file()]
    if not missing and not (folder / _PARTS).exists():
        return {**facts, "already there": True}
    missing = [unit for unit in missing if not unit.record.is_file()]
    done = options.count - sum(unit.size for unit in missing)
    with WorkerPool(min(workers, len(missing))) as pool:
        for unit, _ in pool.run(_write_unit, missing, report=report, total=options.count, what="images", done=done):
            _finish_batch(batches[unit.batch])
    for batch in batches.values():  # those whose last unit was done before an interruption
        _finish_batch(batch)
    shutil.rmtree(folder / _PARTS, ignore_errors=True)
    return facts


def _metadata(unit: _Unit) -> Path:
    return unit.folder / "metadata" / f"{unit.batch}.npy"


def _write_unit(unit: _Unit, tick: Tick) -> None:
    made = make_pictures(unit.settings, unit.size, unit.seed)
    images = unit.folder / "imgs" / str(unit.batch)
    images.mkdir(parents=True, exist_ok=True)
    for place, pixels in enumerate(made.pixels, unit.first):
        Image.fromarray(pixels).save(images / f"sample_{place}.png")
    with atomic_path(unit.record, sync=False) as draft, draft.open("wb") as file:
        np.savez(file, allow_pickle=False, **{key: getattr(made, key) for key in _RECORDS})
    tick(unit.size)


def _finish_batch(units: list[_Unit]) -> None:
    """Write the records of a batch if all its units are done and it has none yet."""
    path = _metadata(units[0])
    if path.is_file() or not all(unit.record.is_file() for unit in units):
        return
    records = [_read(unit.record) for unit in units]
    whole = {key: np.concatenate([record[key] for record in records]) for key in _RECORDS}
    contours = units[0].folder / "contours" / f"{units[0].batch}.npz"
    with atomic_path(contours, sync=False) as draft, draft.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **whole)
    with atomic_path(path, sync=False) as draft, draft.open("wb") as file:
        for number, (label, margin) in enumerate(zip(whole["labels"], whole["margins"], strict=True)):
            file.write(_line(units[0], number, int(label), int(margin)))
    for unit in units:
        unit.record.unlink()


def _read(path: Path) -> dict[str, NDArray[np.int16]]:
    with np.load(path, allow_pickle=False) as file:
        return {key: file[key] for key in _RECORDS}


def _line(unit: _Unit, number: int, label: int, margin: int) -> bytes:
    sizes = unit.settings
    lengths = f"{sizes.contour_length} {sizes.distractor_length} {sizes.dash_length} {sizes.dash_thickness}"
    # The last number: contrasts of a dash to choose from.
    line = f"imgs/{unit.batch} sample_{number}.png {number} {label} {sizes.continuity} {lengths} {margin} 1\n"
    return line.encode()
