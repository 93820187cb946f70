"""ListOps in the official layout: ``listops-1000/basic_train.tsv`` and so on, a header, then source and target.

Every thousand examples are a file of their own until all are there. An example is decided by the seed, its split and
its number. Should two be the same, which is rare, the later one is drawn again when the files are put together.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import NamedTuple

from tost._io import atomic_path
from tost.data._pool import Tick, WorkerPool
from tost.data.lra.generate.options import ListOpsFilesOptions
from tost.data.lra.grammar import SPLITS, ListOpsGenerator, listops_text
from tost.data.prepare import Report
from tost.data.toy.options import ListOpsOptions

FOLDER = "listops-1000"
"""Folder in the official release; the number means nothing."""

HEADER = "Source\tTarget\n"

_PARTS = "parts"  # folder of the parts until they are joined
_PART = 1000  # examples of a unit of work


class _Part(NamedTuple):
    folder: Path
    limits: ListOpsOptions
    seed: int
    split: str
    first: int
    size: int

    @property
    def path(self) -> Path:
        return self.folder / _PARTS / f"{self.split}-{self.first:08d}.tsv"


def prepare_listops(options: ListOpsFilesOptions, out: Path, *, workers: int, report: Report) -> dict[str, object]:
    """Generate ListOps; see `tost.data.prepare.prepare`."""
    folder, counts = out / FOLDER, options.counts()
    parts = [
        _Part(folder, options.limits(), options.seed, split, first, min(_PART, count - first))
        for split, count in counts.items()
        for first in range(0, count, _PART)
    ]
    files = [folder / f"basic_{split}.tsv" for split in counts]
    facts: dict[str, object] = {**counts, "folder": str(folder)}
    if not (folder / _PARTS).exists() and all(file.is_file() for file in files):
        return {**facts, "already there": True}
    missing = [part for part in parts if not part.path.is_file()]
    done = options.count - sum(part.size for part in missing)
    with WorkerPool(min(workers, len(missing))) as pool:
        for _ in pool.run(_write_part, missing, report=report, total=options.count, what="examples", done=done):
            pass
    facts["fingerprint"] = _join(parts, counts, folder)[:12]
    shutil.rmtree(folder / _PARTS)
    return facts


def _write_part(part: _Part, tick: Tick) -> None:
    generator = ListOpsGenerator(part.limits, part.seed)
    with atomic_path(part.path, sync=False) as draft, draft.open("wb") as file:
        for index in range(part.first, part.first + part.size):
            file.write(_line(*generator.example(SPLITS[part.split], index, lambda tokens: False)))
    tick(part.size)


def _line(tokens: bytes, value: int) -> bytes:
    return f"{listops_text(tokens)}\t{value}\n".encode("ascii")


def _join(parts: list[_Part], counts: dict[str, int], folder: Path) -> str:
    """Put the parts together, without the repetitions; return the SHA-256 of all."""
    seen: set[bytes] = set()
    digest = hashlib.sha256()
    # The splits in the order of their numbers, so that the validation set does not depend on the size of the others.
    for split in sorted(counts, key=SPLITS.__getitem__):
        with atomic_path(folder / f"basic_{split}.tsv", sync=False) as draft, draft.open("wb") as file:
            file.write(HEADER.encode())
            for part in parts:
                if part.split != split:
                    continue
                with part.path.open("rb") as lines:
                    for index, line in enumerate(lines, part.first):
                        unique = _first_time(line, part, index, seen)
                        file.write(unique)
                        digest.update(unique)
    return digest.hexdigest()


def _first_time(line: bytes, part: _Part, index: int, seen: set[bytes]) -> bytes:
    """Return a line that was not seen before: the one given, or the next that its own sequence of draws brings."""
    if _key(line) in seen:
        generator = ListOpsGenerator(part.limits, part.seed)
        line = _line(*generator.example(SPLITS[part.split], index, lambda tokens: _key(_line(tokens, 0)) in seen))
    seen.add(_key(line))
    return line


def _key(line: bytes) -> bytes:
    return hashlib.blake2b(line.partition(b"\t")[0], digest_size=16).digest()
