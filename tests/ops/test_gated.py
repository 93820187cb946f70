"""Gated statistics: every backend against the reference, and the properties of a causal operator with a state."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tost.ops import reference
from tost.ops._blocks import matrices, packed
from tost.ops._inputs import GatedInputs
from tost.testing import assert_close

BACKENDS = [name for name, status in tost.available_backends("gated_tssa").items() if status == "ready"]
FAST = [name for name in BACKENDS if name != "reference"]
# (B, N, H, D), g: single entries, odd widths, tiles that are not full, several chunks, no tokens.
SHAPES = [
    ((1, 1, 1, 1), 1),
    ((2, 63, 3, 5), 1),
    ((2, 130, 3, 12), 4),
    ((1, 300, 2, 16), 8),
    ((3, 65, 9, 8), 8),
    ((2, 40, 1, 48), 16),
    ((2, 0, 2, 4), 2),
]
BOUNDS = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make(shape, g, dtype=torch.float64, *, seed=0, masked=False, state=False):
    generator = torch.Generator().manual_seed(seed)
    B, N, H, D = shape

    def randn(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    write = torch.rand(B, N, H, D // g, generator=generator, dtype=torch.float64) ** 3
    write = write.masked_fill(torch.rand(write.shape, generator=generator) < 0.05, 1)
    given = {"w": (1 + randn(B, N, H, D)).to(dtype), "write": write.to(wide)}
    mask = torch.rand(B, N, generator=generator) < 0.7 if masked else None
    before = None
    if state:
        a = randn(B, H, D // g, g, g)
        mass = torch.rand(B, H, D // g, generator=generator, dtype=torch.float64)
        before = tost.GatedState(randn(B, H, D), packed(a @ a.mT), mass, torch.arange(B))
        before = tost.GatedState(*(x.to(wide) for x in before[:3]), before.position)
    return given, {"mask": mask, "state": before}


def outputs(given, options, backend):
    """Outputs, sums after the last token and every gradient."""
    state = options["state"]
    leaves = [x.clone().requires_grad_() for x in (*given.values(), *(() if state is None else state[:3]))]
    options = options | {"state": None if state is None else tost.GatedState(*leaves[2:], state.position)}
    y, after = tost.gated_tssa_with_state(*leaves[:2], **options, backend=backend)
    results = (y, *after[:3])
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    pairs = [pair for pair in zip(results, cotangents, strict=True) if pair[0].requires_grad]  # all but an empty state
    roots, cotangents = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    gradients = [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, gradients, strict=True)]
    return [x.detach() for x in results] + [*gradients, after.position]


NAMES = ["y", "mean", "covariance", "mass", "dw", "dwrite", "dmean", "dcovariance", "dmass"]


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("shape", "g"), SHAPES, ids=str)
@pytest.mark.parametrize(("masked", "state"), [(False, False), (True, True)])
def test_backends_match_the_reference(backend, dtype, shape, g, masked, state):
    given, options = make(shape, g, dtype, masked=masked, state=state)
    wide = {name: x.double() for name, x in given.items()}
    before = options["state"]
    before = None if before is None else tost.GatedState(*(x.double() for x in before[:3]), before.position)
    expected = outputs(wide, options | {"state": before}, "reference")
    actual = outputs(given, options, backend)
    assert torch.equal(actual[-1], expected[-1])
    for name, a, e in zip(NAMES, actual[:-1], expected[:-1], strict=False):
        assert_close(name, a.double(), e, BOUNDS[dtype])


def test_reference_is_the_weighted_mean_and_covariance():
    given, _ = make((1, 20, 1, 3), 3)
    w, z = given["w"][0, :, 0], given["write"][0, :, 0, 0]
    y, mean, covariance = reference.gated_tssa(GatedInputs(given["w"], given["write"]))
    weights, total = torch.zeros(0, dtype=z.dtype), torch.zeros(3, dtype=z.dtype)
    for n in range(20):
        weights = torch.cat((weights * (1 - z[n]), z[n : n + 1]))
        total = weights @ w[: n + 1]
        second = (weights[:, None, None] * w[: n + 1, :, None] * w[: n + 1, None, :]).sum(0)
        rest = 1 - weights.sum()  # the state of zeros before the first token
        about = second - total[:, None] * total
        assert rest >= -1e-12
        expected = torch.linalg.solve(torch.eye(3, dtype=z.dtype) + about, w[n] - total)
        assert (y[0, n, 0] + expected).abs().max() < 1e-10
    assert_close("mean", mean[0, 0], total, 1e-12)
    assert_close("covariance", matrices(covariance, 3, 3)[0, 0, 0], about, 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_step_is_the_gradient_of_the_coding_rate(backend):
    """``(I + S)^{-1} u`` is half the gradient of ``log det(I + S + u u^T)`` at small u, for a window without u."""
    given, options = make((1, 30, 1, 4), 4)
    _, state = tost.gated_tssa_with_state(**given, **options, backend=backend)
    S = matrices(state.covariance, 4, 4)[0, 0, 0]
    u = (1e-4 * torch.randn(4, dtype=torch.float64)).requires_grad_()
    rate = torch.logdet(torch.eye(4, dtype=torch.float64) + S + torch.outer(u, u))
    (gradient,) = torch.autograd.grad(rate, u)
    step = torch.linalg.solve(torch.eye(4, dtype=torch.float64) + S, u.detach())
    assert_close("step", gradient / 2, step, 1e-6)
    # The operator takes this step for a token that is not written.
    w = (state.mean[:, None] + u.detach()).reshape(1, 1, 1, 4)
    write = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    y, _ = tost.gated_tssa_with_state(w, write, state=state, backend=backend)
    assert_close("y", -y[0, 0, 0], step, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=6, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=4),
    size=st.tuples(st.integers(1, 2), st.just(40), st.integers(1, 3), st.just(6)),
    g=st.sampled_from([1, 2, 3, 6]),
    seed=st.integers(0, 999),
)
def test_pieces_give_the_same_as_the_whole(backend, cuts, size, g, seed):
    given, options = make(size, g, seed=seed, masked=True)
    w, write = given.values()
    whole, last = tost.gated_tssa_with_state(w, write, mask=options["mask"], backend=backend)
    state, parts, bounds = None, [], [0, *sorted(cuts), 40]
    for a, b in pairwise(bounds):
        mask = options["mask"][:, a:b]
        y, state = tost.gated_tssa_with_state(w[:, a:b], write[:, a:b], mask=mask, state=state, backend=backend)
        parts.append(y)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-10
    for name, a, e in zip(last._fields, state, last, strict=True):
        assert_close(name, a.double(), e.double(), 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=6, deadline=None)
@given(g=st.sampled_from([1, 2, 6]), seed=st.integers(0, 999))
def test_mask_is_deletion_and_the_future_does_not_matter(backend, g, seed):
    given, options = make((2, 30, 2, 6), g, seed=seed, masked=True)
    mask = options["mask"]
    mask[:, 15] = True
    w = given["w"].masked_fill(~mask[..., None, None], float("nan"))
    y = tost.gated_tssa(w, given["write"], mask=mask, backend=backend)
    assert not y[~mask].any()
    for b in range(2):
        real = mask[b]
        alone = tost.gated_tssa(given["w"][b : b + 1, real], given["write"][b : b + 1, real], backend=backend)
        assert (alone[0] - y[b, real]).abs().max() < 1e-10
    changed = given["w"].clone()
    changed[:, 20:] += 1
    early = [tost.gated_tssa(x, given["write"], backend=backend) for x in (given["w"], changed)]
    assert torch.equal(early[0][:, :20], early[1][:, :20])
    assert not torch.equal(early[0][:, 20:], early[1][:, 20:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", [False, True])
def test_packed_sequences_are_taken_alone(backend, state):
    given, _ = make((1, 50, 2, 6), 3)
    bounds = [0, 7, 7, 30, 50]
    before = make((4, 1, 2, 6), 3, state=True)[1]["state"] if state else None
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    y, after = tost.gated_tssa_with_state(**leaves, cu_seqlens=cu_seqlens, state=before, backend=backend)
    own = {name: x.clone().requires_grad_() for name, x in given.items()}
    parts = []
    for i, (a, b) in enumerate(pairwise(bounds)):
        start = None if before is None else tost.GatedState(*(x[i : i + 1] for x in before))
        part, last = tost.gated_tssa_with_state(own["w"][:, a:b], own["write"][:, a:b], state=start, backend=backend)
        parts.append(part)
        for x, e in zip(after, last, strict=True):
            assert (x[i] - e[0]).abs().max() < 1e-9
    expected = torch.cat(parts, dim=1)
    assert (y - expected).abs().max() < 1e-10
    dy = torch.randn_like(y)
    actual = torch.autograd.grad(y, leaves.values(), dy)
    for a, e in zip(actual, torch.autograd.grad(expected, own.values(), dy), strict=True):
        assert_close("gradient", a, e, 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_first_and_second_order(backend):
    given, options = make((1, 5, 1, 4), 2, state=True)
    given["write"] = given["write"].clamp(0.05, 0.95)
    leaves = [x.requires_grad_() for x in given.values()]

    def run(*tensors):
        y, after = tost.gated_tssa_with_state(*tensors, **options, backend=backend)
        return y, after.mean, after.covariance

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_registered_operator():
    given, _ = make((2, 9, 2, 4), 2, torch.float32, masked=True)
    w, write = (given[name].requires_grad_() for name in ("w", "write"))
    mask, mean = torch.rand(2, 9) < 0.5, torch.randn(2, 2, 4)
    covariance = torch.rand(2, 2, 6)
    tests = ("test_schema", "test_faketensor")
    for arguments in ((w, write, None, None, None, None), (w, write, mask, mean, covariance, None)):
        torch.library.opcheck(torch.ops.tost.gated_tssa.default, arguments, test_utils=tests)
    with pytest.raises(ValueError, match="tost::gated_tssa"):
        torch.ops.tost.gated_tssa(w, write[..., :0], None, None, None, None)


def test_large_means_and_tight_windows_stay_accurate():
    given, _ = make((1, 200, 1, 8), 8, torch.float32)
    shifted = given["w"] + 300
    y = tost.gated_tssa(given["w"], given["write"])
    moved = tost.gated_tssa(shifted, given["write"])
    assert (y - moved).abs().max() < 2e-3


def test_many_tokens():
    given, _ = make((1, 65_600, 1, 8), 8, torch.float32)
    y, state = tost.gated_tssa_with_state(**given)
    middle = tost.gated_tssa_with_state(*(x[:, :40_000] for x in given.values()))[1]
    rest = (x[:, 40_000:] for x in given.values())
    z, last = tost.gated_tssa_with_state(*rest, state=middle)
    assert_close("y", z, y[:, 40_000:], 1e-5)
    assert_close("covariance", last.covariance, state.covariance, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"write": torch.rand(2, 5, 2, 3)}, "where g divides 4"),
        ({"write": torch.rand(2, 5, 4)}, "gate per token and block"),
        ({"write": torch.full((2, 5, 2, 2), 1.5)}, "Use torch.sigmoid"),
        ({"state": tost.GatedState.empty(2, 2, 4, block_size=4)}, "in blocks of 2 needs"),
        ({"mask": torch.ones(2, 5)}, "mask has dtype"),
        ({"w": torch.ones(2, 5, 8)}, "w has shape"),
    ],
)
def test_errors_name_the_argument(change, message):
    given = {"w": torch.ones(2, 5, 2, 4), "write": torch.rand(2, 5, 2, 2)}
    with pytest.raises(ValueError, match=message):
        tost.gated_tssa_with_state(**given | change)
