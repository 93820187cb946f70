"""Checkpoints that survive an interruption at any instant, and from which no code is ever run.

A checkpoint is a folder ``step-00001000`` of safetensors files and JSON. It is written under a temporary name, every
file is flushed to the disk, a manifest with sizes and hashes is written last, and then the folder is renamed: a reader
finds either a whole checkpoint or none. A checkpoint that does not match its manifest (a bit flipped, a file cut short)
is refused with one line, and the one before it is used.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from tost._io import atomic_path, is_utf8, read_json, sha256_of, sync_folder, write_json
from tost.errors import CheckpointError, StorageError, TostError

TensorTree = Mapping[str, Tensor]
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
AVERAGES = "ema.safetensors"
PREFIX = "step-"
SHOWN = 40
"""Most differences that a message lists."""
ASIDE = "set-aside-"
"""Prefix of checkpoints that a run left behind when it resumed from an earlier one."""


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file.

    Raises:
        CheckpointError: The file is missing or is not safetensors. A pickle is refused by its first bytes, unread.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    try:
        if not is_utf8(path):  # which safetensors does not open
            return load(path.read_bytes())
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


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: Where the ``step-*`` folders lie.
        keep: How many of the newest to keep; the best one is kept besides. Damaged ones do not count.
    """

    folder: Path
    keep: int = 2
    _whole: set[Path] = field(default_factory=set, init=False)

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
        write_manifest(temporary)
        sync_folder(temporary)
        if final.exists():  # the same step again
            _remove(final)
        temporary.rename(final)
        sync_folder(self.folder)
        self._point("last", final)
        if best:
            self._point("best", final)
        self._remove_old(final)
        return final

    def go_on(self, step: int, start: Path | None) -> list[Path]:
        """Rename the checkpoints of later steps, which a run that resumes after `step` steps writes again.

        Args:
            step: Steps that are done.
            start: The checkpoint that the run resumes from; it gets its name back if it was set aside itself.

        Returns:
            The checkpoints by their new names, under which they are never looked for or removed.
        """
        number = next(number for number in count(1) if not any(self.folder.glob(f"{ASIDE}{number}-*")))
        here = start is not None and start.parent.resolve() == self.folder.resolve()
        name = start.name if start is not None and here else ""
        later = [path for other, path in self.steps() if other >= step and path.name != name]
        aside = [path.rename(path.with_name(f"{ASIDE}{number}-{path.name}")) for path in later]
        if name:
            (self.folder / name).rename(self.path(step))
            self._point("last", self.path(step))
        for link in (self.folder / "last", self.folder / "best"):
            if link.is_symlink() and not link.exists():
                link.unlink()
        return aside

    def newest(self, report: Callable[[str], None], files: Collection[str] | None = None) -> Path | None:
        """Return the newest checkpoint that is whole; `report` gets one line for each one that is not.

        Args:
            report: Receives the lines.
            files: Files that will be read and have to be whole; None for all.
        """
        for _, path in self.steps():
            problem = verify(path, files)
            if problem is None:
                return path
            report(f"checkpoint {path.name} is damaged ({problem}), using the one before it")
        return None

    def _point(self, name: str, target: Path) -> None:
        temporary = self.folder / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        temporary.replace(self.folder / name)

    def steps(self) -> list[tuple[int, Path]]:
        """Return the checkpoints and their steps, the latest step first; whether they are whole is not checked.

        Raises:
            StorageError: The folder cannot be read.
        """
        try:
            paths = list(self.folder.iterdir()) if self.folder.exists() else []
        except OSError as error:
            raise StorageError(f"cannot read the checkpoints in {self.folder}: {error}") from error
        numbers = {path: path.name.removeprefix(PREFIX) for path in paths if path.name.startswith(PREFIX)}
        return sorted(((int(text), path) for path, text in numbers.items() if text.isdecimal()), reverse=True)

    def _remove_old(self, committed: Path) -> None:
        """Remove what is older than the newest whole ones, but neither the best one nor the one just written."""
        self._whole.add(committed)
        protected = {committed.resolve(), (self.folder / "best").resolve()}
        kept = 1
        for _, path in self.steps():
            if kept >= self.keep:
                if path.resolve() not in protected:
                    _remove(path)
            elif path != committed and (path in self._whole or _is_whole(path)):
                self._whole.add(path)  # hashed once
                kept += 1
        for path in self.folder.glob(f".tmp-{PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    # The manifest goes first: an interrupted removal leaves no checkpoint that looks whole.
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def write_manifest(folder: Path) -> None:
    """Write sizes and hashes of all other files of a folder."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST]
    entries = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files}
    write_json(folder / MANIFEST, entries)


def _is_whole(path: Path) -> bool:
    try:
        return verify(path) is None
    except StorageError:
        return False


def verify(path: Path, files: Collection[str] | None = None) -> str | None:
    """Return what is wrong with a checkpoint, or None if it matches its manifest.

    Args:
        path: Its folder.
        files: Names of those to compare, where the checkpoint has them; None for all.

    Raises:
        StorageError: A file cannot be read, for lack of permission or because the disk fails. The checkpoint may be
            whole.
    """
    try:
        if not (path / MANIFEST).is_file():
            return f"no {MANIFEST}"
        with (path / MANIFEST).open("rb"):  # raises what `read_json` would wrap
            entries = read_json(path / MANIFEST)
        if WEIGHTS not in entries:
            return f"{MANIFEST} does not list {WEIGHTS}"
        for name, entry in entries.items():
            if Path(name).name != name:
                return f"{MANIFEST} names {name!r}, which is not a file of the checkpoint"
            file = path / name
            if files is not None and name not in files:
                continue
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
            if sha256_of(file) != entry["sha256"]:
                return f"{name} does not match its hash"
    except OSError as error:
        raise StorageError(
            f"cannot read the checkpoint {path}: {error}. It was left as it is; make it readable and try again."
        ) from error
    except (TostError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None


def save_tensors(path: Path, tensors: TensorTree) -> None:
    """Write tensors to a safetensors file, one after the other, and wait until they are on the disk.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    dense: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        one = tensor.detach().contiguous().cpu()
        address = one.untyped_storage().data_ptr()
        # Tied weights share their storage; the format stores each by itself.
        dense[name] = one.clone() if one.numel() and address in seen else one
        seen.add(address)
    with atomic_path(path) as draft:
        try:
            save_file(dense, draft)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def check_fit(here: TensorTree, there: TensorTree, source: str, remedy: str, *, spared: Collection[str] = ()) -> None:
    """Raise if two sets of tensors differ in names or shapes.

    Args:
        here: Tensors of the model.
        there: Tensors of a file.
        source: Name of the file in messages.
        remedy: Advice at the end of the message.
        spared: Names that may differ.

    Raises:
        CheckpointError: Names or shapes differ; the message lists them.
    """
    wanted, found = ({name: tuple(x.shape) for name, x in tensors.items()} for tensors in (here, there))
    wrong = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name) and name not in spared]
    if wrong:
        lines = [f"{source} belongs to another model: {len(wrong)} of {len(wanted)} tensors differ; nothing was loaded"]
        for name in wrong[:SHOWN]:
            lines.append(f"{name}: {found.get(name, 'missing')} there, {wanted.get(name, 'unknown')} here")
        lines += [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise CheckpointError("\n  ".join([*lines, remedy]))


def resolve_checkpoint(path: Path, report: Callable[[str], None], files: Collection[str] | None = None) -> Path:
    """Find the checkpoint that a user means by `path`.

    Args:
        path: A checkpoint folder, or a run folder for its newest one.
        report: Gets one line for each newer checkpoint that is damaged.
        files: Files that will be read and have to be whole; None for all. Only these are hashed.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a checkpoint is a folder such as RUN/checkpoints/last. For foreign weights "
            "use `tost convert`; a pickle is never opened."
        )
    if (path / MANIFEST).is_file():
        problem = verify(path, files)
        if problem is not None:
            raise CheckpointError(f"checkpoint {path} is damaged: {problem}. Use another one of the run.")
        return path.resolve()
    store = CheckpointStore(path / "checkpoints")
    found = store.newest(report, files)
    if found is None and (damaged := store.steps()):
        raise CheckpointError(f"none of the {len(damaged)} checkpoints in {store.folder} is whole; use another run.")
    if found is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; give a run folder (with checkpoints/ in it) or a folder such as "
            "RUN/checkpoints/step-00001000."
        )
    return found


def read_model_tensors(checkpoint: Path, *, ema: bool = False) -> dict[str, Tensor]:
    """Return the model's tensors from a checkpoint folder; with `ema` the moving averages of those that have one.

    Raises:
        CheckpointError: A file cannot be read, or there are no averages.
    """
    tensors = load_tensors(checkpoint / WEIGHTS)
    if ema and not (checkpoint / AVERAGES).is_file():
        raise CheckpointError(
            f"{checkpoint} holds no moving average of the weights; a run keeps one if train.ema_decay is set. "
            "Take the weights themselves."
        )
    return tensors | load_tensors(checkpoint / AVERAGES) if ema else tensors


def pack_rng() -> dict[str, Any]:
    """Return the state of the random number generators of Python and torch, on all devices, as JSON values."""
    version, internal, gauss = random.getstate()
    cuda = [_hex(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else []
    return {"python": [version, list(internal), gauss], "torch": _hex(torch.get_rng_state()), "cuda": cuda}


def restore_rng(packed: Mapping[str, Any]) -> None:
    """Restore what `pack_rng` returned; devices that are not there any more are left out."""
    version, internal, gauss = packed["python"]
    state = _from_hex(packed["torch"])
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state)
    if torch.cuda.is_available():
        for device, state in enumerate(packed.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_from_hex(state), device)


def _hex(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
