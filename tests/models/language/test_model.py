"""The language model against a re-statement of the authors' network, and its state against the whole sequence."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.models.tiny import example, make_tiny, perturb
from tost.errors import ConfigError
from tost.testing import assert_close

LENGTH = 20


def make(**overrides):
    torch.manual_seed(0)
    return perturb(make_tiny("tost_lm_base", **overrides).double())


def authors_network(model, ids):
    """The released network, written from its description: heads first, cumulative sums, all in plain torch."""
    weights, H = model.state_dict(), model.options.num_heads
    bias = weights.get

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], bias(f"{name}.bias"), 1e-5)

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], bias(f"{name}.bias"))

    def attend(x, name):
        w = linear(x, f"{name}.proj_in").unflatten(-1, (H, -1)).transpose(1, 2)
        squares = w**2
        shares = squares / squares.cumsum(-2).clamp_min(1e-12)
        shares = shares + weights[f"{name}.position_bias"][:, : ids.shape[1], None]
        pi = (shares.sum(-1) * weights[f"{name}.temperature"][:, None]).softmax(dim=1)
        moment = (squares * pi[..., None]).cumsum(-2) / (pi.cumsum(-1) + 1e-8)[..., None]
        return linear((-(w * pi[..., None]) / (1 + moment)).transpose(1, 2).flatten(2), f"{name}.proj_out")

    x = weights["tokens.weight"][ids] + weights["positions.weight"][: ids.shape[1]]
    for index in range(model.options.depth):
        name = f"blocks.{index}"
        x = x + weights[f"{name}.gamma1"] * attend(norm(x, f"{name}.norm1"), f"{name}.attention")
        hidden = F.gelu(linear(norm(x, f"{name}.norm2"), f"{name}.mlp.proj_in"))
        x = x + weights[f"{name}.gamma2"] * linear(hidden, f"{name}.mlp.proj_out")
    return norm(x, "norm") @ weights["tokens.weight"].t()


@pytest.mark.parametrize("bias", [False, True])
def test_network_is_the_authors(bias):
    model = make(bias=bias)
    assert any(name.endswith(".bias") for name, _ in model.named_parameters()) is bias
    ids = example(model, batch=3, length=LENGTH)
    assert_close("logits", model(ids), authors_network(model, ids), 1e-12)


def test_initial_weights_are_the_authors():
    model = make_tiny("tost_lm_base", embed_dim=128, depth=8, vocab_size=500, max_length=100, bias=True)
    expected = {"gamma1": 1e-5, "gamma2": 1e-5, "temperature": 1.0, "position_bias": 0.0, "bias": 0.0}
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        if "norm" in name and kind == "weight":
            assert (parameter == 1).all(), name
        elif kind in expected:
            assert torch.equal(parameter, torch.full_like(parameter, expected[kind])), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("proj_out.weight") else 0.02
            assert abs(parameter.std() / std - 1) < 0.05, name
            assert abs(parameter.mean()) < std / 20, name


def test_positions_and_their_biases_end_at_max_length():
    model = make()
    ids = example(model, length=25)
    with pytest.raises(
        ValueError, match=r"reaches position 25, but this model has 24 positions.*max_length=25 or more"
    ):
        model(ids)
    _, state = model.forward_with_state(ids[:, :24])
    with pytest.raises(ValueError, match=r"reaches position 25, but this model has 24 positions"):
        model.forward_with_state(ids[:, 24:], state)


def test_head_is_the_embedding_unless_it_is_not():
    tied, free = make(), make(tie_head=False)
    assert tied.head is None
    assert free.num_parameters() - tied.num_parameters() == 11 * 16
    ids = example(tied)
    x, _ = free.features_with_state(ids)
    assert_close("logits", free(ids), free.norm(x) @ free.head.weight.t(), 1e-13)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(4, dtype=torch.int64)), r"shape \(4,\) and dtype torch.int64.*Use ids\[None\]"),
        (lambda m: m(torch.zeros(1, 4)), r"dtype torch.float32; this model needs token ids \[B, N\]"),
        (lambda m: m(torch.tensor([[3, 11]])), r"ids reach from 3 to 11, but this model has vocab_size=11.*0 to 10"),
        (lambda m: m(torch.tensor([[-1, 2]])), r"ids reach from -1 to 2"),
        (lambda m: m(torch.tensor([[1, 2]]), torch.ones(1, 2)), r"mask has dtype torch.float32; it must be torch.bool"),
        (lambda m: m(torch.tensor([[1, 2]]), torch.ones(2, 1) > 0), r"needs shape \(1, 2\), one entry per token"),
        (
            lambda m: m.forward_with_state(
                torch.tensor([[1]]), make(depth=1).forward_with_state(torch.tensor([[1]]))[1]
            ),
            r"the state has 1 layers, but this model has 2; pass the state that this model returned",
        ),
        (
            lambda m: m.forward_with_state(torch.tensor([[1]]), m.forward_with_state(torch.tensor([[1], [1]]))[1]),
            r"the state holds 2 sequences, but ids have shape \(1, 1\); pass the state that came from the same batch",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(make())


@pytest.mark.parametrize("chunk", [None, 3])
def test_an_untied_head_is_called_like_every_other_module(chunk):
    model = make_tiny("tost_lm_base", tie_head=False).eval()
    ids = example(model)
    plain, loss = model(ids), model.loss(ids, ids, chunk=chunk)
    model.head.register_forward_hook(lambda module, inputs, y: 2 * y)
    assert torch.equal(model(ids), 2 * plain)
    assert torch.equal(model.forward_with_state(ids)[0], 2 * plain)
    expected = torch.nn.functional.cross_entropy(2 * plain.flatten(0, 1), ids.flatten())
    assert_close("loss", model.loss(ids, ids, chunk=chunk), expected, 1e-5)
    assert not torch.isclose(loss, expected)


def test_a_tied_head_that_is_offloaded_is_refused():
    model = make_tiny("tost_lm_base")
    ids = example(model)
    x, _ = model.features_with_state(ids)
    model.tokens.to("meta")
    with pytest.raises(ConfigError, match=r"its token embedding, which is on the meta device.*tie_head=false"):
        model.logits(x)
