"""What the schema of a run demands of images: mixing, channels, sizes and classes that fit."""

from __future__ import annotations

import pytest

from tost.errors import ConfigError
from tost.train.config import RunConfig, load_config

IMAGES = """\
recipe: image_classification
model: {name: tost_mini, depth: 1}
data: {name: cifar10, path: somewhere}
train: {steps: 100, batch_size: 12}
optim: {lr: 1e-3}
"""


@pytest.fixture
def load(tmp_path):
    """Load the configuration above with overrides."""
    (tmp_path / "my.yaml").write_text(IMAGES)
    return lambda *overrides: load_config(tmp_path / "my.yaml", overrides)


IMAGE_RULES_BROKEN = {
    "probability without mixing": (
        ["regularize.mix_prob=0.5"],
        "regularize.mix_prob (command line): 0.5 has no effect without regularize.mixup or regularize.cutmix",
    ),
    "switching without both": (
        ["regularize.mixup=1", "regularize.switch_prob=0.3"],
        "regularize.switch_prob (command line): 0.3 has no effect unless regularize.mixup and regularize.cutmix",
    ),
    "odd": (
        ["regularize.cutmix=1", "train.accumulate=4"],
        "train.batch_size (line 4): 12 in 4 micro-batches is an odd number of images each",
    ),
    "channels": (
        ["model.in_chans=1"],
        "model.in_chans (command line): 1 does not fit the data: cifar10 has images of 3 channels; set it to 3",
    ),
    "size": (
        ["model.name=vit_mini", "model.image_size=64"],
        "model.image_size (command line): 64 does not fit the data: cifar10 has images of 32 x 32 pixels",
    ),
    "classes": (
        ["model.num_classes=0"],
        "model.num_classes (command line): 0 does not fit the data: cifar10 has 10 classes",
    ),
    "unknown classes": (
        ["data.name=image_folder"],
        "data.options (line 3): data.options.num_classes is missing",
    ),
    "probability": (
        ["regularize.mix_prob=1.5"],
        "regularize.mix_prob (command line): 1.5 given; needs a number >= 0 and <= 1",
    ),
    "typo": (
        ["regularize.mixpu=1"],
        "regularize.mixpu (command line): unknown key; did you mean regularize.mixup?",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), IMAGE_RULES_BROKEN.values(), ids=IMAGE_RULES_BROKEN.keys())
def test_impossible_combinations(load, overrides, message):
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    lines = str(error.value).split("\n  ")[1:]
    assert [line for line in lines if line.startswith(message)] == lines


def test_image_options_follow_the_data(load):
    options = load("data.name=fashion_mnist", "model.name=vit_mini").model.options
    assert (options["in_chans"], options["num_classes"], options["image_size"]) == (1, 10, 28)
    wide = load("data.options.image_size=[32, 64]", "model.name=vit_mini")
    assert wide.model.options["image_size"] == [32, 64]
    assert RunConfig.model_validate(wide.model_dump()) == wide
