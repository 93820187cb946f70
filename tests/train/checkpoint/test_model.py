"""Model folders, and weights that a run starts from: accepted, refused, written whole or not at all."""

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
from tost.train.checkpoint.files import CheckpointStore, save_tensors, write_manifest
from tost.train.checkpoint.model import (
    load_initial,
    load_weights,
    nearest_name,
    read_saved,
    save_model,
    trained_precision,
)

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


def test_the_precision_of_a_run_is_known(run_folder, tmp_path):
    run, model = run_folder
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("precision: auto", "precision: bf16"))
    save_model(model, run / "checkpoints" / "model")
    assert trained_precision(run) == trained_precision(run / "checkpoints" / "last") == "bf16"
    assert trained_precision(run / "checkpoints" / "model") is None


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


OPTIONS = {"embed_dim": 16, "depth": 1, "num_heads": 2, "class_depth": 1}


def image_model(**options):
    return tost.create_model("tost_mini", **{**OPTIONS, "num_classes": 4, **options})


def never(line):
    raise AssertionError(line)


@pytest.fixture
def saved(tmp_path):
    """Write a model's weights, return the file and the model."""

    def write(**options):
        torch.manual_seed(0)
        model = image_model(**options)
        for buffer in model.buffers():  # batch norm statistics that differ from fresh ones
            buffer.add_(1)
        save_tensors(tmp_path / "model.safetensors", model.state_dict())
        return tmp_path / "model.safetensors", model

    return write


NEW = ("head.weight", "head.bias")


@pytest.mark.parametrize(
    ("there", "here", "head", "fresh"),
    [(4, 4, "fit", ()), (7, 4, "fit", NEW), (0, 4, "fit", NEW), (4, 0, "fit", ()), (4, 4, "new", NEW)],
)
def test_all_is_taken_over_but_a_head_that_is_new(saved, there, here, head, fresh):
    path, source = saved(num_classes=there)
    model = image_model(num_classes=here)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start = load_initial(model, str(path), never, head=head)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name in fresh else source.state_dict()[name]), name
    assert (start.loaded, start.fresh, len(start.sha256)) == (len(before) - len(fresh), fresh, 64)
    assert str(start) == f"started from {path}: {start.loaded} tensors{'; new: ' * bool(fresh)}{', '.join(fresh)}"


def test_the_folder_of_a_model_works_too_and_damage_is_noticed(tmp_path):
    source, model = image_model(), image_model()
    save_model(source, tmp_path / "mine", name="tost_mini")
    assert load_initial(model, str(tmp_path / "mine"), never).fresh == ()
    assert torch.equal(model.cls_token, source.cls_token)
    weights = tmp_path / "mine" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_initial(model, str(tmp_path / "mine"), never)


def test_where_the_head_must_fit_it_is_refused(saved):
    path, _ = saved(num_classes=7)
    with pytest.raises(CheckpointError, match=r"head\.weight: \(7, 16\) there, \(4, 16\) here"):
        load_initial(image_model(), str(path), never, head="same")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"in_chans": 1},
            r"1 of \d+ tensors differ.*\n  patch_embed\.proj\.0\.0\.weight: \(8, 1, 3, 3\) there, \(8, 3",
        ),
        ({"depth": 2}, r"blocks\.1\.norm1\.weight: \(16,\) there, unknown here"),
        ({"class_depth": 2}, r"there, unknown here\n  choose model\.name and its options as they were there"),
        ({"embed_dim": 32}, r"\d+ of \d+ tensors differ; nothing was loaded.*\n  and \d+ more\n  choose"),
        ({"embed_dim": 32, "num_classes": 9}, r"cls_token: \(1, 1, 32\) there, \(1, 1, 16\) here"),
    ],
)
def test_other_models_are_refused_with_what_differs(saved, options, message):
    path, _ = saved(**options)
    model = image_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="(?s)" + message) as error:
        load_initial(model, str(path), never)
    assert "head.bias: (4,)" not in str(error.value)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_places_without_weights_are_named_and_pickles_stay_unread(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"whatever")
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, message in {
        "checkpoint.pt": r"is a pickle, which is never opened here.*`tost convert`",
        "nowhere": r"there is no .*nowhere; train\.init_from takes a run folder",
        "empty": r"holds no weights; needed are a run folder",
        "run": "holds no checkpoint",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            load_initial(image_model(), str(tmp_path / name), never)


def test_heads_with_a_hidden_layer_keep_what_does_not_depend_on_the_classes():
    options = {"embed_dim": 16, "depth": 1, "num_heads": 2, "max_length": 8}
    source, model = (tost.create_model("lra_image", **options, num_classes=count) for count in (3, 5))
    assert load_weights(model, source.state_dict(), "x", head="fit") == ("head.2.weight",)
    assert torch.equal(model.head[0].weight, source.head[0].weight)
