"""Checkpoints whose hashes are right and whose content is not, and those with names of earlier versions."""

import json
import shutil

import pytest

from tests.train.runs import run
from tost.errors import CheckpointError, TostError
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


STATES = [
    lambda state: {},
    lambda state: [],
    lambda state: {key: value for key, value in state.items() if key != "groups"},
    lambda state: {**state, "step": "3"},
    lambda state: {**state, "step": -3},
    lambda state: {**state, "step": True},
    lambda state: {**state, "step": 10**21},
    lambda state: {**state, "best": []},
    lambda state: {**state, "best": "0.5"},
    lambda state: {**state, "metrics": 1},
    lambda state: {**state, "groups": [[]]},
    lambda state: {**state, "groups": 5},
    lambda state: {**state, "groups": [{"params": ["nothing"]}]},
    lambda state: {**state, "loader": {}},
    lambda state: {**state, "loader": [1]},
    lambda state: {**state, "loader": dict.fromkeys(state["loader"], "first")},
    lambda state: {**state, "loader": {"global_position": 10**21}},
    lambda state: {**state, "data": 7},
    lambda state: {**state, "format": 0},
    lambda state: {**state, "format": True},
    lambda state: {**state, "format": [2]},
]
RANDOM_NUMBERS = [
    lambda state: {},
    lambda state: [],
    lambda state: {**state, "torch": "zz"},
    lambda state: {**state, "torch": "00"},
    lambda state: {**state, "python": 3},
    lambda state: {**state, "python": [3, [1, 2], None]},
]


@pytest.mark.parametrize(
    ("name", "change"),
    [*(("state.json", change) for change in STATES), *(("random-00000.json", change) for change in RANDOM_NUMBERS)],
)
def test_changed_content_with_right_hashes_is_refused_by_name(finished, tmp_path, name, change):
    start = tampered(finished, tmp_path / "old", name, change)
    with pytest.raises(CheckpointError, match="step-00000003"):
        run(tmp_path / "new", *OPTIONS, resume=start)


def test_deep_json_is_refused_in_words(finished, tmp_path):
    start = tampered(finished, tmp_path / "old", "state.json", dict)
    (start / "state.json").write_text("[" * 10**6)
    write_manifest(start)
    with pytest.raises(TostError, match="not JSON"):
        run(tmp_path / "new", *OPTIONS, resume=start)
