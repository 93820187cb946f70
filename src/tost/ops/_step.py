"""A step of a language model by the native CPU library: the structures of ``csrc/library.h``, field by field.

The library reads a model as a list of addresses. What they point to must stay alive and where it is.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from tost.ops import _native

__all__ = ["Layer", "Local", "Matrix", "Norm", "Step", "matrix", "missing", "pointer", "run_step"]

_TYPES = {torch.float32: 0, torch.bfloat16: 2, torch.int8: 4}


class Matrix(ctypes.Structure):
    """W ``[rows, columns]``, with a scale and a bias per row, or null."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
    )


class Norm(ctypes.Structure):
    """A LayerNorm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float))


class Local(ctypes.Structure):
    """A causal convolution, taps ``[width, C]`` or null, and its windows before and after."""

    _fields_ = (("taps", c_void_p), ("window_in", c_void_p), ("window", c_void_p), ("width", c_int64))


class Layer(ctypes.Structure):
    """A block, with the sums of its attention before and after."""

    _fields_ = (
        *((name, Norm) for name in ("norm1", "norm2")),
        *((name, Local) for name in ("local", "local_mlp")),
        *((name, Matrix) for name in ("proj_in", "gate", "proj_out", "mlp_in", "mlp_out")),
        *((name, c_void_p) for name in ("temperature", "bias", "decay", "gamma1", "gamma2")),
        *((name, c_void_p) for name in ("squares_in", "weighted_in", "mass_in", "squares", "weighted", "mass")),
        ("count_scaled", c_int32),
        ("tanh", c_int32),
    )


class Step(ctypes.Structure):
    """One token per sequence, from its embedding to its logits."""

    _fields_ = (
        ("threads", c_int32),
        *((name, c_int64) for name in ("B", "C", "H", "hidden", "depth", "bias_length")),
        *((name, c_void_p) for name in ("position", "place")),
        ("layers", POINTER(Layer)),
        ("norm", Norm),
        ("head", Matrix),
        *((name, c_void_p) for name in ("x", "logits")),
    )


def missing() -> list[str]:
    """Return why the library cannot take steps; an empty list when it can."""
    if _native.missing():
        return _native.missing()
    library = _native.library()
    sizes = [library.tost_call_size(index) for index in (4, 5)]
    if sizes != [ctypes.sizeof(Step), ctypes.sizeof(Layer)]:
        return ["the native library was built from older sources than this package; reinstall tost"]
    return []


def pointer(tensor: Tensor | None) -> int | None:
    """Return where the data of a contiguous tensor is; None for null."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def matrix(weight: Tensor | None, scale: Tensor | None = None, bias: Tensor | None = None) -> Matrix:
    """Describe ``y = scale * (W x) + bias`` with W ``[rows, columns]``; None has no matrix."""
    shape = (0, 0) if weight is None else weight.shape
    return Matrix(pointer(weight), pointer(scale), pointer(bias), *shape)


def run_step(dtype: torch.dtype, step: Step) -> None:
    """Take a step with matrices of `dtype`: float32, bfloat16 or int8.

    Raises:
        MemoryError: There is no memory for what the layers pass on.
    """
    if _native.library().tost_language_step(_TYPES[dtype], ctypes.byref(step)) != 0:
        raise MemoryError(f"no memory for a step of {step.B} sequences")
