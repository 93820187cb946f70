"""Tasks of other packages: registered by decorator, found by name, refused unless they are allowed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tost
from tost import _env
from tost.errors import ConfigError
from tost.recipes import get_task, list_tasks, load_config, task_spec
from tost.recipes.classification import Classification
from tost.train import BatchResult, Task, registry


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Forget what a test registers and allows."""
    monkeypatch.setattr(registry.TASKS, "_specs", dict(registry.TASKS._specs))
    monkeypatch.delenv(_env.PLUGINS.name, raising=False)


class Forecasting(Task):
    """Squared error of real numbers."""

    def compute(self, model, batch):
        error = model(batch["inputs"]) - batch["targets"]
        return BatchResult(error.square().mean(dim=-1).sum(), {"mae": error.abs().mean(dim=-1).sum()})


def test_a_task_needs_one_method():
    class Half(Task):
        metric = "accuracy"

    with pytest.raises(TypeError, match="abstract"):
        Half()
    with pytest.raises(ConfigError, match=r"Half is no task yet; it lacks: compute\."):
        tost.register_task("half")(Half)


def test_defaults_of_a_task():
    batch = {"inputs": torch.ones(3, 5, 2), "targets": torch.zeros(3, 4)}
    task = Forecasting()
    found = task.compute(lambda inputs: torch.ones(3, 4), batch)
    assert (task.terms(batch), task.tokens(batch), task.metric) == (3, 15, "loss")
    assert task.tokens({"inputs": torch.zeros(3, 5, dtype=torch.int64)}) == 15
    assert task.metrics({"loss": found.loss.item(), "mae": found.sums["mae"].item()}, 3) == {"loss": 1.0, "mae": 1.0}
    assert task.training_batch(batch, None, 0) is batch
    assert task.flops(nn.Linear(1, 1), batch) is None
    assert task.details({}, None).tables == ()


def test_registered_tasks_are_listed_and_found():
    assert tost.register_task("forecasting", description="numbers to come")(Forecasting) is Forecasting
    tost.register_task("forecasting_2")(Forecasting)
    assert "forecasting" in list_tasks()
    assert task_spec("forecasting").description == "numbers to come"
    assert task_spec("forecasting_2").description == "Squared error of real numbers."
    assert isinstance(get_task("forecasting"), Forecasting)
    with pytest.raises(ConfigError, match="did you mean 'forecasting'"):
        get_task("forecastin")
    with pytest.raises(ConfigError, match="there is a task 'forecasting' already"):
        tost.register_task("forecasting")(Forecasting)


@pytest.mark.parametrize("wrong", [3, nn.Linear, Forecasting()], ids=["number", "module", "instance"])
def test_what_is_no_task_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"a task is a class that derives from tost\.train\.Task"):
        tost.register_task("wrong")(wrong)


def test_a_derived_task_takes_models_and_data_of_its_base():
    @tost.register_task("brier")
    class Brier(Classification):
        pass

    assert task_spec("brier").bases == ("classification",)
    assert load_config("demo/digits", ["recipe=brier"]).recipe == "brier"
    tost.register_task("forecasting")(Forecasting)
    with pytest.raises(ConfigError, match="digits is for the recipe classification, but this is forecasting"):
        load_config("demo/digits", ["recipe=forecasting"])


def test_code_is_loaded_only_if_its_package_is_allowed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tasks_of_others.py").write_text(
        "from tost.recipes.classification import Classification\n\n\nclass Mine(Classification):\n    pass\n"
    )
    with pytest.raises(ConfigError, match=r"recipe \(command line\): 'tasks_of_others:Mine' is code outside tost"):
        load_config("demo/digits", ["recipe=tasks_of_others:Mine"])
    monkeypatch.setenv(_env.PLUGINS.name, "tasks_of_others")
    config = load_config("demo/digits", ["recipe=tasks_of_others:Mine"])
    assert type(get_task(config.recipe)).__name__ == "Mine"
    with pytest.raises(ConfigError, match="tasks_of_others has no 'Mina'; did you mean 'Mine'"):
        load_config("demo/digits", ["recipe=tasks_of_others:Mina"])
