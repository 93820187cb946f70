"""Causal TSSA over ranks: each needs the sums of the ranks before it, and of nobody's tokens.

    1. sum this rank's squares                                    exchange: the sums of the ranks before
    2. with them, memberships, and this rank's weighted squares and mass      exchange: likewise
    3. with both, the outputs

The gradients take the same way back, with sums over the ranks after. Steps 2 and 3 are two runs of the operator: the
first only for its sums. A run is cheap next to the projections around it, and as gradients flow through its state,
nothing has to be derived again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost import ops
from tost.ops import TSSAState
from tost.ops._checks import check_bias, check_mask, check_state, check_temperature, check_tokens
from tost.ops._numerics import statistics_dtype
from tost.parallel._autograd import exclusive_sum, local_squares, total_of
from tost.parallel._channel import Channel, untraced
from tost.parallel.context import ContextParallel, resolve

__all__ = ["causal_tssa", "causal_tssa_with_state"]


def causal_tssa(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    backend: str = "auto",
    context: ContextParallel | None = None,
) -> Tensor:
    """Run `tost.causal_tssa` on a sequence of which this rank holds a piece.

    Args:
        w: This rank's projected tokens, ``[B, N, H, D]``; N may differ between ranks and may be 0.
        temperature: As in `tost.causal_tssa`, the same on every rank.
        bias: As in `tost.causal_tssa`, for the whole sequence, the same on every rank.
        mask: Real tokens of this rank, bool ``[B, N]``.
        backend: As in `tost.causal_tssa`.
        context: The ranks that share the sequence; None for the active context.

    Returns:
        y of this rank's tokens, ``[B, N, H, D]``, in the dtype of `w`.

    Raises:
        ValueError: As in `tost.causal_tssa`; a bias shorter than the whole sequence is refused on every rank.
        BackendError: As in `tost.causal_tssa`.
        RuntimeError: No context was given and none is active.
    """
    return causal_tssa_with_state(w, temperature, bias, mask=mask, backend=backend, context=context)[0]


@untraced
def causal_tssa_with_state(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    state: TSSAState | None = None,
    backend: str = "auto",
    context: ContextParallel | None = None,
) -> tuple[Tensor, TSSAState]:
    """Run `tost.causal_tssa_with_state` on a sequence of which this rank holds a piece.

    Each rank hands out ``B (4 H (2D+1) + 8)`` bytes forward (statistics in float32, and a count of tokens) and
    ``4 B H (2D+1)`` backward, in two collectives each, whatever the length of the sequence. A loss that uses the
    returned state must do so on every rank; its backward pass then takes two more.

    Args:
        w: As in `causal_tssa`.
        temperature: As in `causal_tssa`.
        bias: As in `causal_tssa`.
        mask: As in `causal_tssa`.
        state: The state before the whole shared sequence, the same on every rank; None at its start.
        backend: As in `causal_tssa`.
        context: As in `causal_tssa`.

    Returns:
        y of this rank's tokens, ``[B, N, H, D]``, and the state after the whole sequence, the same on every rank.

    Raises:
        ValueError: As in `tost.causal_tssa_with_state`.
        BackendError: As in `tost.causal_tssa`.
        RuntimeError: As in `causal_tssa`.
    """
    _check(w, temperature, bias, mask, state)
    channel = resolve(context).channel
    return _run(w, temperature, bias, mask, _zeros(w) if state is None else state, backend, channel)


def _run(
    w: Tensor,
    temperature: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    state: TSSAState,
    backend: str,
    channel: Channel,
) -> tuple[Tensor, TSSAState]:
    tokens = torch.full(w.shape[:1], w.shape[1], device=w.device) if mask is None else mask.sum(dim=1)
    squares = local_squares(w, mask)
    all_squares, all_tokens = channel.gather(squares, tokens)
    end = state.position + all_tokens.sum(dim=0)
    _check_length(bias, end)

    def run(before: TSSAState) -> tuple[Tensor, TSSAState]:
        return ops.causal_tssa_with_state(w, temperature, bias, mask=mask, state=before, backend=backend)

    before = _zeros(w)._replace(
        squares=state.squares + exclusive_sum(squares, all_squares, channel),
        position=state.position + all_tokens[: channel.rank].sum(dim=0),
    )
    sums = _joined(run(before)[1])
    (all_sums,) = channel.gather(sums)
    prior = _joined(state) + exclusive_sum(sums, all_sums, channel)
    y, _ = run(before._replace(weighted_squares=prior[..., :-1], mass=prior[..., -1]))
    total = _joined(state) + total_of(sums, all_sums, channel)
    total_squares = state.squares + total_of(squares, all_squares, channel)
    return y, TSSAState(total_squares, total[..., :-1], total[..., -1], end)


def _zeros(w: Tensor) -> TSSAState:
    B, _, H, D = w.shape
    return TSSAState.empty(B, H, D, dtype=statistics_dtype(w.dtype), device=w.device)


def _joined(state: TSSAState) -> Tensor:
    """Return the two sums that depend on memberships as one tensor, [B, H, D + 1]."""
    return torch.cat((state.weighted_squares, state.mass.unsqueeze(-1)), dim=-1)


def _check(w: Tensor, temperature: Tensor, bias: Tensor | None, mask: Tensor | None, state: TSSAState | None) -> None:
    check_tokens(w)
    check_temperature(temperature, w)
    check_mask(mask, w)
    check_state(state, w)
    # The form of the bias; its length is checked when the length of the whole sequence is known.
    check_bias(bias, w[:, :0], None, None)


def _check_length(bias: Tensor | None, position_after: Tensor) -> None:
    """Refuse a bias that ends too early on every rank at once: a rank that stopped alone would leave others waiting."""
    if bias is None or position_after.device.type != "cpu" or position_after.numel() == 0:
        return
    needed = int(position_after.max())
    if needed > bias.shape[1]:
        raise ValueError(
            f"bias covers {bias.shape[1]} positions, but the sequence that the ranks share reaches position {needed}. "
            "Use a longer bias, a shorter sequence, or bias=None."
        )
