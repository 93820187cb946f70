"""The other token mixers against their definitions, and what every mixer has to do with padding, order and dtypes."""

import pytest
import torch
import torch.nn.functional as F

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


@pytest.mark.parametrize("name", NEW)
def test_half_precision_has_room_for_features_that_are_zero_or_large(name):
    module = MIXERS[name](C, H, in_bias=False, dtype=torch.float16)
    assert module(torch.zeros(1, 4, C, dtype=torch.float16)).isfinite().all()
    assert module(torch.full((1, 64, C), 200.0, dtype=torch.float16)).isfinite().all()
