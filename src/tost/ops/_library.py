"""The native CPU library: loading it, calling it, or the reason why it is missing.

The library has a plain C interface (``csrc/library.h``); the structures below mirror the ones there, field by field. It
reads a call, or a whole model, as a list of addresses: what they point to must stay alive and where it is.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tost import _env
from tost._machine import available_cpus
from tost.errors import BackendError, ConfigError
from tost.ops.form import FLAGS

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""Types of tokens that the kernels take, and their numbers in the library."""
_MATRIX_TYPES = {torch.float32: 0, torch.bfloat16: 2, torch.int8: 4}


def _pointers(names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names.split()]


class Flags(ctypes.Structure):
    """The fields of `Form`."""

    _fields_ = tuple((name, c_int32) for name in FLAGS)


class Shape(ctypes.Structure):
    """Batch, tokens, heads, head width."""

    _fields_ = tuple((name, c_int64) for name in ("B", "N", "H", "D"))


_SEQUENCES = (("shape", Shape), ("sequences", c_int64), ("cu_seqlens", c_void_p))
_HEAD = (("threads", c_int32), ("form", Flags), *_SEQUENCES)
_CAUSAL_HEAD = (("threads", c_int32), *_SEQUENCES, ("bias_stride", c_int64))
_GATED_HEAD = (("threads", c_int32), ("block_size", c_int64), *_SEQUENCES)


class Forward(ctypes.Structure):
    """Non-causal forward pass."""

    _fields_ = (*_HEAD, *_pointers("w temperature mask y pi squares weighted mass"))


class Backward(ctypes.Structure):
    """Non-causal backward pass."""

    _fields_ = (*_HEAD, *_pointers("w temperature mask dy pi squares weighted mass dw dtemperature"))


class CausalForward(ctypes.Structure):
    """Causal forward pass."""

    _fields_ = (
        *_CAUSAL_HEAD,
        *_pointers("w temperature bias mask squares_in weighted_in mass_in"),
        *_pointers("y pi starts squares weighted mass"),
    )


class CausalBackward(ctypes.Structure):
    """Causal backward pass."""

    _fields_ = (
        *_CAUSAL_HEAD,
        *_pointers("w temperature bias mask dy dsquares dweighted dmass pi starts"),
        *_pointers("dw dtemperature denergy dsquares_in dweighted_in dmass_in"),
    )


class GatedForward(ctypes.Structure):
    """Forward pass of gated statistics."""

    _fields_ = (*_GATED_HEAD, *_pointers("w write mask mean_in covariance_in y mean_out covariance_out"))


class GatedBackward(ctypes.Structure):
    """Backward pass of gated statistics."""

    _fields_ = (
        *_GATED_HEAD,
        *_pointers("w write mask mean_in covariance_in dy dmean_out dcovariance_out"),
        *_pointers("dw dwrite dmean_in dcovariance_in"),
    )


class Matrix(ctypes.Structure):
    """W ``[rows, columns]``, with a scale and a bias per row, or null."""

    _fields_ = (*_pointers("weight scale bias"), ("rows", c_int64), ("columns", c_int64))


class Norm(ctypes.Structure):
    """A LayerNorm, or a norm of heads by their root mean square; without a weight there is none."""

    _fields_ = (*_pointers("weight bias"), ("eps", c_float))


class Convolution(ctypes.Structure):
    """A causal convolution, taps ``[width, C]`` or null, and its windows before and after."""

    _fields_ = (*_pointers("taps window_in window"), ("width", c_int64))


class Layer(ctypes.Structure):
    """A block, with the sums of its attention before and after."""

    _fields_ = (
        *((name, Norm) for name in ("norm1", "norm2", "heads")),
        *((name, Convolution) for name in ("conv", "conv_mlp")),
        *((name, Matrix) for name in ("proj_in", "write", "gate", "proj_out", "mlp_in", "mlp_out")),
        *_pointers("temperature bias gamma1 gamma2 squares_in weighted_in mass_in squares weighted mass"),
        ("block_size", c_int64),
        ("tanh", c_int32),
    )


class Step(ctypes.Structure):
    """One token per sequence, from its embedding to its logits."""

    _fields_ = (
        ("threads", c_int32),
        *((name, c_int64) for name in ("B", "C", "H", "hidden", "depth", "bias_length")),
        *_pointers("position place"),
        ("layers", POINTER(Layer)),
        ("norm", Norm),
        ("head", Matrix),
        *_pointers("x logits"),
    )


_CALLS: dict[str, type[ctypes.Structure]] = {
    "tost_tssa_forward": Forward,
    "tost_tssa_backward": Backward,
    "tost_causal_tssa_forward": CausalForward,
    "tost_causal_tssa_backward": CausalBackward,
    "tost_gated_forward": GatedForward,
    "tost_gated_backward": GatedBackward,
    "tost_language_step": Step,
}


def _letters(structure: Any) -> Iterator[str]:
    """Return the fields of a structure, and of those in it, in the letters of `struct`."""
    known = {c_int32: "i", c_int64: "q", c_void_p: "P"}
    for _, kind in structure._fields_:
        yield from [known[kind]] if kind in known else _letters(kind)


# Calls of operators are packed: to fill a structure field by field takes as long as a small call itself.
_PACKERS = {name: struct.Struct("".join(_letters(call))) for name, call in _CALLS.items() if call is not Step}


def _load() -> tuple[ctypes.CDLL | None, str]:
    folder = Path(__file__).parent
    note = folder / "_native_build_error.txt"
    path = folder / "_kernels.so"
    if not path.exists():
        built = note.read_text(encoding="utf-8").strip() if note.exists() else ""
        cause = built or "the package was not built from its own setup.py"
        return None, f"the native library was not built ({cause}); reinstall tost with a C++17 compiler"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the native library cannot be loaded ({error}); reinstall tost on this machine"
    if not _matches(library):
        return None, "the native library was built from other sources than this package; reinstall tost"
    for name, structure in _CALLS.items():
        getattr(library, name).argtypes = [c_int32, c_char_p if name in _PACKERS else POINTER(structure)]
        getattr(library, name).restype = c_int32
    for name in ("tost_compiled_isa", "tost_active_isa", "tost_compiler"):
        getattr(library, name).restype = c_char_p
    library.tost_causal_chunk.restype = c_int64
    _avoid_broken_amx(library)
    return library, ""


def _avoid_broken_amx(library: ctypes.CDLL) -> None:
    """Keep oneDNN, which multiplies torch's matrices in bfloat16, from matrix registers that are not as announced.

    Some virtual machines announce AMX but hide how large its tiles are, and the process dies of an illegal instruction.
    oneDNN reads the variable when it is first used.
    """
    if library.tost_amx_is_broken():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def _matches(library: ctypes.CDLL) -> bool:
    """Return whether the library reads calls as they are laid out here: an old one would misread their memory."""
    if not hasattr(library, "tost_form") or not hasattr(library, "tost_amx_is_broken"):
        return False
    library.tost_form.restype, library.tost_call_size.restype = c_char_p, c_int64
    structures: list[type[ctypes.Structure]] = [*_CALLS.values(), Layer]
    sizes = [ctypes.sizeof(structure) for structure in structures]
    found = [library.tost_call_size(index) for index in range(len(sizes))]
    return sizes == found and library.tost_form().decode().split() == list(FLAGS)


_LIBRARY, _REASON = _load()
CAUSAL_CHUNK: int = _LIBRARY.tost_causal_chunk() if _LIBRARY is not None else 0


def unavailable() -> list[str]:
    """Return why the native library cannot be used at all; an empty list when it can."""
    return [_REASON] if _LIBRARY is None else []


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
        "threads": str(num_threads()),
    }


_FORKED = False
_TORCH_DEFAULT = torch.get_num_threads()
_OUR_DEFAULT = min(_TORCH_DEFAULT, available_cpus())


def num_threads() -> int:
    """Return how many threads the kernels may use: torch's number, but by default no more than this process gets.

    One in a forked process: OpenMP's threads are not forked with it, and waiting for them would never end.
    """
    if _FORKED:
        return 1
    chosen = torch.get_num_threads()
    return _OUR_DEFAULT if chosen == _TORCH_DEFAULT else chosen


def _after_fork() -> None:
    global _FORKED
    _FORKED = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(
    function: str,
    options: Sequence[int],
    cu_seqlens: Tensor | None,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    *strides: int,
) -> None:
    """Run an operator of the library.

    Args:
        function: Name of its function.
        options: The fields of the call's structure between the threads and the shape.
        cu_seqlens: First token of each sequence in one row, and the end, int64 ``[S + 1]``; None if a row is one.
        inputs: Contiguous tensors in the order of the call's structure, tokens ``[B, N, H, D]`` first; None for null.
        outputs: Likewise; they are filled.
        *strides: The fields of the structure between the sequences and the addresses.

    Raises:
        MemoryError: There is no memory for the partial sums.
        ValueError: A tensor has no memory, or `cu_seqlens` does not describe the tokens.
    """
    w = inputs[0]
    assert w is not None
    shape, tensors = w.shape, (*inputs, *outputs)
    addresses = [0 if x is None else _address(x) for x in tensors]
    packed = (shape[0], 0) if cu_seqlens is None else (len(cu_seqlens) - 1, _address(cu_seqlens))
    call = _PACKERS[function].pack(num_threads(), *options, *shape, *packed, *strides, *addresses)
    code = getattr(_LIBRARY, function)(TYPES[w.dtype], call)
    if code:
        raise _error(function, code, TYPES[w.dtype], f"the partial sums of {shape[1]} tokens")


def _address(x: Tensor) -> int:
    """Return where the numbers of x are; 0 if it has none."""
    address = x.data_ptr()
    if address == 0 and x.numel() > 0:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no memory: its storage was resized to 0 bytes.")
    return address


def run_step(dtype: torch.dtype, step: Step) -> None:
    """Take a step with matrices of `dtype`: float32, bfloat16 or int8.

    Raises:
        MemoryError: There is no memory for what the layers pass on.
    """
    assert _LIBRARY is not None
    if code := _LIBRARY.tost_language_step(_MATRIX_TYPES[dtype], ctypes.byref(step)):
        raise _error("tost_language_step", code, _MATRIX_TYPES[dtype], f"a step of {step.B} sequences")


def _error(function: str, code: int, kind: int, purpose: str) -> Exception:
    """Return the error that a code of the library stands for; see `Status` in ``library.h``."""
    known: dict[int, Exception] = {
        1: MemoryError(f"{function}: no memory for {purpose}"),
        2: BackendError(f"{function}: the native library has no kernel for type {kind}; reinstall tost"),
        3: ValueError("cu_seqlens has to begin with 0, end with the number of tokens and never decrease."),
    }
    return known.get(code) or RuntimeError(f"{function} failed with error code {code}, which is not known")


if _LIBRARY is not None:
    select_isa(_env.NATIVE_ISA.get())
