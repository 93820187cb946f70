"""Causal TSSA over ranks: each needs the sums of the ranks before it, but none of their tokens.

    1. sum this rank's squares                                    exchange: the sums of the ranks before
    2. with them, memberships, and this rank's weighted squares and mass      exchange: likewise
    3. with both, the outputs

The gradients take the same way back, with sums over the ranks after. Steps 2 and 3 are two runs of the operator: the
first only for its sums. A run is cheap next to the projections around it, and as gradients flow through its state,
nothing has to be derived again.

With decays, the sums of a rank fade with the tokens of the ranks between it and where they are added. A fixed decay has
powers, and the number of tokens of every rank is known to all; where decays come from the data, each rank sends their
product over its tokens with its sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tost.ops import Packing, TSSAState
from tost.ops._blocks import Layout
from tost.ops._checks import check_bias, check_causal
from tost.ops._inputs import empty_sums, mass_columns, mass_of_columns, one_for_padding
from tost.ops._numerics import num_tokens, statistics_dtype, zero_padding
from tost.ops.form import Form
from tost.ops.functional import run_causal
from tost.ops.pytorch import summed_squares
from tost.ops.state import CausalArguments
from tost.parallel._autograd import at_ranks, exclusive_sum, gather_sums, local_squares, sum_of_gathered
from tost.parallel._channel import Channel, untraced


@untraced
def causal_tssa(
    form: Form, backend: str, packing: Packing | None, *given: *CausalArguments, channel: Channel
) -> tuple[Tensor, TSSAState]:
    """Run `tost.causal_tssa_with_state` on sequences of which this rank holds a piece; `given` are this rank's tensors.

    The state is that before the whole sequences, the same on every rank, and so is the one that is returned. A table of
    biases is one for the whole sequences; one that is shorter is refused on every rank.

    Each rank sends ``B (4 H (2D+1) + 8)`` bytes forward (statistics in float32, and a count of tokens) and
    ``4 B H (2D+1)`` backward, in two collectives each, whatever the length of the sequence; in blocks of g features
    ``D + D(g+1)/2 + 1`` stands for ``2D+1``, and it is as much more as the state is larger where statistics are
    centered or decays come from the data. For the latter each rank also sends its product of decays. With a decay of
    any kind it sends as much backward for every rank. A loss that uses the returned state must do so on every rank; its
    backward pass then takes two more. Packed sequences count as so many in a batch: B is then their number S.
    """
    w, temperature, bias, mask, state, decay = given
    check_causal(form, packing, w, temperature, None, mask, state, decay)
    # The form of the bias; its length is checked when the length of the whole sequence is known.
    check_bias(bias, w if bias is not None and bias.dim() == 3 else w[:, :0], None, None)
    sequences = w.shape[0] if packing is None else packing.num_sequences
    none = w.new_empty((sequences, 0, *w.shape[2:]))
    zeros = TSSAState(*empty_sums(none, form), num_tokens(none, None))
    state = zeros if state is None else state
    decay = None if decay is None else decay.to(statistics_dtype(w.dtype))

    def run(before: TSSAState) -> tuple[Tensor, TSSAState]:
        return run_causal(form, backend, packing, w, temperature, bias, mask, before, decay)

    tokens = num_tokens(w, mask) if packing is None else packing.num_tokens(mask)
    if decay is not None:
        return _fading(form, w, bias, mask, packing, decay, state, zeros, tokens, channel, run)
    squares = local_squares(w, mask) if packing is None else run(zeros)[1].squares
    all_squares, all_tokens = channel.gather(squares, tokens)
    end = state.position + all_tokens.sum(dim=0)
    _check_length(bias, end)
    before = zeros._replace(
        squares=state.squares + exclusive_sum(squares, all_squares, channel),
        position=state.position + all_tokens[: channel.rank].sum(dim=0),
    )
    sums = _joined(run(before)[1], form)
    (all_sums,) = channel.gather(sums)
    prior = _joined(state, form) + exclusive_sum(sums, all_sums, channel)
    y, _ = run(before._replace(weighted_squares=prior[..., :-1], mass=prior[..., -1]))
    total = _joined(state, form) + sum_of_gathered(sums, all_sums, channel)
    total_squares = state.squares + sum_of_gathered(squares, all_squares, channel)
    return y, TSSAState(total_squares, total[..., :-1], total[..., -1], end)


def _fading(
    form: Form,
    w: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    packing: Packing | None,
    decay: Tensor,
    state: TSSAState,
    zeros: TSSAState,
    tokens: Tensor,
    channel: Channel,
    run: Callable[[TSSAState], tuple[Tensor, TSSAState]],
) -> tuple[Tensor, TSSAState]:
    """Do the same with decays, through the products of those of every rank's tokens."""
    layout, K = Layout(w.shape[-1], form, w.device), form.num_masses(w.shape[-1])
    if not form.token_decay:  # products are powers, which need no exchange
        squares = local_squares(w, mask, decay) if packing is None else run(zeros)[1].squares
        all_squares, all_tokens = gather_sums(squares, tokens, channel)
        products = (decay ** all_tokens.unsqueeze(-1)).unsqueeze(-1)
    else:
        if packing is None:
            faded = _faded_squares(w, mask, decay, layout, form)
        else:
            faded = state.squares.new_zeros(packing.num_sequences, w.shape[2], state.squares.shape[-1] + K)
            for group in packing.groups():
                rows = _faded_squares(group.take(w), group.mask(mask), group.take(decay), layout, form)
                faded = faded.index_copy(0, group.sequences, rows)
        everyone, all_tokens = gather_sums(faded, tokens, channel)
        all_squares, products = everyone[..., :-K], everyone[..., -K:]
    end = state.position + all_tokens.sum(dim=0)
    _check_length(bias, end)
    of_squares = at_ranks(state.squares, all_squares, layout.spread(products, layout.squares))
    before = zeros._replace(
        squares=of_squares[channel.rank], position=state.position + all_tokens[: channel.rank].sum(dim=0)
    )
    sums = _joined(run(before)[1], form)
    all_sums, _ = gather_sums(sums, tokens[:0], channel)
    fading = torch.cat((layout.spread(products, layout.weighted).expand_as(all_sums[..., :-K]), products), dim=-1)
    of_sums = at_ranks(_joined(state, form), all_sums, fading)
    (weighted, mass), last = (
        (sums[..., :-K], mass_of_columns(sums[..., -K:], form)) for sums in (of_sums[channel.rank], of_sums[-1])
    )
    y, _ = run(before._replace(weighted_squares=weighted, mass=mass))
    return y, TSSAState(of_squares[-1], *last, end)


def _faded_squares(w: Tensor, mask: Tensor | None, decay: Tensor, layout: Layout, form: Form) -> Tensor:
    """Return this rank's sums of squares, faded by its own decays, and behind them the K products of these."""
    columns = one_for_padding(decay, mask)
    columns = columns if form.channel_decay else columns.unsqueeze(-1)
    first = columns.new_ones(columns.shape[0], 1, *columns.shape[2:])
    after = torch.cat((first, columns.flip(1)), dim=1).cumprod(dim=1).flip(1)  # with the product of all in front
    summed = summed_squares(zero_padding(w.to(columns.dtype), mask).square(), mask, layout, form)
    return torch.cat(((summed * layout.spread(after[:, 1:], layout.squares)).sum(dim=1), after[:, 0]), dim=-1)


def _joined(state: TSSAState, form: Form) -> Tensor:
    """Return the two sums that depend on memberships as one tensor, [B, H, D + 1] without blocks."""
    return torch.cat((state.weighted_squares, mass_columns(state.mass, form)), dim=-1)


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
