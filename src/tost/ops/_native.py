"""Finds and loads the native CPU library, or remembers why there is none.

The library has a plain C interface (``csrc/library.h``); the structures below mirror the ones there, field by field.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from tost import _env
from tost.errors import ConfigError

__all__ = [
    "CAUSAL_CHUNK",
    "Backward",
    "CausalBackward",
    "CausalForward",
    "Forward",
    "Shape",
    "address",
    "compiled_isas",
    "library",
    "missing",
    "native_info",
    "run",
    "select_isa",
    "shape_of",
    "why_not",
]

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Shape(ctypes.Structure):
    """Batch, tokens, heads, head width."""

    _fields_ = tuple((name, c_int64) for name in ("B", "N", "H", "D"))


class _Call(ctypes.Structure):
    """A call of the library: whole numbers, the shape, then addresses, null where an argument is absent."""

    shape: Shape


def _pointers(names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names.split()]


class Forward(_Call):
    """Non-causal forward pass."""

    _fields_ = (
        ("threads", c_int32),
        ("normalize", c_int32),
        ("shape", Shape),
        *_pointers("w temperature mask y pi squares weighted mass"),
        ("count_scaled", c_int32),
    )


class Backward(_Call):
    """Non-causal backward pass."""

    _fields_ = (
        ("threads", c_int32),
        ("normalize", c_int32),
        ("shape", Shape),
        *_pointers("w dy temperature mask pi squares weighted mass dw dtemperature"),
        ("count_scaled", c_int32),
    )


class CausalForward(_Call):
    """Causal forward pass."""

    _fields_ = (
        ("threads", c_int32),
        ("shape", Shape),
        *_pointers("w temperature bias"),
        ("bias_stride", c_int64),
        *_pointers("mask squares_in weighted_in mass_in y pi starts squares weighted mass"),
        *_pointers("scale"),
        ("scale_stride", c_int64),
        *_pointers("decay"),
    )


class CausalBackward(_Call):
    """Causal backward pass."""

    _fields_ = (
        ("threads", c_int32),
        ("shape", Shape),
        *_pointers("w dy temperature bias"),
        ("bias_stride", c_int64),
        *_pointers("mask pi starts dsquares dweighted dmass"),
        *_pointers("dw dtemperature denergy dsquares_in dweighted_in dmass_in"),
        *_pointers("scale"),
        ("scale_stride", c_int64),
        *_pointers("decay dscale ddecay"),
    )


_CALLS = {
    "tost_tssa_forward": Forward,
    "tost_tssa_backward": Backward,
    "tost_causal_tssa_forward": CausalForward,
    "tost_causal_tssa_backward": CausalBackward,
}


def _load() -> tuple[ctypes.CDLL | None, str]:
    folder = Path(__file__).parent
    note = folder / "_native_build_error.txt"
    path = folder / "_kernels.so"
    if not path.exists():
        cause = note.read_text().strip() if note.exists() else "the package was not built from its own setup.py"
        return None, f"the native library was not built ({cause}); reinstall tost with a C++17 compiler"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the native library cannot be loaded ({error}); reinstall tost on this machine"
    if not _matches(library):
        return None, "the native library was built from other sources than this package; reinstall tost"
    for name, structure in _CALLS.items():
        getattr(library, name).argtypes = [c_int32, POINTER(structure)]
        getattr(library, name).restype = c_int32
    for name in ("tost_compiled_isa", "tost_active_isa", "tost_compiler"):
        getattr(library, name).restype = c_char_p
    library.tost_causal_chunk.restype = c_int64
    return library, ""


def _matches(library: ctypes.CDLL) -> bool:
    """Tell whether the library reads calls as they are laid out here: an old one would misread their memory."""
    if not hasattr(library, "tost_call_size"):
        return False
    library.tost_call_size.restype = c_int64
    sizes = [ctypes.sizeof(structure) for structure in _CALLS.values()]
    return sizes == [library.tost_call_size(i) for i in range(len(sizes))]


_LIBRARY, _REASON = _load()
CAUSAL_CHUNK: int = _LIBRARY.tost_causal_chunk() if _LIBRARY is not None else 0


def missing() -> list[str]:
    """Return why the native library cannot be used at all; an empty list when it can."""
    return [_REASON] if _LIBRARY is None else []


def library() -> ctypes.CDLL:
    """Return the library itself; look at `missing` first."""
    assert _LIBRARY is not None
    return _LIBRARY


def why_not(w: Tensor) -> list[str]:
    """Return why the native kernels cannot run on the tokens `w`."""
    reasons = []
    if w.device.type != "cpu":
        reasons.append(f"needs a CPU tensor, got {w.device}")
    if w.dtype not in _TYPES:
        reasons.append(f"supports float32, float64, bfloat16 and float16, got {str(w.dtype).removeprefix('torch.')}")
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        reasons.append("ONNX has no such operator")
    return reasons


def compiled_isas() -> list[str]:
    """Return the instruction sets in the library, best first, whether this processor has them or not."""
    if _LIBRARY is None:
        return []
    names: list[str] = []
    while (name := _LIBRARY.tost_compiled_isa(len(names))) is not None:
        names.append(name.decode())
    return names


def select_isa(name: str) -> None:
    """Make the kernels use one instruction set, ``"auto"`` for the best that the processor has.

    Raises:
        ConfigError: The library was not built for `name`, or the processor does not have it.
    """
    if _LIBRARY is None:
        raise ConfigError(f"cannot select instruction set {name!r}: {_REASON}")
    code = _LIBRARY.tost_select_isa(name.encode())
    if code != 0:
        why = "this processor does not have it" if code == 2 else f"the library holds {', '.join(compiled_isas())}"
        raise ConfigError(f"cannot select instruction set {name!r}: {why}. Use 'auto' for the best one.")


def native_info() -> dict[str, str]:
    """Describe the native library: instruction sets, compiler, threads; or why there is none."""
    if _LIBRARY is None:
        return {"missing": _REASON}
    return {
        "isa": _LIBRARY.tost_active_isa().decode(),
        "compiled": ", ".join(compiled_isas()),
        "compiler": _LIBRARY.tost_compiler().decode(),
        "openmp": "yes" if _LIBRARY.tost_has_openmp() else "no",
        "threads": str(torch.get_num_threads()),
    }


def address(tensor: Tensor | None) -> int | None:
    """Return where a tensor's data starts, None for a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def shape_of(w: Tensor) -> Shape:
    """Return the shape of tokens [B, N, H, D] as the library reads it."""
    return Shape(*w.shape)


def run(function: str, dtype: torch.dtype, call: _Call) -> None:
    """Run one function of the library on tokens of `dtype`."""
    assert _LIBRARY is not None
    if getattr(_LIBRARY, function)(_TYPES[dtype], ctypes.byref(call)) != 0:
        raise MemoryError(f"{function}: no memory for the partial sums of {call.shape.N} tokens")


if _LIBRARY is not None:
    select_isa(_env.NATIVE_ISA.get())
