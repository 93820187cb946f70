"""Configurations: what is read, refused with all problems at once, written and read back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tost._options import keys_of
from tost._yaml import write_value
from tost.data import DataOptions, find_data, list_data
from tost.errors import ConfigError
from tost.models import model_spec
from tost.recipes import find_config, list_configs, list_tasks
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
IMAGES = """\
recipe: image_classification
model: {name: tost_mini, depth: 1}
data: {name: cifar10, path: somewhere}
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
    """Return the lines of the error that a configuration gives, without the heading."""

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
    assert (config.train.steps, type(config.train.steps), config.train.compile) == (1000, int, True)
    assert (config.optim.betas, config.optim.eps, config.optim.lr) == ((0.9, 0.95), 1e-6, 1e-3)
    assert (config.data.path, config.train.seed, config.schedule.name, config.log.trackers) == (None, 0, "constant", ())
    assert load("train.seed=1", "train.seed=2").train.seed == 2
    assert load("checkpoint.best_metric=a=b", "evaluate.every=1").checkpoint.best_metric == "a=b"


def test_model_options_are_given_else_demanded_by_the_data_else_registered(load):
    options = load("data.options.length=48", "model.vocab_size=300", text=LANGUAGE).model.options
    assert (options["depth"], options["vocab_size"], options["max_length"]) == (2, 300, 48)
    assert (options["embed_dim"], options["num_heads"]) == (768, 12)
    assert set(options) == set(model_spec("tost_lm_base").options.model_fields)
    options = load("data.name=fashion_mnist", "model.name=vit_mini", text=IMAGES).model.options
    assert (options["in_chans"], options["num_classes"], options["image_size"]) == (1, 10, 28)


def test_python_construction_obeys_the_same_rules(load):
    config = load()
    values = config.model_dump()
    assert RunConfig.model_validate(values) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 5
    values["train"]["accumulate"] = 5
    with pytest.raises(ValidationError, match=r"train\.batch_size: 12 is not a multiple of train\.accumulate \(5\)"):
        RunConfig.model_validate(values)
    with pytest.raises(ValidationError, match="unknown"):
        RunConfig.model_validate({**config.model_dump(), "model": {"name": "lra_image", "deph": 2}})
    with pytest.raises(ValidationError):
        TrainConfig(steps=True, batch_size=1)


WRONG = {
    "lr=1": "unknown key; did you mean optim.lr?",
    "batch_size=1": "unknown key; did you mean train.batch_size or evaluate.batch_size?",
    "train.stpes=1": "unknown key; did you mean train.steps?",
    "train.lr=1": "unknown key; did you mean optim.lr?",
    "model.hedas=1": "unknown key; did you mean model.num_heads?",
    "data.options.size=1": "unknown key; data.options takes no keys",
    "log.zzz=1": "unknown key; the keys here are: every, trackers",
    "regularize.mixpu=1": "unknown key; did you mean regularize.mixup?",
    "train.steps=0": "0 given; needs a whole number >= 1",
    "train.steps=true": "true given; needs a whole number >= 1",
    "train.steps=1.5": "1.5 given; needs a whole number >= 1",
    "train.steps=": "null given; needs a whole number >= 1",
    f"train.steps=1{'0' * 250}": f"1{'0' * 59}... given; needs a whole number >= 1 and <= 1e+12",
    "train.precision=bf32": "bf32 given; needs one of auto, fp32, bf16, fp16; did you mean fp32?",
    "train.clip_norm=none": "none given; needs a number > 0 or null; write null for none",
    "train.compile=maybe": "maybe given; needs true or false",
    "optim.lr=.nan": ".nan given; needs a number > 0",
    "optim.betas=0.9": "0.9 given; needs a list of 2, each entry a number >= 0 and < 1",
    "log.trackers=[tensorbord]": "tensorbord given; needs one of tensorboard, wandb; did you mean tensorboard?",
    "train=5": "5 given; needs keys and their values, indented below it",
    "data.name=3": "3 given; needs text",
    "model.depth=0": "0 given; needs a whole number >= 1",
    "model.depth=true": "true given; needs a whole number >= 1",
    "optim.lr.x=5": "optim.lr holds a single value, nothing below it",
    "data.path={a: 1}": "'{a: 1}' is a mapping; set one key at a time",
    "nope": "not an override; write key=value, for example train.steps=100",
    "a b=3": "not an override",
    "train..steps=3": "not an override",
}


@pytest.mark.parametrize(("override", "message"), WRONG.items())
def test_wrong_overrides_say_what_is_needed(problems, override, message):
    (line,) = problems(override)
    key, _, text = line.partition(" (command line): ")
    assert override.startswith(key.removesuffix(".0"))
    assert text.startswith(message)


def test_problems_of_data_options_and_names(problems):
    assert problems("data.options.longth=3", "data.options.length=0", text=LANGUAGE) == [
        "data.options.length (command line): 0 given; needs a whole number >= 1",
        "data.options.longth (command line): unknown key; did you mean data.options.length?",
    ]
    lines = problems("model.name=lra_imag", "data.name=digitz")
    assert any("did you mean 'lra_image'?" in line for line in lines)
    assert any("did you mean 'digits'?" in line for line in lines)
    (line,) = problems(text=f"{CLASSIFIER}train.seed: 3\n")
    assert line == "train.seed (line 6): unknown key; write seed indented below train"
    (line,) = problems("data.name=image_folder", text=IMAGES)
    assert line.startswith("data.options (line 3): data.options.num_classes is missing")


def test_missing_keys_are_named(problems):
    assert problems(text="recipe: x\ntrain:\n  steps: 3\n") == [
        "model: missing; needs keys and their values, indented below it",
        "data: missing; needs keys and their values, indented below it",
        "train.batch_size (line 2): missing; needs a whole number >= 1 and <= 1e+12",
        "optim: missing; needs keys and their values, indented below it",
        "recipe (line 1): there is no task 'x'; tasks: " + ", ".join(list_tasks()) + ".",
    ]


# Overrides, the place of the problem, the beginning of its text.
BROKEN = [
    ("train.accumulate=5", "train.batch_size (line 4)", "12 is not a multiple of train.accumulate (5)"),
    ("train.clip_norm=1 train.clip_value=2", "train.clip_norm", "1.0 given together with"),
    ("schedule.warmup_steps=101", "schedule.warmup_steps", "101 is longer than the run of 100"),
    ("schedule.name=one_cycle schedule.warmup_steps=1", "schedule.name", "one_cycle has its peak at the end of the"),
    ("schedule.name=inverse_sqrt", "schedule.name", "inverse_sqrt has its peak at the end of the warm-up"),
    ("schedule.name=linear schedule.min_lr=1", "schedule.min_lr", "1.0 is above the peak"),
    (
        "schedule.warmup_from=1 schedule.warmup_first_step=zero",
        "schedule.warmup_from",
        "1.0 is above the peak optim.lr",
    ),
    ("train.init_from=?", "train.init_from", "missing; this configuration starts from trained weights"),
    ("checkpoint.best_metric=loss", "checkpoint.best_metric", "loss would be measured at the end"),
    ("evaluate.telemetry=true", "evaluate.telemetry", "true would show the end only"),
    ("train.chunk=8", "train.chunk", "8 given, but the recipe classification takes its sequences as a whole"),
    ("train.hide=0.3", "train.hide", "0.3 given, but the recipe classification hides nothing"),
    ("regularize.mixup=0.8", "regularize.mixup", "0.8 given, but the recipe classification does not regularize"),
    ("model.in_features=2", "model.in_features", "2 does not fit the data: digits has 1 numbers"),
    ("model.num_classes=9", "model.num_classes", "9 does not fit the data: digits has 10 classes"),
    ("model.max_length=63", "model.max_length", "63 does not fit the data: digits has sequences"),
    ("model.max_length=63 model.position=sinusoidal", "model.max_length", "63 does not fit the data"),
    ("model.num_heads=7", "model (line 2)", "embed_dim=64 is not divisible by num_heads=7"),
    ("recipe=langage_modeling", "recipe", "there is no task 'langage_modeling'; did you mean"),
    ("recipe=masked_prediction", "train.hide (line 4)", "the recipe masked_prediction needs the share of the inputs"),
]
BROKEN_LANGUAGE = [
    ("train.chunk=9 parallel.context=2", "train.chunk", "9 tokens cannot be shared by 2 processes"),
    ("train.truncate=2", "train.truncate", "2 counts pieces, but texts are taken as a whole; set train.chunk"),
]
BROKEN_IMAGES = [
    ("regularize.cutmix=1 train.accumulate=4", "train.batch_size (line 4)", "12 in 4 micro-batches is an odd number"),
    ("model.in_chans=1", "model.in_chans", "1 does not fit the data: cifar10 has images of 3 channels; set it to 3"),
    ("model.name=vit_mini model.image_size=64", "model.image_size", "64 does not fit the data: cifar10 has images"),
    ("parallel.context=2", "parallel.context", "2 processes cannot share a sample of image_classification"),
    ("recipe=masked_prediction train.hide=0.3 parallel.context=2", "parallel.context", "2 processes cannot share a"),
    ("model.name=lra_image", "model.name", "lra_image is a model for classification, but the recipe"),
]
ALL_BROKEN = [
    *((CLASSIFIER, *row) for row in BROKEN),
    *((LANGUAGE, *row) for row in BROKEN_LANGUAGE),
    *((IMAGES, *row) for row in BROKEN_IMAGES),
]


@pytest.mark.parametrize(
    ("text", "overrides", "place", "message"), ALL_BROKEN, ids=[overrides for _, overrides, *_ in ALL_BROKEN]
)
def test_impossible_combinations(problems, text, overrides, place, message):
    given = [
        f'{key}="{value}"' if value == "?" else f"{key}={value}"
        for key, value in (override.split("=") for override in overrides.split())
    ]
    lines = problems(*given, text=text)
    place = place if "(" in place else f"{place} (command line)"
    assert any(line.startswith(f"{place}: {message}") for line in lines), lines
    assert len(lines) == 1 or "model.name" in place


def test_vocabulary_and_length_of_a_language_model(problems, load):
    assert [
        line.partition(";")[0] for line in problems("model.vocab_size=255", "model.max_length=31", text=LANGUAGE)
    ] == [
        "model.vocab_size (command line): 255 does not fit the data: stdlib_bytes has 256 different tokens",
        "model.max_length (command line): 31 does not fit the data: stdlib_bytes has sequences of 32",
    ]
    for rule in ("model.position=none", "model.position=sinusoidal"):
        assert load("model.max_length=31", rule, text=LANGUAGE).model.options["max_length"] == 31


POSSIBLE = [
    ["schedule.name=cosine", "schedule.decay_from=start", "schedule.warmup_steps=9"],
    ["schedule.epoch_steps=10", "schedule.lag=3"],
    ["train.accumulate=6", "schedule.warmup_steps=100"],
    ["schedule.name=one_cycle", "schedule.warmup_steps=2"],
    ["schedule.name=inverse_sqrt", "schedule.warmup_steps=1", "schedule.min_lr=1e-3"],
    ["schedule.warmup_from=1e-3", "schedule.warmup_first_step=zero", "schedule.warmup_steps=5"],
    ["model.max_length=64", "model.num_classes=11", "regularize.mixup=0"],
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
    return found + [find_data(name).options for name in list_data()]


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.__name__)
def test_every_field_is_described_and_every_schema_closed(schema):
    assert (schema.model_config["extra"], schema.model_config["frozen"]) == ("forbid", True)
    assert all(field.description and len(field.description) < 200 for field in schema.model_fields.values())


def test_hash_identifies_the_settings(load):
    first = config_hash(load())
    assert len(first) == 12
    assert first == config_hash(load("train.seed=0", "model.embed_dim=64"))
    assert len({first, config_hash(load("train.seed=1")), config_hash(load("model.dropout=0.1"))}) == 3


def test_reading_a_configuration_loads_no_torch(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(LANGUAGE)
    probe = (
        "import sys, tost.train\n"
        "from tost.recipes import *\n"
        "from tost.train.config import dump_config\n"
        f"dump_config(load_config({str(path)!r})), list_configs(), list_tasks()\n"
        "print(*(set(sys.modules) & {'torch', 'numpy', 'sklearn', 'accelerate'}))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


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
    recipe, name, data = draw(
        st.sampled_from(
            [
                ("classification", "lra_image", DataOptions(name="digits", workers=3)),
                ("classification", "lra_listops", DataOptions(name="listops", options={"max_depth": 3})),
                ("language_modeling", "tost_lm_base", DataOptions(name="stdlib_bytes", options={"length": 9})),
            ]
        )
    )
    options = {"dropout": draw(st.floats(0, 0.999)), "backend": draw(st.sampled_from(["auto", "torch"]))}
    return config(
        recipe=recipe,
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
def test_written_configurations_read_back_here_and_elsewhere(path, original, comments):
    text = dump_config(original, comments=comments)
    path.write_text(text, encoding="utf-8")
    again = load_config(path)
    assert again == original
    assert config_hash(again) == config_hash(original)
    assert dump_config(again, comments=comments) == text
    assert yaml.safe_load(text) == original.model_dump(mode="json")


def test_comments_have_meaning_default_and_requirement():
    lines = dump_config(config()).splitlines()
    found = {line.partition(":")[0].strip(): line.partition("# ")[2] for line in lines if not line.startswith(" " * 9)}
    assert found["steps"] == "optimizer steps of the whole run; required"
    assert found["betas"].endswith("; default [0.9, 0.999]")
    assert found["depth"].endswith("; default 8")
    assert found["max_length"].endswith("; default 64")  # what the data demands
    assert max(map(len, lines)) <= 120
    text = dump_config(config(), comments=False)
    assert "#" not in text
    assert "\n\n" not in text


KEYS = [*keys_of(RunConfig), "model.depth", "model.vocab_size", "data.options.length", "data.options.max_depth", "x.y"]
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["none", "fp16"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
)


def answer(name: str, overrides: list[str]) -> str:
    """The message of the error; empty if the configuration is usable, in which case it can be written too."""
    try:
        found = load_config(name, overrides)
    except ConfigError as error:
        return str(error)
    assert dump_config(found)
    return ""


@settings(max_examples=150)
@given(st.sampled_from(list_configs()), st.lists(st.tuples(st.sampled_from(KEYS), scalars | values), max_size=4))
@example("demo/digits", [("model", None)])
@example("demo/digits", [("model.name", [])])
@example("demo/digits", [("data", {"name": "digits", "options": None})])
def test_overrides_never_crash(name, changes):
    message = answer(name, [f"{key}={write_value(value)}" for key, value in changes])
    assert not message or message.startswith(f"{name} cannot be used, ")


@settings(max_examples=150)
@given(st.data(), st.sampled_from(list_configs()))
def test_damaged_files_never_crash(path, data, name):
    text = find_config(name).read_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 12)))
    path.write_text(text[:start] + data.draw(st.text(max_size=4)) + text[end:], encoding="utf-8")
    message = answer(str(path), [])
    assert not message or message.startswith(str(path))


@given(st.text())
def test_any_text_is_an_answerable_override(text):
    assert answer("demo/digits", [text]).startswith("demo/digits cannot be used, 1 problem:")
