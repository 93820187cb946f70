"""The language model against a re-statement of the authors' network, and its state against the whole sequence."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.tiny import example, make_tiny, padded, perturb
from tost.errors import ConfigError
from tost.models import LanguageToST, model_options
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


def test_fresh_model_predicts_every_token_alike():
    model = make_tiny("tost_lm_base", vocab_size=500, embed_dim=64)
    ids = example(model, batch=4, length=LENGTH)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss.item() - math.log(500)) < 0.1


@given(st.lists(st.integers(1, LENGTH - 1), max_size=6), st.integers(0, 10_000))
@settings(max_examples=25)
def test_pieces_of_a_sequence_give_the_logits_of_the_whole(cuts, seed):
    model = make()
    torch.manual_seed(seed)
    ids = example(model, length=LENGTH)
    edges = [0, *sorted(set(cuts)), LENGTH]
    state, pieces = None, []
    for begin, end in itertools.pairwise(edges):
        logits, state = model.forward_with_state(ids[:, begin:end], state)
        pieces.append(logits)
        assert state.position.tolist() == [end, end]
    assert_close("logits", torch.cat(pieces, dim=1), model(ids), 1e-10)


def test_token_by_token_is_the_whole_and_so_are_its_gradients():
    model, whole = make(), make()
    ids = example(model, length=LENGTH)
    state, steps = None, []
    for token in ids.split(1, dim=1):
        logits, state = model.forward_with_state(token, state)
        steps.append(logits)
    stepped = torch.cat(steps, dim=1)
    expected = whole(ids)
    assert_close("logits", stepped, expected, 1e-10)
    stepped.square().sum().backward()
    expected.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert_close(name, parameter.grad, other.grad, 1e-10)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(1, 22))
@settings(max_examples=25)
def test_mask_equals_deletion(before, after, cut):
    model = make()
    ids = example(model, length=11)
    junk, mask = padded(ids, before, after)
    expected = model(ids)
    assert_close("logits", model(junk, mask)[mask].view_as(expected), expected, 1e-10)
    # Cut anywhere, inside the padding too.
    first, state = model.forward_with_state(junk[:, :cut], mask=mask[:, :cut])
    second, state = model.forward_with_state(junk[:, cut:], state, mask[:, cut:])
    pieces = torch.cat((first, second), dim=1)
    assert_close("pieces", pieces[mask].view_as(expected), expected, 1e-10)
    assert state.position.tolist() == [11, 11]


def test_rows_of_different_length_do_not_see_each_other():
    model = make()
    lengths = (3, 11, 7)
    ids = [torch.randint(11, (1, n)) for n in lengths]
    batch = torch.cat([F.pad(row, (11 - n, 0), value=99) for row, n in zip(ids, lengths, strict=True)])
    mask = torch.arange(11) >= 11 - torch.tensor(lengths)[:, None]
    logits, state = model.forward_with_state(batch, mask=mask)
    assert state.position.tolist() == list(lengths)
    token = torch.tensor([[1], [2], [3]])
    following, _ = model.forward_with_state(token, state)
    for index, (row, n) in enumerate(zip(ids, lengths, strict=True)):
        assert_close("prompt", logits[index, 11 - n :], model(row)[0], 1e-10)
        alone = model(torch.cat((row, token[index : index + 1]), dim=1))[0, -1]
        assert_close("next", following[index, 0], alone, 1e-10)


def test_later_tokens_change_nothing_before_them():
    model = make()
    ids = example(model, length=LENGTH)
    other = ids.clone()
    other[:, 12:] = (other[:, 12:] + 1) % 11
    assert torch.equal(model(other)[:, :12], model(ids)[:, :12])
    assert not torch.equal(model(other)[:, 12], model(ids)[:, 12])


def test_gradients_stop_where_the_state_is_detached():
    model = make()
    ids = example(model, length=8)
    _, state = model.forward_with_state(ids[:, :4])
    assert state.layers[1].squares.requires_grad
    state = state.detach()
    logits, _ = model.forward_with_state(ids[:, 4:], state)
    logits.sum().backward()
    assert model.positions.weight.grad[:4].abs().sum() == 0
    assert model.positions.weight.grad[4:8].abs().sum() > 0


def test_features_are_what_logits_are_made_of():
    model = make()
    ids = example(model, length=8)
    x, _ = model.features_with_state(ids)
    assert x.shape == (2, 8, 16)
    assert_close("logits", model.logits(x[:, -1]), model(ids)[:, -1], 1e-13)


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


def test_model_without_positions_has_no_end():
    model = make(position="none")
    assert model.positions is None
    assert not [name for name, _ in model.named_parameters() if "position" in name]
    ids = example(model, length=100)
    state, last = None, None
    for piece in ids.split(30, dim=1):
        last, state = model.forward_with_state(piece, state)
    assert_close("logits", last, model(ids)[:, 90:], 1e-10)


def test_head_is_the_embedding_unless_it_is_not():
    tied, free = make(), make(tie_head=False)
    assert tied.head is None
    assert free.num_parameters() - tied.num_parameters() == 11 * 16
    ids = example(tied)
    x, _ = free.features_with_state(ids)
    assert_close("logits", free(ids), free.norm(x) @ free.head.weight.t(), 1e-13)


def test_layer_scale_can_be_left_out():
    model = make(layer_scale=None)
    assert not [name for name, _ in model.named_parameters() if "gamma" in name]
    assert model.blocks[0].gamma1 is None


def test_backend_reaches_every_attention():
    model = make(backend="reference")
    assert {block.attention.backend for block in model.blocks} == {"reference"}


def test_dropout_reaches_every_branch():
    model = LanguageToST(model_options("tost_lm_base", {"depth": 1, "dropout": 0.2, "embed_dim": 24, "vocab_size": 9}))
    (block,) = model.blocks
    assert (block.attention.gain_drop, block.attention.out_drop, block.mlp.drop) == (0.2, 0.2, 0.2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(4, dtype=torch.int64)), r"shape \(4,\) and dtype torch.int64.*Use ids\[None\]"),
        (lambda m: m(torch.zeros(1, 4)), r"dtype torch.float32; this model needs token ids \[B, N\]"),
        (lambda m: m(torch.tensor([[3, 11]])), r"ids reach from 3 to 11, but this model has vocab_size=11.*0 to 10"),
        (lambda m: m(torch.tensor([[-1, 2]])), r"ids reach from -1 to 2"),
        (lambda m: m(torch.tensor([[1, 2]]), torch.ones(1, 2)), r"mask has shape \(1, 2\) and dtype torch.float32"),
        (lambda m: m(torch.tensor([[1, 2]]), torch.ones(2, 1) > 0), r"needs shape \(1, 2\) and dtype torch.bool"),
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
