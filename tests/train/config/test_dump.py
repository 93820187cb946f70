"""Configurations that are written read back as the same, with and without their comments."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tost.data import DataOptions
from tost.train.config import (
    CheckpointConfig,
    EvaluateConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    config_hash,
    dump_config,
    load_config,
)


def config(**changes) -> RunConfig:
    sections = {
        "recipe": "classification",
        "model": ModelConfig(name="lra_image", options={"depth": 3}),
        "data": DataOptions(name="digits"),
        "train": TrainConfig(steps=5, batch_size=4),
        "optim": OptimConfig(lr=1e-3, betas=(0.9, 0.98)),
    }
    return RunConfig(**{**sections, **changes})


@st.composite
def configs(draw) -> RunConfig:
    number = st.floats(min_value=1e-30, max_value=1e30)
    data = draw(
        st.sampled_from(
            [
                DataOptions(name="digits", workers=3),
                DataOptions(name="listops", options={"max_depth": 3}),
                DataOptions(name="stdlib_bytes", options={"length": 9}),
            ]
        )
    )
    task = "language_modeling" if data.name == "stdlib_bytes" else "classification"
    name = {"digits": "lra_image", "listops": "lra_listops", "stdlib_bytes": "tost_lm_base"}[data.name]
    options = {"dropout": draw(st.floats(0, 0.999)), "backend": draw(st.sampled_from(["auto", "torch"]))}
    return config(
        recipe=task,
        model=ModelConfig(name=name, options=options),
        data=data,
        train=TrainConfig(
            steps=draw(st.integers(1, 10**12)), batch_size=6, accumulate=2, clip_norm=draw(st.none() | number)
        ),
        optim=OptimConfig(lr=draw(number), eps=draw(number)),
        checkpoint=CheckpointConfig(best_metric=draw(st.none() | st.text(min_size=1))),
        evaluate=EvaluateConfig(every=7, telemetry=draw(st.booleans())),
        log=LogConfig(trackers=draw(st.lists(st.sampled_from(["tensorboard", "wandb"]), max_size=2))),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("config") / "run.yaml"


@settings(max_examples=30)
@given(configs(), st.booleans())
def test_written_configurations_read_back(path, original, comments):
    text = dump_config(original, comments=comments)
    path.write_text(text, encoding="utf-8")
    again = load_config(path)
    assert again == original
    assert config_hash(again) == config_hash(original)
    assert dump_config(again, comments=comments) == text


@settings(max_examples=30)
@given(configs(), st.booleans())
def test_other_programs_read_the_same_values(original, comments):
    assert yaml.safe_load(dump_config(original, comments=comments)) == original.model_dump(mode="json")


def test_comments_have_meaning_default_and_requirement():
    lines = dump_config(config()).splitlines()
    found = {line.partition(":")[0].strip(): line.partition("# ")[2] for line in lines if not line.startswith(" " * 9)}
    assert found["steps"] == "optimizer steps of the whole run; required"
    assert found["lr"] == "learning rate at the peak of the schedule; required"
    assert found["betas"].endswith("; default [0.9, 0.999]")
    assert found["depth"].endswith("; default 8")  # what the model has unless told otherwise
    assert found["max_length"].endswith("; default 64")  # what the data demands
    assert max(map(len, lines)) <= 120


def test_without_comments_there_are_none():
    text = dump_config(config(), comments=False)
    assert "#" not in text
    assert "\n\n" not in text
    assert "  depth: 3\n" in text
