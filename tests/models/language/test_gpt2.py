"""GPT-2 in our blocks against transformers' GPT-2 with the same weights."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import tost._torchvision  # noqa: F401 - transformers imports torchvision, which this repairs on CPU builds of torch
from tests.models.tiny import example, make_tiny, perturb
from tost.nn import KVState
from tost.testing import assert_close

transformers = import_module("transformers")  # behind the line that repairs torchvision

C, DEPTH, HEADS, V, LENGTH = 24, 3, 4, 29, 20


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=C,
        n_layer=DEPTH,
        n_head=HEADS,
        vocab_size=V,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return perturb(transformers.GPT2LMHeadModel(config).double().eval(), 0.2)


@pytest.fixture(scope="module")
def ours(theirs):
    sizes = {"embed_dim": C, "depth": DEPTH, "num_heads": HEADS, "vocab_size": V, "max_length": LENGTH}
    model = make_tiny("gpt2_base", **sizes, bias=True, activation="gelu_tanh").double().eval()
    places = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attention.proj_in", "attn.c_proj": "attention.proj_out"}
    places |= {"mlp.c_fc": "mlp.proj_in", "mlp.c_proj": "mlp.proj_out"}
    named = {"transformer.wte.weight": "tokens.weight", "transformer.wpe.weight": "positions.weight"}
    named |= {f"transformer.ln_f.{kind}": f"norm.{kind}" for kind in ("weight", "bias")}
    for i in range(DEPTH):
        for a, b in places.items():
            named |= {f"transformer.h.{i}.{a}.{kind}": f"blocks.{i}.{b}.{kind}" for kind in ("weight", "bias")}
    state = {}
    for name, tensor in theirs.state_dict().items():
        if name != "lm_head.weight":
            linear = name.endswith(".weight") and ".c_" in name  # stored the other way around
            state[named[name]] = tensor.t() if linear else tensor
    model.load_state_dict(state)
    return model


def test_logits_and_gradients_are_those_of_transformers(ours, theirs):
    ids = torch.randint(V, (2, LENGTH))
    expected = theirs(ids).logits
    assert_close("logits", ours(ids), expected, 1e-12)
    F.cross_entropy(expected.flatten(0, 1), ids.roll(-1, dims=1).flatten()).backward()
    ours.loss(ids, ids.roll(-1, dims=1)).backward()
    assert_close("tokens", ours.tokens.weight.grad, theirs.transformer.wte.weight.grad, 1e-10)
    qkv = theirs.transformer.h[0].attn.c_attn.weight.grad
    assert_close("qkv", ours.blocks[0].attention.proj_in.weight.grad, qkv.t(), 1e-10)


def test_cached_continuations_are_those_of_transformers(ours, theirs):
    ids = torch.randint(V, (2, LENGTH))
    cache, state = None, None
    with torch.no_grad():
        for piece in ids.split([7, 1, 1, 5, 6], dim=1):
            out = theirs(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits, state = ours.forward_with_state(piece, state)
            assert_close("logits", logits, out.logits, 1e-12)
    assert_close("keys", state.layers[1].keys, cache.layers[1].keys, 1e-12)


def test_left_padded_batches_are_those_of_transformers(ours, theirs):
    ids, mask = torch.randint(V, (3, 12)), torch.arange(12) >= torch.tensor([[0], [5], [11]])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    token = torch.randint(V, (3, 1))
    with torch.no_grad():
        out = theirs(ids, attention_mask=mask.long(), position_ids=positions, use_cache=True)
        logits, state = ours.forward_with_state(ids, mask=mask)
        assert_close("prompt", logits[mask], out.logits[mask], 1e-12)
        longer = torch.cat((mask, torch.ones(3, 1, dtype=torch.bool)), dim=1).long()
        follows = positions[:, -1:] + 1
        past = out.past_key_values
        out = theirs(token, attention_mask=longer, position_ids=follows, past_key_values=past, use_cache=True)
        logits, state = ours.forward_with_state(token, state)
    assert_close("next", logits, out.logits, 1e-12)
    assert state.position.tolist() == [13, 8, 2]


def test_state_grows_with_the_tokens_and_knows_padding_only_where_there_is_some():
    model = perturb(make_tiny("gpt2_base").double())
    ids = example(model, length=12)
    _, state = model.forward_with_state(ids)
    layer = state.layers[0]
    assert isinstance(layer, KVState)
    assert layer.keys.shape == layer.values.shape == (2, 4, 12, 4)
    assert layer.real.shape == (2, 0)
    _, padded = model.forward_with_state(ids[:, :3], state, torch.tensor([[True, False, True], [True, True, True]]))
    assert padded.layers[0].real.sum(dim=1).tolist() == [14, 15]
    assert padded.position.tolist() == [14, 15]
    assert padded.bytes() > state.bytes()


def test_state_of_another_layout_is_refused():
    model, other = make_tiny("gpt2_base"), make_tiny("gpt2_base", num_heads=2)
    _, state = other.forward_with_state(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"keys of shape \(1, 2, 3, 8\), but 1 sequences .* need \[1, 4, M, 4\]"):
        model.forward_with_state(torch.zeros(1, 1, dtype=torch.int64), state)
    _, state = make_tiny("tost_lm_base").forward_with_state(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"a TSSAState with 0 windows .* has CausalSoftmaxAttention and 0 of them"):
        model.forward_with_state(torch.zeros(1, 1, dtype=torch.int64), state)
