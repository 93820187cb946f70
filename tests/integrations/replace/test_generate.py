"""Decoders whose attention was replaced: cached and uncached, padded and alone, whole and partly replaced."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import tost
from tests.integrations.replace.models import DECODERS, ENCODERS, example, make, quietly
from tost.integrations.transformers import StateLayer

SOME = {"all": None, "first": [0], "last": [1, 2]}
# Every family with the paper's form in some layers; two with the form with content.
CASES = [*((family, layers, False) for family in DECODERS for layers in SOME)]
CASES += [("gpt2", "all", True), ("llama", "last", True)]
every_case = pytest.mark.parametrize(("family", "layers", "plus"), CASES)


def replaced(family, layers="all", plus=False):
    model = make(f"decoder_{family}")
    return quietly(tost.replace_attention, model, layers=SOME[layers], plus=plus, block_size=4).double()


@every_case
def test_generation_is_the_same_with_and_without_cache(family, layers, plus):
    model = replaced(family, layers, plus)
    ids = example(f"decoder_{family}")
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cached = model.generate(ids, **options, use_cache=True)
    again = model.generate(ids, **options, use_cache=False)
    assert cached.sequences.tolist() == again.sequences.tolist()
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(again.logits), rtol=0, atol=1e-9)
    kinds = [isinstance(layer, StateLayer) for layer in cached.past_key_values.layers]
    assert kinds == [index in (SOME[layers] or range(3)) for index in range(3)]


@pytest.mark.parametrize(("family", "layers", "plus"), [case for case in CASES if case[0] != "bert"])
def test_left_padding_is_exact(family, layers, plus):
    model = replaced(family, layers, plus)
    ids = example(f"decoder_{family}")
    rows = [ids[0], ids[1, :7]]
    padded = torch.stack((rows[0], torch.cat((torch.zeros(5, dtype=torch.int64), rows[1]))))
    mask = torch.ones_like(padded)
    mask[1, :5] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    together = model.generate(padded, attention_mask=mask, **options)
    for place, row in enumerate(rows):
        alone = model.generate(row[None], attention_mask=torch.ones_like(row[None]), **options)
        assert together.sequences[place, -6:].tolist() == alone.sequences[0, -6:].tolist()
        found, wanted = torch.stack(together.logits)[:, place], torch.stack(alone.logits)[:, 0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layers", SOME)
def test_left_padding_of_bert_is_exact_if_positions_are_given(layers):
    model = replaced("bert", layers)  # it counts positions from the first column, padding or not
    ids = example("decoder_bert")[1:]
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    padded = model(ids, attention_mask=mask, position_ids=torch.arange(-5, 7).clamp(min=0)[None], use_cache=True)
    alone = model(ids[:, 5:], use_cache=True)
    torch.testing.assert_close(padded.logits[:, 5:], alone.logits, rtol=0, atol=1e-9)
    states = [
        [layer for layer in out.past_key_values.layers if isinstance(layer, StateLayer)] for out in (padded, alone)
    ]
    for mine, theirs in zip(*states, strict=True):
        torch.testing.assert_close(mine.recurrent_states, theirs.recurrent_states, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("family", "layers", "plus"), [case for case in CASES if case[0] in ("llama", "gpt2")])
def test_a_static_cache_gives_what_no_cache_gives(family, layers, plus):
    model = replaced(family, layers, plus)
    ids = example(f"decoder_{family}")
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    cache, found = transformers.StaticCache(config=model.config, max_cache_len=20), []
    for start, end in ((0, 5), (5, 6), (6, 9), (9, 12)):
        part = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
        found.append(model(ids[:, start:end], **part).logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(found, dim=1)[real], expected[real], rtol=0, atol=1e-9)


def test_a_static_cache_with_windows_is_refused():
    model = replaced("mistral", "last")
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    with pytest.raises(ValueError, match=r"static cache with sliding windows.*use a DynamicCache"):
        model(example("decoder_mistral"), past_key_values=cache)


@pytest.mark.parametrize(("family", "layers", "plus"), [case for case in CASES if case[1] == "all"])
def test_pieces_are_the_whole(family, layers, plus):
    model = replaced(family, layers, plus)
    ids = example(f"decoder_{family}")
    whole = model(ids).logits
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat((first.logits, second.logits), dim=1), whole, rtol=0, atol=1e-9)
    size = sum(tensor.numel() for layer in second.past_key_values.layers for tensor in layer.recurrent_states.values())
    more = model(ids, past_key_values=second.past_key_values, use_cache=True).past_key_values
    assert size == sum(tensor.numel() for layer in more.layers for tensor in layer.recurrent_states.values())


@pytest.mark.parametrize("plus", [False, True])
def test_beams_follow_their_states(plus):
    model = replaced("gpt2", plus=plus)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    ids = example("decoder_gpt2")
    assert model.generate(ids, **options).tolist() == model.generate(ids, **options, use_cache=False).tolist()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ENCODERS)
def test_padding_does_not_reach_an_encoder(family, implementation):
    for layers in (None, [0, 2]):
        model = tost.replace_attention(make(f"encoder_{family}"), layers=layers).double()
        if layers is not None:
            model.set_attn_implementation(implementation)
        ids = example(f"encoder_{family}")
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        ids[1, 7:] = 0
        alone = model(ids[1:, :7])[0]
        torch.testing.assert_close(model(ids, attention_mask=mask)[0][1, :7], alone[0], rtol=0, atol=1e-10)


def test_masks_over_pairs_are_not_made_without_need():
    model = replaced("gpt2")
    ids = example("decoder_gpt2")
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    seen = []
    handle = model.transformer.h[1].attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"].shape), with_kwargs=True
    )
    model(ids, attention_mask=mask)
    handle.remove()
    assert seen == [mask.shape]


LENGTHS = (5, 1, 6)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


@pytest.mark.parametrize(
    ("family", "layers", "plus"),
    # BERT makes its masks without looking at positions, so only its replaced layers keep sequences apart.
    [case for case in CASES if case[0] != "bert" or case[1] == "all"],
)
def test_packed_sequences_are_kept_apart(family, layers, plus):
    model = replaced(family, layers, plus)
    ids = example(f"decoder_{family}", batch=1)
    alone = torch.cat([model(piece, use_cache=False).logits for piece in ids.split(LENGTHS, dim=1)], dim=1)
    told = {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS}
    for more in ({}, told, {"seq_idx": torch.tensor([[4] * 5 + [5] + [6] * 6])}):
        packed = model(ids, position_ids=POSITIONS, use_cache=False, **more).logits
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_sequences_by_a_mask_over_pairs(family, implementation, monkeypatch):
    # The eager softmax of the layer that stays would be in float32, which rounds by length on some processors.
    exact = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: exact(x, dim))
    model = replaced(family, "last")
    model.set_attn_implementation(implementation)
    ids = example(f"decoder_{family}", batch=1)
    alone = torch.cat([model(piece, use_cache=False).logits for piece in ids.split(LENGTHS, dim=1)], dim=1)
    packed = model(ids, position_ids=POSITIONS, use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ENCODERS)
def test_packed_sequences_in_encoders(family):
    model = tost.replace_attention(make(f"encoder_{family}")).double()
    ids = example(f"encoder_{family}", batch=1)
    embeds = model.get_input_embeddings()(ids)  # without positions, which not every encoder takes
    positions = {} if family == "distilbert" else {"position_ids": POSITIONS + 2 * (family == "roberta")}
    seen = {}
    first = next(m for m in model.modules() if hasattr(m, "windowed"))
    first.register_forward_hook(lambda module, args, out: seen.update(x=args[0], y=out[0]))
    model(inputs_embeds=embeds, cu_seq_lens_q=CU_SEQLENS, cu_seq_lens_k=CU_SEQLENS, **positions)
    alone = [first.attention(piece) for piece in seen["x"].split(LENGTHS, dim=1)]
    torch.testing.assert_close(seen["y"], torch.cat(alone, dim=1), rtol=0, atol=1e-12)


def test_the_collator_without_padding_trains():
    from transformers import DataCollatorWithFlattening

    model = replaced("gpt2").train(False)
    rows = [{"input_ids": piece.tolist()} for piece in example("decoder_gpt2", batch=1)[0].split(LENGTHS)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    kept = [row["input_ids"] for row in rows if len(row["input_ids"]) > 1]
    losses = [model(torch.tensor([ids]), labels=torch.tensor([ids]), use_cache=False).loss for ids in kept]
    expected = sum(one * (len(ids) - 1) for one, ids in zip(losses, kept, strict=True)) / sum(len(i) - 1 for i in kept)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    assert all(parameter.grad is not None for parameter in model.transformer.h.parameters())


@pytest.mark.parametrize(
    ("layers", "given", "message"),
    [
        ("all", {"use_cache": True}, "sequences are packed, and a cache was passed.*use_cache=False"),
        ("all", {"cu_seq_lens_q": torch.tensor([0, 5, 13])}, "goes from 0 to 13, but there are 12 tokens"),
        ("all", {"seq_idx": torch.tensor([[1, 2] * 6])}, "an id comes back after another one"),
        (
            "last",
            {"cu_seq_lens_q": torch.tensor([0, 3, 12])},
            r"0, 3, 12\], but the mask keeps them apart at \[0, 5, 6",
        ),
    ],
)
def test_wrong_packing(layers, given, message):
    model = replaced("llama", layers)
    ids = example("decoder_llama", batch=1)
    with pytest.raises(ValueError, match=message):
        model(ids, **{"position_ids": POSITIONS, "use_cache": False, **given})


def test_a_cache_of_keys_and_values_is_refused():
    old = make("decoder_gpt2")
    new = tost.replace_attention(copy.deepcopy(old))
    ids = example("decoder_gpt2")
    cache = old(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="layer 0 of past_key_values holds keys and values"):
        new(ids, past_key_values=cache)


def test_attention_over_all_tokens_has_no_state():
    model = tost.replace_attention(make("decoder_gpt2"), causal=False)
    ids = example("decoder_gpt2")
    assert not torch.equal(model(ids, use_cache=False).logits[:, 0], model(ids[:, :5], use_cache=False).logits[:, 0])
    with pytest.raises(ValueError, match="Call the model with use_cache=False"):
        model(ids, use_cache=True)
    mixed = tost.replace_attention(make("decoder_gpt2"), causal=False, layers=[1])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="it is causal"):
        mixed(ids, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("plus", [False, True])
def test_training_with_checkpointing_gives_the_same_gradients(plus):
    plain = replaced("gpt2", plus=plus)
    saving = copy.deepcopy(plain)
    saving.gradient_checkpointing_enable()
    ids = example("decoder_gpt2")
    for model in (plain, saving):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(module, tost.CausalTSSAttention | tost.GatedTSSAttention):
                module.out_drop = 0.0
        model(ids, labels=ids, use_cache=False).loss.backward()
    for mine, theirs in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)
