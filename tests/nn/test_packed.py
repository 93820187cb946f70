"""Modules on packed sequences: each gives what it gives alone, convolutions, positions and states included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tost
from tost.errors import ConfigError
from tost.nn import (
    MLP,
    Block,
    CausalBlock,
    CausalConvolution,
    GridConvolution,
    PaperForm,
    SoftmaxAttention,
)
from tost.testing import assert_close

C, H = 12, 3
lengths_of_sequences = st.lists(st.integers(0, 9), min_size=1, max_size=6)
examples = settings(max_examples=8, deadline=None)
CONTINUED = ["causal", "gated", "conv", "block", "softmax", "recurrent"]


def pack(lengths):
    return tost.Packing.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths))


def draw(lengths, seed, *, masked):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, sum(lengths), C, dtype=torch.float64, generator=g)
    return x, torch.rand(1, sum(lengths), generator=g) > 0.3 if masked else None


def by_sequence(x, lengths):
    return [None] * len(lengths) if x is None else x.split(lengths, dim=1)


def make(kind):
    if kind == "tssa":
        module = tost.TSSAttention(C, H, paper=PaperForm(step_size=0.1))
    elif kind == "causal":
        module = tost.CausalTSSAttention(C, H, 9, paper=PaperForm(step_size=0.1))
        nn.init.normal_(module.position_bias)
    elif kind == "blocks":
        module = Block(tost.BlockTSSAttention(C, H, block_size=2), MLP(C, 2 * C), C)
    elif kind == "gated":
        module = CausalBlock(tost.GatedTSSAttention(C, H, block_size=2), MLP(C, 2 * C), C)
    elif kind == "conv":
        module = CausalConvolution(C, width=4)
    elif kind == "block":
        attention = tost.CausalTSSAttention(C, H, 12)
        convs = {"conv": CausalConvolution(C, width=3), "conv_mlp": CausalConvolution(C, width=5)}
        module = CausalBlock(attention, MLP(C, 2 * C), C, layer_scale=0.5, **convs)
    else:
        mixer = {"softmax": tost.nn.CausalSoftmaxAttention, "recurrent": tost.nn.MinGRU}[kind](C, H)
        module = CausalBlock(mixer, MLP(C, 2 * C), C)
    return module.double()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["tssa", "blocks", *CONTINUED])
@examples
@given(lengths=lengths_of_sequences, seed=st.integers(0, 2**31))
def test_a_packed_batch_is_each_sequence_alone(kind, masked, lengths, seed):
    module, (x, mask) = make(kind), draw(lengths, seed, masked=masked)
    given = [x.clone().requires_grad_() for _ in range(2)]
    y = module(given[0], mask, packing=pack(lengths))
    parts = zip(by_sequence(given[1], lengths), by_sequence(mask, lengths), strict=True)
    alone = torch.cat([module(part, real) for part, real in parts if part.shape[1]] or [given[1]], dim=1)
    real = torch.ones_like(y[..., 0], dtype=torch.bool) if mask is None else mask
    assert_close("y", y[real], alone[real], 1e-10)
    weight = torch.randn_like(y).where(real.unsqueeze(-1), 0)
    leaves = [parameter for parameter in module.parameters() if parameter.requires_grad]
    options = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad((y * weight).sum(), [given[0], *leaves], **options)
    wanted = torch.autograd.grad((alone * weight).sum(), [given[1], *leaves], **options)
    for actual, expected in zip(found, wanted, strict=True):
        assert_close("gradient", actual, expected, 1e-9)


@pytest.mark.parametrize("kind", CONTINUED)
@examples
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), data=st.data())
def test_packed_sequences_continue_from_their_states(kind, lengths, data):
    """Every sequence is cut somewhere; the first parts are packed, then the second ones."""
    module, (x, _) = make(kind).eval(), draw(lengths, 0, masked=False)
    cuts = [data.draw(st.integers(0, length)) for length in lengths]
    if kind == "softmax":  # its state has one length for all
        cuts = [max(1, cut) for cut in cuts]
    parts = [(part[:, :cut], part[:, cut:]) for part, cut in zip(by_sequence(x, lengths), cuts, strict=True)]
    state, pieces = None, []
    for half in zip(*parts, strict=True):
        sizes = [part.shape[1] for part in half]
        y, state = module.forward_with_state(torch.cat(half, dim=1), state, packing=pack(sizes))
        pieces.append(y.split(sizes, dim=1))
    for first, second, part in zip(*pieces, by_sequence(x, lengths), strict=True):
        assert_close("y", torch.cat((first, second), dim=1), module(part), 1e-10)


def test_a_convolution_gives_the_same_bits_packed_and_alone():
    lengths, conv = [1, 2, 30, 1, 9], CausalConvolution(C, width=4)
    x = torch.randn(1, sum(lengths), C)
    y = conv(x, packing=pack(lengths)).split(lengths, dim=1)
    for packed, part in zip(y, x.split(lengths, dim=1), strict=True):
        if part.shape[1] > 8:  # fewer tokens go another way, which rounds differently
            assert torch.equal(packed, conv(part))
        assert_close("y", packed, conv(part), 1e-6)


def test_rows_of_segments_are_packed_too():
    ids = torch.tensor([[0, 0, 0, 1, 1], [5, 6, 6, 6, 6]])
    module, x = make("block"), torch.randn(2, 5, C, dtype=torch.float64)
    y = module(x, packing=tost.Packing.from_segment_ids(ids))
    assert_close("first", y[:1, :3], module(x[:1, :3]), 1e-12)
    assert_close("last", y[1:, 1:], module(x[1:, 1:]), 1e-12)


def test_dropped_branches_and_features_are_those_of_whole_sequences():
    lengths = [4, 1, 6, 5]
    dropping = {"gain_drop": 0.5, "out_bias": False}
    attention = tost.TSSAttention(C, H, **dropping)
    nn.init.eye_(attention.proj_out.weight)
    x = torch.randn(1, 16, C) + 2
    zero = (attention(x, packing=pack(lengths)) == 0).split(lengths, dim=1)
    assert all(bool((part == part[:, :1]).all()) for part in zero)
    assert not all(torch.equal(part[:, 0], zero[0][:, 0]) for part in zero)
    block = Block(tost.TSSAttention(C, H), MLP(C, C), C, drop_path=0.5)
    torch.manual_seed(1)
    kept = (block(x, packing=pack(lengths)) != x).any(dim=-1).split(lengths, dim=1)
    assert all(bool((part == part[:, :1]).all()) for part in kept)


def test_what_does_not_know_packing_is_refused():
    for attention, convs in (
        (tost.TSSAttention(C, H), {"conv": GridConvolution(C)}),
        (tost.TSSAttention(C, H), {"conv_block": GridConvolution(C)}),
        (tost.TSSAttention(C, H, value_conv=GridConvolution(C)), {}),
        (SoftmaxAttention(C, H, value_conv=GridConvolution(C)), {}),
    ):
        block = Block(attention, MLP(C, C), C, **convs)
        with pytest.raises(ConfigError, match="the grid of one image, but the batch is packed"):
            block(torch.randn(1, 6, C), None, (2, 3), packing=pack([2, 4]))
