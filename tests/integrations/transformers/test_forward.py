"""The forward pass under transformers' conventions: masks, labels, caches, hidden states, compilation, bad input."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

# isort: split
from transformers import DynamicCache, StaticCache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.integrations.transformers.models import KINDS, LINEAR, left_padded, make, tokens
from tost.integrations.transformers import StateLayer

every_kind = pytest.mark.parametrize("kind", KINDS)


def close(a, b, tolerance=1e-9):
    return a.shape == b.shape and torch.allclose(a, b, atol=tolerance, rtol=tolerance)


# Logits, masks and caches


@every_kind
@pytest.mark.parametrize("use_cache", [False, True])
def test_logits_are_those_of_the_network(kind, use_cache):
    model, ids = make(kind, dtype=torch.float64), tokens(2, 9)
    out = model(ids, use_cache=use_cache)
    assert isinstance(out, CausalLMOutputWithPast)
    assert (out.past_key_values is not None) == use_cache
    assert out.loss is None
    assert out.hidden_states is None
    assert close(out.logits, model.to_tost()(ids))


@every_kind
@settings(max_examples=10)
@given(data=st.data())
def test_padding_on_the_left_is_deletion(kind, data):
    model = make(kind, dtype=torch.float64)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    fill = data.draw(st.sampled_from([0, 60, 1000, -1]))  # padding may hold any number
    rows = [tokens(length, seed=index) for index, length in enumerate(lengths)]
    ids, mask = left_padded(rows, fill)
    dtype = data.draw(st.sampled_from([torch.int64, torch.bool, torch.float32]))
    out = model(ids, attention_mask=mask.to(dtype))
    for index, row in enumerate(rows):
        assert close(out.logits[index, -len(row) :], model(row[None]).logits[0])
    assert out.past_key_values.layers[0].read().position.tolist() == lengths


@every_kind
@settings(max_examples=10)
@given(data=st.data())
def test_pieces_give_what_the_whole_gives(kind, data):
    model = make(kind, dtype=torch.float64)
    ids, mask = left_padded([tokens(12), tokens(data.draw(st.integers(1, 12)), seed=1)])
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, 11)))), 12]
    cache, parts = None, []
    full_mask = data.draw(st.booleans())  # transformers passes the mask of all tokens up to here
    for begin, end in pairwise(cuts):
        shown = mask[:, 0 if full_mask else begin : end]
        out = model(ids[:, begin:end], attention_mask=shown, past_key_values=cache)
        cache = out.past_key_values
        parts.append(out.logits)
        assert cache.get_seq_length() == end
    real = mask.bool()
    assert close(torch.cat(parts, dim=1)[real], whole[real])


@pytest.mark.parametrize("kind", LINEAR)
@torch.no_grad()
def test_a_cache_does_not_grow_and_keeps_its_memory(kind):
    model = make(kind, max_position_embeddings=48)
    cache = model(tokens(2, 5)).past_key_values
    held = [tensor for layer in cache.layers for tensor in layer.recurrent_states.values()]
    places, sizes = [x.data_ptr() for x in held], [x.numel() for x in held]
    for step in range(20):
        model(tokens(2, 1, seed=step), past_key_values=cache)
    held = [tensor for layer in cache.layers for tensor in layer.recurrent_states.values()]
    assert [x.data_ptr() for x in held] == places
    assert [x.numel() for x in held] == sizes
    assert cache.get_seq_length() == 25
    assert cache.is_linear == [True, True]


@every_kind
def test_any_unused_cache_is_taken(kind):
    model, ids = make(kind, dtype=torch.float64), tokens(2, 9)
    full = model(ids).logits
    caches = [DynamicCache(), DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)]
    for cache in caches:
        first = model(ids[:, :4], past_key_values=cache)
        assert first.past_key_values is cache
        assert all(isinstance(layer, StateLayer) for layer in cache.layers)
        assert close(model(ids[:, 4:], past_key_values=cache).logits, full[:, 4:])
        cache.reset()
        assert cache.get_seq_length() == 0
        assert close(model(ids, past_key_values=cache).logits, full)


@every_kind
@torch.no_grad()
def test_rows_of_a_cache_can_be_selected_and_copied(kind):
    model, ids = make(kind, dtype=torch.float64), tokens(3, 9)
    full = model(ids).logits
    cache = model(ids[:, :5]).past_key_values
    kept = copy.deepcopy(cache)
    rows = torch.tensor([2, 0, 0, 1])
    cache.reorder_cache(rows)
    assert close(model(ids[rows, 5:], past_key_values=cache).logits, full[rows, 5:])
    cache = copy.deepcopy(kept)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1, 4]))
    assert close(model(ids[[0, 2], 5:], past_key_values=cache).logits, full[[0, 2], 5:])
    assert close(model(ids[:, 5:], past_key_values=kept).logits, full[:, 5:])  # the copy is its own


def test_gradients_flow_through_a_cache():
    model, ids = make("plus", dtype=torch.float64), tokens(2, 9)
    model(ids).logits[:, -1].sum().backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    cache = model(ids[:, :4]).past_key_values
    cache = model(ids[:, 4:7], past_key_values=cache).past_key_values
    model(ids[:, 7:], past_key_values=cache).logits[:, -1].sum().backward()
    assert all(close(p.grad, w, 1e-8) for p, w in zip(model.parameters(), whole, strict=True))


# Other inputs and outputs


@every_kind
def test_embeddings_in_place_of_ids(kind):
    model, ids = make(kind, dtype=torch.float64), tokens(2, 9)
    ids, mask = left_padded([ids[0], ids[1, 4:]])
    vectors = model.get_input_embeddings()(ids.masked_fill(mask == 0, 3))
    with_ids, with_vectors = model(ids, attention_mask=mask), model(inputs_embeds=vectors, attention_mask=mask)
    assert close(with_vectors.logits, with_ids.logits)
    # And they can follow on ids.
    cache = model(ids[:, :6], attention_mask=mask[:, :6]).past_key_values
    after = model(inputs_embeds=vectors[:, 6:], past_key_values=cache, attention_mask=mask)
    assert close(after.logits, with_ids.logits[:, 6:])


@every_kind
def test_hidden_states(kind):
    model, ids = make(kind, dtype=torch.float64), tokens(2, 9)
    out = model(ids, output_hidden_states=True)
    assert [x.shape for x in out.hidden_states] == [(2, 9, 32)] * 3
    assert close(out.hidden_states[1], model.model.blocks[0](out.hidden_states[0]))
    assert close(model.lm_head(out.hidden_states[-1]), out.logits)
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 3
    for x in (hidden := model(ids, use_cache=False).hidden_states):
        x.retain_grad()
    model.to_tost().logits(hidden[1]).sum().backward()
    assert hidden[0].grad is not None


def test_logits_of_some_tokens_only():
    model, ids = make("plus", dtype=torch.float64), tokens(2, 9)
    full = model(ids).logits
    assert close(model(ids, logits_to_keep=1).logits, full[:, -1:])
    assert close(model(ids, logits_to_keep=20).logits, full)
    assert close(model(ids, logits_to_keep=torch.tensor([0, 5])).logits, full[:, [0, 5]])
    assert model(ids, skip_logits=True).logits is None


# Labels


@every_kind
@pytest.mark.parametrize("count", [None, 7, torch.tensor(7)])
def test_the_loss_is_that_of_transformers(kind, count):
    model, ids = make(kind, dtype=torch.float64), tokens(3, 9)
    labels = ids.clone()
    labels[0, :4] = labels[1, 6:] = -100
    out = model(ids, labels=labels, num_items_in_batch=count)
    expected = F.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="mean" if count is None else "sum"
    ) / (1 if count is None else 7)
    assert close(out.loss, expected)
    assert abs(ForCausalLMLoss(out.logits, labels, 61, num_items_in_batch=count) - expected) < 1e-5
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    assert close(model(ids, shift_labels=shifted, num_items_in_batch=count).loss, expected)


@every_kind
def test_padding_neither_predicts_nor_is_predicted(kind):
    model = make(kind, dtype=torch.float64)
    rows = [tokens(9), tokens(4, seed=1), tokens(1, seed=2)]
    alone = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
    ids, mask = left_padded(rows)
    assert close(model(ids, attention_mask=mask, labels=ids).loss, sum(alone) / (8 + 3))
    right, right_mask = ids.flip(1), mask.flip(1)
    reverse = [model(row.flip(0)[None], labels=row.flip(0)[None]).loss * (len(row) - 1) for row in rows]
    assert close(model(right, attention_mask=right_mask, labels=right).loss, sum(reverse) / (8 + 3))


@pytest.mark.parametrize("skip", [False, True])
def test_training_may_leave_the_logits_out_and_has_the_same_gradients(skip):
    model, ids = make("plus", dtype=torch.float64, skip_logits=skip), tokens(2, 9)
    F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.train()
    out = model(ids, labels=ids)
    assert (out.logits is None) == skip
    assert out.past_key_values is None
    out.loss.backward()
    assert all(close(p.grad, e, 1e-8) for p, e in zip(model.parameters(), expected, strict=True))
    assert model(ids, labels=ids, skip_logits=False).logits.shape == (2, 9, 61)
    assert model(ids).logits.shape == (2, 9, 61)


@every_kind
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(kind, reentrant):
    plain = make(kind, dtype=torch.float64, dropout=0.1).train()
    again = copy.deepcopy(plain)
    assert plain.supports_gradient_checkpointing
    again.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert again.is_gradient_checkpointing
    ids, mask = left_padded([tokens(9), tokens(4, seed=1)])
    for model in (plain, again):
        torch.manual_seed(0)
        model(ids, attention_mask=mask, labels=ids).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert close(a.grad, b.grad), name
        assert a.grad.abs().max() > 0, name
    again.gradient_checkpointing_disable()
    assert not again.is_gradient_checkpointing


# torch.compile


@pytest.fixture
def fresh_compiler():
    """Without it, a model that was compiled too often in this process would silently run as it is."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "backend"), [("authors", "eager"), pytest.param("plus", "aot_eager", marks=pytest.mark.slow)]
)
def test_compiled_training_is_one_graph(kind, backend, fresh_compiler):
    plain = make(kind, dtype=torch.float64, depth=1).train()
    model = copy.deepcopy(plain)
    ids, mask = left_padded([tokens(9), tokens(4, seed=1)])
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    a, b = compiled(ids, attention_mask=mask, labels=ids).loss, plain(ids, attention_mask=mask, labels=ids).loss
    assert close(a, b)
    a.backward()
    b.backward()
    assert all(close(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["authors", "plus"])
@torch.no_grad()
def test_compiled_steps_use_the_cache_and_do_not_compile_without_end(kind, fresh_compiler):
    model, ids = make(kind, dtype=torch.float64), tokens(2, 12)
    full = model(ids).logits
    cache = model(ids[:, :4]).past_key_values
    counter = CompileCounter()
    step = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for n in range(4, 12):
        assert close(step(ids[:, n : n + 1], past_key_values=cache).logits, full[:, n : n + 1])
    assert counter.frame_count == 1
    assert cache.get_seq_length() == 12


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.tensor([[1, 61]])}, "ids reach from 1 to 61, but this model has vocab_size=61"),
        ({"input_ids": torch.tensor([[-1]])}, "ids reach from -1"),
        ({"input_ids": torch.tensor([1, 2])}, "token ids \\[B, N\\]"),
        ({"input_ids": torch.ones(1, 2)}, "dtype torch.float32"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, "no token in the input"),
        ({"input_ids": torch.ones(1, 49, dtype=torch.int64)}, "reaches position 49, but this model has 48"),
        ({}, "either input_ids or inputs_embeds, but neither"),
        ({"input_ids": tokens(1, 2), "inputs_embeds": torch.zeros(1, 2, 32)}, "but both are given"),
        ({"inputs_embeds": torch.zeros(1, 2, 31)}, "needs vectors \\[B, N, 32\\]"),
        ({"input_ids": tokens(1, 2), "labels": tokens(1, 3)}, "labels have shape \\(1, 3\\), but the tokens"),
        ({"input_ids": tokens(1, 2), "labels": torch.tensor([[1, 61]])}, "targets reach from -100 to 61"),
        ({"input_ids": tokens(1, 2), "position_ids": tokens(1, 2)}, "are not the numbers of the real tokens"),
        ({"input_ids": tokens(1, 2), "output_attentions": True}, "no weights between pairs"),
        ({"input_ids": tokens(1, 2), "seq_idx": tokens(1, 3)}, "packed into 1 rows of 3 tokens"),
        ({"input_ids": tokens(1, 2), "attention_musk": tokens(1, 2)}, "attention_musk: not known"),
        ({"input_ids": tokens(1, 2), "past_key_values": ((1, 2),)}, "needs a Cache of transformers"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make("authors")(**arguments)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[0, 2, 2]]), "holds values from 0 to 2"),
        (torch.tensor([[0.0, -1e9, 0.0]]), "masks that are added to scores are not taken"),
        (torch.ones(1, 4), "needs shape \\[1, 3\\]"),
        (torch.ones(2, 3), "1 sequences of 3 tokens"),
        (torch.ones(1, 1, 3, 3), "has shape \\(1, 1, 3, 3\\)"),
    ],
)
def test_a_mask_that_is_none_is_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        make("authors")(tokens(1, 3), attention_mask=mask)


def test_a_cache_that_does_not_fit_is_refused():
    model, ids = make("authors"), tokens(2, 5)
    cache = model(ids).past_key_values
    with pytest.raises(ValueError, match="holds 2 sequences, but the input 1"):
        model(ids[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="needs shape \\[2, 5\\] or \\[2, 10\\]"):
        model(ids, past_key_values=cache, attention_mask=torch.ones(2, 7))
    with pytest.raises(ValueError, match="2 layers of another model, but this one has 3"):
        make("authors", depth=3)(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="cannot go back by 2 tokens"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="not keys and values"):
        cache.update(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), 0)
    other = DynamicCache()
    other.update(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), 0)
    with pytest.raises(ValueError, match="1 layers of another model"):
        model(ids, past_key_values=other)
    with pytest.raises(ValueError, match="is a TSSAState"):
        make("plus")(ids, past_key_values=cache)
