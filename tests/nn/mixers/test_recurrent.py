"""The recurrent baselines against their recurrences, token by token, and what every mixer with a state has to do."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.tiny import perturb
from tost.nn import CausalLinearAttention, CausalS4D, GatedDeltaNet, MinGRU, NoMixer
from tost.ops._scan import linear_recurrence
from tost.testing import assert_close

B, C, H = 2, 12, 3
D = C // H
MIXERS = {
    "linear": CausalLinearAttention,
    "mingru": MinGRU,
    "gated_delta": GatedDeltaNet,
    "s4d": partial(CausalS4D, state_size=6, step=(0.05, 0.5)),
}


def make(name, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return perturb(MIXERS[name](C, H, dtype=dtype, **options))


def tokens(N, dtype=torch.float64):
    return torch.randn(B, N, C, dtype=dtype, generator=torch.Generator().manual_seed(1))


def linear(module, x, parts, memory):
    q, k, v = parts
    q, k = F.elu(q) + 1, F.elu(k) + 1
    memory = memory + k[:, :, None] * F.pad(v, (0, 1), value=1.0)[:, None]
    y = torch.einsum("hk,hkv->hv", q, memory)
    return y[:, :-1] / (y[:, -1:] + 1e-6), memory


def mingru(module, x, parts, memory):
    update, value, gate = parts.flatten(1)
    memory = (1 - update.sigmoid()) * memory + update.sigmoid() * value
    return (F.silu(gate) * memory).view(H, D), memory


def gated_delta(module, x, parts, memory):
    q, k, v, gate = parts
    q, k = (F.silu(part) / F.silu(part).norm(dim=-1, keepdim=True) for part in (q, k))
    fade, write = module.proj_rates(x).view(2, H)
    a = torch.exp(-module.log_rate.exp() * F.softplus(fade + module.offset))[:, None, None]
    b = write.sigmoid()[:, None, None]
    pair = k[:, :, None] * k[:, None]
    memory = a * memory @ (torch.eye(D, dtype=x.dtype) - b * pair) + b * v[:, :, None] * k[:, None]
    y = torch.einsum("hvk,hk->hv", memory, q)
    y = y / (y.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * module.norm_weight
    return y * F.silu(gate), memory


def s4d(module, x, memory):
    kernel, states = module.kernel, torch.view_as_complex(memory.view(C, 3, 2))
    group = torch.arange(C) // D
    a = torch.complex(-kernel.log_decay.exp(), kernel.frequency)[group]
    turn = (kernel.log_step.exp()[:, None] * a).exp()
    states = turn * states + (turn - 1) / a * x[:, None]
    y = 2 * (torch.view_as_complex(kernel.c[0]) * states).sum(dim=1).real + module.d * x
    return F.glu(module.proj_out(F.gelu(y)), dim=0), torch.view_as_real(states).flatten(1)


STEPS = {"linear": linear, "mingru": mingru, "gated_delta": gated_delta}


def definition(name, module, x):
    """The outputs and the memory of one sequence x [N, C], one token after another."""
    memory, outputs = x.new_zeros(module.memory_shape()), []
    for token in x:
        if name == "s4d":
            y, memory = s4d(module, token, memory)
        else:
            y, memory = STEPS[name](module, token, module.proj_in(token).view(-1, H, D), memory)
            y = module.proj_out(y.flatten())
        outputs.append(y)
    return torch.stack(outputs), memory


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("N", [1, 7, 70])
def test_mixer_is_its_recurrence_with_every_gradient(name, N):
    module, x = make(name), tokens(N).requires_grad_()
    wanted, memories = zip(*(definition(name, module, sequence) for sequence in x), strict=True)
    expected = torch.stack(wanted)
    y, state = module.forward_with_state(x)
    assert_close("y", y, expected, 1e-12)
    assert_close("memory", state.memory, torch.stack(memories), 1e-12)
    assert state.position.tolist() == [N] * B
    variables, cotangent = (x, *module.parameters()), torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, variables, cotangent)
    for got, want in zip(torch.autograd.grad(y, variables, cotangent), gradients, strict=True):
        assert_close("gradient", got, want, 1e-10)


@pytest.mark.parametrize("N", [1, 2, 5, 16, 17])
def test_linear_recurrence_has_every_derivative(N):
    generator = torch.Generator().manual_seed(N)
    inputs = [torch.rand(shape, dtype=torch.float64, generator=generator) for shape in ((2, N, 3), (2, N, 3), (2, 3))]
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(linear_recurrence, leaves)
    assert torch.autograd.gradgradcheck(linear_recurrence, leaves)
    tangents = [torch.ones_like(x) for x in inputs]
    h, found = torch.func.jvp(linear_recurrence, tuple(inputs), tuple(tangents))
    expected = torch.autograd.functional.jvp(linear_recurrence, tuple(leaves), tuple(tangents))[1]
    assert_close("tangent", found, expected, 1e-12)
    assert_close("h", h, linear_recurrence(*leaves), 1e-12)


@pytest.mark.parametrize("name", MIXERS)
@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 80), max_size=4))
def test_pieces_give_what_the_whole_gives(name, cuts):
    module, x, state, outputs = make(name), tokens(80), None, []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), 80], strict=True):
        y, state = module.forward_with_state(x[:, begin:end], state)
        outputs.append(y)
    whole, after = module.forward_with_state(x)
    assert_close("y", torch.cat(outputs, dim=1), whole, 1e-12)
    assert_close("memory", state.memory, after.memory, 1e-12)
    assert torch.equal(state.position, after.position)


@pytest.mark.parametrize("name", MIXERS)
@settings(max_examples=10)
@given(real=st.lists(st.booleans(), min_size=9, max_size=9), filler=st.sampled_from([7.0, float("nan"), float("inf")]))
def test_mask_is_deletion(name, real, filler):
    module, x, mask = make(name), tokens(9), torch.tensor([real, real[::-1]])
    x[~mask] = filler
    with torch.no_grad():
        y, state = module.forward_with_state(x, mask=mask)
    silence = F.glu(module.proj_out.bias, dim=0) if name == "s4d" else module.proj_out.bias
    for row in range(B):
        assert torch.equal(y[row][~mask[row]], silence.expand(int((~mask[row]).sum()), C))
        alone, after = module.forward_with_state(x[row][mask[row]].unsqueeze(0))
        assert_close("y", y[row][mask[row]], alone[0], 1e-12)
        assert_close("memory", state.memory[row], after.memory[0], 1e-12)
        assert state.position[row] == after.position[0]


@pytest.mark.parametrize("name", MIXERS)
def test_no_token_sees_a_later_one(name):
    module, x = make(name), tokens(70).requires_grad_()
    (gradient,) = torch.autograd.grad(module(x)[:, 40].sum(), x)
    assert gradient[:, :41].abs().amax(dim=(0, 2)).min() > 0
    rounding = 1e-15 if name == "s4d" else 0.0  # of a Fourier transform
    assert gradient[:, 41:].abs().max() <= rounding


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-2), (torch.bfloat16, 6e-2), (torch.float32, 1e-5)])
def test_every_dtype_follows_float64(name, dtype, bound):
    exact, x = make(name), tokens(70)
    module = MIXERS[name](C, H, dtype=dtype)
    module.load_state_dict(exact.state_dict())
    y, state = module.forward_with_state(x.to(dtype))
    assert (y.dtype, state.memory.dtype) == (dtype, torch.float32)
    assert_close("y", y, exact(x), bound)


def test_the_control_mixes_nothing_and_counts():
    x, mask = torch.randn(B, 5, C, requires_grad=True), torch.tensor([[True] * 5, [True, True, False, False, False]])
    y, state = NoMixer(C, H).forward_with_state(x, mask=mask)
    assert not y.any()
    assert state.position.tolist() == [5, 2]
    assert NoMixer(C, H).forward_with_state(x, state)[1].position.tolist() == [10, 7]
    assert y.requires_grad  # what comes before it is not left without a gradient
    assert sum(p.numel() for p in NoMixer(C, H).parameters()) == 0


@pytest.mark.parametrize("name", MIXERS)
def test_a_state_of_another_model_is_refused(name):
    _, state = make(name).forward_with_state(tokens(3))
    with pytest.raises(ValueError, match="Pass the state that came from the same batch"):
        make(name).forward_with_state(tokens(3)[:1], state)
