"""Classification of sequences: which token is classified, the losses, files, the trainer."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import tost.integrations.transformers  # noqa: F401  comes before transformers

# isort: split
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from tests.integrations.transformers.models import KINDS, TINY, left_padded, make, tokens
from tost.integrations.transformers import TostConfig, TostForSequenceClassification

every_kind = pytest.mark.parametrize("kind", KINDS)


def classifier(kind: str = "plus", **more) -> TostForSequenceClassification:
    torch.manual_seed(0)
    model = TostForSequenceClassification(TostConfig(**{**TINY, **KINDS[kind], "num_labels": 3, **more}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


@every_kind
@settings(max_examples=5)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_batch_gives_what_its_rows_give_alone(kind, lengths):
    model = classifier(kind)
    rows = [tokens(length, seed=index) for index, length in enumerate(lengths)]
    alone = torch.cat([model(row[None]).logits for row in rows])
    for row, logits in zip(rows, alone, strict=True):
        assert torch.allclose(model.score(model.model(row[None]).last_hidden_state[0, -1]), logits)
    ids, mask = left_padded(rows, fill=7)  # padding may hold any id
    assert torch.allclose(model(ids, attention_mask=mask).logits, alone)
    right = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=7)
    right_mask = mask.flip(1)
    assert torch.allclose(model(right, attention_mask=right_mask).logits, alone)
    vectors = model.get_input_embeddings()(right)
    assert torch.allclose(model(inputs_embeds=vectors, attention_mask=right_mask).logits, alone)
    # Without a mask, padding is known by its id.
    right = right.where(right_mask.bool(), 0)
    assert torch.allclose(model(right).logits, alone)


def test_the_losses_are_those_of_transformers():
    ids = tokens(4, 9)
    model, labels = classifier(), torch.tensor([0, 2, 1, 1])
    out = model(ids, labels=labels)
    assert torch.allclose(out.loss, F.cross_entropy(out.logits, labels))
    several = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).double()
    out = classifier()(ids, labels=several)
    assert torch.allclose(out.loss, F.binary_cross_entropy_with_logits(out.logits, several))
    numbers = torch.randn(4, dtype=torch.float64)
    out = classifier(num_labels=1)(ids, labels=numbers)
    assert torch.allclose(out.loss, F.mse_loss(out.logits[:, 0], numbers))
    loss, logits, cache = model(ids, labels=labels, use_cache=True, return_dict=False)
    assert (loss.shape, logits.shape, cache.get_seq_length()) == ((), (4, 3), 9)


@pytest.mark.parametrize("tie_head", [True, False])
def test_a_language_model_becomes_a_classifier(tie_head, tmp_path):
    language = make("plus", tie_head=tie_head)
    language.save_pretrained(tmp_path / "language")
    model, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "language", num_labels=5, output_loading_info=True
    )
    assert type(model) is TostForSequenceClassification
    assert report["missing_keys"] == {"score.weight"}
    assert not report["unexpected_keys"]
    ids = tokens(2, 9)
    assert torch.equal(model.model(ids).last_hidden_state, language.model(ids).last_hidden_state)
    assert 0.01 < model.score.weight.std() < 0.03
    model.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.config.num_labels == 5


def test_the_trainer_learns_to_classify(tmp_path):
    torch.manual_seed(0)
    model = TostForSequenceClassification(TostConfig(**TINY, num_labels=2))
    texts = [{"input_ids": tokens(6, seed=seed), "labels": seed % 2} for seed in range(16)]
    for text in texts:
        text["input_ids"][3] = 5 + text["labels"]
    batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    others = {"max_steps": 20, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no"}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **batches, **others)
    trainer = Trainer(model, arguments, train_dataset=texts)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.5 * losses[0]
