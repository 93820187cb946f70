"""Diagonal blocks in place of the diagonal, and groups without their means: bounds, and the step of the operator."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.objective.problems import every_f, many, memberships, orthonormal, problem, psd, randn, second_moments, seeds
from tost import objective
from tost.testing import assert_close

some = settings(deadline=None, max_examples=15)


def allow(x):
    """Room for rounding beside x."""
    return 1e-9 * (1 + abs(x))


@every_f
@many
@given(seed=seeds, d=st.sampled_from([2, 4, 6, 8, 12]), data=st.data(), log_scale=st.floats(-3, 3))
def test_merging_blocks_tightens_the_bound(f, seed, d, data, log_scale):
    m = 10**log_scale * psd(seed, d, data.draw(st.integers(1, d)))
    q = orthonormal(seed, d, d)
    sizes = [g for g in range(1, d + 1) if d % g == 0]
    exact = objective.spectral_sum(m, f).item()
    bounds = {g: objective.diagonal_bound(m, q, f, block_size=g).item() for g in sizes}
    assert bounds[1] == objective.diagonal_bound(m, q, f).item()
    assert bounds[d] == pytest.approx(exact, rel=1e-9, abs=1e-9)
    for small in sizes:
        assert exact <= bounds[small] + allow(exact)
        for large in sizes:
            if large % small == 0:
                assert bounds[large] <= bounds[small] + allow(exact)


@every_f
@many
@given(seed=seeds, blocks=st.integers(1, 3), g=st.integers(1, 4))
def test_block_bound_is_tight_where_the_basis_makes_blocks(f, seed, blocks, g):
    parts = [psd(seed + b, g, g) for b in range(blocks)]
    q = orthonormal(seed, blocks * g, blocks * g)
    m = q @ torch.block_diag(*parts) @ q.T
    exact = objective.spectral_sum(m, f).item()
    assert objective.diagonal_bound(m, q, f, block_size=g).item() == pytest.approx(exact, rel=1e-10)


@every_f
@many
@given(seed=seeds, n=st.integers(1, 9), blocks=st.integers(1, 3), g=st.integers(1, 3), eps=st.floats(0.1, 5))
def test_block_compression_lies_between_the_rate_and_the_diagonal(f, seed, n, blocks, g, eps):
    d = blocks * g
    z, pi, u = problem(n, d, K=3, p=d, seed=seed)
    exact = objective.compression_rate(z, pi, eps, f=f).item()
    inner = objective.variational_compression(z, pi, u, eps, f=f, block_size=g).item()
    diagonal = objective.variational_compression(z, pi, u, eps, f=f).item()
    assert exact - allow(exact) <= inner <= diagonal + allow(diagonal)
    whole = objective.variational_compression(z, pi, u, eps, f=f, block_size=d).item()
    assert whole == pytest.approx(exact, rel=1e-8, abs=1e-9)


@every_f
@many
@given(
    seed=seeds, n=st.integers(1, 9), eps=st.floats(0.3, 5), fraction=st.floats(0.01, 1), g=st.sampled_from([1, 2, 3])
)
def test_block_step_descends_by_the_promised_amount(f, seed, n, eps, fraction, g):
    d = 6
    z, pi, u = randn(seed, n, d), memberships(seed, n, 3), orthonormal(seed, 3, d, d)
    slope = f.derivative(torch.zeros(())).item()
    tau = fraction * n * eps**2 / (d * slope)
    arguments = {"f": f, "block_size": g}
    before = objective.variational_compression(z, pi, u, eps, **arguments)
    gradient = objective.variational_gradient(z, pi, u, eps, **arguments)
    step = objective.tssa_step(z, pi, u, eps, tau, **arguments)
    after = objective.variational_compression(z + step, pi, u, eps, **arguments)
    assert after <= before - tau / 2 * gradient.square().sum() + allow(before)


@pytest.mark.parametrize("g", [0, -2, 3, 5])
def test_blocks_that_do_not_divide_are_refused(g):
    z, pi, u = problem(5, 4, p=4)
    m = z.T @ z
    calls = [
        lambda: objective.diagonal_bound(m, u[0], block_size=g),
        lambda: objective.variational_compression(z, pi, u, 1.0, block_size=g),
        lambda: objective.variational_gradient(z, pi, u, 1.0, block_size=g),
        lambda: objective.tssa_step(z, pi, u, 1.0, 1.0, block_size=g),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"block_size is {g} and the basis has 4 columns"):
            call()


# --- Without the means of the groups


@every_f
@some
@given(seed=seeds, n=st.integers(1, 9), blocks=st.integers(1, 3), g=st.integers(1, 3), eps=st.floats(0.1, 5))
def test_centered_rates_lie_in_the_same_order_and_below_the_others(f, seed, n, blocks, g, eps):
    d = blocks * g
    z, pi, u = problem(n, d, K=3, p=d, seed=seed)
    z = z + 2 * randn(seed + 9, d)
    room = 1e-8
    exact = objective.compression_rate(z, pi, eps, f=f, centered=True).item()
    inner = objective.variational_compression(z, pi, u, eps, f=f, block_size=g, centered=True).item()
    diagonal = objective.variational_compression(z, pi, u, eps, f=f, centered=True).item()
    assert exact - room <= inner <= diagonal + room
    assert inner <= objective.variational_compression(z, pi, u, eps, f=f, block_size=g).item() + room
    assert exact <= objective.compression_rate(z, pi, eps, f=f).item() + room
    assert objective.rate_reduction(z, pi, eps, f=f, centered=True).item() >= -room


def test_centered_moments_are_covariances():
    z, pi, _ = problem(20, 5)
    mean = pi.T @ z / pi.sum(0)[:, None]
    covariance = second_moments(z, pi) - mean[:, :, None] * mean[:, None, :]
    share = pi.sum(0) / len(z)
    expected = 0.5 * (share * objective.spectral_sum(5 / 0.7**2 * covariance)).sum()
    assert_close("rate", objective.compression_rate(z, pi, 0.7, centered=True), expected, 1e-10)
    moved = objective.compression_rate(z + randn(5, 5), pi, 0.7, centered=True)
    assert_close("moved", moved, expected, 1e-10)
