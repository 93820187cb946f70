"""Inputs for the operators and a way to run one backend on them, shared by the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import tost
from tost.ops._blocks import products
from tost.ops._numerics import statistics_dtype
from tost.ops.form import Form
from tost.testing import assert_close

# Single entries, odd widths, one head, more than one chunk of the kernel, a last chunk of one token.
SHAPES = [(1, 1, 1, 1), (2, 63, 3, 5), (3, 130, 2, 33), (1, 257, 8, 64), (2, 129, 1, 7), (5, 2, 4, 3)]
BACKENDS = [name for name, status in tost.available_backends("tssa").items() if status == "ready"]
FAST_BACKENDS = [name for name in BACKENDS if name != "reference"]
BLOCK_BACKENDS = [name for name in BACKENDS if name != "triton"]
FAST_BLOCK_BACKENDS = [name for name in FAST_BACKENDS if name in BLOCK_BACKENDS]
# Bound on the relative rms of an output against the reference in float64 on the same rounded inputs.
BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Case:
    """Arguments of a call and a cotangent for each of its outputs."""

    w: Tensor
    temperature: Tensor
    dy: Tensor
    mask: Tensor | None = None
    normalize: bool = True
    bias: Tensor | None = None
    state: tost.TSSAState | None = None
    dstate: tuple[Tensor, Tensor, Tensor] | None = None
    count_scaled: bool = False
    decay: Tensor | None = None
    block_size: int = 1
    centered: bool = False

    def double(self) -> Case:
        """The same numbers, rounded as they are, in float64."""

        def up(x):
            return None if x is None else x.double()

        state = None if self.state is None else self.state.to(dtype=torch.float64)
        dstate = None if self.dstate is None else tuple(map(up, self.dstate))
        return replace(
            self,
            w=up(self.w),
            temperature=up(self.temperature),
            dy=up(self.dy),
            bias=up(self.bias),
            decay=up(self.decay),
            state=state,
            dstate=dstate,
        )


def make_decay(H: int, dtype: torch.dtype) -> Tensor:
    """Slow and fast forgetting, and one head that forgets nothing."""
    return torch.tensor([0.9, 1.0, 0.5, 0.999, 1e-3])[torch.arange(H) % 5].to(dtype)


def make_token_decay(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Of every token: from nothing forgotten to nothing kept, and no two alike."""
    return torch.rand(shape, generator=generator).pow(0.2).masked_fill(torch.rand(shape, generator=generator) < 0.02, 0)


def make_case(
    shape,
    dtype,
    *,
    masked=False,
    normalize=True,
    bias=False,
    state=False,
    count_scaled=False,
    decay=False,
    block_size=1,
    centered=False,
    seed=0,
) -> Case:
    """Make a case; `decay` is True for one per head, or "head" or "channel" for those of every token."""
    g = torch.Generator().manual_seed(seed)
    B, N, H, D = shape

    def randn(*size):
        return torch.randn(size, generator=g)

    def rand(*size):
        return torch.rand(size, generator=g)

    sums, K = statistics_dtype(dtype), D // block_size
    form = Form(
        count_scaled=count_scaled,
        block_size=block_size,
        centered=centered,
        token_decay=isinstance(decay, str),
        channel_decay=decay == "channel",
    )
    squares = 3 * rand(B, H, D)
    weighted = rand(B, H, D) if block_size == 1 else products(rand(B, 3, H, D), block_size).sum(dim=1)
    before = (squares, weighted, 3 * rand(B, H, K) if form.channel_decay else 3 * rand(B, H))
    if form.counted:
        before = (torch.cat((squares, 1 + rand(B, H, form.num_masses(D))), dim=-1), *before[1:])
    if centered:  # of some tokens, so that what is left of the moments is a covariance
        weight, seen = rand(B, 3, H, 1), randn(B, 3, H, D)
        parts = torch.cat((products(seen, block_size), seen), dim=-1)
        mass = before[2] + (weight.sum(dim=1) if form.channel_decay else weight.sum(dim=(1, 3)))
        before = (before[0], (weight * parts).sum(dim=1), mass)
    position = torch.randint(0, 4, (B,), generator=g)
    decays = make_decay(H, sums) if decay else None
    if form.token_decay:
        per_token = torch.Generator().manual_seed(seed + 1)
        decays = make_token_decay((B, N, H, K) if form.channel_decay else (B, N, H), per_token).to(sums)
    return Case(
        w=randn(B, N, H, D).to(dtype),
        # Both signs. Un-normalized energies are as large as D, and scaled ones as N, so their temperature is small.
        temperature=(randn(H) * (3.0 if normalize else 0.2) / (max(N, 1) if count_scaled else 1)).to(sums),
        dy=randn(B, N, H, D).to(dtype),
        mask=rand(B, N) > 0.3 if masked else None,
        normalize=normalize,
        bias=(0.3 * randn(H, N + 4)).to(sums) if bias else None,
        state=tost.TSSAState(*(x.to(sums) for x in before), position) if state else None,
        dstate=tuple(randn(*x.shape).to(sums) for x in before),
        count_scaled=count_scaled,
        decay=decays,
        block_size=block_size,
        centered=centered,
    )


def run_tssa(case: Case, backend: str) -> dict[str, Tensor]:
    """Output and gradients of ``tost.tssa``."""
    w, t = case.w.detach().requires_grad_(), case.temperature.detach().requires_grad_()
    options = {"normalize": case.normalize, "count_scaled": case.count_scaled}
    options |= {"block_size": case.block_size, "centered": case.centered}
    y = tost.tssa(w, t, mask=case.mask, backend=backend, **options)
    dw, dt = torch.autograd.grad(y, (w, t), case.dy)
    return {"y": y, "dw": dw, "dtemperature": dt}


def run_causal(case: Case, backend: str) -> dict[str, Tensor]:
    """Outputs and gradients of ``tost.causal_tssa_with_state``, those of the state included."""
    inputs = {"w": case.w, "temperature": case.temperature}
    inputs |= {name: getattr(case, name) for name in ("bias", "decay") if getattr(case, name) is not None}
    if case.state is not None:
        inputs |= {name: getattr(case.state, name) for name in ("squares", "weighted_squares", "mass")}
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    state = None
    if case.state is not None:
        sums = (inputs[name] for name in ("squares", "weighted_squares", "mass"))
        state = tost.TSSAState(*sums, case.state.position)
    options = {"mask": case.mask, "state": state, "count_scaled": case.count_scaled, "decay": inputs.get("decay")}
    options |= {"block_size": case.block_size, "centered": case.centered}
    y, after = tost.causal_tssa_with_state(
        inputs["w"], inputs["temperature"], inputs.get("bias"), backend=backend, **options
    )
    outputs, cotangents = (y, *after[:3]), (case.dy, *case.dstate)
    gradients = torch.autograd.grad(outputs, tuple(inputs.values()), cotangents, materialize_grads=True)
    return {"y": y, **after._asdict(), **{f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}}


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_close(name, actual[name], expected[name], bound)


def options(case: Case, **changes) -> dict:
    """The keyword arguments of `causal_tssa_with_state` for a case."""
    names = ("mask", "state", "count_scaled", "decay", "block_size", "centered")
    return {name: getattr(case, name) for name in names} | changes


def whole_options(case: Case, **changes) -> dict:
    """Those of `tssa`."""
    names = ("mask", "normalize", "count_scaled", "block_size", "centered")
    return {name: getattr(case, name) for name in names} | changes


def causal(case: Case, backend: str, **changes) -> tuple[Tensor, tost.TSSAState]:
    """Run the causal operator on a case; `changes` are other tensors and options."""
    tensors = [changes.pop(name, getattr(case, name)) for name in ("w", "temperature", "bias")]
    return tost.causal_tssa_with_state(*tensors, **options(case, backend=backend) | changes)


def part(x: Tensor | None, rows) -> Tensor | None:
    """What tokens have, [B, N, ...], of some of them; what all share as it is."""
    return x if x is None or x.dim() == 1 else x[:, rows]


def assert_same_state(actual: tost.TSSAState, expected: tost.TSSAState, bound: float) -> None:
    assert_all_close(actual._asdict(), expected._asdict(), bound)


# Every option with every other one that it could disturb.
FORMS: dict[str, dict] = {
    "plain": {},
    "scaled": {"count_scaled": True},
    "fading": {"decay": True},
    "scaled fading": {"count_scaled": True, "decay": True},
    "blocks": {"block_size": 3},
    "scaled fading blocks": {"block_size": 3, "count_scaled": True, "decay": True},
    "centered": {"centered": True, "count_scaled": True},
    "fading centered": {"centered": True, "decay": True},
    "centered blocks": {"block_size": 3, "centered": True, "count_scaled": True},
    "decays of heads": {"decay": "head", "count_scaled": True},
    "decays of heads in centered blocks": {"decay": "head", "block_size": 3, "centered": True, "count_scaled": True},
    "decays of channels": {"decay": "channel", "count_scaled": True},
    "decays of channels centered": {"decay": "channel", "centered": True, "count_scaled": True},
    "decays of blocks": {"decay": "channel", "block_size": 2, "count_scaled": True},
    "decays of whole blocks centered": {"decay": "channel", "block_size": 6, "centered": True, "count_scaled": True},
}
# Those that tssa has; the rest of their options is about tokens that come before.
WHOLE_FORMS = {name: form for name, form in FORMS.items() if "decay" not in form}


def takes(backend: str, form: dict) -> bool:
    """Whether a backend has a form: Triton kernels have neither blocks, nor means, nor decays from the data."""
    return backend in BLOCK_BACKENDS or not (
        form.get("block_size", 1) > 1 or form.get("centered") or isinstance(form.get("decay"), str)
    )


def on_forms(backends: list[str] = BACKENDS, forms: dict[str, dict] = FORMS):
    """Parametrize a test by `backend` and `form`, an options dictionary, where the backend has the form."""
    pairs = [(name, text) for name in backends for text in forms if takes(name, forms[text])]
    return pytest.mark.parametrize(
        ("backend", "form"),
        [pytest.param(name, forms[text], id=f"{name} {text}".replace(" ", "-")) for name, text in pairs],
    )
