"""`tost.tssa` and `tost.causal_tssa` by Triton kernels. Experimental: we have never run them compiled on a device.

They are compared with the reference under Triton's interpreter (``TRITON_INTERPRET=1``, CPU tensors) and compiled
ahead of time for four targets. ``backend="auto"`` does not take them: ask for them with ``backend="triton"`` or
``TOST_BACKEND=triton``. Second derivatives and the transforms of ``torch.func`` go through plain PyTorch. Importing
this module loads no triton.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from tost.ops._inputs import Inputs, Sums
from tost.ops._operators import causal_arguments, is_differentiated, run_causal, run_tssa
from tost.ops._transforms import is_transformed
from tost.ops.backends import TRITON_INTERPRETS
from tost.ops.form import Form
from tost.ops.triton.tiles import WIDEST, choose_tiles

__all__ = ["causal_tssa", "tssa", "unavailable", "unsupported"]

_INSTALLED = find_spec("triton") is not None
# Registering takes milliseconds, which a build of torch without GPUs need not spend.
if _INSTALLED and (TRITON_INTERPRETS or torch.version.cuda or torch.version.hip):
    from tost.ops.triton import operators as operators  # registers them

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def unavailable() -> list[str]:
    """Return why the kernels cannot be used on this machine."""
    if not _INSTALLED:
        return ["triton is not installed; run: pip install 'tost-transformer[gpu]'"]
    if not (TRITON_INTERPRETS or torch.cuda.is_available()):
        return ["torch finds no GPU here; TRITON_INTERPRET=1 runs the kernels on CPU tensors, very slowly"]
    return []


def unsupported(w: Tensor, form: Form) -> list[str]:
    """Return why the kernels cannot run on the tokens `w`, or in this form."""
    reasons = []
    if w.dtype not in _TYPES:
        reasons.append(f"supports float32, float64, bfloat16 and float16, got {str(w.dtype).removeprefix('torch.')}")
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        reasons.append("ONNX has no such operator")
    if form.block_size > 1:
        reasons.append(f"its kernels have no block_size, got block_size={form.block_size}")
    return reasons


def _check_width(w: Tensor) -> None:
    """Refuse tokens that are wider than a tile may be."""
    H, D = w.shape[2:]
    size = choose_tiles(H, D)
    if size.HP * size.DP > WIDEST:
        raise ValueError(
            f"w has {H} heads of width {D}; the Triton kernels hold all heads of a token at once, at most {WIDEST} "
            "numbers with both rounded up to powers of two. Use backend='torch'."
        )


def tssa(inputs: Inputs, form: Form) -> Tensor:
    """Return y [B, N, H, D] in the dtype of w."""
    _check_width(inputs.w)
    return run_tssa("tssa_triton", inputs, form)


def causal_tssa(inputs: Inputs) -> tuple[Tensor, Sums]:
    """Return y [B, N, H, D] in the dtype of w, and the sums after the last token."""
    _check_width(inputs.w)
    arguments = causal_arguments(inputs)
    if inputs.packing is None and inputs.w.shape[1] == 1 and not (is_transformed() or is_differentiated(arguments)):
        y, *sums = torch.ops.tost.causal_tssa_triton_step(*arguments)
        return y, Sums(*sums)
    return run_causal("causal_tssa_triton", inputs)
