"""Recipes and configurations by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tost import recipes
from tost.data import find_data, list_data
from tost.errors import ConfigError
from tost.models import list_models
from tost.recipes import find_config, get_task, list_configs, list_tasks, load_config, task_spec

DEMOS = ["demo/digits", "demo/listops", "demo/stdlib_bytes"]


def test_tasks_are_listed():
    assert list_tasks("lang*") == ["language_modeling"]


@pytest.mark.parametrize("name", list_tasks())
def test_recipes_can_be_carried_out(name):
    task = get_task(name)
    assert task.metric
    assert task_spec(name).description


def test_unknown_recipes_get_a_suggestion():
    with pytest.raises(ConfigError, match=r"there is no task 'klassification'; did you mean 'classification'\?"):
        get_task("klassification")
    with pytest.raises(ConfigError, match="tasks: classification, image_classification, language_modeling"):
        task_spec("x")


def test_configs_are_found_by_name_and_pattern():
    assert set(DEMOS) <= set(list_configs())
    assert list_configs("demo/*") == DEMOS
    assert list_configs("nothing*") == []
    for name in list_configs():
        assert find_config(name).is_file()


def test_files_work_like_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("my.yaml", "my.yml", "plain"):
        Path(file).write_bytes(find_config("demo/digits").read_bytes())
        assert find_config(file) == Path(file)
        assert load_config(file) == load_config("demo/digits")
        assert load_config(str(tmp_path / file)) == load_config("demo/digits")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo/digitz", "demo/digitz: neither a built-in configuration nor a file; did you mean demo/digits?"),
        ("digits", "did you mean demo/digits?"),
        ("zzz", "`tost ls configs` lists the built-in ones"),
        ("none.yaml", "none.yaml: there is no such file"),
        (".", "is a folder; give the YAML file in it"),
        ("../configs/demo/digits", "neither a built-in configuration nor a file"),
    ],
)
def test_configs_that_do_not_exist(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config(name)
    assert message in str(error.value)


def test_recipe_model_and_data_have_to_fit():
    with pytest.raises(ConfigError) as error:
        load_config("demo/digits", ["recipe=language_modeling"])
    models = ", ".join(list_models(task="language_modeling"))
    data = ", ".join(name for name in list_data() if find_data(name).task == "language_modeling")
    assert str(error.value).splitlines() == [
        "demo/digits cannot be used, 2 problems:",
        "  model.name (line 7): tost_sequence is a model for classification, but the recipe language_modeling trains: "
        f"{models}",
        "  data.name (line 8): digits is for the recipe classification, but this is language_modeling, "
        f"which takes: {data}",
    ]
    with pytest.raises(
        ConfigError, match=r"recipe \(command line\): there is no task 'langage_modeling'; did you mean"
    ):
        load_config("demo/digits", ["recipe=langage_modeling"])


def test_sections_of_other_recipes_are_not_ignored():
    with pytest.raises(ConfigError, match=r"regularize.mixup \(command line\): 0.8 given, but the recipe"):
        load_config("demo/digits", ["regularize.mixup=0.8", "regularize.label_smoothing=0.1"])
    assert load_config("demo/digits", ["regularize.mixup=0"])


def test_images_are_not_shared_out():
    with pytest.raises(ConfigError, match=r"parallel.context \(command line\): 2 processes cannot share a sample"):
        load_config("small/cifar10", ["data.path=x", "parallel.context=2"])


def test_one_recipe_trains_several_networks():
    for name in ("tost_mini", "vit_mini", "crate_mini", "xcit_mini", "softmax_mini"):
        assert load_config("small/cifar10", ["data.path=x", f"model.name={name}"]).model.name == name
    with pytest.raises(ConfigError, match="lra_image is a model for classification, but the recipe image_class"):
        load_config("small/cifar10", ["data.path=x", "model.name=lra_image"])


def test_every_problem_of_an_unfitting_recipe_comes_at_once():
    with pytest.raises(ConfigError, match="3 problems"):
        load_config("demo/digits", ["recipe=language_modeling", "lr=1"])


def test_registry_loads_no_torch():
    probe = "import sys; from tost.recipes import *; list_configs(); list_tasks(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_unknown_names_of_the_package_are_refused():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = recipes.no_such_name
    assert set(recipes.__all__) <= set(dir(recipes))
