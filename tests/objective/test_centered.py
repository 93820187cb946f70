"""Rates of groups without their means: the chain of bounds, the gradient, and the operator that takes its step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.objective.problems import STRICT, every_f, problem, randn, second_moments, seeds
from tost import objective
from tost.testing import assert_close

some = settings(deadline=None, max_examples=15)


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


@pytest.mark.parametrize("f", STRICT, ids=lambda f: f.name)
@pytest.mark.parametrize("g", [1, 2])
def test_centered_gradient_equals_autograd(f, g):
    z, pi, u = problem(6, 7, p=4, batch=(2,))
    z.requires_grad_()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 2:] = False
    arguments = {"f": f, "mask": mask, "block_size": g, "centered": True}
    (expected,) = torch.autograd.grad(objective.variational_compression(z, pi, u, 0.8, **arguments).sum(), z)
    assert_close("gradient", objective.variational_gradient(z, pi, u, 0.8, **arguments), expected, 1e-8)


@pytest.mark.parametrize("g", [1, 2])
def test_the_centered_operator_is_a_step_of_the_centered_rate(g):
    n, d, K = 9, 6, 3
    z, _, u = problem(n, d, K=K, p=4)
    w = torch.einsum("nd,kdp->nkp", z, u).unsqueeze(0)
    t = torch.ones(K, dtype=torch.float64)
    pi = tost.membership(w, t)[0]
    y = tost.tssa(w, t, block_size=g, centered=True)[0]
    step = objective.tssa_step(z, pi, u, d**0.5, n, block_size=g, centered=True)
    assert_close("step", torch.einsum("nkp,kdp->nd", y, u), step, 1e-7)
