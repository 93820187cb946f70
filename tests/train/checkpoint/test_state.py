"""Checkpoints whose hashes are right and whose content is not, and those with names of earlier versions."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.train.runs import assert_same_run, run
from tost.errors import CheckpointError, TostError
from tost.models.renamed import former_name
from tost.train.checkpoint.files import write_manifest

OPTIONS = ("train.ema_decay=0.9", "train.steps=6", "checkpoint.every=3", "evaluate.every=6")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run(out / "run", *OPTIONS)
    return out / "run"


def tampered(finished, folder, name, change):
    """Return a copy of a checkpoint with one file changed, and hashes that fit."""
    copy = folder / "checkpoints" / "step-00000003"
    shutil.copytree(finished / "checkpoints" / copy.name, copy)
    content = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(change(content)))
    write_manifest(copy)
    shutil.copy(finished / "config.yaml", folder)
    return copy


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {},
        lambda state: [],
        lambda state: {key: value for key, value in state.items() if key != "groups"},
        lambda state: {**state, "step": "3"},
        lambda state: {**state, "step": -3},
        lambda state: {**state, "metrics": 1},
        lambda state: {**state, "groups": [[]]},
        lambda state: {**state, "groups": 5},
        lambda state: {**state, "groups": [{"params": ["nothing"]}]},
        lambda state: {**state, "loader": {}},
        lambda state: {**state, "loader": [1]},
        lambda state: {**state, "loader": dict.fromkeys(state["loader"], "first")},
        lambda state: {**state, "data": 7},
        lambda state: {**state, "format": 0},
        lambda state: {**state, "format": True},
        lambda state: {**state, "format": [2]},
    ],
)
def test_a_changed_state_is_refused_in_words(finished, tmp_path, change):
    start = tampered(finished, tmp_path / "old", "state.json", change)
    with pytest.raises(CheckpointError, match="step-00000003"):
        run(tmp_path / "new", *OPTIONS, resume=start)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {},
        lambda state: [],
        lambda state: {**state, "torch": "zz"},
        lambda state: {**state, "torch": "00"},
        lambda state: {**state, "python": 3},
        lambda state: {**state, "python": [3, [1, 2], None]},
    ],
)
def test_changed_random_numbers_are_refused_in_words(finished, tmp_path, change):
    start = tampered(finished, tmp_path / "old", "random-00000.json", change)
    with pytest.raises(CheckpointError, match="step-00000003"):
        run(tmp_path / "new", *OPTIONS, resume=start)


def test_deep_json_is_refused_in_words(finished, tmp_path):
    start = tampered(finished, tmp_path / "old", "state.json", dict)
    (start / "state.json").write_text("[" * 10**6)
    write_manifest(start)
    with pytest.raises(TostError, match="not JSON"):
        run(tmp_path / "new", *OPTIONS, resume=start)


def test_a_checkpoint_with_former_names_is_resumed_exactly(tmp_path):
    """Parameters of convolutions had another name in the first version: in weights, optimizer and averages."""
    sizes = ("model.max_length=32", "data.options.length=32", "model.conv_width=3", "checkpoint.best_metric=loss")
    options = (*OPTIONS, *sizes)
    run(tmp_path / "whole", *options, config="demo/stdlib_bytes")
    old = tmp_path / "cut" / "checkpoints" / "step-00000003"
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", symlinks=True)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000006")
    (tmp_path / "cut" / "checkpoints" / "last").unlink()
    renamed = 0
    for name in ("model", "optimizer", "ema"):
        tensors = load_file(old / f"{name}.safetensors")
        former = {_former(key): value for key, value in tensors.items()}
        renamed += len(former.keys() - tensors.keys())
        save_file(former, old / f"{name}.safetensors")
    state = json.loads((old / "state.json").read_text())
    for group in state["groups"]:
        group["params"] = [former_name(name) for name in group["params"]]
    (old / "state.json").write_text(json.dumps(state))
    write_manifest(old)
    assert renamed > 3
    run(tmp_path / "cut", *options, config="demo/stdlib_bytes", resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def _former(key):
    name, slash, quantity = key.partition("/")
    return f"{former_name(name)}{slash}{quantity}"
