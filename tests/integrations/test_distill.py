"""Distillation: both stages reduce what they should, and only the student moves."""

from __future__ import annotations

import copy

import pytest
import torch

import tost
from tests.integrations.replace.models import VOCABULARY, make, quietly
from tost.errors import ConfigError, TrainingError
from tost.integrations.distill import compare, distill
from tost.integrations.distill.train import _block_names, output_loss


def batches(name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(1, VOCABULARY, (4, 10), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        yield {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ["encoder_bert", "encoder_distilbert", "decoder_gpt2", "decoder_llama"])
def test_both_stages_come_closer_to_the_teacher(name):
    teacher = make(name)
    student = quietly(tost.replace_attention, copy.deepcopy(teacher), layers=[1])
    before = compare(teacher, student, batches(name, seed=1), 2)
    kept = {key: value.clone() for key, value in teacher.state_dict().items()}
    lines = []
    progress = distill(
        teacher, student, batches(name), layer_steps=30, output_steps=30, lr=5e-3, output_lr=2e-3, report=lines.append
    )
    assert sum(progress.layers[-5:]) < sum(progress.layers[:5])
    assert sum(progress.outputs[-5:]) < sum(progress.outputs[:5])
    assert compare(teacher, student, batches(name, seed=1), 2) < before
    assert all(torch.equal(kept[key], value) for key, value in teacher.state_dict().items())
    assert lines[0].startswith("layers: 3 of 30 (10%), eta ")


def test_the_first_stage_moves_the_replaced_blocks_only():
    teacher = make("encoder_bert")
    student = tost.replace_attention(copy.deepcopy(teacher), layers=[1])
    before = {key: value.clone() for key, value in student.state_dict().items()}
    distill(teacher, student, batches("encoder_bert"), layer_steps=2, output_steps=0)
    moved = {key for key, value in student.state_dict().items() if not torch.equal(before[key], value)}
    assert moved
    assert all(key.startswith("encoder.layer.1.") for key in moved)


def test_a_copy_has_no_distance():
    for name in ("encoder_bert", "decoder_gpt2"):
        teacher = make(name)
        assert output_loss(teacher, copy.deepcopy(teacher), next(batches(name))) < 1e-6


def test_blocks_are_the_innermost_numbered_modules():
    assert _block_names(tost.replace_attention(make("encoder_bert"), layers=[0, 2])) == [
        "encoder.layer.0",
        "encoder.layer.2",
    ]
    assert _block_names(quietly(tost.replace_attention, make("swin"), layers=[3])) == ["layers.1.blocks.1"]
    with pytest.raises(ConfigError, match="nothing in the student is replaced"):
        _block_names(make("encoder_bert"))


def test_a_loss_that_is_no_number_ends_it():
    teacher = make("encoder_bert")
    student = tost.replace_attention(copy.deepcopy(teacher))
    with torch.no_grad():
        student.encoder.layer[0].attention.self.attention.proj_in.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="use a smaller lr"):
        distill(teacher, student, batches("encoder_bert"), layer_steps=1)
