"""Language recipes: the paper's numbers, nanoGPT's setting, and plans whose arms can be compared."""

from __future__ import annotations

import math

import pytest
import torch

from tests.recipes.language_folders import STEPS, TINY, write_text
from tost.data import build_data
from tost.models import create_model
from tost.recipes import get_task, load_config
from tost.train.loop import fit
from tost.train.optim import learning_rate, parameter_groups

OWT = {
    "gpt2_base": ("owt/tost_base", "model.name=gpt2_base", "optim.weight_decay=0.1"),
    "tost_base": ("owt/tost_base",),
    "tost_large": ("owt/tost_medium", "model.name=tost_lm_large", "train.accumulate=3", "evaluate.batch_size=20"),
    "tost_medium": ("owt/tost_medium",),
}
PARAMETERS = {
    "gpt2_base": 123_587_328,
    "tost_base": 109_597_584,
    "tost_large": 655_136_720,
    "tost_medium": 303_662_464,
}


def load(name, *overrides):
    return load_config(name, ["data.path=somewhere", *overrides])


def build(config):
    with torch.device("meta"):
        return create_model(config.model.name, **config.model.options)


def test_openwebtext_has_the_four_models():
    assert {name: build(load(*OWT[name])).num_parameters() for name in OWT} == PARAMETERS


@pytest.mark.parametrize("name", OWT)
def test_openwebtext_is_the_paper_s_recipe(name):
    config = load(*OWT[name])
    assert config.train.batch_size * config.data.shape().length == 491_520
    assert config.train.batch_size * config.data.shape().length * config.train.steps == 294_912_000_000
    rates = {
        step: learning_rate(step, config=config.schedule, peak=config.optim.lr, total=config.train.steps)
        for step in (0, 1000, 2000, 301_000, 600_000)
    }
    assert rates == pytest.approx({0: 0.0, 1000: 3e-4, 2000: 6e-4, 301_000: 3.3e-4, 600_000: 6e-5})
    assert (config.optim.betas, config.train.clip_norm) == ((0.9, 0.95), 1.0)
    micro = {"base": 60, "medium": 30, "large": 20}[name.rpartition("_")[2]]
    assert config.train.batch_size == 8 * config.train.accumulate * micro, "micro-batches of the authors on 8 processes"


def test_openwebtext_decays_as_the_released_configurations_do():
    decay = {name: load(*OWT[name]).optim.weight_decay for name in OWT}
    assert decay == {"gpt2_base": 0.1, "tost_base": 0.01, "tost_large": 0.1, "tost_medium": 0.1}
    model = build(load("owt/tost_base"))
    decayed, spared = parameter_groups(model, load("owt/tost_base").optim)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = {names[id(parameter)] for parameter in decayed["params"]}
    assert "tokens.weight" in matrices
    assert any(name.startswith("blocks.0.") for name in matrices)
    kinds = {names[id(parameter)].rpartition(".")[2] for parameter in spared["params"]}
    assert {"temperature", "position_bias"} <= kinds
    assert not any(name.endswith(("temperature", "position_bias")) for name in matrices)


def test_openwebtext_recipes_differ_in_model_decay_and_micro_batches_only():
    def rest(name):
        config = load(*OWT[name], "optim.weight_decay=0.1", "train.accumulate=1", "evaluate.batch_size=60")
        return config.model_dump(exclude={"model"})

    assert all(rest(name) == rest("tost_base") for name in OWT)


def test_shakespeare_is_the_setting_of_nanogpt():
    config = load("small/shakespeare")
    assert (config.data.shape().length, config.data.shape().vocab_size, config.train.batch_size) == (64, 65, 12)
    assert (config.train.steps, config.optim.lr, config.schedule.min_lr) == (2000, 1e-3, 1e-4)
    assert (config.schedule.warmup_steps, config.optim.betas, config.optim.weight_decay) == (100, (0.9, 0.99), 0.1)
    assert config.model.options["dropout"] == 0
    assert config.evaluate.batches is None, "the whole validation part"
    longer = load("small/shakespeare_256")
    assert (longer.data.shape().length, longer.train.steps) == (256, 1000)
    same = load("small/shakespeare", "data.options.length=256", "train.steps=1000", "checkpoint.every=1000")
    assert longer.model_dump(exclude={"evaluate"}) == same.model_dump(exclude={"evaluate"})


@pytest.mark.parametrize("name", ["small/shakespeare", "small/shakespeare_256", "small/wikitext2", "owt/tost_base"])
def test_language_recipes_take_two_steps(name, tmp_path):
    data = write_text(tmp_path)
    config = load_config(name, [f"data.path={data}", "data.options.vocab_size=null", *TINY, *STEPS])
    result = fit(config, get_task(config.recipe), tmp_path / "run")
    assert (result.status, result.step) == ("finished", 2)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(result.metrics["loss"]))


def test_gradients_are_cut_off_after_the_pieces_that_were_asked_for():
    config = load_config("demo/stdlib_bytes", [*TINY, "train.chunk=4", "train.truncate=2", "model.dropout=0.0"])
    task = get_task(config.recipe)
    model = task.build_model(config, build_data(config.data, seed=0))
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    taken = task.compute(model, {"inputs": ids, "targets": ids}).loss
    cut, exact = (model.loss(ids, ids, reduction="sum", chunk=4, truncate=pieces) for pieces in (2, None))
    gradients = [torch.autograd.grad(loss, model.blocks[0].attention.proj_in.weight)[0] for loss in (taken, cut, exact)]
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])
