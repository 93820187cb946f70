"""Blocks against their equations, alone and in a row."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tost
from tost.nn import MLP, Block, CausalBlock, run_blocks
from tost.testing import assert_close

B, N, C, H = 2, 13, 16, 4


def perturb(module):
    """Move every parameter off its initial value, so that none of them can be ignored unnoticed."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.double()


def make_block(**options):
    return perturb(Block(tost.TSSAttention(C, H), MLP(C, 3 * C), C, **options))


def make_causal_block(**options):
    attention = tost.CausalTSSAttention(C, H, 32)
    return perturb(CausalBlock(attention, MLP(C, 3 * C, bias=False), C, layer_scale=0.5, norm_bias=False, **options))


def tokens(batch=B):
    return torch.randn(batch, N, C, dtype=torch.float64)


def test_hooks_fire_when_a_sequence_continues():
    block, fired = make_causal_block(conv=tost.nn.CausalConvolution(C), conv_mlp=tost.nn.CausalConvolution(C)), []
    for name, module in block.named_modules():
        module.register_forward_hook(lambda *_, name=name: fired.append(name))
    _, state = block.forward_with_state(tokens())
    once = sorted(fired)
    assert once == sorted(name for name, _ in block.named_modules())
    block.forward_with_state(tokens(), state)
    assert sorted(fired) == sorted(2 * once)


def test_a_carry_is_the_state_that_goes_in_and_comes_out():
    block, x = make_causal_block(), tokens()
    first, between = block.forward_with_state(x[:, :5])
    carry = tost.nn.Carry(between)
    both = torch.cat((first, block(x[:, 5:], carry=carry)), dim=1)
    assert torch.allclose(both, block(x), atol=1e-12)
    assert carry.state.position.tolist() == [N, N]
    assert between.position.tolist() == [5, 5]


def normalized(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    shape = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return shape * norm.weight + (0 if norm.bias is None else norm.bias)


@pytest.mark.parametrize("layer_scale", [None, 0.1])
def test_pre_norm_block_is_its_equation(layer_scale):
    block, x = make_block(layer_scale=layer_scale), tokens()
    scale1, scale2 = (1, 1) if layer_scale is None else (block.gamma1, block.gamma2)
    mixed = x + scale1 * block.attention(normalized(x, block.norm1))
    expected = mixed + scale2 * block.mlp(normalized(mixed, block.norm2))
    assert_close("y", block(x), expected, 1e-13)


@pytest.mark.parametrize("layer_scale", [None, 0.1])
def test_post_norm_block_is_its_equation(layer_scale):
    block, x = make_block(norm="post", layer_scale=layer_scale), tokens()
    scale1, scale2 = (1, 1) if layer_scale is None else (block.gamma1, block.gamma2)
    mixed = normalized(x + scale1 * block.attention(x), block.norm1)
    expected = normalized(mixed + scale2 * block.mlp(mixed), block.norm2)
    assert_close("y", block(x), expected, 1e-13)


def test_mlp_is_two_layers_with_the_exact_gelu():
    mlp, x = perturb(MLP(C, 3 * C)), tokens()
    hidden = F.linear(x, mlp.proj_in.weight, mlp.proj_in.bias)
    gelu = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    assert_close("y", mlp(x), F.linear(gelu, mlp.proj_out.weight, mlp.proj_out.bias), 1e-14)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_reaches_no_other_token(norm):
    block, x = make_block(norm=norm), tokens()
    padded = torch.cat((torch.full((B, 3, C), 7.0, dtype=x.dtype), x, torch.full_like(x[:, :2], -50.0)), dim=1)
    mask = torch.zeros(B, N + 5, dtype=torch.bool)
    mask[:, 3 : N + 3] = True
    assert_close("y", block(padded, mask)[:, 3 : N + 3], block(x), 1e-13)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_causal_block_continues_where_it_stopped(norm):
    block, x = make_causal_block(norm=norm), tokens()
    whole, last = block.forward_with_state(x)
    assert torch.equal(whole, block(x))
    state, pieces = None, []
    for piece in x.split((5, 1, 7), dim=1):
        y, state = block.forward_with_state(piece, state)
        pieces.append(y)
    assert_close("y", torch.cat(pieces, dim=1), whole, 1e-13)
    for name, got, expected in zip(state._fields, state, last, strict=True):
        assert_close(name, got, expected, 1e-13)


def test_causal_block_takes_a_mask_with_its_state():
    block, x = make_causal_block(), tokens()
    padded = torch.cat((x[:, :4], torch.full_like(x[:, :2], 9.0), x[:, 4:]), dim=1)
    mask = torch.ones(B, N + 2, dtype=torch.bool)
    mask[:, 4:6] = False
    first, state = block.forward_with_state(padded[:, :5], mask=mask[:, :5])
    second, state = block.forward_with_state(padded[:, 5:], state, mask[:, 5:])
    assert_close("y", torch.cat((first, second), dim=1)[mask].view(B, N, C), block(x), 1e-13)
    assert state.position.tolist() == [N, N]


def test_recomputation_gives_the_same_gradients_and_runs_every_block_twice():
    blocks = nn.ModuleList(Block(tost.TSSAttention(C, H, out_drop=0.3), MLP(C, C, drop=0.3), C) for _ in range(3))
    calls, x = [], torch.randn(B, N, C)
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(1)
        calls.clear()
        run_blocks(blocks, x, recompute=recompute).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in blocks.parameters()])
        blocks.zero_grad()
        assert len(calls) == (6 if recompute else 3)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    with torch.no_grad():
        calls.clear()
        run_blocks(blocks, x, recompute=True)
        assert len(calls) == 3
