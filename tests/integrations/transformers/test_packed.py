"""Packed sequences as the padding-free collator of transformers passes them."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from tests.integrations.transformers.models import LINEAR, TINY, make, tokens
from tost.integrations.transformers import TostConfig, TostForSequenceClassification
from tost.testing import assert_close

LENGTHS = [5, 1, 9, 3]
COLLATORS = [
    {},
    {"return_flash_attn_kwargs": True},
    {"return_seq_idx": True, "return_position_ids": False},
    {"return_flash_attn_kwargs": True, "return_position_ids": False},
]


def texts():
    return [tokens(length, seed=length) for length in LENGTHS]


def collate(options):
    return DataCollatorWithFlattening(return_tensors="pt", **options)([{"input_ids": text} for text in texts()])


@pytest.mark.parametrize("options", COLLATORS, ids=["positions", "flash", "seq_idx", "lengths"])
@pytest.mark.parametrize("kind", [*LINEAR, "gpt2"])
def test_a_flattened_batch_is_each_text_alone(kind, options):
    model = make(kind, dtype=torch.float64)
    found = model(**collate(options))
    expected = [model(text[None], labels=text[None]) for text in texts()]
    assert_close("logits", found.logits, torch.cat([each.logits for each in expected], dim=1), 1e-10)
    predicted = [length - 1 for length in LENGTHS]
    losses = [each.loss * count for each, count in zip(expected, predicted, strict=True) if count]
    assert_close("loss", found.loss, sum(losses) / sum(predicted), 1e-10)
    assert found.past_key_values is None


def test_training_and_checkpointing():
    model = make("plus").train()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(**collate(COLLATORS[1])).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.gradient_checkpointing_enable()
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_packed_texts_are_classified_each():
    model = TostForSequenceClassification(TostConfig(**TINY, num_labels=3)).double().eval()
    batch = collate(COLLATORS[0])
    found = model(batch["input_ids"], position_ids=batch["position_ids"], labels=torch.tensor([0, 2, 1, 1]))
    expected = torch.cat([model(text[None]).logits for text in texts()])
    assert_close("logits", found.logits, expected, 1e-10)
    assert found.loss.isfinite()


def test_contradictions_are_refused():
    model, batch = make(), collate(COLLATORS[1])
    del batch["labels"]
    with pytest.raises(ValueError, match="pass use_cache=False"):
        model(**batch, use_cache=True)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        model(**{**batch, "cu_seq_lens_k": torch.tensor([0, 18], dtype=torch.int32)})
    with pytest.raises(ValueError, match="are not the numbers of the real tokens"):
        model(**{**batch, "position_ids": torch.arange(18)[None]})
    with pytest.raises(ValueError, match="are not the numbers of the real tokens"):
        model(batch["input_ids"], position_ids=batch["position_ids"] * 2)
