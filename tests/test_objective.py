import doctest
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tost import objective
from tost.objective import EXP, LOG, RATIO, SQRT, Concave
from tost.testing import assert_close

STRICT = [LOG, SQRT, RATIO, EXP]
LINEAR = Concave("linear", lambda x: x, torch.ones_like)
NUMPY = {
    "log": lambda x: np.log(1 + x),
    "sqrt": lambda x: np.sqrt(1 + x) - 1,
    "ratio": lambda x: 1 - 1 / (1 + x),
    "exp": lambda x: 1 - np.exp(-x),
}

every_f = pytest.mark.parametrize("f", STRICT, ids=lambda f: f.name)
many = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randn(seed, *shape):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def memberships(seed, *shape):
    return torch.softmax(2 * randn(seed + 1, *shape), -1)


def orthonormal(seed, *shape):
    return torch.linalg.qr(randn(seed + 2, *shape)).Q


def problem(n=7, d=5, K=3, p=4, seed=0, batch=()):
    return randn(seed, *batch, n, d), memberships(seed, *batch, n, K), orthonormal(seed, K, d, p)


def psd(seed, d, rank):
    a = randn(seed, d, rank)
    return a @ a.T / rank


def second_moments(z, pi):
    return torch.einsum("nk,nd,ne->kde", pi / pi.sum(0), z, z)


def naive_rate(z, eps, f="log"):
    n, d = z.shape
    return 0.5 * NUMPY[f](d / (n * eps**2) * np.linalg.eigvalsh(z.T @ z)).sum()


def naive_compression(z, pi, eps, f="log"):
    (n, d), total = z.shape, 0.0
    for p in pi.T:
        moment = sum(p[i] * np.outer(z[i], z[i]) for i in range(n)) / p.sum()
        total += p.sum() / n * NUMPY[f](d / eps**2 * np.linalg.eigvalsh(moment)).sum()
    return 0.5 * total


def naive_variational(z, pi, u, eps, f="log"):
    (n, d), total = z.shape, 0.0
    for k, p in enumerate(pi.T):
        for column in u[k].T:
            moment = sum(p[i] * (column @ z[i]) ** 2 for i in range(n)) / p.sum()
            total += p.sum() / n * NUMPY[f](d / eps**2 * moment)
    return 0.5 * total


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 6), (6, 1), (4, 9), (9, 4), (5, 5)])
def test_log_rates_match_determinants(n, d):
    z, pi, _ = problem(n, d, p=1)
    eps, eye = 0.7, np.eye(d)
    c, zn, pn = d / eps**2, z.numpy(), pi.numpy()
    r = 0.5 * np.log(np.linalg.det(eye + c / n * zn.T @ zn))
    r_c = sum(0.5 * p.sum() / n * np.log(np.linalg.det(eye + c / p.sum() * zn.T @ np.diag(p) @ zn)) for p in pn.T)
    assert_close("R", objective.coding_rate(z, eps), scalar(r), 1e-12)
    assert_close("R_c", objective.compression_rate(z, pi, eps), scalar(r_c), 1e-12)
    assert objective.rate_reduction(z, pi, eps).item() == pytest.approx(r - r_c, abs=1e-12)


@every_f
@pytest.mark.parametrize(("n", "d"), [(1, 4), (3, 6), (8, 3)])
@pytest.mark.parametrize("eps", [0.3, 2.0])
def test_rates_match_naive_implementation(f, n, d, eps):
    z, pi, u = problem(n, d, p=d - 1)
    zn, pn, un = z.numpy(), pi.numpy(), u.numpy()
    assert_close("R", objective.coding_rate(z, eps, f=f), scalar(naive_rate(zn, eps, f.name)), 1e-12)
    expected = scalar(naive_compression(zn, pn, eps, f.name))
    assert_close("R_c", objective.compression_rate(z, pi, eps, f=f), expected, 1e-12)
    expected = scalar(naive_variational(zn, pn, un, eps, f.name))
    assert_close("R_c_var", objective.variational_compression(z, pi, u, eps, f=f), expected, 1e-12)


@every_f
def test_concave_functions_are_what_they_claim(f):
    x = torch.linspace(0, 20, 2001, dtype=torch.float64, requires_grad=True)
    value = f.value(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert value[0] == 0
    assert_close("derivative", f.derivative(x), slope, 1e-12)
    assert (slope > 0).all()
    assert (slope.diff() < 0).all()
    assert_close("value", value, torch.from_numpy(NUMPY[f.name](x.detach().numpy())), 1e-12)


@pytest.mark.parametrize("f", [*STRICT, LINEAR], ids=lambda f: f.name)
@pytest.mark.parametrize(("n", "d", "p"), [(1, 3, 3), (4, 7, 2), (9, 4, 4)])
def test_variational_gradient_equals_autograd(f, n, d, p):
    z, pi, u = problem(n, d, p=p, batch=(2,))
    u = u + 0.3 * randn(9, *u.shape)  # the gradient does not need orthonormal columns
    z.requires_grad_()
    value = objective.variational_compression(z, pi, u, 0.8, f=f)
    (expected,) = torch.autograd.grad(value.sum(), z)
    assert_close("gradient", objective.variational_gradient(z, pi, u, 0.8, f=f), expected, 1e-12)


@every_f
def test_gradcheck(f):
    z, pi, u = (t.requires_grad_() for t in problem(3, 4, K=2, p=3))
    rate, compression = objective.coding_rate, objective.compression_rate
    value, gradient = objective.variational_compression, objective.variational_gradient
    assert torch.autograd.gradcheck(lambda z: rate(z, 0.9, f=f), (z,))
    assert torch.autograd.gradcheck(lambda z: compression(z, pi.detach(), 0.9, f=f), (z,))
    assert torch.autograd.gradcheck(lambda z, pi: compression(z, pi, 0.9, f=f), (z, pi))
    assert torch.autograd.gradcheck(lambda z, pi, u: value(z, pi, u, 0.9, f=f), (z, pi, u))
    assert torch.autograd.gradcheck(lambda z, pi, u: gradient(z, pi, u, 0.9, f=f), (z, pi, u))


@every_f
def test_spectral_sum_gradient_is_the_matrix_function(f):
    m = torch.diag(torch.tensor([2.0, 2.0, 0.5, 0.0, 0.0], dtype=torch.float64))  # repeated and zero eigenvalues
    q = orthonormal(0, 5, 5)
    rotated = (q @ m @ q.T).requires_grad_()
    (gradient,) = torch.autograd.grad(objective.spectral_sum(rotated, f), rotated)
    assert_close("gradient", gradient, q @ f.derivative(m.diagonal()).diag() @ q.T, 1e-12)


@pytest.mark.parametrize("f", [*STRICT, LINEAR], ids=lambda f: f.name)
@many
@given(seed=seeds, d=st.integers(1, 8), data=st.data(), log_scale=st.floats(-3, 3))
def test_theorem_bound_holds(f, seed, d, data, log_scale):
    rank = data.draw(st.integers(1, d))
    p = data.draw(st.integers(rank, d))
    q = orthonormal(seed, d, p)
    m = q @ psd(seed, p, rank) @ q.T * 10**log_scale  # the image of m lies in the span of q
    bound, exact = objective.diagonal_bound(m, q, f), objective.spectral_sum(m, f)
    assert exact <= bound + 1e-10 * (1 + bound)
    square = orthonormal(seed + 5, d, d)
    assert exact <= objective.diagonal_bound(m, square, f) + 1e-10 * (1 + bound)


@every_f
@many
@given(seed=seeds, d=st.integers(1, 8), data=st.data(), log_scale=st.floats(-2, 2))
def test_theorem_bound_is_tight_in_an_eigenbasis(f, seed, d, data, log_scale):
    rank = data.draw(st.integers(1, d))
    m = psd(seed, d, rank) * 10**log_scale
    eigenbasis = torch.linalg.eigh(m).eigenvectors
    exact = objective.spectral_sum(m, f)
    assert_close("square", objective.diagonal_bound(m, eigenbasis, f), exact, 1e-9)
    assert_close("thin", objective.diagonal_bound(m, eigenbasis[:, -rank:], f), exact, 1e-9)


@every_f
@many
@given(seed=seeds, d=st.integers(2, 8), small=st.floats(0, 1), gap=st.floats(1, 3), angle=st.floats(0.3, 1.2))
def test_theorem_bound_is_strict_outside_eigenbases(f, seed, d, small, gap, angle):
    eigenvalues = torch.cat([scalar([small, small + gap]), randn(seed, d - 2).square()])
    basis = orthonormal(seed, d, d)
    m = basis @ eigenvalues.diag() @ basis.T
    rotation = torch.eye(d, dtype=torch.float64)
    rotation[:2, :2] = scalar([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    exact, turned = objective.spectral_sum(m, f), basis @ rotation
    assert objective.diagonal_bound(m, turned, f) > exact + 1e-3
    trace = objective.spectral_sum(m, LINEAR)  # without strict concavity every basis is tight
    assert_close("trace", objective.diagonal_bound(m, turned, LINEAR), trace, 1e-12)


def test_diagonal_bound_fails_where_the_theorem_does_not_apply():
    m = torch.eye(3, dtype=torch.float64)
    thin = m[:, :2]  # misses a direction of the image of m
    assert objective.diagonal_bound(m, thin) < objective.spectral_sum(m) - 0.1


@every_f
@many
@given(seed=seeds, n=st.integers(1, 9), d=st.integers(1, 6), K=st.integers(1, 4), eps=st.floats(0.1, 5))
def test_variational_compression_bounds_compression(f, seed, n, d, K, eps):
    z, pi, u = problem(n, d, K, d, seed)
    rate = objective.compression_rate(z, pi, eps, f=f)
    assert rate <= objective.variational_compression(z, pi, u, eps, f=f) * (1 + 1e-10) + 1e-12
    tight = torch.linalg.eigh(second_moments(z, pi)).eigenvectors
    assert_close("tight", objective.variational_compression(z, pi, tight, eps, f=f), rate, 1e-9)


@every_f
def test_thin_bases_bound_compression_on_a_subspace(f):
    subspace = orthonormal(3, 9, 4)
    z, pi = randn(0, 20, 4) @ subspace.T, memberships(0, 20, 3)
    rate = objective.compression_rate(z, pi, 3.0, f=f)
    turned = subspace @ orthonormal(4, 3, 4, 4)
    assert objective.variational_compression(z, pi, turned, 3.0, f=f) > rate + 1e-3
    tight = torch.linalg.eigh(second_moments(z, pi)).eigenvectors[..., -4:]
    assert_close("tight", objective.variational_compression(z, pi, tight, 3.0, f=f), rate, 1e-10)


@every_f
@many
@given(seed=seeds, n=st.integers(1, 9), d=st.integers(1, 6), K=st.integers(1, 4), eps=st.floats(0.1, 5))
def test_rate_reduction_is_not_negative(f, seed, n, d, K, eps):
    z, pi, _ = problem(n, d, K, d, seed)
    assert objective.rate_reduction(z, pi, eps, f=f) >= -1e-10
    one_group = torch.full_like(pi, 1 / K)
    assert abs(objective.rate_reduction(z, one_group, eps, f=f)) < 1e-9


def test_rate_reduction_of_orthogonal_groups_is_the_textbook_value():
    z = torch.cat([torch.eye(4)[:2].repeat(5, 1), torch.eye(4)[2:].repeat(5, 1)]).double()
    pi = torch.tensor([[1, 0]] * 10 + [[0, 1]] * 10)
    # All tokens fill 4 directions with 1/4 each, a group fills 2 with 1/2 each; d/eps^2 = 4.
    assert_close("Delta R", objective.rate_reduction(z, pi, 1.0), scalar(2 * math.log(2) - math.log(3)), 1e-12)


@every_f
@settings(deadline=None, max_examples=25)
@given(seed=seeds, n=st.integers(1, 9), d=st.integers(1, 9))
def test_rates_are_invariant(f, seed, n, d):
    z, pi, u = problem(n, d, 3, d, seed)
    order, groups = torch.randperm(n, generator=generator(seed)), torch.randperm(3, generator=generator(seed))
    q = orthonormal(seed + 7, d, d)
    rate, value = objective.compression_rate, objective.variational_compression
    for name, z2, pi2, u2 in [
        ("tokens permuted", z[order], pi[order], u),
        ("features rotated", z @ q, pi, q.T @ u),
        ("groups permuted", z, pi[:, groups], u[groups]),
    ]:
        assert_close(f"R, {name}", objective.coding_rate(z2, 0.7, f=f), objective.coding_rate(z, 0.7, f=f), 1e-10)
        assert_close(f"R_c, {name}", rate(z2, pi2, 0.7, f=f), rate(z, pi, 0.7, f=f), 1e-10)
        assert_close(f"R_c_var, {name}", value(z2, pi2, u2, 0.7, f=f), value(z, pi, u, 0.7, f=f), 1e-10)


@every_f
@settings(deadline=None, max_examples=25)
@given(
    seed=seeds,
    kept=st.lists(st.booleans(), min_size=1, max_size=9).filter(any),
    padding=st.sampled_from([3.0, math.nan]),
)
def test_mask_equals_deletion(f, seed, kept, padding):
    mask = torch.tensor(kept)
    z, pi, u = problem(len(kept), 4, 3, 3, seed)
    z[~mask], pi[~mask] = padding, padding
    short = z[mask].requires_grad_()
    z.requires_grad_()
    calls = {
        "R": lambda z, pi, **mask: objective.coding_rate(z, 0.7, f=f, **mask),
        "R_c": lambda z, pi, **mask: objective.compression_rate(z, pi, 0.7, f=f, **mask),
        "Delta R": lambda z, pi, **mask: objective.rate_reduction(z, pi, 0.7, f=f, **mask),
        "R_c_var": lambda z, pi, **mask: objective.variational_compression(z, pi, u, 0.7, f=f, **mask),
        "step": lambda z, pi, **mask: objective.tssa_step(z, pi, u, 0.7, 1.0, f=f, **mask),
    }
    for name, call in calls.items():
        actual, expected = call(z, pi, mask=mask), call(short, pi[mask])
        if name == "step":
            assert (actual[~mask] == 0).all()
            actual = actual[mask]
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        (dz,) = torch.autograd.grad(actual.sum(), z)
        (dshort,) = torch.autograd.grad(expected.sum(), short)
        assert (dz[~mask] == 0).all(), name
        torch.testing.assert_close(dz[mask], dshort, rtol=1e-9, atol=1e-11)


def test_mask_without_tokens_gives_zero():
    z, pi, u = problem(batch=(2,))
    mask = torch.tensor([[False] * 7, [True] * 7])
    for value in (
        objective.coding_rate(z, 1.0, mask=mask),
        objective.compression_rate(z, pi, 1.0, mask=mask),
        objective.variational_compression(z, pi, u, 1.0, mask=mask),
    ):
        assert value[0] == 0
        assert value[1] > 0


@every_f
def test_batching_equals_loop(f):
    z, pi, _ = problem(6, 4, K=2, batch=(3, 2))
    u = orthonormal(0, 3, 2, 2, 4, 3)
    mask = torch.rand(3, 2, 6, generator=generator(0)) < 0.7
    cells = [(i, j) for i in range(3) for j in range(2)]
    for name, call in {
        "R": lambda z, pi, u, mask: objective.coding_rate(z, 0.7, f=f, mask=mask),
        "Delta R": lambda z, pi, u, mask: objective.rate_reduction(z, pi, 0.7, f=f, mask=mask),
        "R_c_var": lambda z, pi, u, mask: objective.variational_compression(z, pi, u, 0.7, f=f, mask=mask),
        "gradient": lambda z, pi, u, mask: objective.variational_gradient(z, pi, u, 0.7, f=f, mask=mask),
    }.items():
        loop = torch.stack([call(z[c], pi[c], u[c], mask[c]) for c in cells])
        assert_close(name, call(z, pi, u, mask).flatten(0, 1), loop, 1e-12)


def test_leading_dimensions_broadcast():
    z, pi, u = problem(6, 4, K=2, p=3)
    zs, masks = torch.stack([z, 2 * z, 3 * z])[:, None], torch.rand(2, 6, generator=generator(1)) < 0.7
    value = objective.rate_reduction(zs, pi, 0.7, mask=masks)
    assert value.shape == (3, 2)
    assert_close("rate", value[2, 1], objective.rate_reduction(3 * z, pi, 0.7, mask=masks[1]), 1e-12)
    gradient = objective.variational_gradient(zs, pi, u, 0.7, mask=masks)
    expected = objective.variational_gradient(3 * z, pi, u, 0.7, mask=masks[1])
    assert_close("gradient", gradient[2, 1], expected, 1e-12)


@every_f
@settings(deadline=None, max_examples=40)
@given(seed=seeds, n=st.integers(1, 9), d=st.integers(1, 6), eps=st.floats(0.3, 5), fraction=st.floats(0.01, 1))
def test_tssa_step_descends_by_the_promised_amount(f, seed, n, d, eps, fraction):
    z, pi, u = problem(n, d, 3, max(1, d - 1), seed)
    tau = fraction * n * eps**2 / (d * f.derivative(scalar(0.0)).item())
    step = objective.tssa_step(z, pi, u, eps, tau, f=f)
    gradient = objective.variational_gradient(z, pi, u, eps, f=f)
    before = objective.variational_compression(z, pi, u, eps, f=f)
    after = objective.variational_compression(z + step, pi, u, eps, f=f)
    assert before - after >= tau / 2 * gradient.square().sum() - 1e-11


def test_tssa_step_is_the_attention_operator():
    n, d = 9, 6
    z, pi, u = problem(n, d, K=2, p=3)
    expected = torch.zeros_like(z)
    for k in range(2):
        w = z @ u[k]
        moment = (pi[:, k, None] * w**2).sum(0) / pi[:, k].sum()
        expected -= (pi[:, k, None] * w / (1 + moment)) @ u[k].T
    assert_close("step", objective.tssa_step(z, pi, u, math.sqrt(d), n), expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_f
def test_low_precision_agrees_with_float64(f, dtype):
    z, pi, u = (t.to(dtype) for t in problem(40, 16, K=4, p=8))
    z64, pi64, u64 = z.double(), pi.double(), u.double()
    gradient_bound = 1e-5 if dtype == torch.float32 else 1e-2  # the gradient is rounded to the dtype of z
    rate = objective.rate_reduction(z, pi, 4.0, f=f)
    value = objective.variational_compression(z, pi, u, 4.0, f=f)
    gradient = objective.variational_gradient(z, pi, u, 4.0, f=f)
    assert (rate.dtype, value.dtype, gradient.dtype) == (torch.float32, torch.float32, dtype)
    assert_close("rate", rate, objective.rate_reduction(z64, pi64, 4.0, f=f), 1e-4)
    assert_close("value", value, objective.variational_compression(z64, pi64, u64, 4.0, f=f), 1e-5)
    expected = objective.variational_gradient(z64, pi64, u64, 4.0, f=f)
    assert_close("gradient", gradient, expected, gradient_bound)


def test_autocast_does_not_lower_the_precision():
    z, pi, u = (t.float() for t in problem(40, 16, K=4, p=16))
    m = z.T @ z / 40

    def measure():
        yield objective.rate_reduction(z, pi, 0.5)
        yield objective.compression_rate(z[:9], pi[:9], 0.5)
        yield objective.variational_compression(z, pi, u, 0.5)
        yield objective.variational_gradient(z, pi, u, 0.5)
        yield objective.diagonal_bound(m, u[0])

    expected = list(measure())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = list(measure())
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@every_f
@pytest.mark.parametrize(("n", "d"), [(6, 3), (3, 6)])
def test_empty_group_contributes_nothing(f, n, d):
    z, pi, u = problem(n, d, K=2, p=2)
    padded_pi = torch.cat([pi, torch.zeros(n, 1, dtype=torch.float64)], 1).requires_grad_()
    padded_u = torch.cat([u, orthonormal(8, 1, d, 2)])
    z.requires_grad_()
    rate = objective.compression_rate(z, padded_pi, 0.7, f=f)
    value = objective.variational_compression(z, padded_pi, padded_u, 0.7, f=f)
    assert_close("R_c", rate, objective.compression_rate(z, pi, 0.7, f=f), 1e-12)
    assert_close("R_c_var", value, objective.variational_compression(z, pi, u, 0.7, f=f), 1e-12)
    gradient = objective.variational_gradient(z, padded_pi, padded_u, 0.7, f=f)
    assert_close("gradient", gradient, objective.variational_gradient(z, pi, u, 0.7, f=f), 1e-12)
    for name, scalar_value in (("R_c", rate), ("R_c_var", value)):
        dz, dpi = torch.autograd.grad(scalar_value, (z, padded_pi))
        assert torch.isfinite(dz).all(), name
        assert torch.isfinite(dpi).all(), name
        assert (dpi[:, -1] == 0).all(), name


@every_f
@pytest.mark.parametrize(("n", "d"), [(8, 5), (5, 8)])
def test_rank_deficient_tokens(f, n, d):
    z = randn(0, 1, d).expand(n, d).clone()  # one token, repeated
    pi = memberships(0, n, 3)
    eps = math.sqrt(d)
    energy = z[0].square().sum()
    z.requires_grad_()
    rate = objective.compression_rate(z, pi, eps, f=f)
    assert_close("R_c", rate, 0.5 * f.value(energy), 1e-12)
    (dz,) = torch.autograd.grad(rate, z)
    # A single direction is left, along which R_c is a function of the mean square.
    assert_close("gradient", dz, f.derivative(energy) * z / n, 1e-9)


@every_f
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_tokens_have_zero_rate_and_gradient(f, dtype):
    z = torch.zeros(5, 4, dtype=dtype, requires_grad=True)
    rate = objective.coding_rate(z, 0.1, f=f)
    (dz,) = torch.autograd.grad(rate, z)
    assert rate == 0
    assert (dz == 0).all()


@every_f
@pytest.mark.parametrize(("n", "d"), [(4, 40), (40, 4)])
def test_small_and_large_gram_agree(f, n, d):
    soft, hard = memberships(0, n, 3), torch.nn.functional.one_hot(torch.arange(n) % 3, 3).double()
    z, eps = randn(0, n, d) / math.sqrt(d), math.sqrt(d)
    for pi in (soft, hard):
        constant, variable = z.clone().requires_grad_(), z.clone().requires_grad_()
        small = objective.compression_rate(constant, pi, eps, f=f)
        large = objective.compression_rate(variable, pi.clone().requires_grad_(), eps, f=f)
        assert_close("R_c", small, large, 1e-12)
        small.backward()
        large.backward()
        assert_close("gradient", constant.grad, variable.grad, 1e-11)


@pytest.mark.parametrize(("n", "d"), [(4, 40), (40, 4)])
@pytest.mark.parametrize("f", [LOG, EXP], ids=lambda f: f.name)
def test_the_smaller_gram_is_factorised(f, n, d, monkeypatch):
    sizes = []

    def record(solver):
        def wrapped(m):
            sizes.append(m.shape[-1])
            return solver(m)

        return wrapped

    for name in ("cholesky_ex", "eigvalsh"):
        monkeypatch.setattr(torch.linalg, name, record(getattr(torch.linalg, name)))
    objective.coding_rate(randn(0, n, d), 1.0, f=f)
    assert sizes == [4]


@every_f
def test_membership_gradient_is_exact_at_hard_assignments(f):
    n, d = 3, 6  # fewer tokens than features: eigenvalues that are zero up to rounding
    z, pi = randn(0, n, d), torch.eye(3, 2, dtype=torch.float64)
    pi[2, 1] = 1
    (gradient,) = torch.autograd.grad(objective.compression_rate(z, pi.requires_grad_(), 3.0, f=f), pi)
    at_rest, step = naive_compression(z.numpy(), pi.detach().numpy(), 3.0, f.name), 1e-6
    for i, k in [(0, 1), (1, 0), (2, 0), (2, 1)]:
        moved = pi.detach().clone()
        moved[i, k] += step
        rise = naive_compression(z.numpy(), moved.numpy(), 3.0, f.name) - at_rest
        assert gradient[i, k].item() == pytest.approx(rise / step, rel=1e-3)


def test_log_rate_is_finite_where_rounding_defeats_cholesky():
    z = randn(0, 196, 1) @ randn(1, 1, 64) * 1e4
    single = z.float().requires_grad_()
    m = 64 / 0.1**2 * single.T @ single / 196
    assert torch.linalg.cholesky_ex(m + torch.eye(64)).info > 0
    rate = objective.coding_rate(single, 0.1)
    (dz,) = torch.autograd.grad(rate, single)
    assert torch.isfinite(dz).all()
    assert rate.isfinite()
    assert rate > 0.99 * objective.coding_rate(z, 0.1)  # no upper bound: float32 cannot see that the rank is one


def test_log_rate_is_the_same_without_cholesky(monkeypatch):
    z, pi, _ = problem(batch=(2,))
    z.requires_grad_()
    expected = objective.compression_rate(z, pi, 0.7)
    (dexpected,) = torch.autograd.grad(expected.sum(), z)
    failed = (None, torch.tensor([[0, 1, 0], [0, 0, 0]]))
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: failed)
    actual = objective.compression_rate(z, pi, 0.7)
    (dactual,) = torch.autograd.grad(actual.sum(), z)
    assert_close("R_c", actual, expected, 1e-12)
    assert_close("gradient", dactual, dexpected, 1e-10)


@every_f
def test_a_token_that_is_not_finite_spoils_only_its_batch_entry(f):
    z, pi, _ = problem(batch=(3,))
    clean = objective.rate_reduction(z, pi, 0.7, f=f)
    z[1, 2, 3] = math.nan
    spoilt = objective.rate_reduction(z, pi, 0.7, f=f)
    assert torch.isnan(spoilt[1])
    assert_close("others", spoilt[[0, 2]], clean[[0, 2]], 1e-12)


def test_memberships_may_be_integers():
    z, labels = randn(0, 6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    pi = torch.nn.functional.one_hot(labels, 3)
    for convert in (torch.Tensor.long, torch.Tensor.bool, torch.Tensor.float):
        actual = objective.compression_rate(z, convert(pi), 0.7)
        assert_close("R_c", actual, objective.compression_rate(z, pi.double(), 0.7), 1e-14)


def test_examples_run():
    result = doctest.testmod(objective, extraglobs={"torch": torch})
    assert result.attempted >= 9
    assert result.failed == 0


def zeros(*shape):
    return torch.zeros(*shape)


ERRORS = {
    "eps zero": (
        lambda: objective.coding_rate(zeros(3, 2), 0.0),
        r"eps is 0\.0; .* must be positive and finite\. Use sqrt\(d\)",
    ),
    "eps negative": (
        lambda: objective.variational_gradient(zeros(3, 2), zeros(3, 1), zeros(1, 2, 2), -1.0),
        r"eps is -1\.0; .* positive",
    ),
    "eps infinite": (lambda: objective.coding_rate(zeros(3, 2), math.inf), r"eps is inf; .* finite"),
    "eps nan": (lambda: objective.compression_rate(zeros(3, 2), zeros(3, 1), math.nan), r"eps is nan; .* positive"),
    "z rank": (
        lambda: objective.coding_rate(zeros(3), 1.0),
        r"z has shape \(3,\) .*; tokens must be .*\[\.\.\., n, d\].* Put one token in each row",
    ),
    "z without tokens": (lambda: objective.coding_rate(zeros(0, 3), 1.0), r"z has shape \(0, 3\).*at least one token"),
    "z integer": (lambda: objective.coding_rate(zeros(3, 2).long(), 1.0), r"dtype torch.int64; .* floating point"),
    "pi rank": (
        lambda: objective.compression_rate(zeros(3, 2), zeros(3), 1.0),
        r"pi has shape \(3,\) and z has shape \(3, 2\); .* \[\.\.\., 3, K\]\. Put one token in each row",
    ),
    "pi tokens": (
        lambda: objective.rate_reduction(zeros(3, 2), zeros(4, 2), 1.0),
        r"pi has shape \(4, 2\) and z has shape \(3, 2\); .* \[\.\.\., 3, K\]",
    ),
    "u rank": (
        lambda: objective.variational_compression(zeros(3, 2), zeros(3, 1), zeros(2, 2), 1.0),
        r"u has shape \(2, 2\) .*; bases must be \[\.\.\., 1, 2, p\] with p <= 2\. Stack one matrix per group",
    ),
    "u groups": (
        lambda: objective.variational_gradient(zeros(3, 2), zeros(3, 4), zeros(5, 2, 2), 1.0),
        r"u has shape \(5, 2, 2\) .* \[\.\.\., 4, 2, p\]",
    ),
    "u width": (
        lambda: objective.tssa_step(zeros(3, 2), zeros(3, 1), zeros(1, 3, 2), 1.0, 0.1),
        r"u has shape \(1, 3, 2\) .* \[\.\.\., 1, 2, p\]",
    ),
    "u too wide": (
        lambda: objective.variational_compression(zeros(3, 2), zeros(3, 1), zeros(1, 2, 3), 1.0),
        r"u has shape \(1, 2, 3\) .* with p <= 2",
    ),
    "mask dtype": (
        lambda: objective.coding_rate(zeros(3, 2), 1.0, mask=zeros(3)),
        r"mask has shape \(3,\) and dtype torch.float32; it must be bool, \[\.\.\., 3\].* Convert with mask\.bool\(\)",
    ),
    "mask shape": (
        lambda: objective.coding_rate(zeros(3, 2), 1.0, mask=zeros(4).bool()),
        r"mask has shape \(4,\) and dtype torch.bool; .* \[\.\.\., 3\]",
    ),
    "leading dimensions": (
        lambda: objective.variational_compression(zeros(5, 3, 2), zeros(3, 1), zeros(4, 1, 2, 2), 1.0),
        r"leading dimensions are z \(5,\), pi \(\), u \(4,\); they must broadcast\. Expand or unsqueeze",
    ),
    "leading dimensions of the mask": (
        lambda: objective.coding_rate(zeros(5, 3, 2), 1.0, mask=zeros(4, 3).bool()),
        r"leading dimensions are .*mask \(4,\); they must broadcast",
    ),
    "m not square": (
        lambda: objective.spectral_sum(zeros(3, 2)),
        r"m has shape \(3, 2\) .*; .* square matrices \[\.\.\., d, d\]\. Pass a second moment",
    ),
    "m integer": (lambda: objective.diagonal_bound(zeros(2, 2).int(), zeros(2, 2)), r"m has .* dtype torch.int32; "),
    "q rows": (
        lambda: objective.diagonal_bound(zeros(3, 3), zeros(2, 2)),
        r"q has shape \(2, 2\) and m has shape \(3, 3\); .* \[\.\.\., 3, p\] with p <= 3\. Pass the basis vectors",
    ),
    "q too wide": (lambda: objective.diagonal_bound(zeros(3, 3), zeros(3, 4)), r"q has shape \(3, 4\) .* p <= 3"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_what_was_given_what_is_needed_and_what_to_do(case):
    call, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        call()
