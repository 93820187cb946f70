"""The sequence classifier: its equation, its two kinds of input, and padding that must not exist."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.models.tiny import example, make_tiny, padded, perturb
from tost.testing import assert_close

NAMES = {"tokens": "lra_listops", "values": "lra_image"}


def make(kind="tokens", **overrides):
    torch.manual_seed(0)
    return perturb(make_tiny(NAMES[kind], **{"dropout": 0.0, **overrides}).double())


def inputs(model, **sizes):
    return example(model, dtype=torch.float64, **sizes)


def test_pre_norm_network_is_its_equation():
    model = make("tokens", norm="pre", position="sinusoidal")
    x = inputs(model)
    tokens = model.embedding.weight[x] * math.sqrt(16) + model.positions(torch.arange(9)[None])
    for block in model.blocks:
        tokens = block(tokens)
    pooled = model.norm_out(tokens).mean(dim=1)
    hidden = F.gelu(F.linear(pooled, model.head[0].weight, model.head[0].bias))
    assert model.norm_in is None
    assert_close("logits", model(x), hidden @ model.head[2].weight.t(), 1e-12)


def test_post_norm_network_is_its_equation():
    model = make("values", norm="post", position="learned", pooling="cls")
    x = inputs(model)
    tokens = F.linear(x, model.embedding.weight, model.embedding.bias) + model.positions.weight[:9]
    tokens = torch.cat((model.class_token.expand(2, 1, 16), tokens), dim=1)
    tokens = model.norm_in(tokens)
    for block in model.blocks:
        tokens = block(tokens)
    assert model.norm_out is None
    assert {block.norm for block in model.blocks} == {"post"}
    assert_close("logits", model(x), model.head(tokens[:, 0]), 1e-12)


def test_positions_tell_orders_apart_and_none_does_not():
    for position, alike in (("none", True), ("learned", False), ("sinusoidal", False)):
        model = make(position=position)
        x = inputs(model)
        same = torch.allclose(model(x), model(x.flip(1)), rtol=1e-9, atol=1e-9)
        assert same is alike, position


def test_initial_tokens_have_the_scale_of_their_positions():
    tokens = make_tiny("lra_listops", embed_dim=512, num_heads=8)
    assert abs(tokens.embedding.weight.std() * math.sqrt(512) - 1) < 0.05
    values = make_tiny("lra_image", embed_dim=512, num_heads=8, in_features=4)
    assert abs(values.embedding.weight.std() - 0.5) < 0.05
    assert abs(values.embedding.bias.std() - 0.1) < 0.02


@pytest.mark.parametrize("kind", ["tokens", "values"])
@pytest.mark.parametrize("position", ["sinusoidal", "learned", "none"])
def test_sequences_end_at_max_length(kind, position):
    model = make(kind, position=position)
    assert model(inputs(model, length=24)).shape == (2, 3)
    with pytest.raises(ValueError, match="reaches position 25, but this model has 24 positions"):
        model(inputs(model, length=25))
    junk, mask = padded(inputs(model, length=24), 3, 3)
    assert model(junk, mask).shape == (2, 3)


@pytest.mark.parametrize(
    ("kind", "x", "message"),
    [
        ("tokens", torch.zeros(2, 5, 1), r"ids have shape \(2, 5, 1\) and dtype torch.float32"),
        ("tokens", torch.full((2, 5), 16), r"ids reach from 16 to 16, but this model has vocab_size=16"),
        (
            "values",
            torch.zeros(2, 5),
            r"x has shape \(2, 5\).*needs floating point values \[B, N, 1\]. Use x\[..., None\]",
        ),
        ("values", torch.zeros(2, 5, 3), r"x has shape \(2, 5, 3\)"),
        ("values", torch.zeros(2, 5, 1, dtype=torch.int64), r"dtype torch.int64; this model needs floating point"),
    ],
)
def test_bad_input_is_refused(kind, x, message):
    with pytest.raises(ValueError, match=message):
        make(kind)(x)


def test_bad_mask_is_refused():
    with pytest.raises(ValueError, match=r"mask has shape \(2, 4\).*2 sequences of 5 tokens; it needs shape \(2, 5\)"):
        make()(torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool))
