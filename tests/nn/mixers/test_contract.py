"""The other token mixers against their definitions, and what every mixer has to do with padding, order and dtypes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
import tost._torchvision  # repairs the import of timm on CPU builds of torch
from tost.nn import CrossCovarianceAttention, Extensions, SoftmaxAttention, SubspaceAttention
from tost.testing import assert_close

B, N, C, H = 2, 9, 12, 3
D = C // H
NEW = {"softmax": SoftmaxAttention, "xca": CrossCovarianceAttention, "mssa": SubspaceAttention}
MIXERS = NEW | {
    "tssa": tost.TSSAttention,
    "gated": lambda *sizes, **options: tost.TSSAttention(*sizes, extensions=Extensions(gate=True), **options),
}


def perturb(module):
    """Move every parameter off its initial value, so that none of them can be ignored unnoticed."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def make(name, dtype=torch.float64, **options):
    return perturb(MIXERS[name](C, H, dtype=dtype, **options))


def tokens(dtype=torch.float64):
    return torch.randn(B, N, C, dtype=dtype)


def definition(name, module, x):
    """The output for one sequence x [N, C], head by head and in no hurry."""
    projected = F.linear(x, module.proj_in.weight, module.proj_in.bias)
    heads = []
    for h in range(H):
        q, k, v = (part[:, h * D : (h + 1) * D] for part in (projected.split(C, dim=1) * 3)[:3])
        if name == "xca":
            q, k = (part / part.square().sum(0).sqrt().clamp_min(1e-12) for part in (q, k))
            heads.append(v @ (module.temperature[h] * q.T @ k).softmax(1).T)
        else:
            heads.append((q @ k.T / D**0.5).softmax(1) @ v)
    return F.linear(torch.cat(heads, dim=1), module.proj_out.weight, module.proj_out.bias)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("biases", [(False, False), (True, True)])
def test_mixer_is_its_definition_with_every_gradient(name, biases):
    module, x = make(name, in_bias=biases[0], out_bias=biases[1]), tokens().requires_grad_()
    assert (module.proj_in.bias is not None, module.proj_out.bias is not None) == biases
    variables = (x, *module.parameters())
    expected = torch.stack([definition(name, module, sequence) for sequence in x])
    cotangent = torch.randn_like(expected)
    actual = module(x)
    assert_close("y", actual, expected, 1e-13)
    wanted = torch.autograd.grad(expected, variables, cotangent)
    for got, want in zip(torch.autograd.grad(actual, variables, cotangent), wanted, strict=True):
        assert want.abs().max() > 0
        assert_close("gradient", got, want, 1e-11)


def test_xca_is_that_of_timm():
    from timm.models.xcit import XCA

    theirs, ours, x = perturb(XCA(C, H, qkv_bias=True)).double(), make("xca"), tokens()
    state = {name.replace("qkv", "proj_in"): value for name, value in theirs.state_dict().items()}
    state = {name.replace("proj.", "proj_out."): value for name, value in state.items()}
    ours.load_state_dict(state | {"temperature": state["temperature"].flatten()})
    assert_close("y", ours(x), theirs(x), 1e-14)


def test_defaults_are_those_of_the_originals():
    assert SubspaceAttention(C, H).proj_in.bias is None
    assert SubspaceAttention(C, H).proj_out.bias is not None
    assert SubspaceAttention(C, H).proj_in.weight.shape == (C, C)
    assert SoftmaxAttention(C, H).proj_in.weight.shape == (3 * C, C)
    assert torch.equal(CrossCovarianceAttention(C, H).temperature, torch.ones(H))


@pytest.mark.parametrize("name", MIXERS)
@settings(max_examples=15)
@given(real=st.lists(st.booleans(), min_size=N, max_size=N), filler=st.sampled_from([7.0, float("nan"), float("inf")]))
def test_mask_is_deletion(name, real, filler):
    torch.manual_seed(0)
    module, x, mask = make(name), tokens(), torch.tensor([real, real[::-1]])
    x[~mask] = filler
    with torch.no_grad():
        y = module(x, mask)
    for sequence, row, out in zip(x, mask, y, strict=True):
        assert torch.equal(out[~row], module.proj_out.bias.expand(int((~row).sum()), C))
        if row.any():
            assert_close("real tokens", out[row], module(sequence[row].unsqueeze(0))[0], 1e-12)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sequence_of_padding_only_gives_finite_results(name, dtype):
    module, x = make(name, dtype), tokens(dtype).requires_grad_()
    mask = torch.tensor([[False] * N, [True] * N])
    y = module(x, mask)
    assert torch.equal(y[0], module.proj_out.bias.expand(N, C))
    y.square().sum().backward()
    assert all(variable.grad.isfinite().all() for variable in (x, *module.parameters()))
    assert not x.grad[0].any()
    assert x.grad[1].any()


@pytest.mark.parametrize("name", ["softmax", "mssa"])
def test_kernel_always_has_something_to_attend_to(name, monkeypatch):
    # Not every implementation of the softmax, nor every exported graph, survives a row without a single entry.
    masks, kernel = [], F.scaled_dot_product_attention

    def watched(*arguments, attn_mask, **options):
        masks.append(attn_mask)
        return kernel(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    make(name)(tokens(), torch.tensor([[False] * N, [True] + [False] * (N - 1)]))
    assert masks[0].sum(dim=-1).flatten().tolist() == [N, 1]


@pytest.mark.parametrize("name", MIXERS)
def test_order_of_tokens_carries_over(name):
    module, x, order = make(name), tokens(), torch.randperm(N)
    assert_close("y", module(x[:, order]), module(x)[:, order], 1e-13)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 5e-3), (torch.bfloat16, 4e-2), (torch.float32, 3e-6)])
def test_every_dtype_follows_float64(name, dtype, bound):
    exact, x = make(name), tokens()
    module = MIXERS[name](C, H, dtype=dtype)
    module.load_state_dict(exact.state_dict())
    y = module(x.to(dtype).requires_grad_())
    assert y.dtype == dtype
    assert_close("y", y, exact(x), bound)
    y.float().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("name", MIXERS)
def test_autocast_gives_gradients_of_the_parameters_dtype(name):
    module = make(name, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(tokens(torch.float32))
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("name", ["softmax", "xca", "mssa"])
@pytest.mark.parametrize("option", ["attn_drop", "out_drop"])
def test_dropout_acts_in_training_only(name, option):
    module, x = make(name, torch.float32, **{option: 0.5}), tokens(torch.float32)
    assert not torch.equal(module(x), module(x))
    plain = MIXERS[name](C, H)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x), plain(x))


@pytest.mark.parametrize("name", NEW)
def test_mixers_take_no_tokens_and_compile_without_a_break(name):
    module, x = make(name, torch.float32), tokens(torch.float32)
    assert module(x[:, :0]).shape == (B, 0, C)
    mask = torch.arange(N).expand(B, -1) < 5
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close("y", compiled(x, mask), module(x, mask), 1e-6)


@pytest.mark.parametrize("name", NEW)
def test_half_precision_has_room_for_features_that_are_zero_or_large(name):
    module = MIXERS[name](C, H, in_bias=False, dtype=torch.float16)
    assert module(torch.zeros(1, 4, C, dtype=torch.float16)).isfinite().all()
    assert module(torch.full((1, 64, C), 200.0, dtype=torch.float16)).isfinite().all()


@pytest.mark.parametrize("name", NEW)
def test_bad_arguments_are_refused(name):
    with pytest.raises(ValueError, match=r"embed_dim \(10\) must be divisible by num_heads \(3\)"):
        MIXERS[name](10, 3)
    module = make(name)
    with pytest.raises(ValueError, match=rf"x has shape \(3, {C}\); this module needs \[B, N, {C}\]"):
        module(torch.zeros(3, C))
    with pytest.raises(ValueError, match=r"mask has dtype torch\.int64; it must be torch\.bool"):
        module(tokens(), torch.ones(B, N, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"mask has shape \(1, {N}\)"):
        module(tokens(), torch.ones(1, N, dtype=torch.bool))
