"""Attention masks of other libraries, read as the padding mask that TSSA takes.

TSSA has no scores between pairs of tokens, so a mask can say only which tokens are real. Masks over pairs, as
``scaled_dot_product_attention``, timm and transformers pass them, often say no more than that, or the same within
the causal order. Shapes: B batch, N tokens, K tokens with those that a cache holds (the last N of them are new).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.ops._checks import mask_hint

MASKED = -100.0
"""A float mask hides a token by adding this or less to its score: exp(-100) is 0 in float32."""


def read_attention_mask(
    mask: Tensor, batch_size: int, num_tokens: int, *, causal: bool, windowed: bool = False
) -> Tensor | None:
    """Return which tokens are real; None if all are, as far as can be seen without waiting for a device.

    Args:
        mask: Bool or integers (true for pairs or keys that count), or floats that are added to scores (0 for those
            that count, -100 or less for the others). ``[B, K]`` for keys; or broadcastable to ``[B, H, N, K]`` for
            pairs, where two axes stand for ``[N, K]`` and three for ``[B, N, K]``.
        batch_size: B.
        num_tokens: N.
        causal: The attention is causal, so the mask may be so, too.
        windowed: The mask may hide what lies further back than a window; it is read as if it did not.

    Returns:
        Bool ``[B, N]``.

    Raises:
        ValueError: It has another shape, adds something else to scores, or says more about pairs than which tokens are
            real.
    """
    B, N = batch_size, num_tokens
    allowed = _allowed(mask)
    if mask.dim() == 2 and mask.shape[0] == B and mask.shape[1] >= N and (B != N or mask.shape[1] != N):
        real = allowed[:, -N:]
    else:
        pairs = _pairs(allowed, B, N)
        keys = pairs.any(dim=1)  # a real token is seen by itself at least
        real = keys[:, -N:]
        if pairs.shape[1] > 1 and not (causal and windowed):
            _check_pairs(pairs, keys, causal=causal)
    if not _can_look(real):
        return real.expand(B, N)
    return None if bool(real.all()) else real.expand(B, N)


def read_packed_mask(
    mask: Tensor, batch_size: int, num_tokens: int, *, causal: bool, windowed: bool = False
) -> Tensor | None:
    """Return the sequences of a mask over pairs that keeps packed sequences apart.

    Args:
        mask: Over pairs of tokens, broadcastable to ``[B, H, N, N]``, bool or added to scores. If it is none of packed
            sequences, `read_attention_mask` takes it.
        batch_size: B.
        num_tokens: N.
        causal: The attention is causal, so the mask is so, too.
        windowed: The mask may hide what lies further back than a window; it is read as if it did not.

    Returns:
        The number of each token's sequence in its row, int64 ``[B, N]``; None if every token attends to the one before
        it, or if the mask cannot be looked at.

    Raises:
        ValueError: Tokens do not see the one before them, and yet the mask is not that of packed sequences.
    """
    pairs = _pairs(_allowed(mask), batch_size, num_tokens)
    if pairs.shape[1] != pairs.shape[2] or not _can_look(pairs):
        return None
    keys = pairs.any(dim=1)
    seen = pairs.diagonal(-1, dim1=1, dim2=2)
    begins = torch.zeros_like(keys)
    begins[:, 1:] = keys[:, 1:] & keys[:, :-1] & ~seen
    if not bool(begins.any()):
        return None
    segments = begins.cumsum(dim=1)
    expected = (segments.unsqueeze(1) == segments.unsqueeze(2)) & keys.unsqueeze(1)
    expected = expected.tril() if causal else expected
    wrong = (pairs & ~expected) if causal and windowed else pairs != expected
    demand(
        ~(wrong & keys.unsqueeze(2)).any(),
        "attn_mask is neither that of packed sequences nor of padding: tokens see some of the others, and not the one "
        "before them. TSSA has sums over whole sequences and cannot leave out single pairs.",
    )
    return segments.expand(batch_size, -1)


def read_segments(mask: Tensor) -> Tensor | None:
    """Return the groups of a mask that lets tokens meet within groups only, such as shifted windows.

    Args:
        mask: Bool or added to scores, ``[W, N, N]``, as in `read_attention_mask`.

    Returns:
        For each token the first one of its group, int64 ``[W, N]``; None if the mask does not divide tokens into
        groups.
    """
    allowed = _allowed(mask)
    first = allowed.to(torch.uint8).argmax(dim=-1)
    same = first.unsqueeze(-1) == first.unsqueeze(-2)
    return first if bool((same == allowed).all()) else None


def _can_look(x: Tensor) -> bool:
    """Tell whether values can be looked at without waiting for a device or breaking a graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def demand(condition: Tensor, message: str) -> None:
    """Raise a ValueError unless `condition` holds; on a device and in a graph, when the work gets there."""
    if _can_look(condition):
        if not bool(condition):
            raise ValueError(message)
    elif condition.device.type != "meta":
        torch._assert_async(condition, message)


def _allowed(mask: Tensor) -> Tensor:
    """Return true where a mask lets through."""
    if not mask.is_floating_point():
        return mask != 0
    fits = ((mask == 0) | (mask <= MASKED)).all()
    hint = mask_hint(mask).replace("mask", "attn_mask") if _can_look(fits) and not bool(fits) else ""
    demand(
        fits,
        "attn_mask adds values to scores other than 0 (counts) and -100 or less (hidden), but TSSA has no scores "
        f"between pairs of tokens that a bias could be added to. Leave position biases out. {hint}",
    )
    return mask > MASKED


def _pairs(allowed: Tensor, B: int, N: int) -> Tensor:
    """Return the mask over pairs, [B or 1, N or 1, K]."""
    given = tuple(allowed.shape)
    if allowed.dim() == 2:
        allowed = allowed[None, None]
    elif allowed.dim() == 3:
        allowed = allowed[:, None]
    fits = (
        allowed.dim() == 4
        and (allowed.shape[0] == 1 or allowed.shape[0] == B)  # `in` does not see that symbolic sizes are equal
        and (allowed.shape[2] == 1 or allowed.shape[2] == N)
        and (allowed.shape[3] == 1 or allowed.shape[3] >= N)
    )
    if not fits:
        raise ValueError(
            f"attn_mask has shape {given}, but there are {B} sequences of {N} tokens; it needs [{B}, {N}] for tokens, "
            f"or what broadcasts to [{B}, heads, {N}, {N}] for pairs of them."
        )
    if allowed.shape[1] > 1:
        demand(
            (allowed == allowed[:, :1]).all(),
            "attn_mask differs between heads, but in TSSA the heads share the tokens. Use one mask for all heads.",
        )
    return allowed[:, 0].expand(-1, -1, max(allowed.shape[3], N))


def _check_pairs(pairs: Tensor, keys: Tensor, *, causal: bool) -> None:
    """Refuse masks in which real tokens see others than all real ones (before them, if causal)."""
    N, K = pairs.shape[1:]
    expected = keys.unsqueeze(1)
    order = torch.ones(N, K, dtype=torch.bool, device=pairs.device).tril(K - N)
    real = keys[:, -N:].unsqueeze(-1)  # what padding sees does not matter
    same = ((pairs == expected) | ~real).all()
    in_order = ((pairs == (expected & order)) | ~real).all()
    if causal:
        demand(
            same | in_order,
            "attn_mask is neither causal nor a mask of padding: some tokens see others. TSSA sums over all "
            "tokens before each one and cannot leave out pairs. Leave the mask out; pass packed sequences as packing=.",
        )
        return
    hint = "tokens see different others."
    if _can_look(in_order) and N > 1 and bool(in_order):
        hint = "it is causal. Use CausalTSSAttention."
    demand(
        same,
        f"attn_mask is no mask of padding: {hint} TSSA has sums over all real tokens and cannot leave out "
        "single pairs; mask=[B, N] or attn_mask=[B, 1, 1, N] says which tokens are real.",
    )
