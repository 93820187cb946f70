"""Causal TSSA over ranks: each needs the sums of the ranks before it, but none of their tokens.

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

from tost.ops import Packing, TSSAState
from tost.ops._checks import check_bias, check_causal
from tost.ops._inputs import empty_sums
from tost.ops._numerics import num_tokens
from tost.ops.functional import run_causal
from tost.ops.state import CausalArguments
from tost.parallel._autograd import exclusive_sum, local_squares, sum_of_gathered
from tost.parallel._channel import Channel, untraced


@untraced
def causal_tssa(
    backend: str, packing: Packing | None, *given: *CausalArguments, channel: Channel
) -> tuple[Tensor, TSSAState]:
    """Run `tost.causal_tssa_with_state` on sequences of which this rank holds a piece; `given` are this rank's tensors.

    The state is that before the whole sequences, the same on every rank, and so is the one that is returned. A table of
    biases is one for the whole sequences; one that is shorter is refused on every rank.

    Each rank sends ``B (4 H (2D+1) + 8)`` bytes forward (statistics in float32, and a count of tokens) and
    ``4 B H (2D+1)`` backward, in two collectives each, whatever the length of the sequence. A loss that uses the
    returned state must do so on every rank; its backward pass then takes two more. For packed sequences B is their
    number S.
    """
    w, temperature, bias, mask, state = given
    check_causal(packing, w, temperature, None, mask, state)
    # The form of the bias; its length is checked when the length of the whole sequence is known.
    check_bias(bias, w if bias is not None and bias.dim() == 3 else w[:, :0], None, None)
    sequences = w.shape[0] if packing is None else packing.num_sequences
    none = w.new_empty((sequences, 0, *w.shape[2:]))
    zeros = TSSAState(*empty_sums(none), num_tokens(none, None))
    state = zeros if state is None else state

    def run(before: TSSAState) -> tuple[Tensor, TSSAState]:
        return run_causal(backend, packing, w, temperature, bias, mask, before)

    tokens = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
    squares = local_squares(w, mask) if packing is None else run(zeros)[1].squares
    all_squares, all_tokens = channel.gather(squares, tokens)
    end = state.position + all_tokens.sum(dim=0)
    _check_length(bias, end)
    before = zeros._replace(
        squares=state.squares + exclusive_sum(squares, all_squares, channel),
        position=state.position + all_tokens[: channel.rank].sum(dim=0),
    )
    sums = _joined(run(before)[1])
    (all_sums,) = channel.gather(sums)
    prior = _joined(state) + exclusive_sum(sums, all_sums, channel)
    y, _ = run(before._replace(weighted_squares=prior[..., :-1], mass=prior[..., -1]))
    total = _joined(state) + sum_of_gathered(sums, all_sums, channel)
    total_squares = state.squares + sum_of_gathered(squares, all_squares, channel)
    return y, TSSAState(total_squares, total[..., :-1], total[..., -1], end)


def _joined(state: TSSAState) -> Tensor:
    """Return the two sums that depend on memberships as one tensor, [B, H, D + 1]."""
    return torch.cat((state.weighted_squares, state.mass.unsqueeze(-1)), dim=-1)


def _check_length(bias: Tensor | None, position_after: Tensor) -> None:
    """Refuse a bias that ends too early on every rank at once: a rank that stopped alone would leave others waiting."""
    if bias is None or bias.dim() == 3 or position_after.device.type != "cpu" or position_after.numel() == 0:
        return
    needed = int(position_after.max())
    if needed > bias.shape[1]:
        raise ValueError(
            f"bias covers {bias.shape[1]} positions, but the sequence that the ranks share reaches position {needed}. "
            "Use a longer bias, a shorter sequence, or bias=None."
        )
