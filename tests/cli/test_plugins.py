"""Code of other packages on the command line: typed names are allowed, names in files are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tost import _env
from tost.data.registry import DATA_SETS
from tost.models import registry as models_registry
from tost.train import registry

TASK = '''
import tost
from tost.recipes.classification import Classification


@tost.register_task("weighted")
class Weighted(Classification):
    """Classification with weights."""


class Plain(Classification):
    """Classification without weights."""
'''
FORECASTING = '''
import torch
from torch import nn

from tost.data import DataShape
from tost.train import BatchResult, Task


class Linear(nn.Module):
    """Predicts the next values from the last ones.

    Args:
        length: Values that it reads.
        horizon: Values that it predicts.
    """

    def __init__(self, length: int, horizon: int = 4) -> None:
        super().__init__()
        self.map = nn.Linear(length, horizon)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.map(inputs.squeeze(-1))


def waves(count: int = 64, length: int = 16, horizon: int = 4):
    """Sines of random frequency.

    Args:
        count: Training samples.
    """
    generator = torch.Generator().manual_seed(0)
    phase = torch.rand(count + 16, 1, generator=generator) * 6 + torch.arange(length + horizon) / 3
    rows = [{"inputs": x[:length].unsqueeze(-1), "targets": x[length:]} for x in phase.sin()]
    return rows[16:], rows[:16]


class Forecasting(Task):
    """Mean squared error of the next values."""

    metric = "mse"

    def compute(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> BatchResult:
        error = (model(batch["inputs"]) - batch["targets"]).square().mean(dim=-1).sum()
        return BatchResult(error, {"mse": error})
'''
CONFIG = """\
recipe: {recipe}
model: {{name: {model}}}
data: {{name: {data}}}
train: {{steps: 60, batch_size: 10}}
optim: {{lr: 3e-2}}
"""
SMALL = ["train.steps=2", "train.batch_size=8", "model.embed_dim=16", "model.depth=1", "evaluate.batch_size=400"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module beside the user's work, which nothing has imported yet."""
    monkeypatch.setattr(registry.TASKS, "_specs", dict(registry.TASKS._specs))
    monkeypatch.setenv(_env.PLUGINS.name, "")
    monkeypatch.chdir(tmp_path)
    for module in (DATA_SETS, models_registry.MODELS):
        monkeypatch.setattr(module, "_specs", dict(module._specs))
    name = f"stranger_{tmp_path.parent.name}_{tmp_path.name}".replace("-", "_")
    Path(f"{name}.py").write_text(TASK)
    return name


def test_a_name_in_a_file_needs_permission(run, refuse, package):
    run("cp", "demo/digits", "mine.yaml")
    text = Path("mine.yaml").read_text().replace("recipe: classification", f"recipe: {package}:Plain")
    Path("mine.yaml").write_text(text)
    refused = refuse(f"'{package}:Plain' is code outside tost", "validate", "mine.yaml")
    assert f"--plugin {package}" in refused.err
    assert run("validate", "mine.yaml", "--plugin", package).code == 0


def test_a_typed_name_is_permission(run, package):
    assert run("validate", "demo/digits", f"recipe={package}:Plain").code == 0
    assert f"recipe: {package}:Plain" in run("cat", "demo/digits", f"recipe={package}:Plain").out
    assert run("validate", "demo/digits", "recipe=../x:y").code == 2
    assert run("validate", "demo/digits", f"recipe={package}:Plian").err.count("did you mean 'Plain'") == 1


def test_registered_names_are_listed_suggested_trained_and_evaluated(run, package):
    assert "weighted" not in run("ls", "tasks").out
    assert "weighted\tClassification with weights." in run("ls", "tasks", "--plugin", package).out
    assert "did you mean 'weighted'" in run("validate", "demo/digits", "recipe=weigted", "--plugin", package).err
    done = run("train", "demo/digits", "recipe=weighted", *SMALL, "--plugin", package, "--out", "run", "--json")
    assert json.loads(done.out)["step"] == 2
    found = json.loads(run("eval", "run", "--plugin", package, "--json").out.splitlines()[-1])
    assert 0 <= found["accuracy"] <= 1


@pytest.mark.parametrize(
    ("name", "message"),
    [("no package", "is not the name of a package"), ("../x", "is not the name"), ("not_there", "there is no module")],
)
def test_plugins_are_importable_names(refuse, package, name, message):
    refuse(message, "ls", "tasks", "--plugin", name)


def test_forecasting_with_nothing_registered(run, package):
    Path(f"{package}.py").write_text(FORECASTING)
    names = {"recipe": f"{package}:Forecasting", "model": f"{package}:Linear", "data": f"{package}:waves"}
    Path("mine.yaml").write_text(CONFIG.format(**names))
    assert run("validate", "mine.yaml", "model.length=16").code == 2
    plugin = ("--plugin", package)
    shown = run("cat", "mine.yaml", "model.length=16", *plugin).out
    (line,) = [line for line in shown.splitlines() if line.startswith("  length: 16 ")]
    assert line.endswith("# Values that it reads; required")
    assert "# Values that it predicts; default 4" in shown
    assert "# Training samples; default 64" in shown
    assert "did you mean model.horizon?" in run("cat", "mine.yaml", "model.length=16", "model.horzon=2", *plugin).err
    missing = run("validate", "mine.yaml", *plugin)
    assert missing.err.endswith("model.length (line 2): missing; needs a whole number\n")
    done = run("train", "mine.yaml", "model.length=16", *plugin, "--out", "run", "--json")
    assert json.loads(done.out)["mse"] < 0.1
    found = json.loads(run("eval", "run", *plugin, "--json").out.splitlines()[-1])
    assert found["mse"] == pytest.approx(json.loads(done.out)["mse"], rel=1e-4)
    assert run("eval", "run").code == 0  # allowed by the commands before, in this process
    assert run("train", "mine.yaml", "model.length=16", *plugin, "--dry-run").code == 0
