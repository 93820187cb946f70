"""`tost eval` on a tiny run of images."""

from __future__ import annotations

import json

import pytest

from tests.recipes.pictures import write_cifar10
from tests.train.runs import Recorder
from tost.recipes import get_task, load_config
from tost.train.loop import fit

TINY = ("model.embed_dim=16", "model.depth=1", "model.num_heads=2")
STEPS = ("train.steps=2", "train.batch_size=8", "schedule.warmup_steps=1", "evaluate.every=1", "train.ema_decay=0.5")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    data = write_cifar10(folder / "data")
    config = load_config("small/cifar10", [f"data.path={data}", *TINY, *STEPS])
    fit(config, get_task(config.recipe), folder / "run", resume=None, reporter=Recorder())
    return folder


def content(outcome):
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out.splitlines()[-1])


def test_run_folder_and_checkpoint_give_the_same_complete_json(run, trained):
    summary = json.loads((trained / "run" / "summary.json").read_text())
    found = content(run("eval", str(trained / "run"), "--ema", "--json"))
    for name, value in summary["final"].items():
        assert found[name] == pytest.approx(value)
    assert found == content(run("eval", str(trained / "run" / "checkpoints" / "last"), "--ema", "--json"))
    assert found["samples"] == 30
    assert [row["samples"] for row in found["classes"]] == [3] * 10
    assert found["classes"][0]["name"] == "airplane"
    assert sum(count for _, _, count in found["confusion"]) == 30
    assert sum(count for label, guess, count in found["confusion"] if label == guess) == round(found["accuracy"] * 30)


def test_files_on_request(run, trained, tmp_path):
    outcome = run("eval", str(trained / "run"), "--out", str(tmp_path / "report"))
    assert outcome.out.splitlines()[-2:] == [str(tmp_path / "report" / f) for f in ("evaluation.json", "confusion.csv")]
    assert json.loads((tmp_path / "report" / "evaluation.json").read_text())["samples"] == 30
    rows = (tmp_path / "report" / "confusion.csv").read_text().splitlines()
    assert rows[0].startswith("label,airplane,automobile,")
    assert len(rows) == 11


def test_weights_by_themselves_need_a_configuration(run, trained):
    weights = trained / "run" / "checkpoints" / "last" / "model.safetensors"
    found = content(
        run("eval", "small/cifar10", f"data.path={trained / 'data'}", *TINY, f"train.init_from={weights}", "--json")
    )
    assert found == content(run("eval", str(trained / "run"), "--json"))


REFUSED = {
    "nothing there": (["nowhere"], "neither a built-in configuration nor a file"),
    "no weights": (["small/cifar10", "data.path=x"], "add train.init_from=PATH"),
    "average of nothing": (["small/cifar10", "data.path=x", "--ema"], "--ema takes the average that a run has kept"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_mistakes_are_explained(refuse, arguments, message):
    refuse(message, "eval", *arguments)


def test_wrong_overrides_and_files_are_explained(refuse, trained, tmp_path):
    refuse("did you mean evaluate.batches", "eval", str(trained / "run"), "evaluate.batchs=1")
    (tmp_path / "weights.pth").write_bytes(b"")
    refuse("tost convert", "eval", str(tmp_path / "weights.pth"))
    refuse("holds no checkpoint", "eval", str(tmp_path))
