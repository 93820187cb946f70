"""``generate`` of transformers from our state: the same texts as without it, in every mode that applies."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

import tost.integrations.transformers

# isort: split
from transformers import CompileConfig, DynamicCache

from tests.integrations.transformers.models import KINDS, LINEAR, left_padded, make, tokens

every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = [7, 3, 1]
NEW = 12


def prompts():
    return [tokens(length, seed=index) for index, length in enumerate(LENGTHS)]


def scored(model, ids, **options):
    """A generation with all its logits."""
    return model.generate(
        ids, max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True, do_sample=False, **options
    )


@every_kind
def test_greedy_texts_are_those_of_the_full_forward_pass(kind):
    model = make(kind, dtype=torch.float64)
    ids = tokens(2, 7)
    out = scored(model, ids)
    text = out.sequences
    assert text.shape == (2, 7 + NEW)
    assert torch.equal(text[:, :7], ids)
    logits = model.to_tost()(text)[:, 6:-1]
    assert torch.equal(logits.argmax(-1), text[:, 7:])
    assert torch.allclose(torch.stack(out.logits, dim=1).double(), logits, atol=1e-5)
    assert torch.equal(tost.generate(model.to_tost(), ids, max_new_tokens=NEW, temperature=0), text)


@every_kind
@settings(max_examples=5)
@given(data=st.data())
def test_a_batch_gives_what_its_rows_give_alone(kind, data):
    model = make(kind, dtype=torch.float64)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    rows = [tokens(length, seed=10 + index) for index, length in enumerate(lengths)]
    ids, mask = left_padded(rows)
    text = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for index, row in enumerate(rows):
        alone = model.generate(row[None], max_new_tokens=6, do_sample=False)[0]
        assert torch.equal(text[index, ids.shape[1] - len(row) :], alone)


@every_kind
def test_beam_search(kind):
    model = make(kind, dtype=torch.float64)
    ids, mask = left_padded(prompts())
    options = {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 3, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": 5}
    cached = model.generate(ids, attention_mask=mask, **options)
    plain = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(cached.sequences, plain.sequences)
    assert torch.allclose(cached.sequences_scores, plain.sequences_scores, atol=1e-5)
    # Beams have changed places, or reordering the state would not have been needed.
    assert (cached.beam_indices.diff(dim=1) != 0).any()
    # The score of a text is its log-probability, divided by its length.
    text = model.generate(ids[:1], max_new_tokens=6, num_beams=4, do_sample=False)
    logp = model.to_tost()(text)[0, 6:-1].log_softmax(-1).gather(1, text[0, 7:, None]).sum() / 6
    best = model.generate(ids[:1], **{**options, "num_return_sequences": 1, "eos_token_id": None})
    assert torch.allclose(best.sequences_scores[0].double(), logp, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 3},
        {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"do_sample": False, "bad_words_ids": [[7], [8, 9]], "min_new_tokens": 5, "eos_token_id": 11},
        {"do_sample": False, "guidance_scale": 1.5},
    ],
    ids=["sampling", "several", "beam_sampling", "penalty", "bad_words", "guidance"],
)
@pytest.mark.parametrize("kind", ["plus", "gpt2"])
def test_other_modes_do_not_depend_on_the_cache(kind, options):
    model = make(kind, dtype=torch.float64)
    ids, mask = left_padded(prompts())
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        texts.append(model.generate(ids, attention_mask=mask, max_new_tokens=8, use_cache=use_cache, **options))
    assert torch.equal(*texts)


@every_kind
def test_a_text_goes_on_from_its_cache(kind):
    model = make(kind, dtype=torch.float64)
    ids, mask = left_padded(prompts())
    cache = DynamicCache()
    text = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, past_key_values=cache)
    assert cache.get_seq_length() == 7 + 4
    kept = copy.deepcopy(cache)
    # As in a conversation: all that was said so far, and something new. Only what is new is read.
    asked = torch.cat((text, tokens(3, 4, seed=9)), dim=1)
    more_mask = torch.cat((mask, torch.ones(3, 9, dtype=torch.int64)), dim=1)
    options = {"attention_mask": more_mask, "max_new_tokens": 5, "do_sample": False}
    lengths = []
    original = model.model.embed
    model.model.embed = lambda ids, *rest: (lengths.append(ids.shape[1]), original(ids, *rest))[1]
    more = model.generate(asked, past_key_values=cache, **options)
    del model.model.embed
    assert lengths == [5, 1, 1, 1, 1]
    assert torch.equal(more, model.generate(asked, **options))
    # A copy branches off, and takes the new tokens alone as well.
    branch = model.generate(asked[:, 11:], past_key_values=kept, **options)
    assert torch.equal(branch[:, 5:], more[:, 16:])


def test_texts_end_where_they_should():
    model, ids = make("plus", dtype=torch.float64), torch.stack([tokens(7), tokens(7, seed=5)])
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    stop = int(text[0, 10])
    ended = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=stop)
    for row, whole in zip(ended, text, strict=True):
        end = (whole[7:] == stop).nonzero().flatten()
        length = 7 + int(end[0]) + 1 if len(end) else len(whole)
        assert torch.equal(row[:length], whole[:length])
        assert (row[length:] == 0).all()


def test_without_positions_a_text_has_no_end():
    for kind in ("none", "plus", "both"):
        model = make(kind, max_position_embeddings=4)
        assert model.config.context_limit is None
        text = model.generate(tokens(1, 6), max_new_tokens=30, do_sample=False)
        assert text.shape == (1, 36)
        assert torch.equal(text, model.generate(tokens(1, 6), max_new_tokens=30, do_sample=False, use_cache=False))


def test_a_text_that_does_not_fit_is_refused_before_any_work():
    model = make("authors")
    model.model.forward = model.model.embed = None  # nothing may be computed
    with pytest.raises(ValueError, match="take 49 positions, but the model has learned 48"):
        model.generate(tokens(1, 10), max_new_tokens=40)
    model = make("authors")
    assert model.generate(tokens(1, 10), max_new_tokens=39, do_sample=False).shape == (1, 49)
    ids, mask = left_padded([tokens(10), tokens(4, seed=1)])
    wide, wide_mask = torch.nn.functional.pad(ids, (5, 0)), torch.nn.functional.pad(mask, (5, 0))
    assert model.generate(wide, attention_mask=wide_mask, max_new_tokens=39, do_sample=False).shape == (2, 54)
    with pytest.raises(ValueError, match="positions"):
        model.generate(inputs_embeds=torch.zeros(1, 10, 32), max_new_tokens=40)
    cache = DynamicCache()
    text = model.generate(tokens(1, 10), max_new_tokens=39, do_sample=False, past_key_values=cache)
    with pytest.raises(ValueError, match="reaches position 49"):
        model.generate(text, max_new_tokens=2, past_key_values=cache)


def test_bad_prompts_are_refused():
    model = make("authors")
    for row, mask in enumerate(([[0, 0, 0]], [[1, 1, 1], [1, 1, 0]])):
        with pytest.raises(ValueError, match=f"row {row} ends with padding"):
            model.generate(tokens(row + 1, 3), attention_mask=torch.tensor(mask), max_new_tokens=2)
    with pytest.raises(ValueError, match="no token in the input"):
        model.generate(torch.ones(1, 0, dtype=torch.int64), max_new_tokens=2)
    with pytest.raises(ValueError, match="ids reach from 1 to 99"):
        model.generate(torch.tensor([[1, 99]]), max_new_tokens=2)
    with pytest.raises(ValueError, match="bos_token_id"):
        model.generate(max_new_tokens=2)
    assert make("authors", bos_token_id=3).generate(max_new_tokens=2).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": 2}, "not supported with stateful models"),
        ({"assistant_model": None, "penalty_alpha": 0.6, "top_k": 4}, "trust_remote_code"),
        ({"past_key_valeus": None, "foo": 1}, "foo"),
    ],
)
def test_modes_that_do_not_apply_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make("authors").generate(tokens(1, 3), max_new_tokens=2, **options)


@pytest.mark.parametrize("kind", LINEAR)
def test_a_static_cache_is_the_same_as_a_dynamic_one(kind):
    model, ids = make(kind, dtype=torch.float64), tokens(2, 7)
    a = model.generate(ids, max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(a, model.generate(ids, max_new_tokens=6, do_sample=False))


@pytest.mark.slow
def test_generation_compiled_by_transformers():
    torch._dynamo.reset()
    model, ids = make("plus", dtype=torch.float64), tokens(2, 7)
    counters.clear()
    how = CompileConfig(backend="eager", fullgraph=True, mode=None, dynamic=False)
    how._compile_all_devices = True
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False, cache_implementation="static", compile_config=how)
    assert torch.equal(text, model.generate(ids, max_new_tokens=NEW, do_sample=False))
    assert counters["stats"]["unique_graphs"] == 1  # whatever the number of tokens is
