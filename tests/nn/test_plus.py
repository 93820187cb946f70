"""Attention in blocks and over gated windows against its equations, and how models with it start."""

import pytest
import torch
import torch.nn.functional as F

import tost
from tests.models.tiny import perturb
from tost.testing import assert_close

B, N, C, H = 2, 15, 12, 3
BLOCK_SIZES = pytest.mark.parametrize("g", [1, 2, 4])


def tokens(dtype=torch.float64):
    return torch.randn(B, N, C, dtype=dtype)


def heads(x):
    return x.unflatten(-1, (H, -1))


def gated_norm(module, x, y):
    """Normed heads of y [B, N, H, D] times the gate of x, projected back."""
    normed = y / (y.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    return module.proj_out(normed.flatten(2) * module.norm_weight * F.silu(module.proj_gate(x)))


def check_gradients(module, y):
    y.square().sum().backward()
    assert all(parameter.grad.abs().max() > 1e-8 for parameter in module.parameters())


@BLOCK_SIZES
@pytest.mark.parametrize("normalize", [True, False])
def test_block_attention_is_its_equation(g, normalize):
    module = perturb(tost.BlockTSSAttention(C, H, block_size=g, normalize=normalize, dtype=torch.float64))
    x = tokens()
    y = tost.tssa(heads(module.proj_in(x)), module.temperature, block_size=g, normalize=normalize)
    assert module.operator_options() == {"block_size": g, "normalize": normalize}
    assert_close("y", module(x), gated_norm(module, x, y), 1e-12)
    check_gradients(module, module(x))


@BLOCK_SIZES
@pytest.mark.parametrize("bias", [False, True])
def test_gated_attention_is_its_equation(g, bias):
    options = {"block_size": g, "in_bias": bias, "out_bias": bias, "dtype": torch.float64}
    module, x = perturb(tost.GatedTSSAttention(C, H, **options)), tokens()
    write = heads(module.proj_write(x).sigmoid())
    assert_close("y", module(x), gated_norm(module, x, tost.gated_tssa(heads(module.proj_in(x)), write)), 1e-12)
    check_gradients(module, module(x))


@pytest.mark.parametrize("kind", ["block", "gated"])
@pytest.mark.parametrize("filler", [7.0, float("nan"), float("inf")])
def test_padding_does_not_exist_and_comes_out_as_the_bias(kind, filler):
    options = {"block_size": 2, "out_bias": True, "dtype": torch.float64}
    module = perturb((tost.BlockTSSAttention if kind == "block" else tost.GatedTSSAttention)(C, H, **options))
    x, mask = tokens(), torch.rand(B, N) < 0.6
    x[~mask] = filler
    with torch.no_grad():
        y = module(x, mask)
        assert torch.equal(y, module(x, attn_mask=mask))
        assert torch.equal(y[~mask], module.proj_out.bias.expand(int((~mask).sum()), C))
        for row in range(B):
            assert_close("y", y[row, mask[row]], module(x[row, mask[row]][None])[0], 1e-12)


def test_gated_attention_takes_the_causal_mask_of_other_callers():
    module, x = tost.GatedTSSAttention(C, H, block_size=2), tokens(torch.float32)
    order = torch.ones(N, N, dtype=torch.bool).tril()
    assert torch.equal(module(x, attn_mask=order, is_causal=False), module(x))
    with pytest.raises(ValueError, match="attn_mask"):
        module(x, attn_mask=order.roll(1, dims=0))


def test_a_state_is_replaced_and_one_of_other_blocks_is_refused():
    module, x = perturb(tost.GatedTSSAttention(C, H, block_size=2, dtype=torch.float64)), tokens()
    first, state = module.forward_with_state(x[:, :6])
    kept = [part.clone() for part in state]
    second, after = module.forward_with_state(x[:, 6:], state)
    assert_close("y", torch.cat((first, second), dim=1), module(x), 1e-12)
    assert all(map(torch.equal, state, kept))
    assert after.position.tolist() == [N] * B
    # A mean, a packed covariance and a mass per block.
    assert [part.shape[2] for part in after[:3]] == [4, 6, 2]
    with pytest.raises(ValueError, match="in blocks of 4 needs"):
        tost.GatedTSSAttention(C, H, block_size=4, dtype=torch.float64).forward_with_state(x, state)


@pytest.mark.parametrize(("max_length", "first", "last"), [(1024, 4, 1024), (32, 4, 32), (2, 2, 2)])
def test_windows_start_with_half_lives_at_equal_ratios_in_every_head(max_length, first, last):
    module = tost.GatedTSSAttention(64, 2, max_length, block_size=8)
    keep = 1 - module.write(torch.zeros(1, 1, 64, dtype=torch.float64).to(module.proj_write.weight))[0, 0]
    half_lives = torch.tensor(0.5).log() / keep.log()
    expected = torch.logspace(0, 1, 4, base=last / first) * first
    torch.testing.assert_close(half_lives, expected.expand(2, -1), rtol=2e-3, atol=0)


@pytest.mark.parametrize("kind", [tost.BlockTSSAttention, tost.GatedTSSAttention])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-2), (torch.bfloat16, 6e-2), (torch.float32, 1e-5)])
def test_every_dtype_follows_float64(kind, dtype, bound):
    exact, x = perturb(kind(C, H, block_size=2, dtype=torch.float64)), tokens()
    module = kind(C, H, block_size=2, dtype=dtype)
    module.load_state_dict(exact.state_dict())
    y = module(x.to(dtype))
    assert y.dtype == dtype
    assert_close("y", y, exact(x), bound)
    if kind is tost.GatedTSSAttention:
        assert {part.dtype for part in module.forward_with_state(x.to(dtype))[1][:3]} == {torch.float32}
        assert module.write(x.to(dtype)).dtype == torch.float32


@pytest.mark.parametrize("name", ["tost_lm_base", "tost_lm_base_plus", "tost_mini", "lra_listops"])
def test_models_start_with_tokens_of_variance_1(name):
    model = tost.create_model(name, embed_dim=256, depth=2, num_heads=4, mixer="tssa_plus")
    for block in model.blocks:
        w = block.attention.proj_in(torch.randn(500, 256))
        assert w.var().item() == pytest.approx(1, rel=0.05)


def test_language_models_start_with_the_windows_of_their_length():
    sizes = {"embed_dim": 64, "depth": 1, "num_heads": 2, "vocab_size": 9, "max_length": 300}
    model = tost.create_model("tost_lm_base_plus", **sizes)
    expected = tost.GatedTSSAttention(64, 2, 300).proj_write.bias
    assert torch.equal(model.blocks[0].attention.proj_write.bias, expected)


def test_output_dropout_acts_in_training_only():
    for kind in (tost.BlockTSSAttention, tost.GatedTSSAttention):
        module, x = kind(16, 2, out_drop=0.5), torch.randn(1, 5, 16)
        assert not torch.equal(module(x), module(x))
        module.eval()
        assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("kind", [tost.BlockTSSAttention, tost.GatedTSSAttention])
def test_impossible_sizes_are_refused(kind):
    with pytest.raises(ValueError, match=r"block_size \(3\) must divide the width of a head \(4\)"):
        kind(C, H, block_size=3)
    with pytest.raises(ValueError, match=r"embed_dim \(10\) must be divisible by num_heads \(3\)"):
        kind(10, 3)
    with pytest.raises(ValueError, match=r"x has shape \(3, 12\); this module needs \[B, N, 12\]"):
        kind(C, H, block_size=2)(torch.randn(3, C))
    assert "block_size=2" in repr(kind(C, H, block_size=2))
