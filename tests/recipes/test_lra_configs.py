"""The configurations of the Long-Range Arena: the numbers of the paper, of the official code and of S4."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tost.models import create_model
from tost.recipes import find_config, load_config
from tost.train.optim import learning_rate

TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
# The paper's table: L, d, K, MLP, batch, learning rate, dropout, decay, iterations, warm-up, schedule.
PAPER = {
    "listops": (6, 512, 8, 2048, 64, 1e-4, 0.1, 1e-2, 90_000, 3000, "inverse_sqrt"),
    "text": (4, 256, 4, 1024, 32, 1e-4, 0.1, 1e-2, 25_000, 10_000, "linear"),
    "retrieval": (6, 128, 4, 512, 64, 1e-4, 0.1, 4e-2, 91_960, 10_000, "linear"),
    "image": (8, 64, 8, 128, 64, 1e-4, 0.0, 2e-2, 180_000, 9000, "linear"),
    "pathfinder": (2, 64, 2, 128, 256, 2e-4, 0.1, 0.0, 200_000, 312, "one_cycle"),
}
# Counted by hand from the sizes: embedding, blocks, last norm, head.
PARAMETERS = {
    "listops": 18 * 512 + 6 * (2 * 512 * 513 + 8 + 2048 * 513 + 512 * 2049 + 4 * 512) + 1024 + 513 * 2048 + 20_480,
    "text": 258 * 256 + 4 * (2 * 256 * 257 + 4 + 1024 * 257 + 256 * 1025 + 4 * 256) + 512 + 257 * 1024 + 2048,
    "retrieval": 258 * 128 + 6 * (2 * 128 * 129 + 4 + 512 * 129 + 128 * 513 + 4 * 128) + 256 + 257 * 512 + 1024,
    "image": 2 * 64 + 8 * (2 * 64 * 65 + 8 + 128 * 65 + 64 * 129 + 4 * 64) + 128 + 65 * 128 + 1280,
    "pathfinder": 256 * 64 + 2 * (2 * 64 * 65 + 2 + 128 * 65 + 64 * 129 + 4 * 64) + 128 + 65 * 128 + 258,
}
OFFICIAL_STEPS = {"listops": (32, 5000), "text": (32, 20_000), "retrieval": (32, 5000), "image": (256, 35_000)}
OFFICIAL_STEPS |= {"pathfinder": (512, 62_400), "pathx": (64, 500_000)}
S4_STEPS = {"listops": (32, 120_000, 0.01), "text": (16, 50_000, 0.01), "retrieval": (64, 50_000, 0.01)}
S4_STEPS |= {"image": (50, 180_000, 0.01), "pathfinder": (64, 500_000, 0.004), "pathx": (16, 500_000, 0.001)}


def load(task, form="", *overrides):
    """Load a task, with the overrides of the line ``official`` or ``s4`` of its header."""
    if form:
        text = find_config(f"lra/{task}").read_text()
        lines = re.search(rf"^#   {form} +(.+\n(?:#            .+\n)*)", text, flags=re.MULTILINE)[1]
        overrides = (*lines.replace("#", "").split(), *overrides)
    return load_config(f"lra/{task}", ["data.path=somewhere", *overrides])


def count(config):
    with torch.device("meta"):
        return create_model(config.model.name, **config.model.options).num_parameters()


@pytest.mark.parametrize("task", PAPER)
def test_the_paper_s_table(task):
    config = load(task)
    options, train, optim, schedule = config.model.options, config.train, config.optim, config.schedule
    assert PAPER[task] == (
        options["depth"],
        options["embed_dim"],
        options["num_heads"],
        round(options["embed_dim"] * options["mlp_ratio"]),
        train.batch_size,
        optim.lr,
        options["dropout"],
        optim.weight_decay,
        train.steps,
        schedule.warmup_steps,
        schedule.name,
    )
    assert options["mixer"] == "tssa"
    assert count(config) == PARAMETERS[task]


def test_path_x_is_pathfinder_with_more_pixels():
    small, large = load("pathfinder"), load("pathx")
    sizes = ("depth", "embed_dim", "num_heads", "mlp_ratio", "dropout", "vocab_size")
    assert [small.model.options[name] for name in sizes] == [large.model.options[name] for name in sizes]
    assert (small.model.options["max_length"], large.model.options["max_length"]) == (1024, 16_384)
    assert (small.optim, small.schedule.name) == (large.optim, large.schedule.name)


@pytest.mark.parametrize("task", TASKS)
def test_official_settings(task):
    config = load(task, "official")
    assert (config.train.batch_size, config.train.steps) == OFFICIAL_STEPS[task]
    assert (config.optim.betas, config.optim.eps) == ((0.9, 0.98), 1e-9)
    assert config.model.options["mixer"] == "softmax"


@pytest.mark.parametrize(("task", "warmup"), [("listops", 1000), ("text", 8000), ("retrieval", 8000)])
def test_official_learning_rates(task, warmup):
    config = load(task, "official")
    for step in (0, 1, 500, 1000, 4999, config.train.steps - 1):
        rate = learning_rate(step, config=config.schedule, peak=config.optim.lr, total=config.train.steps)
        assert rate == pytest.approx(0.05 * min(1, step / warmup) / math.sqrt(max(step, warmup)), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_s4_settings(task):
    config = load(task, "s4")
    assert (config.train.batch_size, config.train.steps, config.optim.lr) == S4_STEPS[task]
    assert (config.schedule.name, config.schedule.warmup_steps) == ("cosine", config.train.steps // 10)
    assert (config.optim.weight_decay, config.model.options["mixer"]) == (0.05, "s4")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("form", ["", "official", "s4"])
def test_presets_of_data_and_model_agree(task, form):
    config = load(task, form)
    preset = config.data.options.get("preset", "paper") if isinstance(config.data.options, dict) else None
    bytes_here = form == "s4" and task in ("text", "retrieval")  # S4 takes characters
    assert preset in (None, "paper" if bytes_here else form or "paper")
    shape = config.data.shape()
    given = {name: config.model.options[name] for name in shape.model_options()}
    assert given == shape.model_options()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mixer", ["softmax", "reformer", "bigbird", "linformer", "linear", "performer", "s4d"])
def test_a_recipe_takes_every_mixer(task, mixer):
    assert load(task, "", f"model.mixer={mixer}").model.options["mixer"] == mixer
