"""`tost analyze` on tiny runs and model folders."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from PIL import Image

from tests.models.tiny import make_tiny, perturb
from tests.recipes.pictures import write_cifar10
from tests.train.runs import Recorder
from tost.recipes import get_task, load_config
from tost.train.checkpoint.model import save_model
from tost.train.loop import fit

TINY = ("model.embed_dim=16", "model.depth=2", "model.num_heads=2")
STEPS = ("train.steps=1", "train.batch_size=8", "schedule.warmup_steps=1", "evaluate.every=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyze")
    data = write_cifar10(folder / "data")
    config = load_config("small/cifar10", [f"data.path={data}", *TINY, *STEPS])
    fit(config, get_task(config.recipe), folder / "run", resume=None, reporter=Recorder())
    return folder / "run"


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "bytes"
    torch.manual_seed(0)
    save_model(perturb(make_tiny("tost_lm_base", vocab_size=256, depth=1)), folder)
    return folder


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    monkeypatch.setattr("tost.analysis.plots.DPI", 20)


def content(outcome):
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out.splitlines()[-1])


def test_coding_rate_of_a_run_lands_in_its_folder(run, trained):
    found = content(run("analyze", str(trained), "coding-rate", "--samples", "3", "--json"))
    assert found["out"] == str(trained / "analysis")
    assert {file.name for file in (trained / "analysis").iterdir()} == {
        f"coding-rate.{ending}" for ending in ("png", "svg", "json", "csv")
    }
    with (trained / "analysis" / "coding-rate.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["source"], row["split"]) for row in rows} == {
        ("trained", "train"),
        ("trained", "validation"),
        ("control", "validation"),
    }
    number = found["results"]["coding-rate"]["summary"]["trained, validation: R_c^var falls from layer to layer"]
    assert number in ("0 of 1", "1 of 1")


def test_chosen_layers_get_a_picture_each(run, trained, tmp_path):
    out = ["--out", str(tmp_path)]
    checkpoint = str(trained / "checkpoints" / "last")
    outcome = run("analyze", checkpoint, "membership-maps", *out, "--layers", "0,-1", "--samples", "2")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "membership-maps-layer00.png").is_file()
    assert (tmp_path / "membership-maps-layer01.svg").is_file()
    assert "entropy of memberships" in outcome.out
    assert outcome.out.splitlines()[-1] == str(tmp_path)
    assert "[1/1] membership-maps: 8 files" in outcome.err


def test_images_of_the_user(run, trained, tmp_path):
    for number in range(3):
        Image.new("RGB", (40, 30), (90 * number, 20, 200)).save(tmp_path / f"{number}.png")
    out = ["--out", str(tmp_path / "out"), "--no-control", "--json"]
    found = content(run("analyze", str(trained), "class-attention", "--images", str(tmp_path), *out))
    assert found["results"]["class-attention"]["summary"]["images"] == 3


def test_text_of_the_user(run, language, tmp_path):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 3)
    out = ["--out", str(tmp_path / "out"), "--json"]
    found = content(run("analyze", str(language), "text-memberships", "--text", str(tmp_path / "text.txt"), *out))
    with (tmp_path / "out" / "text-memberships.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert "".join(row["token"] for row in rows) == ("def f(x):\n    return x\n" * 3)[:24]
    assert found["results"]["text-memberships"]["summary"]["tokens"] == 24


def test_all_leaves_out_what_it_cannot_do(run, language, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a text of some length, or so it seems")
    monkeypatch.setattr("tost.analysis.run.list_analyses", lambda: ["class-attention", "subspaces", "heads"])
    out = ["--out", str(tmp_path / "out"), "--json"]
    found = content(run("analyze", str(language), "all", "--text", str(tmp_path / "text.txt"), *out))
    assert list(found["results"]) == ["subspaces", "heads"]
    found = content(run("analyze", str(language), "all", "--text", str(tmp_path / "text.txt"), "--layers", "3", *out))
    assert found["results"] == {}
    assert "there are 1 TSSA layers" in found["skipped"]["heads"]


MISTAKES = {
    "unknown name": (["RUN", "coding-rat"], "did you mean 'coding-rate'"),
    "does not apply": (["RUN", "state-memory"], "These do: coding-rate, membership-maps"),
    "no such folder": (["nowhere", "heads"], "there is no nowhere"),
    "layers": (["RUN", "heads", "--layers", "one"], "--layers 0,4,-1"),
    "no such layer": (["RUN", "heads", "--layers", "7"], "there are 2 TSSA layers: 0 to 1"),
    "no data": (["MODEL", "heads"], "add --images FOLDER or --text FILE"),
    "both": (["MODEL", "heads", "--images", "a", "--text", "b"], "both given"),
    "no images": (["RUN", "heads", "--images", "nowhere"], "there is no image file and no folder"),
    "images for text": (["MODEL", "heads", "--images", "."], "does not read any"),
    "no text": (["MODEL", "heads", "--text", "nowhere"], "cannot read the text from nowhere"),
    "text for images": (["RUN", "heads", "--text", "nowhere"], "does not read tokens"),
}


@pytest.mark.parametrize(("arguments", "hint"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(refuse, trained, language, arguments, hint):
    places = {"RUN": str(trained), "MODEL": str(language)}
    refuse(hint, "analyze", *(places.get(argument, argument) for argument in arguments))
