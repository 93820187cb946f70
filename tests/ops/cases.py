"""Inputs for the operators and a way to run one backend on them, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tost
from tost.ops._numerics import statistics_dtype
from tost.testing import assert_close

# Single entries, odd widths, one head, more than one chunk of the kernel, a last chunk of one token.
SHAPES = [(1, 1, 1, 1), (2, 63, 3, 5), (3, 130, 2, 33), (1, 257, 8, 64), (2, 129, 1, 7), (5, 2, 4, 3)]
BACKENDS = [name for name, status in tost.available_backends("tssa").items() if status == "ready"]
FAST_BACKENDS = [name for name in BACKENDS if name != "reference"]
# Bound on the relative rms of an output against the reference in float64 on the same rounded inputs.
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SUMS = ("squares", "weighted_squares", "mass")

backends = pytest.mark.parametrize("backend", BACKENDS)
fast_backends = pytest.mark.parametrize("backend", FAST_BACKENDS)


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=dtype_id)


def takes(backend: str, block_size: int) -> bool:
    """Whether a backend has `tssa` in blocks: Triton kernels have none."""
    return block_size == 1 or backend != "triton"


def on_blocks(names: list[str] = BACKENDS, sizes: tuple[int, ...] = (1, 3)):
    """Parametrize a test by `backend` and `block_size`."""
    pairs = [(name, g) for name in names for g in sizes if takes(name, g)]
    return pytest.mark.parametrize(("backend", "block_size"), pairs, ids=[f"{name}-{g}" for name, g in pairs])


# --- Every operator as a function of tokens and temperatures


def gated(w: Tensor, temperature: Tensor, block_size: int = 2, **options: Any) -> Tensor:
    """Gated statistics with gates that are made of the arguments of the other operators."""
    g = block_size if w.shape[-1] % block_size == 0 else 1
    sums = w.to(statistics_dtype(w.dtype)).unflatten(-1, (-1, g)).sum(dim=-1)
    return tost.gated_tssa(w, (temperature.to(sums.dtype).unsqueeze(-1) * sums).sigmoid(), **options)


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "tssa": tost.tssa,
    "blocks": partial(tost.tssa, block_size=2),
    "causal": tost.causal_tssa,
    "gated": gated,
}


def on_operators(names: list[str] = BACKENDS):
    """Parametrize a test by `backend` and `run`, one of `OPERATORS`."""
    pairs = [(name, op) for name in names for op in OPERATORS if name != "triton" or op in ("tssa", "causal")]
    return pytest.mark.parametrize(
        ("backend", "run"), [pytest.param(name, OPERATORS[op], id=f"{name}-{op}") for name, op in pairs]
    )


# --- The forms of the paper, with outputs, states and gradients


@dataclass(frozen=True)
class Case:
    """Arguments of a call and a cotangent for each of its outputs."""

    w: Tensor
    temperature: Tensor
    dy: Tensor
    dstate: tuple[Tensor, ...]
    mask: Tensor | None = None
    normalize: bool = True
    block_size: int = 1
    bias: Tensor | None = None
    state: tost.TSSAState | None = None

    def double(self) -> Case:
        """The same numbers, rounded as they are, in float64."""
        tensors = {name: getattr(self, name) for name in ("w", "temperature", "dy", "bias")}
        wide = {name: x.double() for name, x in tensors.items() if x is not None}
        state = None if self.state is None else self.state.to(dtype=torch.float64)
        return replace(self, **wide, state=state, dstate=tuple(x.double() for x in self.dstate))


def make_case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    masked: bool = False,
    normalize: bool = True,
    block_size: int = 1,
    bias: bool = False,
    state: bool = False,
    seed: int = 0,
) -> Case:
    """Make a case; `block_size` is that of `tssa`."""
    g = torch.Generator().manual_seed(seed)
    B, N, H, D = shape

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=g)

    def rand(*size: int) -> Tensor:
        return torch.rand(size, generator=g)

    wide = statistics_dtype(dtype)
    before = (3 * rand(B, H, D), rand(B, H, D), 3 * rand(B, H))
    position = torch.randint(0, 4, (B,), generator=g)
    return Case(
        w=randn(B, N, H, D).to(dtype),
        # Both signs. Un-normalized energies are as large as D, so their temperature is small.
        temperature=(randn(H) * (3.0 if normalize else 0.2)).to(wide),
        dy=randn(B, N, H, D).to(dtype),
        mask=rand(B, N) > 0.3 if masked else None,
        normalize=normalize,
        block_size=block_size,
        bias=(0.3 * randn(H, N + 4)).to(wide) if bias else None,
        state=tost.TSSAState(*(x.to(wide) for x in before), position) if state else None,
        dstate=tuple(randn(*x.shape).to(wide) for x in before),
    )


def plain(case: Case, backend: str, **changes: Any) -> Tensor:
    """Run ``tost.tssa`` on a case; `changes` are other tensors and options."""
    w, t = (changes.pop(name, getattr(case, name)) for name in ("w", "temperature"))
    given = {name: getattr(case, name) for name in ("mask", "normalize", "block_size")}
    return tost.tssa(w, t, **given | {"backend": backend} | changes)


def continued(case: Case, backend: str, **changes: Any) -> tuple[Tensor, tost.TSSAState]:
    """Run ``tost.causal_tssa_with_state`` on a case; `changes` are other tensors and options."""
    tensors = [changes.pop(name, getattr(case, name)) for name in ("w", "temperature", "bias")]
    given = {"mask": case.mask, "state": case.state, "backend": backend}
    return tost.causal_tssa_with_state(*tensors, **given | changes)


def leaves(case: Case, *, causal: bool) -> dict[str, Tensor]:
    """The tensors of a case that gradients are taken of, by name."""
    found = {"w": case.w, "temperature": case.temperature}
    if causal:
        found |= {"bias": case.bias} | ({} if case.state is None else dict(zip(SUMS, case.state[:3], strict=True)))
    return {name: x.detach().clone().requires_grad_() for name, x in found.items() if x is not None}


def outputs(case: Case, inputs: dict[str, Tensor], backend: str, *, causal: bool, **options: Any) -> dict[str, Tensor]:
    """Outputs of an operator on the `leaves` of a case."""
    if not causal:
        return {"y": plain(case, backend, **inputs, **options)}
    inputs = dict(inputs)
    sums = [inputs.pop(name) for name in SUMS if name in inputs]
    state = tost.TSSAState(*sums, case.state.position) if sums else None
    y, after = continued(case, backend, **inputs, state=state, **options)
    return {"y": y, **after._asdict()}


def gradients(case: Case, inputs: dict[str, Tensor], results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the `leaves`, by the cotangents of the case."""
    floating = [x for x in results.values() if x.is_floating_point()]
    cotangents = (case.dy, *case.dstate)[: len(floating)]
    found = torch.autograd.grad(floating, list(inputs.values()), cotangents, materialize_grads=True)
    return {f"d{name}": x for name, x in zip(inputs, found, strict=True)}


def _run(case: Case, backend: str, *, causal: bool) -> dict[str, Tensor]:
    inputs = leaves(case, causal=causal)
    results = outputs(case, inputs, backend, causal=causal)
    return results | gradients(case, inputs, results)


run_tssa = partial(_run, causal=False)
"""Output and gradients of ``tost.tssa``."""
run_causal = partial(_run, causal=True)
"""Outputs and gradients of ``tost.causal_tssa_with_state``, those of the state included."""


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_close(name, actual[name], expected[name], bound)


def assert_same_state(actual: tost.TSSAState, expected: tost.TSSAState, bound: float) -> None:
    assert_all_close(actual._asdict(), expected._asdict(), bound)
