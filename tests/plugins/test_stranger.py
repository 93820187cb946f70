"""A package that tost has never heard of, installed with entry points: everything works with what it adds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MODULE = '''
"""A model, a mixer and a data set of a stranger."""
from pathlib import Path

import torch
from torch import Tensor, nn

import tost
from tost.data import DataShape, TensorDataset

Path("imported").touch()  # so that a test can see whether this ran


@tost.register_data("dots", task="image_classification", shape=DataShape(
    input="image", num_classes=2, in_chans=1, image_size=(8, 8)))
def dots(count: int = 64, seed: int = 0):
    """Bright and dark images."""
    images = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(count) % 2
    rows = {"inputs": images + labels[:, None, None, None], "targets": labels}
    return TensorDataset(rows), TensorDataset({key: value[:16] for key, value in rows.items()})


@tost.register_mixer("half_mean")
class HalfMean(nn.Module):
    """Adds the mean of all tokens to each."""

    def __init__(self, embed_dim: int, num_heads: int, share: float = 0.5) -> None:
        super().__init__()
        self.share, self.out = share, nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.out((1 - self.share) * x + self.share * x.mean(dim=1, keepdim=True))


@tost.register_model("brightness", tasks=("image_classification",), description="mean of the pixels")
class Brightness(nn.Module):
    def __init__(self, num_classes: int, in_chans: int = 1, image_size: int = 8, sharpness: float = 1.0) -> None:
        super().__init__()
        self.sharpness, self.head = sharpness, nn.Linear(in_chans, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.sharpness * images.mean(dim=(2, 3)))
'''
ENTRY_POINTS = """
[tost.models]
brightness = stranger.things:Brightness

[tost.mixers]
half_mean = stranger.things:HalfMean

[tost.data]
dots = stranger.things:dots
"""
CONFIG = """
recipe: image_classification
model: {name: brightness}
data: {name: dots, options: {count: 48}}
train: {steps: 4, batch_size: 8}
optim: {lr: 1e-2}
evaluate: {every: 2, batch_size: 8}
"""


@pytest.fixture
def installed(tmp_path) -> Path:
    """A folder with the package and its metadata, as an installer leaves them; a configuration beside it."""
    site = tmp_path / "site"
    metadata = site / "stranger-1.0.dist-info"
    (site / "stranger").mkdir(parents=True)
    metadata.mkdir()
    (site / "stranger" / "__init__.py").write_text("")
    (site / "stranger" / "things.py").write_text(MODULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    return site


def test_show_train_resume_and_evaluate(installed, tost_in):
    outputs = []
    for command in (
        "cat mine.yaml",
        "train mine.yaml --out run",
        "train mine.yaml train.steps=6 --out run --resume auto",
        "eval run --json",
    ):
        done = tost_in(*command.split(), path=installed)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert all(text in outputs[0] for text in ("sharpness: 1.0", "num_classes: 2", "count: 48")), "model and data too"
    assert "accuracy" in json.loads(outputs[-1].splitlines()[-1])


@pytest.mark.parametrize(("kind", "name"), [("models", "brightness"), ("mixers", "half_mean"), ("data", "dots")])
def test_ls_lists_without_importing(installed, tost_in, tmp_path, kind, name):
    done = tost_in("ls", kind, path=installed)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
    assert not (tmp_path / "imported").exists()
    assert name not in tost_in("ls", kind).stdout, "only where the package is installed"


def test_typos_are_answered_with_names_of_others(installed, tost_in):
    for typos, meant in {
        ("model.sharpnes=2", "data.options.cuont=2"): ("model.sharpness", "data.options.count"),
        ("model.name=brightnes", "data.name=dot"): ("'brightness'", "'dots'"),
    }.items():
        done = tost_in("validate", "mine.yaml", *typos, path=installed)
        assert done.returncode == 2
        assert all(f"did you mean {name}?" in done.stderr for name in meant)


def test_a_mixer_of_others_fits_into_a_model_of_tost(installed, tost_in):
    changes = ["model.name=tost_mini", "model.mixer=half_mean", "model.mixer_options.share=0.25", "model.depth=1"]
    done = tost_in("train", "mine.yaml", *changes, "train.steps=2", "--out", "run", path=installed)
    assert done.returncode == 0, done.stderr
    shown = tost_in("cat", "run/config.yaml", path=installed)
    assert "half_mean" in shown.stdout, shown.stderr
    assert "0.25" in shown.stdout


@pytest.mark.parametrize(
    ("command", "key"),
    [("validate", "model"), ("validate", "data"), ("validate", "recipe"), ("train", "model"), ("cat", "data")],
)
def test_a_file_cannot_import_code(installed, tost_in, tmp_path, command, key):
    names = {"model": "stranger.things:Brightness", "data": "stranger.things:dots", "recipe": "stranger.things:Task"}
    given = {"model": "tost_mini", "data": "cifar10", "recipe": "image_classification", key: names[key]}
    (tmp_path / "theirs.yaml").write_text(
        f"recipe: {given['recipe']}\nmodel: {{name: {given['model']}}}\ndata: {{name: {given['data']}, path: x}}\n"
        "train: {steps: 1, batch_size: 8}\noptim: {lr: 1e-2}\n"
    )
    done = tost_in(command, "theirs.yaml", path=installed)
    assert done.returncode == 2, done.stdout
    assert "--plugin stranger" in done.stderr
    assert not (tmp_path / "imported").exists(), "nothing may be imported"
    assert not (tmp_path / "runs").exists(), "nothing may be written"


def test_a_run_folder_cannot_import_code(installed, tost_in, tmp_path):
    changes = ["model.name=stranger.things:Brightness", "train.steps=2"]
    done = tost_in("train", "mine.yaml", *changes, "--out", "run", path=installed)
    assert done.returncode == 0, done.stderr
    (tmp_path / "imported").unlink()
    (installed / "stranger-1.0.dist-info" / "entry_points.txt").write_text("")
    done = tost_in("eval", "run", path=installed)
    assert done.returncode == 2, done.stdout
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("how", ["typed", "option", "variable"])
def test_a_name_that_is_allowed_is_imported(installed, tost_in, tmp_path, how):
    (installed / "stranger-1.0.dist-info" / "entry_points.txt").write_text("")
    name = "stranger.things:Brightness"
    (tmp_path / "theirs.yaml").write_text(CONFIG.replace("brightness", name).replace("dots", "stranger.things:dots"))
    allowed = {
        "typed": ([f"model.name={name}", "data.name=stranger.things:dots"], {}),
        "option": (["--plugin", "stranger"], {}),
        "variable": ([], {"TOST_PLUGINS": "stranger"}),
    }
    arguments, variables = allowed[how]
    done = tost_in("validate", "theirs.yaml", *arguments, path=installed, **variables)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "imported").exists()
