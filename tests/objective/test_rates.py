"""Values, gradients, the theorem and the invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.objective.problems import (
    LINEAR,
    NUMPY,
    STRICT,
    every_f,
    generator,
    many,
    memberships,
    naive_compression,
    naive_rate,
    naive_variational,
    orthonormal,
    problem,
    psd,
    randn,
    scalar,
    second_moments,
    seeds,
)
from tost import objective
from tost.testing import assert_close


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
@pytest.mark.parametrize(("n", "d", "p", "g"), [(1, 3, 3, 1), (4, 7, 2, 1), (1, 3, 3, 3), (4, 7, 4, 2), (9, 6, 6, 3)])
@pytest.mark.parametrize("centered", [False, True])
def test_variational_gradient_equals_autograd(f, n, d, p, g, centered):
    z, pi, u = problem(n, d, p=p, batch=(2,))
    if g == 1:
        u = u + 0.3 * randn(9, *u.shape)  # the gradient does not need orthonormal columns
    z.requires_grad_()
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, 2:] = False
    arguments = {"f": f, "mask": mask, "block_size": g, "centered": centered}
    value = objective.variational_compression(z, pi, u, 0.8, **arguments)
    (expected,) = torch.autograd.grad(value.sum(), z)
    actual = objective.variational_gradient(z, pi, u, 0.8, **arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


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
