"""Precision, degenerate input, batching of bad entries, and error messages."""

import doctest
import math

import pytest
import torch

from tests.objective.problems import every_f, memberships, naive_compression, orthonormal, problem, randn
from tost import objective
from tost.objective import EXP, LOG
from tost.testing import assert_close


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
def test_the_smaller_gram_is_factorized(f, n, d, monkeypatch):
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
        r"mask has shape \(3,\) and dtype torch.float32; it must be bool, \[\.\.\., 3\].* Use mask\.bool\(\)",
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
