"""The Triton kernels against the reference: outputs, states, gradients, masks, options, packing, steps, equal bits.

On a machine with a GPU the compiled kernels run there, with every shape and dtype; elsewhere small shapes run under
Triton's interpreter, so that a failure on a device is not due to a bound.
"""

import pytest
import torch

from tost.ops import TSSAState, causal_tssa_with_state, tssa
from tost.ops._numerics import statistics_dtype
from tost.testing import relative_rms

pytest.importorskip("triton", reason="triton has no packages for this platform")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
SHORT = ((2, 3, 2, 3),)
LONG = (
    *((1, 1, 1, 1), (2, 63, 3, 5), (3, 130, 2, 33), (5, 2, 4, 3), (2, 196, 8, 48)),
    *((1, 257, 8, 64), (2, 1100, 6, 64), (1, 4099, 12, 64), (1, 300, 24, 64), (1, 70, 2, 128)),
)
DTYPES = tuple(BOUNDS)
if DEVICE == "cpu":
    from tests.ops.triton.interpreter import speed_up

    speed_up()
    LONG = tuple(shape for shape in LONG if shape[1] < 1000)
    DTYPES = (torch.float32,)


def make_leaves(shape, dtype, *, causal, form):
    """Tensors that an operator is differentiated in, by name, rounded to a dtype."""
    g = torch.Generator().manual_seed(0)
    B, N, H, D = shape
    sums = statistics_dtype(dtype)
    # Memberships should not be all or nothing, or gradients are rounding. Energies that are not normalized, and those
    # of first tokens, are as large as D.
    sharpness = 1 / D if form == "not normalized" else min(1, 16 / D) if causal else 1.0
    temperature = (sharpness * torch.randn(H, generator=g)).to(sums)
    found = {"w": torch.randn(shape, generator=g).to(dtype), "temperature": temperature}
    if causal:
        found["bias"] = (0.3 * torch.randn(H, N + 4, generator=g)).to(sums)
    if causal and form in ("all options", "one token"):
        sizes = {"squares": (B, H, D), "weighted_squares": (B, H, D), "mass": (B, H)}
        found |= {name: (3 * torch.rand(size, generator=g)).to(sums) for name, size in sizes.items()}
    if form == "one token":
        found["w"] = found["w"][:, :1].contiguous()
    if form == "packed":
        found["w"] = found["w"].reshape(1, B * N, H, D)
    return {name: x.to(DEVICE) for name, x in found.items()}


def make_options(shape, form):
    """Arguments that are not differentiated in."""
    B, N = shape[:2]
    if form == "all options":
        mask = torch.rand((B, N), generator=torch.Generator().manual_seed(1)) > 0.3
        return {"mask": mask.to(DEVICE)}
    if form == "packed":  # the rows, the first one cut after a token, and an empty sequence
        begins = sorted([*range(0, B * N + 1, N), min(1, B * N), B * N])
        return {"cu_seqlens": torch.tensor(begins, dtype=torch.int32, device=DEVICE)}
    return {"normalize": False} if form == "not normalized" else {}


def run(leaves, options, backend, *, causal):
    """Outputs and gradients, for the same cotangents in every dtype; a step of decoding has no gradients."""
    step = causal and leaves["w"].shape[1] == 1 and "mass" in leaves
    inputs = {name: x.detach().requires_grad_(not step) for name, x in leaves.items()}
    w, temperature = inputs["w"], inputs["temperature"]
    if causal:
        state = None
        if "mass" in inputs:
            position = torch.ones(w.shape[0], dtype=torch.int64, device=w.device)
            state = TSSAState(inputs["squares"], inputs["weighted_squares"], inputs["mass"], position)
        options = {**options, "state": state, "backend": backend}
        y, after = causal_tssa_with_state(w, temperature, inputs["bias"], **options)
        outputs = {"y": y, **dict(zip(TSSAState._fields[:3], after[:3], strict=True))}
    else:
        outputs = {"y": tssa(w, temperature, **options, backend=backend)}
    if step:
        return outputs
    g = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(x.shape, generator=g).bfloat16().to(x) for x in outputs.values()]
    gradients = torch.autograd.grad(list(outputs.values()), list(inputs.values()), cotangents)
    return {**outputs, **{f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [*SHORT, *(pytest.param(shape, marks=[pytest.mark.slow] * (DEVICE == "cpu")) for shape in LONG)],
    ids=lambda shape: "x".join(map(str, shape)),
)
@pytest.mark.parametrize(
    ("causal", "form"),
    [
        *((False, form) for form in ("", "all options", "packed", "not normalized")),
        *((True, form) for form in ("", "all options", "packed", "one token")),
    ],
)
def test_kernels_agree_with_the_reference(causal, form, shape, dtype):
    leaves, options = make_leaves(shape, dtype, causal=causal, form=form), make_options(shape, form)
    found, again = (run(leaves, options, "triton", causal=causal) for _ in range(2))
    expected = run({name: x.double() for name, x in leaves.items()}, options, "reference", causal=causal)
    assert all(torch.equal(found[name], again[name]) for name in found)
    errors = {name: relative_rms(found[name], expected[name]) for name in expected}
    failed = {name: error for name, error in errors.items() if not error <= BOUNDS[dtype]}
    if "dtemperature" in failed:  # one sum over all tokens, whose terms may cancel in the reference as well
        own = run(leaves, options, "reference", causal=causal)["dtemperature"]
        if failed["dtemperature"] <= 2 * relative_rms(own, expected["dtemperature"]):
            del failed["dtemperature"]
    assert failed == {}
