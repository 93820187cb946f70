"""The schema of a run: what is accepted, what is refused with which words, all at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from tost.data import list_data
from tost.errors import ConfigError
from tost.models import list_models
from tost.recipes import list_tasks
from tost.train.config import RunConfig, TrainConfig, config_hash, load_config
from tost.train.config.rules import RULES
from tost.train.config.schema import data_option_class, model_option_class

CLASSIFIER = """\
recipe: classification
model: {name: lra_image, depth: 2}
data: {name: digits}
train: {steps: 100, batch_size: 12}
optim: {lr: 1e-3}
"""
LANGUAGE = """\
recipe: language_modeling
model:
  name: tost_lm_base
  depth: 2
data: {name: stdlib_bytes, options: {length: 32}}
train: {steps: 100, batch_size: 12}
optim: {lr: 1e-3}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a configuration from a text and overrides."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(*overrides: str, text: str = CLASSIFIER) -> RunConfig:
        Path("my.yaml").write_text(text)
        return load_config("my.yaml", overrides)

    return write_and_load


@pytest.fixture
def problems(load):
    """Return the lines of the error that a configuration gives, the heading left out."""

    def problems_of(*overrides: str, text: str = CLASSIFIER) -> list[str]:
        with pytest.raises(ConfigError) as error:
            load(*overrides, text=text)
        heading, *lines = str(error.value).split("\n  ")
        assert heading == f"my.yaml cannot be used, {len(lines)} problem{'s' * (len(lines) > 1)}:"
        return lines

    return problems_of


def test_values_and_defaults(load):
    config = load("optim.betas=[0.9, 0.95]", "train.steps=1e3", "data.path=", "optim.eps=1e-6", "train.compile=yes")
    assert (config.recipe, config.model.name, config.data.name) == ("classification", "lra_image", "digits")
    assert (config.train.steps, type(config.train.steps)) == (1000, int)
    assert (config.optim.betas, config.optim.eps, config.optim.lr) == ((0.9, 0.95), 1e-6, 1e-3)
    assert config.data.path is None
    assert config.train.compile is True
    assert (config.train.seed, config.schedule.name, config.log.trackers) == (0, "constant", ())


def test_later_overrides_win_and_the_first_equals_sign_splits(load):
    assert load("train.seed=1", "train.seed=2").train.seed == 2
    assert load("checkpoint.best_metric=a=b", "evaluate.every=1").checkpoint.best_metric == "a=b"


def test_model_options_are_given_else_demanded_by_the_data_else_registered(load):
    options = load("data.options.length=48", "model.vocab_size=300", text=LANGUAGE).model.options
    assert (options["depth"], options["vocab_size"]) == (2, 300)
    assert options["max_length"] == 48
    assert (options["embed_dim"], options["num_heads"]) == (768, 12)
    assert set(options) == set(model_option_class("tost_lm_base").model_fields)


def test_configuration_cannot_be_changed(load):
    config = load()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 5


def test_python_construction_obeys_the_same_rules(load):
    values = load().model_dump()
    assert RunConfig.model_validate(values) == load()
    values["train"]["accumulate"] = 5
    with pytest.raises(ValidationError, match=r"train\.batch_size: 12 is not a multiple of train\.accumulate \(5\)"):
        RunConfig.model_validate(values)
    with pytest.raises(ValidationError, match="unknown"):
        RunConfig.model_validate({**load().model_dump(), "model": {"name": "lra_image", "deph": 2}})


UNKNOWN_KEYS = {
    "lr=1": "lr (command line): unknown key; did you mean optim.lr?",
    "steps=1": "steps (command line): unknown key; did you mean train.steps?",
    "batch_size=1": "batch_size (command line): unknown key; did you mean train.batch_size or evaluate.batch_size?",
    "train.stpes=1": "train.stpes (command line): unknown key; did you mean train.steps?",
    "train.lr=1": "train.lr (command line): unknown key; did you mean optim.lr?",
    "traim.steps=1": "traim (command line): unknown key; did you mean train?",
    "model.hedas=1": "model.hedas (command line): unknown key; did you mean model.num_heads?",
    "model.options=1": "model.options (command line): unknown key; did you mean model.position?",
    "data.namee=x": "data.namee (command line): unknown key; did you mean data.name?",
    "data.options.size=1": "data.options.size (command line): unknown key; data.options takes no keys",
    "log.zzz=1": "log.zzz (command line): unknown key; the keys here are: every, trackers",
}


@pytest.mark.parametrize(("override", "message"), UNKNOWN_KEYS.items())
def test_unknown_keys_get_a_suggestion(problems, override, message):
    assert problems(override) == [message]


def test_unknown_options_of_a_data_set_get_a_suggestion(problems):
    (line,) = problems("data.options.longth=3", text=LANGUAGE)
    assert line == "data.options.longth (command line): unknown key; did you mean data.options.length?"


def test_dotted_keys_in_a_file_are_explained(problems):
    (line,) = problems(text=f"{CLASSIFIER}train.seed: 3\n")
    assert line == "train.seed (line 6): unknown key; write seed indented below train"


WRONG_VALUES = {
    "train.steps=0": "0 given; needs a whole number >= 1",
    "train.steps=many": "many given; needs a whole number >= 1",
    "train.steps=true": "true given; needs a whole number >= 1",
    "train.steps=1.5": "1.5 given; needs a whole number >= 1",
    "train.steps=": "null given; needs a whole number >= 1",
    f"train.steps=1{'0' * 250}": f"1{'0' * 59}... given; needs a whole number >= 1 and <= 1e+12",
    "train.seed=4294967296": "4294967296 given; needs a whole number >= 0 and < 4294967296",
    "train.precision=bf32": "bf32 given; needs one of fp32, bf16, fp16; did you mean fp32?",
    "train.clip_norm=none": "none given; needs a number > 0 or null; write null for none",
    "train.clip_norm=0": "0 given; needs a number > 0 or null",
    "train.ema_decay=1": "1 given; needs a number >= 0 and < 1 or null",
    "train.compile=maybe": "maybe given; needs true or false",
    "optim.lr=.inf": ".inf given; needs a number > 0",
    "optim.lr=.nan": ".nan given; needs a number > 0",
    "optim.name=sgd": "sgd given; needs adamw",
    "optim.betas=0.9": "0.9 given; needs a list of 2, each entry a number >= 0 and < 1",
    "optim.betas=[0.9]": "missing; needs a number >= 0 and < 1",
    "optim.betas=[0.9, 2]": "2 given; needs a number >= 0 and < 1",
    "log.trackers=[tensorbord]": "tensorbord given; needs one of tensorboard, wandb; did you mean tensorboard?",
    "log.trackers=wandb": "wandb given; needs a list, each entry one of tensorboard, wandb",
    "parallel.context=0": "0 given; needs a whole number >= 1",
    "evaluate.batches=0": "0 given; needs a whole number >= 1 and <= 1e+12 or null",
    "train=5": "5 given; needs keys and their values, indented below it",
    "data.name=3": "3 given; needs text",
    "data.workers=x": "x given; needs a whole number >= 0",
    "model.depth=0": "0 given; needs a whole number >= 1",
    "model.depth=100000000": "100000000 given; needs a whole number >= 1 and <= 10000",
    "model.depth=true": "true given; needs a whole number >= 1",
    "model.name=7": "7 given; needs text",
    "optim.lr.x=5": "optim.lr holds a single value, nothing below it",
    "data.path={a: 1}": "'{a: 1}' is a mapping; set one key at a time",
}


@pytest.mark.parametrize(("override", "message"), WRONG_VALUES.items())
def test_wrong_values_say_what_is_needed(problems, override, message):
    (line,) = problems(override)
    key, _, text = line.partition(" (command line): ")
    assert override.startswith(key.removesuffix(".0").removesuffix(".1"))
    assert text.startswith(message)


def test_wrong_options_of_a_data_set_say_what_is_needed(problems):
    assert problems("data.options.length=0", text=LANGUAGE) == [
        "data.options.length (command line): 0 given; needs a whole number >= 1"
    ]


@pytest.mark.parametrize("override", ["nope", "=3", "a b=3", "train..steps=3", "train.=3"])
def test_overrides_that_are_none(problems, override):
    assert problems(override) == [
        f"{override} (command line): not an override; write key=value, for example train.steps=100"
    ]


def test_missing_keys_are_named(problems):
    assert problems(text="recipe: x\ntrain:\n  steps: 3\n") == [
        "model: missing; needs keys and their values, indented below it",
        "data: missing; needs keys and their values, indented below it",
        "train.batch_size (line 2): missing; needs a whole number >= 1 and <= 1e+12",
        "optim: missing; needs keys and their values, indented below it",
        "recipe (line 1): there is no task 'x'; tasks: " + ", ".join(list_tasks()) + ".",
    ]


def test_wrong_names_get_a_suggestion(problems):
    lines = problems("model.name=lra_imag", "data.name=digitz")
    assert sorted(line.partition(":")[0] for line in lines) == ["data.name (command line)", "model.name (command line)"]
    assert any("did you mean 'lra_image'?" in line for line in lines)
    assert any("did you mean 'digits'?" in line for line in lines)


RULES_BROKEN = {
    "batch": (["train.accumulate=5"], "train.batch_size (line 4): 12 is not a multiple of train.accumulate (5)"),
    "small batch": (["train.accumulate=24"], "train.batch_size (line 4): 12 is not a multiple"),
    "clip": (["train.clip_norm=1", "train.clip_value=2"], "train.clip_norm (command line): 1.0 given together with"),
    "warm-up": (
        ["schedule.warmup_steps=101"],
        "schedule.warmup_steps (command line): 101 is longer than the run of 100",
    ),
    "one cycle": (
        ["schedule.name=one_cycle", "schedule.warmup_steps=1"],
        "schedule.name (command line): one_cycle has its peak at the end of the warm-up",
    ),
    "square root": (
        ["schedule.name=inverse_sqrt"],
        "schedule.name (command line): inverse_sqrt has its peak at the end of the warm-up",
    ),
    "floor unused": (["schedule.min_lr=1e-5"], "schedule.min_lr (command line): 1e-05 has no effect on the schedule"),
    "floor high": (["schedule.name=linear", "schedule.min_lr=1"], "schedule.min_lr (command line): 1.0 is above the"),
    "start unused": (
        ["schedule.warmup_from=1e-7"],
        "schedule.warmup_from (command line): 1e-07 has no effect with schedule.warmup_first_step=one",
    ),
    "start unused in a cycle": (
        ["schedule.warmup_from=1e-7", "schedule.name=one_cycle", "schedule.warmup_steps=9"],
        "schedule.warmup_from (command line): 1e-07 has no effect with schedule.warmup_first_step=one on the",
    ),
    "start high": (
        ["schedule.warmup_from=1", "schedule.warmup_first_step=zero"],
        "schedule.warmup_from (command line): 1.0 is above the peak optim.lr (0.001)",
    ),
    "first step unused": (
        ["schedule.warmup_first_step=zero", "schedule.name=one_cycle", "schedule.warmup_steps=9"],
        "schedule.warmup_first_step (command line): zero has no effect on the schedule one_cycle",
    ),
    "decay start unused": (
        ["schedule.decay_from=start", "schedule.warmup_steps=9"],
        "schedule.decay_from (command line): start has no effect on the schedule constant",
    ),
    "decay start without warm-up": (
        ["schedule.decay_from=start", "schedule.name=cosine"],
        "schedule.decay_from (command line): start has no effect on the schedule cosine with 0 warmup_steps",
    ),
    "lag": (["schedule.lag=1"], "schedule.lag (command line): 1 has no effect while schedule.epoch_steps is 0"),
    "decay twice": (
        ["optim.decay_all=true", "optim.decay_statistics=true"],
        "optim.decay_statistics (command line): true has no effect next to optim.decay_all",
    ),
    "weights": (
        ['train.init_from="?"'],
        "train.init_from (command line): missing; this configuration starts from trained weights",
    ),
    "best": (
        ["checkpoint.best_metric=loss"],
        "checkpoint.best_metric (command line): loss would be measured at the end",
    ),
    "telemetry": (["evaluate.telemetry=true"], "evaluate.telemetry (command line): true would show the end only"),
    "kind": (
        ["model.input=tokens", "model.vocab_size=9", "model.in_features=null"],
        "model.input (command line): tokens does not fit the data: digits has values; set it to values",
    ),
    "features": (
        ["model.in_features=2"],
        "model.in_features (command line): 2 does not fit the data: digits has 1 numbers",
    ),
    "classes": (
        ["model.num_classes=9"],
        "model.num_classes (command line): 9 does not fit the data: digits has 10 classes",
    ),
    "length": (
        ["model.max_length=63"],
        "model.max_length (command line): 63 does not fit the data: digits has sequences",
    ),
    "heads": (["model.num_heads=7"], "model (line 2): embed_dim=64 is not divisible by num_heads=7"),
}


@pytest.mark.parametrize(("overrides", "message"), RULES_BROKEN.values(), ids=RULES_BROKEN.keys())
def test_impossible_combinations(problems, overrides, message):
    (line,) = problems(*overrides)
    assert line.startswith(message)


def test_vocabulary_and_length_of_a_language_model(problems, load):
    assert problems("model.vocab_size=255", "model.max_length=31", text=LANGUAGE) == [
        "model.vocab_size (command line): 255 does not fit the data: stdlib_bytes has 256 different tokens; "
        "make it at least that, or leave it out to have it follow the data",
        "model.max_length (command line): 31 does not fit the data: stdlib_bytes has sequences of 32; "
        "make it at least that, or let the data be shorter, or leave it out to have it follow the data",
    ]
    for rule in ("model.position=none", "model.position=sinusoidal", "model.after_last_position=repeat"):
        assert load("model.max_length=31", rule, text=LANGUAGE).model.options["max_length"] == 31


def test_a_classifier_keeps_to_its_length_whatever_its_positions(problems):
    (line,) = problems("model.max_length=63", "model.position=sinusoidal")
    assert "63 does not fit the data: digits has sequences" in line


POSSIBLE = [
    ["schedule.name=cosine", "schedule.decay_from=start", "schedule.warmup_steps=9"],
    ["schedule.epoch_steps=10", "schedule.lag=3"],
    ["evaluate.weights=raw"],
    ["train.accumulate=6"],
    ["schedule.warmup_steps=100"],
    ["schedule.name=one_cycle", "schedule.warmup_steps=2"],
    ["schedule.name=inverse_sqrt", "schedule.warmup_steps=1", "schedule.min_lr=1e-3"],
    ["schedule.warmup_from=1e-3", "schedule.warmup_first_step=zero", "schedule.warmup_steps=5"],
    ["checkpoint.best_metric=loss", "evaluate.every=1"],
    ["model.max_length=64", "model.num_classes=11"],
]


@pytest.mark.parametrize("overrides", POSSIBLE, ids=" ".join)
def test_possible_combinations(load, overrides):
    assert load(*overrides)


def test_all_problems_come_at_once_with_their_lines(problems):
    text = """\
recipe: classification
model: {name: lra_image, depht: 2, embed_dim: 63}
data: {name: digits, workers: -1}
train:
  steps: 0
  batch_size: 12
  accumulate: 5
optim: {lr: fast}
schedule: {name: one_cycle}
"""
    found = problems("lr=1", "train.clip_norm=1", "train.clip_value=1", "nonsense", text=text)
    assert {line.partition(": ")[0] for line in found} == {
        "nonsense (command line)",
        "lr (command line)",
        "model.depht (line 2)",
        "model (line 2)",
        "data.workers (line 3)",
        "train.steps (line 5)",
        "train.batch_size (line 6)",
        "train.clip_norm (command line)",
        "optim.lr (line 8)",
        "schedule.name (line 9)",
    }
    assert len(found) == len(set(found)) == 11  # the width fits neither the heads nor the waves


def schemas() -> list[type[BaseModel]]:
    sections = [field.annotation for field in RunConfig.model_fields.values()]
    found = [RunConfig, *(part for part in sections if isinstance(part, type) and issubclass(part, BaseModel))]
    return found + [data_option_class(name) for name in list_data()]


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.__name__)
def test_every_field_is_described_and_every_schema_closed(schema):
    assert schema.model_config["extra"] == "forbid"
    assert schema.model_config["frozen"]
    for name, field in schema.model_fields.items():
        assert field.description, name
        assert len(field.description) < 200


def test_rules_read_keys_that_exist(load):
    config = load()
    options = {"name"} | {option for name in list_models() for option in model_option_class(name).model_fields}
    for key in {key for rule in RULES for key in rule.keys.split()}:
        if key.startswith("model."):
            assert key.removeprefix("model.") in options
        else:
            config.value(key)  # raises if there is no such key


def test_hash_tells_configurations_apart(load):
    first = config_hash(load())
    assert len(first) == 12
    assert first == config_hash(load("train.seed=0", "model.embed_dim=64"))
    assert first != config_hash(load("train.seed=1"))
    assert first != config_hash(load("model.dropout=0.1"))


def test_numbers_refuse_truth_values_in_python_too():
    with pytest.raises(ValidationError):
        TrainConfig(steps=True, batch_size=1)


def test_reading_a_configuration_loads_no_torch(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(LANGUAGE)
    probe = (
        "import sys, tost.train, tost.recipes\n"
        "from tost.train.config import dump_config, load_config\n"
        f"dump_config(load_config({str(path)!r}))\n"
        "print(*(set(sys.modules) & {'torch', 'numpy', 'sklearn', 'accelerate'}))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
