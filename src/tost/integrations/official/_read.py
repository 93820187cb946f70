"""Read checkpoint files from elsewhere without running code in them.

A pickle is a program. It is read with torch's restricted reader, which builds tensors and plain containers only.
Besides the weights such files hold the settings of the run, which are objects of a few well-known classes; each of
these is replaced by an inert stand-in while it is read, and every other class or function is refused by name.
"""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tost.errors import CheckpointError

Source = str | os.PathLike[str] | Mapping[str, Any]
Weights = Literal["model", "ema"]

# Entries that hold the weights, by the kind of weights: the authors' two programs, timm, and common habits.
_ENTRIES: dict[str, tuple[str, ...]] = {
    "model": ("model", "state_dict", "model_state_dict", "net"),
    "ema": ("model_ema", "state_dict_ema", "ema"),
}
# Added by torch.compile and by data parallelism in front of every name.
_PREFIXES = ("_orig_mod.", "module.")
_MOST_SHARED = 4  # bytes of tensors per byte of the file: a head may be the embedding, an average the weights
_ANY_ENTRY = {name for names in _ENTRIES.values() for name in names}


class _Inert:
    """Placeholder for unneeded pickled classes."""

    def __new__(cls, *args: Any) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


# Settings of a run (argparse), the folder that a scheduler gave it (pathlib), the best loss so far (numpy).
_HARMLESS = (
    "argparse.Namespace",
    *(f"pathlib{private}.{kind}" for private in ("", "._local") for kind in ("PosixPath", "WindowsPath")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    "numpy.dtype",
    "numpy.ndarray",
)


def read_state(source: Source, weights: str = "model") -> dict[str, Tensor]:
    """Return the weights of a checkpoint by name, without the prefixes of wrappers."""
    if weights not in _ENTRIES:
        raise CheckpointError(f"weights={weights!r} is not known; it takes 'model' or 'ema'")
    if isinstance(source, Mapping):
        return _strip(_unwrap(source, weights, "the dictionary"))
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(
            f"a {type(source).__name__} was given; pass the path of a checkpoint, or a state dict such as "
            "model.state_dict()"
        )
    path = Path(source)
    state = _strip(_unwrap(_read_file(path), weights, str(path)))
    needed, held = sum(tensor.nbytes for tensor in state.values()), path.stat().st_size
    if needed > _MOST_SHARED * held:
        raise CheckpointError(
            f"{path} has {held:,} bytes, but its tensors would take {needed:,}: they repeat their values many times, "
            "which no checkpoint of a model does. It was refused."
        )
    return state


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder; a checkpoint of the authors is a file such as checkpoint.pth or ckpt.pt. "
            "Runs and models of this package are loaded with tost.load_model."
        )
    try:
        with path.open("rb") as file:
            head = file.read(16)
        if head[8:9] == b"{":  # the length of a header, then the header, which is JSON
            with safe_open(path, framework="pt") as tensors:
                return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Get it again.") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if head[:2] == b"PK" or head[:1] == b"\x80":
        return _read_pickle(path)
    raise CheckpointError(
        f"{path} is neither a PyTorch checkpoint nor a safetensors file (it starts with {head[:8]!r}); "
        "if it was downloaded, it may be an error page or an archive to unpack first"
    )


def _read_pickle(path: Path) -> Mapping[str, Any]:
    _refuse_packed(path)
    stand_ins: list[Any] = [(_Inert, name) for name in _HARMLESS]
    try:
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on old formats; what matters becomes an error below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make the reader fail in any way
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path} asks for {refused[1]} to be used while it is read, which is neither a tensor nor a plain "
                "setting. It was refused and no code in the file was run. If you trust the file, load it with PyTorch "
                "yourself and pass the state dict."
            ) from None
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or not a PyTorch checkpoint ({reason}); no code in it was run. Get it again."
        ) from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; a dictionary of tensors is needed")
    return content


def _refuse_packed(path: Path) -> None:
    """Refuse an archive that unpacks to more than it is; PyTorch packs without compression."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return  # not an archive, or torch reports what is wrong with it
    if unpacked > path.stat().st_size:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes and unpacks to {unpacked:,}, which no checkpoint of PyTorch "
            "does. It was refused."
        )


def _unwrap(content: Mapping[str, Any], weights: str, place: str) -> Mapping[str, Any]:
    """Find the state dict in the content of a file."""
    wrapped = any(isinstance(content.get(entry), Mapping) for entry in _ANY_ENTRY)
    for entry in _ENTRIES[weights]:
        if isinstance(content.get(entry), Mapping):
            return content[entry]
    held = ", ".join(map(str, list(content)[:10])) or "nothing"
    if wrapped or weights == "ema":
        raise CheckpointError(
            f"{place} holds no entry {_ENTRIES[weights][0]!r} with the weights asked for (weights={weights!r}); "
            f"it holds {held}"
        )
    if not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{place} holds no weights; it holds {held}")
    return content


def _strip(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Remove the prefixes of wrappers; refuse anything but plain tensors."""
    strange = [
        f"{name} ({type(value).__name__ if not isinstance(value, Tensor) else value.layout})"
        for name, value in state.items()
        if not isinstance(value, Tensor) or value.is_quantized or value.layout != torch.strided
    ]
    if strange:
        raise CheckpointError(f"among the weights are things that are not plain tensors: {', '.join(strange[:10])}")
    names = [str(name) for name in state]
    while prefix := next((p for p in _PREFIXES if names and all(name.startswith(p) for name in names)), None):
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, state.values(), strict=True))
