"""Run folders: those of an older version are read, those of a newer one are refused."""

import json
import shutil

import pytest

import tost
from tests.regression.make_run import HERE
from tests.train.runs import run
from tost._io import write_json
from tost.errors import CheckpointError, ConfigError
from tost.train.checkpoint.files import resolve_checkpoint, write_manifest
from tost.train.config import load_config
from tost.train.config.files import FORMAT
from tost.train.evaluate.metrics import evaluate_checkpoint


def change(file, **values):
    write_json(file, {**json.loads(file.read_text()), **values})


def test_an_old_run_folder_loads_and_is_evaluated():
    assert tost.load_model(HERE).options.embed_dim == 16
    assert tost.load_model(HERE, ema=True).options.embed_dim == 16
    checkpoint = resolve_checkpoint(HERE, pytest.fail)
    found = evaluate_checkpoint(checkpoint, ema=True)
    expected = json.loads((HERE / "summary.json").read_text())["final"]
    assert found.metrics == pytest.approx(expected, rel=1e-5)


def test_an_old_run_is_resumed(tmp_path):
    config = load_config(HERE / "config.yaml", ["train.steps=6"])
    assert config.regularize.mixup == 0
    options = ["model.name=lra_image", "model.depth=1", "model.num_heads=2", "model.dropout=0.0"]
    options += ["train.ema_decay=0.9", "train.steps=6"]
    result, recorder = run(tmp_path, *options, "model.mlp_ratio=2.0", resume=resolve_checkpoint(HERE, pytest.fail))
    assert result.step == 6
    assert set(recorder.losses) == {5, 6}


def test_old_configurations_may_name_options_that_were_removed(tmp_path):
    text = """
recipe: language_modeling
model: {name: tost_lm_base, embed_dim: 16, num_heads: 2, conv_width: 3, window_every: 0}
data: {name: stdlib_bytes}
train: {steps: 1, batch_size: 1}
optim: {lr: 1.0}
"""
    (tmp_path / "config.yaml").write_text(text)
    write_json(tmp_path / "env.json", {"format": 2})
    assert load_config(tmp_path / "config.yaml").model.options["conv_width"] == 3
    (tmp_path / "env.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.window_every .*unknown key"):
        load_config(tmp_path / "config.yaml")


def test_new_run_folders_carry_their_format(tmp_path):
    run(tmp_path, "train.steps=2", "schedule.warmup_steps=1")
    assert json.loads((tmp_path / "env.json").read_text())["format"] == FORMAT
    last = (tmp_path / "checkpoints" / "last").resolve()
    assert json.loads((last / "state.json").read_text())["format"] == FORMAT


def test_newer_run_folders_are_refused(tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(HERE, copy)
    change(copy / "env.json", format=FORMAT + 1)
    for read in (lambda: tost.load_model(copy), lambda: load_config(copy / "config.yaml")):
        with pytest.raises(CheckpointError, match=rf"has format {FORMAT + 1}, but this version of tost reads formats"):
            read()


def test_newer_checkpoints_are_refused(tmp_path):
    copy = tmp_path / "step-00000004"
    shutil.copytree(HERE / "checkpoints" / copy.name, copy)
    change(copy / "state.json", format=FORMAT + 1)
    write_manifest(copy)
    with pytest.raises(
        CheckpointError, match=rf"step-00000004 has format {FORMAT + 1}, .*written by a newer version: update tost"
    ):
        run(tmp_path / "new", "train.ema_decay=0.9", "model.dropout=0.0", resume=copy)
