"""Every configuration that is shipped: found by walking the folder, read, checked, and built without memory."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from tests.recipes.given import given
from tests.recipes.pictures import random_bundle
from tests.train.runs import Recorder
from tost import recipes
from tost.errors import ConfigError
from tost.models import create_model
from tost.recipes import config_summary, get_task, list_configs, load_config
from tost.train import task
from tost.train.checkpoint.files import save_tensors
from tost.train.config import RunConfig, dump_config
from tost.train.loop import fit

ROOT = Path(__file__).parents[2]
FOLDER = Path(recipes.__file__).parent / "configs"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
NAMES = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FILES]
KEYS = ("model.name", "data.path", "train.steps", "train.seed", "train.batch_size", "checkpoint.every")
HEADER = re.compile(
    r"# (?P<title>\S.*)\n"
    r"#   run      tost train (?P<name>\S+)( \S+=[A-Z]+)*\n"
    r"#   cost     (?P<cost>.+)\n"
    r"(#   expect   (?P<expect>.+)\n#   checked  (?P<checked>.+)\n)?"  # where measured
    r"(#   (note    |official|s4      ) \S.+\n(#            \S.+\n)*)*"
    r"recipe: "
)
SMALL = (
    "model.embed_dim=32",
    "model.depth=1",
    "model.num_heads=2",
    "data.options.image_size=32",
    "data.options.eval_resize=squash",
    "data.workers=0",
    "train.steps=2",
    "train.batch_size=4",
    "train.precision=fp32",
    "schedule.warmup_steps=1",
    "evaluate.batch_size=8",
)


def header(name: str) -> re.Match[str]:
    match = HEADER.match((FOLDER / f"{name}.yaml").read_text())
    assert match, "the first lines are a title, run and cost, then expect and checked if measured; see CONTRIBUTING.md"
    return match


def load(name: str, *overrides: str) -> RunConfig:
    """Load a configuration with what its header says must be given."""
    return load_config(name, [*given(name), *overrides])


def test_the_list_is_what_the_folder_holds():
    assert list_configs() == NAMES
    assert {path.suffix for path in FILES} == {".yaml"}


@pytest.mark.parametrize("name", NAMES)
def test_header_tells_the_story(name):
    match = header(name)
    assert match["name"] == name
    assert match["title"] == config_summary(name)
    assert not re.search(r"not measured|\b1 threads", match[0])


@pytest.mark.parametrize("name", NAMES)
def test_config_is_valid_and_complete(name):
    config = load(name)
    for key in KEYS:
        config.value(key)
    assert dump_config(config)


@pytest.mark.parametrize("name", NAMES)
def test_model_builds_on_the_meta_device(name):
    config = load(name)
    shape = config.data.shape()
    size = {
        "tokens": (2, *[shape.towers] * (shape.towers > 1), shape.length),
        "values": (2, shape.length, shape.in_features),
        "image": (2, shape.in_chans, *(shape.image_size or ())),
    }[shape.input]
    with torch.device("meta"):
        model = create_model(config.model.name, **config.model.options)
        logits = model(torch.empty(size, dtype=torch.int64 if shape.input == "tokens" else torch.float32))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    classes = shape.num_classes or shape.vocab_size
    assert logits.shape[0] == 2
    assert logits.shape[-1] == classes


def test_what_has_to_be_given_is_asked_for():
    with pytest.raises(ConfigError) as error:
        load_config("finetune/pets")
    path, weights = str(error.value).splitlines()[1:]
    assert re.match(r"  data\.path \(line \d+\): data set 'pets' is read from disk; set data\.path", path)
    assert re.match(r"  train\.init_from \(line \d+\): missing; .* starts from trained weights", weights)
    assert load("finetune/pets", "train.init_from=null").train.init_from is None


IMAGES = [name for name in NAMES if not name.startswith("demo/") and load(name).recipe == "image_classification"]


@pytest.mark.parametrize("name", IMAGES)
def test_image_recipes_take_two_steps(name, tmp_path, monkeypatch):
    config = load(name, *SMALL, *(["schedule.epoch_steps=1"] if load(name).schedule.epoch_steps else []))
    monkeypatch.setattr(task, "build_data", lambda data, seed: random_bundle(config))
    if config.train.init_from:
        weights = create_model(config.model.name, **{**config.model.options, "num_classes": 3}).state_dict()
        save_tensors(tmp_path / "weights.safetensors", weights)
        config = load(name, *SMALL, f"train.init_from={tmp_path / 'weights.safetensors'}")
    recorder = Recorder()
    result = fit(config, get_task(config.recipe), tmp_path / "run", resume=None, reporter=recorder)
    assert (result.status, result.step) == ("finished", 2)
    assert {"loss", "accuracy", "accuracy_top5"} <= set(result.metrics)
    assert any("new: head.weight, head.bias" in line for line in recorder.messages) == bool(config.train.init_from)


def test_imagenet_is_the_recipe_of_xcit():
    config = load("imagenet/tost_small")
    assert config.optim.lr == 5e-4 * config.train.batch_size / 512
    assert config.train.steps == 400 * config.schedule.epoch_steps
    assert config.schedule.epoch_steps == 1_281_167 // config.train.batch_size


VARIANTS = {
    "imagenet/tost_small": (
        "model.name=tost_tiny_patch16_224 model.drop_path=0",
        "model.name=tost_medium_patch16_224 model.drop_path=0.15",
        "model.name=xcit_small_nolpi_patch16_224",
        "model.name=xcit_medium_nolpi_patch16_224 model.drop_path=0.15",
    ),
    "ablation/cifar10": ("model.normalize=false", "model.feed_forward=ista"),
    "finetune/cifar10": ("data.name=cifar100",),
    "owt/tost_base": (
        "model.name=gpt2_base optim.weight_decay=0.1",
        "train.batch_size=1280 train.steps=920000",
    ),
    "owt/tost_medium": ("model.name=tost_lm_large train.accumulate=3 evaluate.batch_size=20",),
    "pretrain/text": ("recipe=masked_prediction train.hide=0.15",),
    "probes/recall": (
        "data.name=brackets data.options.max_depth=15",
        "data.name=induction",
        "data.name=most_frequent",
        "data.name=selective_copy data.options.count=16",
    ),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in VARIANTS for text in VARIANTS[name]])
def test_variants_of_the_headers_are_valid(name, text):
    assert text in re.sub(r"\n#? +", " ", header(name)[0])
    config = load(name, *text.split())
    with torch.device("meta"):
        create_model(config.model.name, **config.model.options)


@pytest.mark.parametrize(("name", "images"), {"cifar10": 50_000, "flowers102": 1020, "pets": 3680}.items())
def test_fine_tuning_takes_200_epochs(name, images):
    config = load(f"finetune/{name}")
    assert config.schedule.epoch_steps == -(-images // config.train.batch_size)
    assert config.train.steps == 200 * config.schedule.epoch_steps
    assert config.data.shape().image_size == (224, 224)


def test_every_file_is_packaged():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tost"]
    packaged = {path for pattern in patterns for path in (ROOT / "src" / "tost").glob(pattern)}
    assert set(FILES) <= packaged
