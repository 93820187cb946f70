"""Model folders: written whole or not at all, loaded again bit by bit, never at the cost of anything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import tost
from tost.errors import CheckpointError, ConfigError, StorageError
from tost.recipes import load_config
from tost.train import dump_config
from tost.train.checkpoint.files import CheckpointStore, resolve_checkpoint, save_tensors, write_manifest
from tost.train.checkpoint.model import nearest_name, read_saved, save_model

MODELS = {
    "tost_lm_base": {"embed_dim": 8, "depth": 1, "num_heads": 2, "vocab_size": 11, "max_length": 8, "dropout": 0.1},
    "lra_image": {"embed_dim": 8, "depth": 1, "num_heads": 2},
    "tost_small_patch8_224": {"embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3},
    "crate_tiny_patch16_224": {"embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3, "image_size": 32},
}


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def small_model() -> nn.Module:
    return tost.create_model("tost_lm_base", **MODELS["tost_lm_base"])


@pytest.fixture
def folder(tmp_path) -> Path:
    save_model(small_model(), tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_comes_back(name, tmp_path):
    model = tost.create_model(name, **MODELS[name])
    save_model(model, tmp_path / "mine", name=name)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == [
        "manifest.json",
        "model.json",
        "model.safetensors",
    ]
    again = tost.load_model(tmp_path / "mine")
    assert again.options == model.options
    assert same(again, model)
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_a_model_folder_is_read_as_a_checkpoint_is(folder):
    assert resolve_checkpoint(folder, print) == folder


@pytest.fixture
def run_folder(tmp_path) -> tuple[Path, nn.Module]:
    """A run as the engine leaves it, with two checkpoints; averages are three times the weights."""
    sizes = ("embed_dim=8", "depth=1", "num_heads=2")
    config = load_config("demo/stdlib_bytes", [f"model.{text}" for text in sizes])
    run = tmp_path / "run"
    store = CheckpointStore(run / "checkpoints")
    for step in (10, 20):
        model = tost.create_model(config.model.name, **config.model.options)
        temporary = store.prepare(step)
        save_tensors(temporary / "model.safetensors", model.state_dict())
        save_tensors(temporary / "ema.safetensors", {name: 3 * p for name, p in model.named_parameters()})
        store.commit(step)
    (run / "config.yaml").write_text(dump_config(config))
    return run, model


def test_a_run_is_loaded_from_its_newest_checkpoint(run_folder):
    run, model = run_folder
    assert same(tost.load_model(run), model)
    assert tost.load_model(run).options == model.options
    assert same(tost.load_model(run / "checkpoints" / "last"), model)
    assert not same(tost.load_model(run / "checkpoints" / "step-00000010"), model)
    average = tost.load_model(run, ema=True)
    for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, 3 * theirs)


def test_averages_leave_buffers_as_they_are(tmp_path):
    model = tost.create_model("tost_small_patch8_224", **MODELS["tost_small_patch8_224"])
    save_model(model, tmp_path / "mine")
    # Put in by hand what only a run writes.
    save_tensors(tmp_path / "mine" / "ema.safetensors", {name: 2 * p for name, p in model.named_parameters()})
    write_manifest(tmp_path / "mine")
    saved = read_saved(tmp_path / "mine", ema=True)
    assert torch.equal(saved.tensors["head.weight"], 2 * model.head.weight)
    assert saved.tensors.keys() == model.state_dict().keys()


def test_a_damaged_checkpoint_is_reported_and_passed_over(run_folder):
    run, model = run_folder
    file = run / "checkpoints" / "step-00000020" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    lines: list[str] = []
    read_saved(run, report=lines.append)
    assert "step-00000020 is damaged" in lines[0]
    assert not same(tost.load_model(run), model)


def test_a_checkpoint_without_its_run_is_refused(run_folder):
    run, _ = run_folder
    (run / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="its model is not known"):
        tost.load_model(run)


def test_a_run_of_another_version_is_refused(run_folder):
    run, _ = run_folder
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("depth: 1", "depth: 1\n  novelty: 3"))
    with pytest.raises(CheckpointError, match=r"this version cannot build[\s\S]*novelty"):
        tost.load_model(run)
    config.write_text("recipe: language_modeling\n")
    with pytest.raises(CheckpointError, match="names no model"):
        tost.load_model(run)


def rewrite(folder: Path, **changes: object) -> None:
    """Change the description, and the manifest with it."""
    file = folder / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    write_manifest(folder)


def test_damage_is_refused(folder):
    with pytest.raises(CheckpointError, match="no moving average"):
        tost.load_model(folder, ema=True)
    (folder / "model.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"damaged: model.json has 2 bytes"):
        tost.load_model(folder)
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    with pytest.raises(CheckpointError, match="does not describe a model"):
        tost.load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "has format 2, this version reads 1"),
        ({"name": "tost_lm_huge"}, "cannot build: there is no model 'tost_lm_huge'"),
        ({"options": {"depth": 0}}, "cannot build: .*depth: 0 given"),
    ],
)
def test_descriptions_that_cannot_be_built_are_refused(folder, changes, message):
    rewrite(folder, **changes)
    with pytest.raises(CheckpointError, match=message.replace(".*", r"[\s\S]*")):
        tost.load_model(folder)


def test_weights_that_do_not_fit_are_listed(folder):
    options = json.loads((folder / "model.json").read_text())["options"]
    rewrite(folder, options=options | {"depth": 2, "vocab_size": 12, "layer_scale": None})
    with pytest.raises(CheckpointError) as caught:
        tost.load_model(folder)
    for text in (
        "blocks.1.norm1.weight: missing there, (8,) here",
        "blocks.0.gamma1: (8,) there, unknown here",
        "tokens.weight: (11, 8) there, (12, 8) here",
    ):
        assert text in str(caught.value)


def test_only_a_model_folder_is_replaced_and_only_by_force(folder, tmp_path):
    old, new = tost.load_model(folder), small_model()
    with pytest.raises(ConfigError, match="add --force"):
        save_model(new, folder)
    assert same(tost.load_model(folder), old)
    save_model(new, folder, force=True)
    assert same(tost.load_model(folder), new)
    (folder / "notes.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"also notes.txt, which would be lost"):
        save_model(old, folder, force=True)
    other = tmp_path / "other"
    other.mkdir()
    save_model(old, other)  # an empty folder is nothing to lose
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("precious")
    for place, message in {
        "file": "not a folder",
        "link": "not a folder",
        "thesis": "other things in it",
        "no/such": "does not exist",
    }.items():
        with pytest.raises(ConfigError, match=message):
            save_model(old, tmp_path / place, force=True)
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "precious"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_a_full_disk_leaves_the_old_model(folder, monkeypatch):
    old = tost.load_model(folder)

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tost.train.checkpoint.model.save_tensors", fail)
    with pytest.raises(StorageError, match="No space left"):
        save_model(small_model(), folder, force=True)
    assert same(tost.load_model(folder), old)
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "name", ["tost_lm_medium", "tost_small_24_patch8_224", "xcit_medium_nolpi_patch16_224", "lra_listops"]
)
def test_nearest_name_of_a_registered_model_is_its_own(name):
    assert nearest_name(tost.models.model_options(name, {"dropout": 0.3})) == name


def test_a_folder_that_cannot_be_replaced_is_left_as_it_was(folder, monkeypatch):
    """Whatever fails, one of the two models is there."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    original = Path.rename

    def rename(path, target):
        if path.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StorageError, match="Input/output error"):
        save_model(tost.load_model(folder), folder, force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
