"""S4 and S4D: kernels against the recurrences that they stand for, in double precision."""

from typing import NamedTuple

import pytest
import torch

from tests.nn.mixers.long_mixers import perturb
from tost.nn import S4
from tost.nn.mixers import DiagonalKernel, LowRankKernel, hippo_legs, long_convolution, s4
from tost.nn.mixers.s4 import _pairs
from tost.testing import assert_close

C, G, N = 6, 3, 8


def low_rank(max_length=40, directions=2, state_size=N):
    return perturb(LowRankKernel(C, G, state_size, directions, max_length=max_length, dtype=torch.float64))


def diagonal(directions=2):
    return perturb(DiagonalKernel(C, G, N, directions, dtype=torch.float64))


class System(NamedTuple):
    """``x[l+1] = a x[l] + b u[l+1], y[l] = c x[l]`` for each channel, with both states of every pair."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor


def dense(kernel):
    """The discrete system of which this is the kernel."""
    if isinstance(kernel, DiagonalKernel):
        rate, b, c = kernel._system()
        return System(torch.diag_embed(_pairs(rate.exp())), _pairs(b), _pairs(c))
    a, b, cut = kernel._dense(kernel.c)
    rest = torch.eye(a.shape[-1], dtype=a.dtype) - torch.linalg.matrix_power(a, kernel.max_length)
    return System(a, b, torch.linalg.solve(rest.mT, cut.movedim(0, -1)).movedim(-1, 0))


def recurrence(system, u):
    """Run the discrete system on u [C, L], one step at a time; returns [R, C, L]."""
    state, out = torch.zeros_like(system.b), []
    for now in u.split(1, dim=1):
        state = (system.a @ state.unsqueeze(-1)).squeeze(-1) + system.b * now
        out.append((system.c * state).sum(-1))
    y = torch.stack(out, dim=-1)
    assert y.imag.abs().max() < 1e-10
    return y.real


KERNELS = {
    "s4, even": lambda: low_rank(40),
    "s4, odd": lambda: low_rank(41),
    "s4, one": lambda: low_rank(30, directions=1),
    "s4d": diagonal,
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("length", [1, 2, 17, 30])
def test_convolution_is_the_recurrence(name, length):
    kernel = KERNELS[name]()
    u = torch.randn(2, C, length, dtype=torch.float64)
    forward = torch.stack([recurrence(dense(kernel), row)[0] for row in u])
    assert_close("forward", long_convolution(u, kernel(length)[:1]), forward, 1e-11)
    if kernel.c.shape[0] == 2:
        backward = torch.stack([recurrence(dense(kernel), row.flip(-1))[1].flip(-1) for row in u])
        # The second kernel sees the tokens behind each one, not the token itself.
        shifted = torch.nn.functional.pad(backward[..., 1:], (0, 1))
        assert_close("both", long_convolution(u, kernel(length)), forward + shifted, 1e-11)


def test_diagonal_kernel_is_its_vandermonde_sum():
    kernel = diagonal()
    step = kernel.log_step.exp()[:, None]
    rate = torch.complex(-kernel.log_decay.exp(), kernel.frequency).repeat_interleave(C // G, dim=0)
    c = torch.view_as_complex(kernel.c.detach())
    for length in (1, 5, 37):
        powers = torch.exp((step * rate).unsqueeze(-1) * torch.arange(length))  # [C, N/2, L]
        expected = 2 * ((c * (torch.exp(step * rate) - 1) / rate).unsqueeze(-1) * powers).sum(-2).real
        assert_close("kernel", kernel(length), expected, 1e-12)
    assert kernel(0).shape == (2, C, 0)


@pytest.mark.parametrize("state_size", [2, 8, 64])
def test_hippo_matrix_comes_back_from_its_parts(state_size):
    i = torch.arange(state_size, dtype=torch.float64)
    roots = (2 * i + 1).sqrt()
    a = torch.where(i[:, None] > i, -roots[:, None] * roots, 0.0) - (i + 1).diag()
    eigenvalues, b, p = (torch.cat((x, x.conj())) for x in hippo_legs(state_size))
    assert (eigenvalues.imag[: state_size // 2] < 0).all()
    assert b.imag.abs().max() < 1e-12
    assert b.real.min() > 0
    assert_close("decay", eigenvalues.real, torch.full_like(i, -0.5), 1e-12)
    # Systems are equal if they answer alike: (z - A)^-1 B, seen through B, at a few z.
    for z in (0.3 + 1j, 2.0 + 0j, 10j):
        eye = torch.eye(state_size, dtype=torch.complex128)
        expected = roots.to(eye) @ torch.linalg.solve(z * eye - a, roots.to(eye))
        low = eigenvalues.diag() - p[:, None] * p.conj()
        actual = b.conj() @ torch.linalg.solve(z * eye - low, b)
        assert abs(actual - expected) < 1e-9 * abs(expected)


def test_fresh_kernel_is_hippo_with_the_output_that_was_drawn():
    torch.manual_seed(0)
    kernel = LowRankKernel(C, G, N, 2, max_length=40, dtype=torch.float64)
    torch.manual_seed(0)
    plain = DiagonalKernel(C, G, N, 2, dtype=torch.float64)  # draws the same numbers in the same order
    drawn = torch.view_as_complex(plain.c)
    actual = dense(kernel).c[..., : N // 2]
    assert_close("c", torch.view_as_real(actual), torch.view_as_real(drawn), 1e-9)
    assert (kernel.log_step.exp() >= 1e-3).all()
    assert (kernel.log_step.exp() <= 1e-1).all()


def test_pieces_of_the_spectrum_change_nothing(monkeypatch):
    kernel = low_rank()
    whole = kernel(40)
    (expected,) = torch.autograd.grad(whole.square().sum(), kernel.p)
    monkeypatch.setattr(s4, "LARGEST_TABLE", 7 * C * N // 2)
    pieces = kernel(40)
    (actual,) = torch.autograd.grad(pieces.square().sum(), kernel.p)
    assert_close("kernel", pieces, whole, 1e-13)
    assert_close("gradient", actual, expected, 1e-12)


def test_layer_is_its_equation():
    layer = perturb(S4(C, G, max_length=20, state_size=4, dtype=torch.float64))
    x = torch.randn(2, 20, C, dtype=torch.float64)
    y = long_convolution(x.mT, layer.kernel(20)).mT + layer.d * x
    y = torch.nn.functional.gelu(y) @ layer.proj_out.weight.T + layer.proj_out.bias
    assert_close("y", layer(x), y[..., :C] * torch.sigmoid(y[..., C:]), 1e-12)


def test_one_direction_is_causal_and_two_are_not():
    x = torch.randn(1, 20, C)
    for kernel in ("s4", "s4d"):
        for both in (False, True):
            layer = S4(C, G, max_length=20, kernel=kernel, bidirectional=both, state_size=4)
            changed = x.clone()
            changed[:, 12:] += 1
            moved = (layer(changed) - layer(x))[:, :12].abs().max()
            assert (moved > 1e-3) == both


def test_tied_dropout_decides_once_for_all_tokens():
    layer = S4(C, G, kernel="s4d", state_size=4, drop=0.5, tied_drop=True)
    seen = []
    layer.proj_out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    layer(torch.randn(4, 9, C))
    dropped = seen[0] == 0
    assert dropped.any()
    assert not dropped.all()
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))


def test_dense_matrices_are_the_bilinear_rule_of_diagonal_plus_low_rank():
    kernel = low_rank()
    a, b, _ = dense(kernel)
    for channel in range(C):
        group = channel // (C // G)
        step = kernel.log_step[channel].exp()
        rate = torch.complex(-kernel.log_decay[group].exp(), kernel.frequency[group])
        vectors = (torch.view_as_complex(x[group]) for x in (kernel.b, kernel.p))
        rate, b_full, p_full = (torch.cat((x, x.conj())) for x in (rate, *vectors))
        continuous = rate.diag() - p_full[:, None] * p_full.conj()
        eye = torch.eye(N, dtype=torch.complex128)
        left = torch.linalg.inv(eye - step / 2 * continuous)
        expected = left @ (eye + step / 2 * continuous)
        assert_close("a", torch.view_as_real(a[channel]), torch.view_as_real(expected), 1e-12)
        assert_close("b", torch.view_as_real(b[channel]), torch.view_as_real(left @ (step * b_full)), 1e-12)
