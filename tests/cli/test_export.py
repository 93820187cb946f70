"""`tost export`: options reach the exporter, and mistakes are found before it starts."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tost
from tost.train.checkpoint.model import save_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    save_model(tost.create_model("vit_mini", depth=1), folder)
    return str(folder)


def test_a_model_folder(run, source, tmp_path):
    out = tmp_path / "out"
    np.savez(tmp_path / "data.npz", images=np.random.default_rng(0).random((20, 3, 32, 32)))
    data = str(tmp_path / "data.npz")
    outcome = run("export", source, "--to", "openvino", "--out", str(out), "--int8", "--data", data, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out.splitlines()[-1])
    assert (found["format"], found["precision"], found["kind"]) == ("openvino", "int8", "images")
    assert found["bytes"] == sum(path.stat().st_size for path in out.glob("model.*"))
    about = json.loads((out / "export.json").read_text())
    assert about["inputs"] == [{"name": "images", "dtype": "float32", "shape": ["batch", 3, 32, 32]}]


def test_a_run_is_quantized_on_its_data_and_measured(run, tmp_path):
    settings = ("train.steps=2", "model.depth=1", "train.batch_size=8", "evaluate.batches=2", "data.workers=0")
    trained = run("train", "demo/digits", *settings, "--out", str(tmp_path / "run"))
    assert trained.code == 0, trained.err
    outcome = run(
        "export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--int8", "--samples", "20", "--json"
    )
    assert outcome.code == 0, outcome.err
    metrics = json.loads(outcome.out.splitlines()[-1])["metrics"]
    assert metrics["before"].keys() == metrics["after"].keys() >= {"accuracy", "loss"}
    assert metrics["after"]["loss"] == pytest.approx(metrics["before"]["loss"], rel=0.05)
    assert metrics["after"]["loss"] != metrics["before"]["loss"]


def test_the_tokenizer_comes_along(run, tmp_path):
    settings = ("train.steps=1", "model.depth=1", "model.embed_dim=32", "train.batch_size=2", "evaluate.batches=1")
    run("train", "demo/stdlib_bytes", *settings, "--out", str(tmp_path / "run"))
    outcome = run("export", str(tmp_path / "run"), "--out", str(tmp_path / "out"))
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "out" / "tokenizer_record.json").is_file()


MISTAKES = {
    "no run": (("--int8",), "give inputs with --data FILE.npz"),
    "data without int8": (("--data", "x.npz"), "add --int8"),
    "override without int8": (("data.path=x",), "leave it out"),
    "no file": (("--int8", "--data", "none.npz"), "cannot read inputs from none.npz"),
    "size": (("--image-size", "big"), "write for example 224"),
    "opset": (("--opset", "7"), "use one of 18 to 23"),
}


@pytest.mark.parametrize(("options", "hint"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes(refuse, source, tmp_path, options, hint):
    refuse(hint, "export", source, "--out", str(tmp_path / "out"), *options)
    assert not (tmp_path / "out").exists()
