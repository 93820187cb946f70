"""Runs the kernels: sizes of tiles, memory for partial sums, the order of launches. Importing it imports triton.

Shapes are those of `tost.ops._operators`; all tensors are contiguous. Nothing here looks at the values of a tensor, so
nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost.ops._inputs import Inputs, Sums
from tost.ops._numerics import statistics_dtype
from tost.ops.triton.kernels import causal, common
from tost.ops.triton.kernels import tssa as noncausal
from tost.ops.triton.tiles import SHORT, choose_tiles, num_chunks

# The same for all kernels and shapes: nothing is tuned on the machine, so results repeat everywhere.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


class Layout(NamedTuple):
    """How rows are cut into sequences and chunks; see `kernels.common`.

    Attributes:
        sequences: How many there are.
        length: Tokens of each sequence; not used with a table.
        chunks: Chunks of each sequence; not used with a table.
        programs: Chunks of all sequences, or more: entries of the table may be empty.
        table: Where each chunk lies, int64 ``[programs, 4]``, or None.
        bounds: First chunk of each sequence, int64 ``[sequences + 1]``, or None.
    """

    sequences: int
    length: int
    chunks: int
    programs: int
    table: Tensor | None = None
    bounds: Tensor | None = None


def padded_layout(w: Tensor, chunk: int) -> Layout:
    """Return the layout of w [B, N, H, D], where all sequences have N tokens."""
    B, N = w.shape[:2]
    chunks = num_chunks(N, chunk)
    return Layout(B, N, chunks, B * chunks)


def packed_layout(cu_seqlens: Tensor, rows: int, chunk: int) -> Layout:
    """Return the layout of sequences that follow each other in one row, found on the device.

    Args:
        cu_seqlens: First row of each sequence, and the number of rows, integers ``[sequences + 1]``.
        rows: Rows of all sequences.
        chunk: Tokens in a chunk.
    """
    ends = cu_seqlens.long()
    sequences = len(ends) - 1
    bounds = torch.cat((ends.new_zeros(1), ((ends.diff() + chunk - 1) // chunk).cumsum(0)))
    # As many as there can be, whatever the lengths are: the exact number is known to the device only.
    programs = rows // chunk + sequences
    number = torch.arange(programs, device=ends.device)
    sequence = torch.searchsorted(bounds[1:], number, right=True).clamp_max(sequences - 1)
    first = ends[sequence]
    begin = first + (number - bounds[sequence]) * chunk
    end = torch.minimum(begin + chunk, ends[sequence + 1])
    return Layout(sequences, 0, 0, programs, torch.stack((sequence, first, begin, end), dim=1), bounds)


@contextmanager
def _device_of(w: Tensor) -> Iterator[None]:
    """Make the device of w the current one, which is where triton launches."""
    if w.is_cuda:
        with torch.cuda.device(w.device):
            yield
    else:
        yield


def _empty(w: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(shape, dtype=statistics_dtype(w.dtype), device=w.device) for shape in shapes]


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


class _Launcher:
    """Launches kernels on one call's chunks."""

    def __init__(self, w: Tensor, layout: Layout | None) -> None:
        self.w, (self.H, self.D) = w, w.shape[2:]
        self.size = choose_tiles(self.H, self.D)
        self.layout = padded_layout(w, self.size.CHUNK) if layout is None else layout

    def by_head(self, kernel: Any, *tensors: Tensor | None, **constants: Any) -> None:
        """Run a kernel for every chunk and head."""
        size, layout = self.size, self.layout
        if layout.programs:
            kernel[(layout.programs, self.H)](
                *tensors, layout.table, layout.chunks, layout.length, **constants,
                H=self.H, D=self.D, DP=size.DP, CHUNK=size.CHUNK, **OPTIONS,
            )  # fmt: skip

    def by_chunk(self, kernel: Any, *tensors: Tensor | None, **constants: Any) -> None:
        """Run a kernel for every chunk, all heads at once."""
        size, layout = self.size, self.layout
        if layout.programs:
            kernel[(layout.programs,)](
                *tensors, layout.table, layout.chunks, layout.length, **constants,
                H=self.H, D=self.D, HP=size.HP, DP=size.DP, T=size.T, CHUNK=size.CHUNK, **OPTIONS,
            )  # fmt: skip

    def over_chunks(self, kernel: Any, *tensors: Tensor | None, **constants: Any) -> None:
        """Run a kernel for every sequence and head."""
        layout = self.layout
        if layout.sequences:
            kernel[(layout.sequences, self.H)](
                *tensors, layout.bounds, layout.chunks, **constants,
                H=self.H, D=self.D, DP=self.size.DP, BLOCK=self.size.BLOCK, **OPTIONS,
            )  # fmt: skip

    def add(self, sums: Tensor, masses: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the totals of sequences, [sequences, H, D] and [sequences, H], from those of chunks."""
        S, H, D = self.layout.sequences, self.H, self.D
        totals, mass = _empty(self.w, (S, H, D), (S, H))
        self.over_chunks(common.add_chunks, sums, masses, totals, mass)
        return totals, mass

    def scan(
        self,
        sums: Tensor,
        masses: Tensor | None,
        before: Tensor | None,
        mass_before: Tensor | None,
        *,
        backward: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what chunks start with and what the last one leaves, for sums and for masses."""
        S, C, H, D = self.layout.sequences, self.layout.programs, self.H, self.D
        starts, mass_starts, after, mass_after = _empty(self.w, (C, H, D), (C, H), (S, H, D), (S, H))
        if self.layout.table is not None:  # what its empty entries start with is written by no one, and read
            starts.zero_()
            mass_starts.zero_()
        tensors = (sums, masses, before, mass_before, starts, mass_starts, after, mass_after)
        self.over_chunks(common.scan_chunks, *tensors, BACKWARD=backward)
        return starts, mass_starts, after, mass_after


def tssa_forward(
    w: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    *,
    normalize: bool,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Return y, pi, squares (None unless normalized), weighted and mass.

    Args:
        w: Tokens, ``[B, N, H, D]``.
        temperature: ``[H]``, in the dtype of the statistics as all that follows.
        mask: Real tokens, bool ``[B, N]``.
        normalize: As in `tost.tssa`.
        layout: Of packed sequences; None if each row of w is one.
    """
    B, N, H, D = w.shape
    launch, mask = _Launcher(w, layout), _bytes(mask)
    size, C = launch.size, launch.layout.programs
    y, (pi,) = torch.empty_like(w), _empty(w, (B, N, H))
    with _device_of(w):
        if layout is None and N <= SHORT:
            squares, weighted, mass = _empty(w, (B, H, D), (B, H, D), (B, H))
            if B:
                noncausal.whole[(B,)](
                    w, mask, temperature, y, pi, squares, weighted, mass, N,
                    H=H, D=D, HP=size.HP, DP=size.DP, T=size.T, NORMALIZE=normalize, **OPTIONS,
                )  # fmt: skip
            return y, pi, squares if normalize else None, weighted, mass
        totals = None
        if normalize:
            (sums,) = _empty(w, (C, H, D))
            launch.by_head(common.chunk_squares, w, mask, sums)
            totals, _ = launch.add(sums)
        sums, masses = _empty(w, (C, H, D), (C, H))
        launch.by_chunk(noncausal.moments, w, mask, temperature, totals, pi, sums, masses)
        weighted, mass = launch.add(sums, masses)
        launch.by_head(noncausal.output, w, mask, pi, weighted, mass, y)
    return y, pi, totals, weighted, mass


def tssa_backward(
    dy: Tensor,
    w: Tensor,
    temperature: Tensor,
    mask: Tensor | None,
    pi: Tensor,
    squares: Tensor | None,
    weighted: Tensor,
    mass: Tensor,
    *,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dw and the gradient of the temperature; arguments are those and the results of `tssa_forward`."""
    B, N, H, D = w.shape
    launch, mask = _Launcher(w, layout), _bytes(mask)
    C, dw = launch.layout.programs, torch.empty_like(w)
    sums, d_energy, d_temperature = _empty(w, (C, H, D), (B, N, H), (C, H))
    with _device_of(w):
        launch.by_head(noncausal.products, w, dy, mask, pi, sums)
        product, _ = launch.add(sums)
        launch.by_chunk(
            noncausal.energies, w, dy, mask, temperature, pi, squares, weighted, mass, product,
            d_energy, sums, d_temperature,
        )  # fmt: skip
        reach = None if squares is None else launch.add(sums)[0]
        launch.by_head(
            noncausal.gradient, w, dy, mask, pi, squares, weighted, mass, product, d_energy, reach, dw
        )  # fmt: skip
    return dw, d_temperature.sum(dim=0)


def _bias_shared(inputs: Inputs) -> bool:
    """Return whether all sequences share one bias."""
    return inputs.bias is not None and inputs.bias.shape[0] != inputs.w.shape[0]


class CausalResult(NamedTuple):
    """What the causal forward pass returns; `starts` are the three sums at the start of each chunk."""

    y: Tensor
    pi: Tensor
    starts: Sums
    after: Sums


NO_SUMS = (None, None, None)


def causal_forward(inputs: Inputs, layout: Layout | None = None) -> CausalResult:
    """Run the causal operator.

    Args:
        inputs: The tensors of the call.
        layout: Of packed sequences; None if each row of w is one.
    """
    w, mask = inputs.w, _bytes(inputs.mask)
    B, N, H, D = w.shape
    launch, before = _Launcher(w, layout), inputs.before or NO_SUMS
    C, y = launch.layout.programs, torch.empty_like(w)
    pi, sums, masses = _empty(w, (B, N, H), (C, H, D), (C, H))
    with _device_of(w):
        launch.by_head(common.chunk_squares, w, mask, sums)
        squares, _, squares_after, _ = launch.scan(sums, None, before[0], None, backward=False)
        launch.by_chunk(
            causal.memberships, w, mask, inputs.temperature, inputs.bias, squares, pi, sums, masses,
            BIAS_SHARED=_bias_shared(inputs),
        )  # fmt: skip
        weighted, mass, *after = launch.scan(sums, masses, *before[1:], backward=False)
        launch.by_head(causal.output, w, mask, pi, weighted, mass, y)
    return CausalResult(y, pi, Sums(squares, weighted, mass), Sums(squares_after, *after))


def causal_step(inputs: Inputs) -> tuple[Tensor, Sums]:
    """Advance every sequence by one token in one launch: return y [B, 1, H, D] and the sums after it."""
    w, before = inputs.w, inputs.before or NO_SUMS
    B, _, H, D = w.shape
    size, y = choose_tiles(H, D), torch.empty_like(w)
    after = Sums(*_empty(w, (B, H, D), (B, H, D), (B, H)))
    with _device_of(w):
        if B:
            causal.step[(B,)](
                w, _bytes(inputs.mask), inputs.temperature, inputs.bias, *before, y, *after,
                BIAS_SHARED=_bias_shared(inputs), H=H, D=D, HP=size.HP, DP=size.DP, **OPTIONS,
            )  # fmt: skip
    return y, after


class CausalGradients(NamedTuple):
    """Gradients of the causal operator; those of logits are per token, [B, N, H]."""

    w: Tensor
    temperature: Tensor
    logit: Tensor
    before: Sums


def causal_backward(
    dy: Tensor,
    d_after: tuple[Tensor | None, Tensor | None, Tensor | None],
    inputs: Inputs,
    pi: Tensor,
    starts: Sums,
    layout: Layout | None = None,
) -> CausalGradients:
    """Return all gradients.

    Args:
        dy: Gradient of y, in the dtype of w.
        d_after: Gradients of the sums after the last token.
        inputs: As in `causal_forward`; the sums before are not looked at.
        pi: As `causal_forward` returned it, and so `starts`.
        starts: The sums at the start of each chunk.
        layout: As in `causal_forward`.
    """
    w, mask, temperature = inputs.w, _bytes(inputs.mask), inputs.temperature
    B, N, H, D = w.shape
    launch, dw = _Launcher(w, layout), torch.empty_like(w)
    C, size = launch.layout.programs, launch.size
    replayed = pi, starts.weighted_squares, starts.mass
    sums, masses, d_pi, d_logit, d_temperature = _empty(w, (C, H, D), (C, H), (B, N, H), (B, N, H), (C, H))
    with _device_of(w):
        launch.by_head(causal.products, w, dy, mask, *replayed, sums, masses)
        later_weighted, later_mass, *d_before = launch.scan(sums, masses, *d_after[1:], backward=True)
        launch.by_head(causal.d_memberships, w, dy, mask, *replayed, later_weighted, later_mass, d_pi)
        if B * N:
            programs, ROWS = num_chunks(B * N, size.ROWS), size.ROWS
            causal.d_logits[(programs,)](pi, d_pi, d_logit, B * N, H=H, HP=size.HP, BLOCK=ROWS, **OPTIONS)
        launch.by_head(
            causal.shares, w, mask, temperature, inputs.bias, starts.squares, d_logit, sums, d_temperature,
            BIAS_SHARED=_bias_shared(inputs),
        )  # fmt: skip
        later_squares, _, d_squares, _ = launch.scan(sums, None, d_after[0], None, backward=True)
        launch.by_head(
            causal.gradient, w, dy, mask, temperature, *replayed, starts.squares, d_logit,
            later_squares, later_weighted, dw,
        )  # fmt: skip
    return CausalGradients(dw, d_temperature.sum(dim=0), d_logit, Sums(d_squares, *d_before))
