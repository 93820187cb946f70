"""Tasks and configurations by name; tasks of other packages are refused unless they are allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tost
from tost import _env
from tost.data import find_data, list_data
from tost.errors import ConfigError
from tost.models import list_models
from tost.recipes import find_config, get_task, list_configs, list_tasks, load_config, task_spec
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


def test_configurations_are_found_by_name_pattern_and_file(tmp_path, monkeypatch):
    assert list_configs("demo/*") == ["demo/digits", "demo/listops", "demo/stdlib_bytes"]
    assert list_configs("nothing*") == []
    monkeypatch.chdir(tmp_path)
    for file in ("my.yaml", "my.yml", "plain"):
        Path(file).write_bytes(find_config("demo/digits").read_bytes())
        assert find_config(file) == Path(file)
        assert load_config(file) == load_config(str(tmp_path / file)) == load_config("demo/digits")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo/digitz", "demo/digitz: neither a built-in configuration nor a file; did you mean demo/digits?"),
        ("digits", "did you mean demo/digits?"),
        ("zzz", "`tost ls configs` lists the built-in ones"),
        ("none.yaml", "none.yaml: there is no such file"),
        (".", "is a folder; give the YAML file in it"),
    ],
)
def test_configurations_that_do_not_exist(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config(name)
    assert message in str(error.value)


def test_recipe_model_and_data_have_to_fit():
    with pytest.raises(ConfigError) as error:
        load_config("demo/digits", ["recipe=language_modeling", "lr=1"])
    models = ", ".join(list_models(task="language_modeling"))
    data = ", ".join(name for name in list_data() if find_data(name).task == "language_modeling")
    assert str(error.value).splitlines() == [
        "demo/digits cannot be used, 3 problems:",
        "  lr (command line): unknown key; did you mean optim.lr?",
        "  model.name (line 7): tost_sequence is a model for classification, but the recipe language_modeling trains: "
        f"{models}",
        "  data.name (line 8): digits is for the recipe classification, but this is language_modeling, "
        f"which takes: {data}",
    ]
