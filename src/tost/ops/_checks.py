"""Input checks of the public functions. Each error says what was given, what is needed and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from tost.ops._numerics import num_tokens, statistics_dtype, zero_padding
from tost.ops._transforms import has_values
from tost.ops.packing import Packing
from tost.ops.state import CausalArguments, GatedState, TSSAState, gated_shapes, sum_shapes

# Tokens are always [B, N, H, D]: batch, tokens, heads, head width.


def check_tokens(w: Tensor) -> None:
    """Refuse anything but a floating point tensor of rank 4 with at least one head and one feature."""
    if w.dim() != 4:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; TSSA needs projected tokens [B, N, H, D]. "
            "Split the width into heads first, for example with w.unflatten(-1, (num_heads, head_dim))."
        )
    if not w.is_floating_point():
        raise ValueError(f"w has dtype {w.dtype}; TSSA needs float16, bfloat16, float32 or float64. Use w.float().")
    if w.shape[2] == 0 or w.shape[3] == 0:
        raise ValueError(f"w has shape {tuple(w.shape)} with no heads or no features; H and D must be at least 1.")


def check_temperature(temperature: Tensor, w: Tensor) -> None:
    """Refuse a temperature that is not one floating point number per head on the device of `w`."""
    if temperature.shape != (w.shape[2],):
        raise ValueError(
            f"temperature has shape {tuple(temperature.shape)}, but w has {w.shape[2]} heads; "
            f"it needs shape [{w.shape[2]}], one number per head. Use .flatten() on a column or .expand() on a scalar."
        )
    if not temperature.is_floating_point():
        raise ValueError(f"temperature has dtype {temperature.dtype}; it must be a floating point tensor.")
    _check_device("temperature", temperature, w)


def mask_hint(mask: Tensor) -> str:
    """Return how to make a boolean mask of another one: masks that are added to scores mean the opposite."""
    if has_values(mask) and not torch.compiler.is_compiling():
        if bool((mask == 1).any()) and bool(((mask == 0) | (mask == 1)).all()):
            return "It holds ones and zeros: use mask.bool() if the ones are real tokens."
        if bool((mask < 0).any()) and bool((mask <= 0).all()):
            return "It looks like a mask that is added to scores, 0 for real tokens: use mask == 0."
    return "Use mask.bool() if it holds ones for real tokens, or mask == 0 if it is added to scores."


def check_mask(mask: Tensor | None, w: Tensor) -> None:
    """Refuse a mask that is not boolean, or not ``[B, N]``, or on another device than `w` [B, N, ...]."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(
            f"mask has dtype {mask.dtype}; it must be torch.bool with True for real tokens. {mask_hint(mask)}"
        )
    if mask.shape != w.shape[:2]:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, but there are {w.shape[0]} sequences of {w.shape[1]} tokens; "
            f"it needs shape {tuple(w.shape[:2])}, one entry per token."
        )
    _check_device("mask", mask, w)


def check_block_size(block_size: int, w: Tensor) -> None:
    """Refuse blocks that do not divide the features of a head."""
    D = w.shape[3]
    if block_size < 1 or D % block_size != 0:
        raise ValueError(
            f"block_size is {block_size}, but the heads of w have {D} features; blocks hold a whole number of features "
            f"that divides {D}. Use 1 for the plain form and {D} for one block per head."
        )


def check_packing(packing: Packing | None, w: Tensor) -> None:
    """Refuse a description of packed sequences on another device than `w`."""
    if packing is not None:
        _check_device("cu_seqlens", packing.cu_seqlens, w)


def check_state(state: TSSAState | None, w: Tensor, packing: Packing | None = None) -> None:
    """Refuse a state made for another batch size, head count, head width, device or precision."""
    if state is None:
        return
    B, _, H, D = w.shape
    B = B if packing is None else packing.num_sequences
    needed = dict(zip(TSSAState._fields, (*sum_shapes(B, H, D), (B,)), strict=True))
    for name, shape in needed.items():
        value: Tensor = getattr(state, name)
        if value.shape != shape:
            raise ValueError(
                f"state.{name} has shape {tuple(value.shape)}, but w of shape {tuple(w.shape)} needs {shape}. Pass the "
                "state that came from the same batch, or start with state=None."
            )
        _check_device(f"state.{name}", value, w)
    dtype = statistics_dtype(w.dtype)
    if state.squares.dtype != dtype:
        raise ValueError(
            f"state has dtype {state.squares.dtype}, but {w.dtype} tokens are summed in {dtype}. "
            f"Use state.to(dtype={dtype})."
        )


def check_bias(
    bias: Tensor | None,
    w: Tensor,
    mask: Tensor | None,
    state: TSSAState | None,
    packing: Packing | None = None,
) -> None:
    """Refuse a bias that is neither each token's nor a table ``[H, L]``, or that ends before the last token."""
    if bias is None:
        return
    B, N, H, _ = w.shape
    if bias.dim() == 3:
        if bias.shape not in ((B, N, H), (1, N, H)) or not bias.is_floating_point():
            raise ValueError(
                f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}, but w has shape {tuple(w.shape)}; the "
                f"bias of every token is a floating point tensor [{B}, {N}, {H}] or [1, {N}, {H}]."
            )
        _check_device("bias", bias, w)
        return
    if bias.dim() != 2 or bias.shape[0] != H or not bias.is_floating_point():
        raise ValueError(
            f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}, but w has {H} heads; it needs a floating "
            f"point tensor [{H}, L] with L at least the number of tokens."
        )
    _check_device("bias", bias, w)
    length = bias.shape[1]
    if mask is None and state is None and packing is None:
        needed = N
    elif B == 0 or not has_values(w) or (packing is not None and packing.num_sequences == 0):
        return
    else:
        tokens = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
        needed = int((tokens if state is None else tokens + state.position).max())
    if needed > length:
        raise ValueError(
            f"bias covers {length} positions, but the sequence reaches position {needed}. "
            "Use a longer bias, a shorter sequence, or bias=None."
        )


def check_gated(
    w: Tensor, write: Tensor, mask: Tensor | None, state: GatedState | None, packing: Packing | None
) -> None:
    """Check all arguments of the gated operator."""
    check_tokens(w)
    check_mask(mask, w)
    check_packing(packing, w)
    B, N, H, D = w.shape
    blocks = write.shape[-1] if write.dim() == 4 else 0
    if write.shape != (B, N, H, blocks) or not blocks or D % blocks or not write.is_floating_point():
        raise ValueError(
            f"write has shape {tuple(write.shape)} and dtype {write.dtype}, but w has shape {tuple(w.shape)}; it needs "
            f"a floating point gate per token and block of g features, [{B}, {N}, {H}, {D} / g], where g divides {D}."
        )
    _check_device("write", write, w)
    if has_values(write) and write.numel() > 0:
        real = write.detach() if mask is None else zero_padding(write.detach(), mask)
        smallest, largest = (x.item() for x in real.aminmax())
        if not (smallest >= 0 and largest <= 1):
            raise ValueError(f"write lies in [{smallest:.6g}, {largest:.6g}]; gates lie in [0, 1]. Use torch.sigmoid.")
    if state is None:
        return
    S = B if packing is None else packing.num_sequences
    for name, shape in zip(GatedState._fields, (*gated_shapes(S, H, D, D // blocks), (S,)), strict=True):
        value: Tensor = getattr(state, name)
        if value.shape != shape or (name != "position" and value.dtype != statistics_dtype(w.dtype)):
            raise ValueError(
                f"state.{name} has shape {tuple(value.shape)} and dtype {value.dtype}, but w of shape {tuple(w.shape)} "
                f"and dtype {w.dtype} in blocks of {D // blocks} needs {shape} in {statistics_dtype(w.dtype)}. Pass "
                "the state of the same batch and options, or start with state=None."
            )
        _check_device(f"state.{name}", value, w)


def check_causal(packing: Packing | None, *given: *CausalArguments) -> None:
    """Check all arguments of the causal operator."""
    w, temperature, bias, mask, state = given
    check_tokens(w)
    check_temperature(temperature, w)
    check_mask(mask, w)
    check_packing(packing, w)
    check_state(state, w, packing)
    check_bias(bias, w, mask, state, packing)


def _check_device(name: str, tensor: Tensor, w: Tensor) -> None:
    if tensor.device != w.device:
        raise ValueError(f"{name} is on {tensor.device}, but w is on {w.device}. Move it with .to({str(w.device)!r}).")
