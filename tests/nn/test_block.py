"""Blocks against their equations: norms, layer scale, drop path, convolutions, states, a feed-forward that replaces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tost
from tests.models import tiny
from tost.nn import (
    ISTA,
    MLP,
    Block,
    CausalBlock,
    CausalConvolution,
    CausalSoftmaxAttention,
    CrossCovarianceAttention,
    GridConvolution,
    SequenceConvolution,
    SoftmaxAttention,
    SubspaceAttention,
    run_blocks,
)
from tost.testing import assert_close

B, GRID, C, H = 3, (2, 4), 12, 3
N = GRID[0] * GRID[1]
MIXERS = [tost.TSSAttention, SoftmaxAttention, CrossCovarianceAttention, SubspaceAttention]


class Ones(nn.Module):
    """A branch whose output is known."""

    def forward(self, x, mask=None):
        return torch.ones_like(x)


def perturb(module):
    return tiny.perturb(module).double()


def tokens(dtype=torch.float64):
    return torch.randn(B, N, C, dtype=dtype)


def make_block(mixer=tost.TSSAttention, mlp=None, conv=True, **options):
    conv = GridConvolution(C) if conv else None
    return perturb(Block(mixer(C, H), MLP(C, 2 * C) if mlp is None else mlp, C, conv=conv, **options))


def naive(block, x):
    """The block as the note in its docstring writes it, one operation at a time."""
    pre = block.norm == "pre"
    if block.conv_block is not None:
        x = x + block.conv_block(x, GRID)
    scale1, scale2 = (1 if gamma is None else gamma for gamma in (block.gamma1, block.gamma2))
    u = block.norm1(x) if pre else x
    if block.conv is not None:
        u = u + block.conv(u, GRID)
    x = x + scale1 * block.attention(u)
    x = x if pre else block.norm1(x)
    u = block.norm2(x) if pre else x
    fed = block.mlp(u if block.conv_mlp is None else u + block.conv_mlp(u, GRID))
    x = x + scale2 * fed if getattr(block.mlp, "residual", True) else fed
    return x if pre else block.norm2(x)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_convolutions_in_front_of_the_block_and_of_both_branches(norm):
    more = {"conv_mlp": GridConvolution(C), "conv_block": GridConvolution(C)}
    block, x = make_block(norm=norm, **more), tokens()
    assert_close("y", block(x, None, GRID), naive(block, x), 1e-14)


@pytest.mark.parametrize(
    ("mixer", "options"), [*((mixer, {}) for mixer in MIXERS), (tost.BlockTSSAttention, {"block_size": 2})]
)
def test_values_of_neighbours_are_added_to_what_the_mixer_gives(mixer, options):
    module, x = perturb(mixer(C, H, value_conv=GridConvolution(C), **options)), tokens().requires_grad_()
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, 3:] = False
    near = module.value_conv(module.proj_in(x)[..., -C:], GRID, mask)
    if options:
        near = near * torch.nn.functional.silu(module.proj_gate(x))
    added = module(x, mask=mask, grid=GRID)
    with torch.no_grad():
        alone = module(x, mask=mask, grid=GRID)
    module.value_conv = None
    expected = module(x, mask=mask) + near @ module.proj_out.weight.t()
    assert_close("y", added, expected, 1e-13)
    assert_close("without gradients", alone, expected, 1e-13)
    cotangent = torch.randn_like(added)
    for a, b in zip(*(torch.autograd.grad(y, x, cotangent) for y in (added, expected)), strict=True):
        assert_close("gradient", a, b, 1e-12)


@pytest.mark.parametrize("mixer", MIXERS)
def test_values_along_a_sequence_are_exact_under_masks_and_packing(mixer):
    block = perturb(
        Block(mixer(C, H, value_conv=SequenceConvolution(C)), MLP(C, C), C, conv_block=SequenceConvolution(C))
    )
    x, lengths = torch.randn(1, 9, C, dtype=torch.float64), [4, 5]
    alone = torch.cat([block(part) for part in x.split(lengths, dim=1)], dim=1)
    packing = tost.Packing.from_cu_seqlens(torch.tensor([0, 4, 9]), 9)
    assert_close("packed", block(x, packing=packing), alone, 1e-13)
    mask = torch.tensor([[False, True, True, False, False, True, True, False, False]])
    real = block(x.masked_fill(~mask.unsqueeze(-1), float("nan")), mask)[mask]
    assert_close("masked", real, block(x[mask][None])[0], 1e-13)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("layer_scale", [None, 0.1])
@pytest.mark.parametrize("feed_forward", [lambda: MLP(C, 2 * C), lambda: ISTA(C)], ids=["mlp", "ista"])
def test_block_is_its_equation_with_every_gradient(norm, layer_scale, feed_forward):
    block = make_block(mlp=feed_forward(), norm=norm, layer_scale=layer_scale)
    x = tokens().requires_grad_()
    actual, expected, cotangent = block(x, None, GRID), naive(block, x), torch.randn_like(x)
    assert_close("y", actual, expected, 1e-14)
    variables = (x, *block.parameters())
    wanted = torch.autograd.grad(expected, variables, cotangent)
    for got, want in zip(torch.autograd.grad(actual, variables, cotangent), wanted, strict=True):
        assert want.abs().max() > 0
        assert_close("gradient", got, want, 1e-12)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("feed_forward", [lambda: MLP(C, 2 * C), lambda: ISTA(C)], ids=["mlp", "ista"])
def test_mixers_and_feed_forwards_combine(mixer, feed_forward):
    block, x = make_block(mixer, feed_forward(), layer_scale=1.0, drop_path=0.2), tokens()
    block(x, None, GRID).square().sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())
    block.eval()
    padded = torch.cat((x, torch.full_like(x[:, :4], 5.0)), dim=1)
    mask = torch.arange(N + 4).expand(B, -1) < N
    assert_close("y", block(padded, mask, (3, 4))[:, :N], block(x, None, GRID), 1e-12)


def test_feed_forward_that_replaces_has_no_scale_and_no_residual():
    block = Block(Ones(), ISTA(C), C, layer_scale=0.5)
    assert block.gamma2 is None
    assert "gamma2" not in block.state_dict()
    x = tokens(torch.float32)
    assert_close("y", block(x), block.mlp(block.norm2(x + 0.5)), 1e-6)


@pytest.mark.parametrize("layer_scale", [None, 0.5])
def test_drop_path_drops_whole_sequences_and_keeps_the_mean(layer_scale):
    drop, scale, many = 0.25, 1.0 if layer_scale is None else layer_scale, 8000
    block = Block(Ones(), Ones(), 4, layer_scale=layer_scale, drop_path=drop)
    added = block(torch.zeros(many, 2, 4)) * (1 - drop) / scale  # 0, 1 or 2 branches
    count = added[:, 0, 0].round()
    assert_close("whole sequences", added, count[:, None, None].expand_as(added), 1e-6)
    # The branches are dropped independently of each other: a binomial distribution of two draws.
    for branches, probability in ((0, drop**2), (1, 2 * drop * (1 - drop)), (2, (1 - drop) ** 2)):
        share = (count == branches).float().mean().item()
        assert abs(share - probability) < 5 * (probability * (1 - probability) / many) ** 0.5
    assert abs(count.mean().item() / (1 - drop) - 2) < 0.05


def test_recomputation_draws_the_same_paths_and_passes_the_grid():
    blocks = nn.ModuleList(make_block(layer_scale=0.3, drop_path=0.5) for _ in range(2))
    x, gradients = tokens(), []
    for recompute in (False, True):
        torch.manual_seed(3)
        run_blocks(blocks, x, grid=GRID, recompute=recompute).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in blocks.parameters()])
        blocks.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_block_stays_in_its_dtype(dtype):
    block = make_block(layer_scale=0.1, drop_path=0.3).to(dtype)
    y = block(tokens(dtype), None, GRID)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in block.parameters())


@pytest.mark.parametrize("layer_scale", [None, 0.1])
def test_autocast_leaves_the_residual_stream_in_full_precision(layer_scale):
    block, x = make_block(layer_scale=layer_scale, drop_path=0.3).float(), tokens(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x, None, GRID)
        exact = block.eval()(x, None, GRID)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in block.parameters())
    assert_close("y", exact, naive(block, x), 3e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Block(Ones(), Ones(), C, drop_path=1.0), r"drop_path=1.0 is not possible; it takes a probability"),
        (lambda: Block(Ones(), Ones(), C, drop_path=-0.1), r"drop_path=-0.1 is not possible"),
        (lambda: CausalBlock(Ones(), Ones(), C, conv=GridConvolution(C)), "a causal block takes no convolution"),
        (lambda: make_block()(tokens()), r"grid=None does not hold the 8 tokens"),
        (lambda: CausalBlock(Ones(), Ones(), C, conv_block=CausalConvolution(C)), "a causal block takes no conv_block"),
        (lambda: CausalSoftmaxAttention(C, H, value_conv=SequenceConvolution(C)), "causal and takes no value_conv"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def make_causal_block(**options):
    attention = tost.CausalTSSAttention(C, H, 2 * N)
    return perturb(CausalBlock(attention, MLP(C, 2 * C, bias=False), C, layer_scale=0.5, norm_bias=False, **options))


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
    assert carry.state.position.tolist() == [N] * B
    assert between.position.tolist() == [5] * B


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_causal_block_continues_where_it_stopped(norm):
    block, x = make_causal_block(norm=norm), tokens()
    whole, last = block.forward_with_state(x)
    assert torch.equal(whole, block(x))
    state, pieces = None, []
    for piece in x.split((4, 1, 3), dim=1):
        y, state = block.forward_with_state(piece, state)
        pieces.append(y)
    assert_close("y", torch.cat(pieces, dim=1), whole, 1e-13)
    for name, got, expected in zip(state._fields, state, last, strict=True):
        assert_close(name, got, expected, 1e-13)


def test_ista_is_its_formula_with_every_gradient():
    module, x = ISTA(C, step_size=0.3, threshold=0.2, dtype=torch.float64), tokens().requires_grad_()
    D, eta, lam = module.dictionary, 0.3, 0.2
    columns = x.mT  # [B, C, N]: tokens as columns, as the formula has them
    inner = columns + eta * (D.T @ columns - D.T @ D @ columns) - eta * lam
    expected = inner.clamp_min(0).mT
    assert_close("y", module(x), expected, 1e-14)
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, D), cotangent)
    for got, want in zip(torch.autograd.grad(module(x), (x, D), cotangent), wanted, strict=True):
        assert_close("gradient", got, want, 1e-13)


@given(
    step=st.floats(0.01, 1.0), threshold=st.floats(0.0, 1.0), seed=st.integers(0, 10), rows=st.sampled_from([1, 3, N])
)
@settings(max_examples=25)
def test_ista_is_a_proximal_step_on_the_lasso(step, threshold, seed, rows):
    torch.manual_seed(seed)
    module, x = ISTA(C, step_size=step, threshold=threshold, dtype=torch.float64), tokens()[:, :rows]
    a = x.clone().requires_grad_()
    smooth = (x - a @ module.dictionary.T).square().sum() / 2
    (slope,) = torch.autograd.grad(smooth, a)
    moved = x - step * slope
    # The proximal operator of step * threshold * |a|_1 over a >= 0, from its definition as a minimum: on each entry
    # (a - moved)^2 / 2 + step * threshold * a is convex, so no other a >= 0 may be better.
    y = module(x)

    def price(code):
        return (code - moved).square() / 2 + step * threshold * code

    assert (y >= 0).all()
    for other in (y + 1e-3, (y - 1e-3).clamp_min(0), torch.zeros_like(y)):
        assert (price(other) >= price(y) - 1e-12).all()
