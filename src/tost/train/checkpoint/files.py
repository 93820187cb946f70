"""Checkpoints that survive being interrupted at any instant, and that never run anybody's code when they are read.

A checkpoint is a folder ``step-00001000`` of safetensors files and JSON. It is written under a temporary name, every
file is flushed to the disk, a manifest with sizes and hashes is written last, and then the folder is renamed: a reader
sees either a whole checkpoint or none. A checkpoint that does not match its manifest (a bit flipped, a file cut short)
is refused with one line, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tost.errors import CheckpointError

__all__ = [
    "CheckpointStore",
    "TensorTree",
    "load_tensors",
    "read_json",
    "read_model_tensors",
    "resolve_checkpoint",
    "write_bytes",
    "write_json",
]

TensorTree = Mapping[str, Tensor]
MANIFEST = "manifest.json"
PREFIX = "step-"


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_bytes(temporary, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        CheckpointError: The file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file.

    Raises:
        CheckpointError: The file is missing or is not safetensors. A pickle is refused by its first bytes, unread.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        with path.open("rb") as stream:
            head = stream.read(2)
        kind = "a pickle or PyTorch archive" if head[:1] == b"\x80" or head == b"PK" else "not a safetensors file"
        raise CheckpointError(
            f"{path} is {kind} ({error}). Checkpoints of tost are safetensors; pickles are never opened, because "
            "reading one runs code from it. Convert foreign weights with `tost convert`."
        ) from error


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: Where the ``step-*`` folders lie.
        keep: How many of the newest to keep; the best one is kept besides.
    """

    folder: Path
    keep: int = 2

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` steps."""
        return self.folder / f"{PREFIX}{step:08d}"

    def begin(self, step: int) -> Path:
        """Return an empty temporary folder for the checkpoint after `step` steps, on every process the same."""
        return self.folder / f".tmp-{PREFIX}{step:08d}"

    def prepare(self, step: int) -> Path:
        """Empty and create the temporary folder. Called by one process before any writes into it."""
        temporary = self.begin(step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        return temporary

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that could not be finished."""
        shutil.rmtree(self.begin(step), ignore_errors=True)

    def commit(self, step: int, *, best: bool = False) -> Path:
        """Turn the temporary folder into the checkpoint: manifest, rename, pointers, and remove the old ones."""
        temporary, final = self.begin(step), self.path(step)
        files = sorted(path for path in temporary.iterdir() if path.is_file())
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files}
        write_json(temporary / MANIFEST, manifest)
        _sync_folder(temporary)
        if final.exists():  # the same step again, after a resume from an older checkpoint
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(self.folder)
        self._point("last", final)
        if best:
            self._point("best", final)
        self._remove_old()
        return final

    def newest(self, report: Callable[[str], None]) -> Path | None:
        """Return the newest checkpoint that is whole; `report` gets one line for each one that is not."""
        for path in sorted(self.folder.glob(f"{PREFIX}*"), reverse=True):
            problem = verify(path)
            if problem is None:
                return path
            report(f"checkpoint {path.name} is damaged ({problem}), using the one before it")
        return None

    def _point(self, name: str, target: Path) -> None:
        temporary = self.folder / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        temporary.replace(self.folder / name)

    def _remove_old(self) -> None:
        best = self.folder / "best"
        protected = {best.resolve()} if best.is_symlink() else set()
        for path in sorted(self.folder.glob(f"{PREFIX}*"))[: -self.keep]:
            if path.resolve() not in protected:
                # The manifest goes first: an interrupted removal leaves nothing that looks whole.
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)
        for path in self.folder.glob(f".tmp-{PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)


def verify(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if it matches its manifest."""
    if not (path / MANIFEST).is_file():
        return f"no {MANIFEST}"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, entry in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
            if _digest(file) != entry["sha256"]:
                return f"{name} does not match its hash"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def save_tensors(path: Path, tensors: TensorTree) -> None:
    """Write tensors to a safetensors file and wait until they are on the disk."""
    dense = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write_bytes(path, save(_without_shared_memory(dense)))


def _without_shared_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share storage with an earlier one (tied weights): the format stores each by itself."""
    seen: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if tensor.numel() and address in seen else tensor
        seen.add(address)
    return result


def resolve_checkpoint(path: Path, report: Callable[[str], None]) -> Path:
    """Find the checkpoint that a user means by `path`: a checkpoint folder, or a run folder for its newest one.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a checkpoint is a folder such as RUN/checkpoints/last. For foreign weights "
            "use `tost convert`; a pickle is never opened."
        )
    if (path / MANIFEST).is_file():
        problem = verify(path)
        if problem is not None:
            raise CheckpointError(f"checkpoint {path} is damaged: {problem}. Use another one of the run.")
        return path.resolve()
    found = CheckpointStore(path / "checkpoints").newest(report) if (path / "checkpoints").is_dir() else None
    if found is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; give a run folder (with checkpoints/ in it) or a folder such as "
            "RUN/checkpoints/step-00001000."
        )
    return found


def read_model_tensors(checkpoint: Path, *, ema: bool = False) -> dict[str, Tensor]:
    """Return the model's tensors, or their moving averages, from a checkpoint folder."""
    return load_tensors(checkpoint / ("ema.safetensors" if ema else "model.safetensors"))


def pack_rng() -> dict[str, Any]:
    """Return the state of Python's and torch's CPU random number generators as JSON values."""
    import random

    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def restore_rng(packed: Mapping[str, Any]) -> None:
    """Restore what `pack_rng` returned."""
    import random

    version, internal, gauss = packed["python"]
    random.setstate((version, tuple(internal), gauss))
    state = bytearray.fromhex(packed["torch"])
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
