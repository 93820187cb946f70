"""The check of the operators: every implementation computes what the reference computes.

Each ready backend, and the paper's formulation that speeds are compared with, runs on a grid of shapes, dtypes and
masks. Output and every gradient are compared with the reference in float64 on the same rounded inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from tost.bench.harness.gate import BOUNDS, Check, GateResult
from tost.bench.ops.cases import Op
from tost.bench.ops.contenders import paper_causal_tssa, paper_tssa
from tost.errors import BackendError
from tost.ops import available_backends, causal_tssa, causal_tssa_with_state, tssa
from tost.ops.backends import BACKENDS
from tost.testing import relative_rms

SHAPES = ((1, 1, 1, 1), (2, 63, 3, 5), (1, 257, 8, 64), (2, 130, 12, 64))
"""``[B, N, H, D]`` of the checks: the smallest, odd sizes, and the head shapes of the paper's models."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Arguments of one call: `w` ``[B, N, H, D]``, `temperature` ``[H]``, `bias` ``[H, N]``, `mask` ``[B, N]``."""

    w: Tensor
    temperature: Tensor
    bias: Tensor | None
    mask: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Positional arguments of the operator."""
        return (self.w, self.temperature) if self.bias is None else (self.w, self.temperature, self.bias)

    def leaves(self, dtype: torch.dtype) -> Sample:
        """Return a copy in another dtype whose floating point tensors collect gradients."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype, copy=True).requires_grad_()

        bias = None if self.bias is None else leaf(self.bias)
        return Sample(w=leaf(self.w), temperature=leaf(self.temperature), bias=bias, mask=self.mask)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients collected so far, by name; a tensor that got none stands at zero."""
        named = {"dw": self.w, "dtemperature": self.temperature, "dbias": self.bias}
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in named.items()
            if tensor is not None
        }


Call = Callable[[Sample], Tensor]
"""Runs an operator: arguments to ``[B, N, H, D]``."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An implementation to check.

    Attributes:
        call: Runs it.
        overwrite: Runs the form that overwrites `w`, which layers use when no gradient is needed; None if it has none.
        takes_mask: Whether it is also checked with a mask.
        threaded: Whether it divides its work among threads itself, and is therefore checked with all of them.
        dtypes: Dtypes it is checked in.
    """

    call: Call
    overwrite: Call | None = None
    takes_mask: bool = True
    threaded: bool = False
    dtypes: tuple[torch.dtype, ...] = tuple(BOUNDS)


def candidates(op: Op, block_size: int = 1) -> dict[str, Candidate]:
    """Return every ready backend of an operator that is chosen by itself, and the paper's formulation.

    The formulation is checked without masks, which it does not have, and not in bfloat16, where it sums in bfloat16. It
    has no blocks, and is left out where backends take statistics in blocks.
    """
    statuses = available_backends(op)
    ready = [backend.name for backend in BACKENDS if backend.automatic and statuses[backend.name] == "ready"]
    found = {name: _backend(op, name, block_size) for name in ready}
    if block_size > 1:
        return found
    formulation = paper_causal_tssa if op is Op.CAUSAL_TSSA else paper_tssa
    found["paper eager"] = Candidate(
        call=lambda x: formulation(*x.arguments), takes_mask=False, dtypes=(torch.float64, torch.float32)
    )
    return found


def run_gate(
    ops: Sequence[Op] = tuple(Op),
    *,
    block_size: int = 1,
    implementations: Mapping[Op, Mapping[str, Candidate]] | None = None,
) -> GateResult:
    """Compare implementations with the reference.

    Args:
        ops: Operators to check.
        block_size: Features in a block of statistics; above 1, backends are checked with it besides.
        implementations: What to check, by operator and name; None takes everything that is ready here.

    Returns:
        All comparisons; look at `GateResult.passed` before showing a speed.
    """
    checks: list[Check] = []
    declined: dict[str, str] = {}
    for op, g in product(ops, sorted({1, block_size})):
        reference = _backend(op, "reference", g).call
        shapes = SHAPES if g == 1 else ((2, 63, 3, g), (2, 130, 4, 3 * g))
        for name, candidate in (implementations[op] if implementations else candidates(op, g)).items():
            for label, inputs, dtype in _grid(op, candidate, shapes):
                title = f"{op} {name} {label}" if g == 1 else f"{op} {name} g={g} {label}"
                try:
                    checks += _compare(title, candidate, reference, inputs, dtype)
                except BackendError as error:
                    declined[title] = str(error)
    return GateResult(checks=tuple(checks), declined=declined)


def _backend(op: Op, name: str, block_size: int = 1) -> Candidate:
    def call(x: Sample) -> Tensor:
        run = causal_tssa if op is Op.CAUSAL_TSSA else tssa
        return run(*x.arguments, mask=x.mask, block_size=block_size, backend=name)

    def overwrite(x: Sample) -> Tensor:
        if op is Op.CAUSAL_TSSA:
            return causal_tssa_with_state(
                *x.arguments, mask=x.mask, block_size=block_size, backend=name, overwrite=True
            )[0]
        return tssa(*x.arguments, mask=x.mask, block_size=block_size, backend=name, overwrite=True)

    return Candidate(call=call, overwrite=overwrite, threaded=name == "native")


def _grid(
    op: Op, candidate: Candidate, shapes: Sequence[tuple[int, int, int, int]]
) -> Iterator[tuple[str, Sample, torch.dtype]]:
    """Yield a label, the inputs rounded to a dtype, and that dtype, for every point of the grid."""
    for shape in shapes:
        B, N, H, _ = shape
        for masked in (False, True) if candidate.takes_mask else (False,):
            for dtype in candidate.dtypes:
                generator = torch.Generator().manual_seed(sum(shape))
                # Tokens of different size keep the memberships away from uniform, where errors would hide.
                size = 0.5 + 2 * torch.rand(B, N, H, 1, generator=generator)
                inputs = Sample(
                    w=(size * torch.randn(shape, generator=generator)).to(dtype),
                    temperature=(1 + torch.rand(H, generator=generator)).to(dtype),
                    bias=(0.1 * torch.randn(H, N, generator=generator)).to(dtype) if op is Op.CAUSAL_TSSA else None,
                    mask=_mask(B, N, generator) if masked else None,
                )
                label = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}{' masked' * masked}"
                yield label, inputs, dtype


def _mask(B: int, N: int, generator: torch.Generator) -> Tensor:
    mask = torch.rand(B, N, generator=generator) < 0.7
    mask[:, N // 2] = True  # at least one token stays
    return mask


def _compare(title: str, candidate: Candidate, reference: Call, inputs: Sample, dtype: torch.dtype) -> list[Check]:
    cotangent = torch.randn(inputs.w.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    # One thread is enough for what torch computes; on a busy machine waiting for the others takes most of the time.
    with nullcontext() if candidate.threaded else _one_thread():
        actual = _outputs(candidate.call, inputs.leaves(dtype), cotangent)
        if candidate.overwrite is not None:
            with torch.no_grad():
                actual["y, overwriting"] = candidate.overwrite(inputs.leaves(dtype))
    with _one_thread():
        expected = _outputs(reference, inputs.leaves(torch.float64), cotangent.double())
        expected["y, overwriting"] = expected["y"]
        errors = {name: relative_rms(value, expected[name]) for name, value in actual.items()}
    return [Check(name=f"{title} {name}", error=error, bound=BOUNDS[dtype]) for name, error in errors.items()]


def _outputs(call: Call, inputs: Sample, cotangent: Tensor) -> dict[str, Tensor]:
    y = call(inputs)
    torch.autograd.backward(y, cotangent)
    return {"y": y, **inputs.gradients()}


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
