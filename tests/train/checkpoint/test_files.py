"""Checkpoints are whole or absent, damage is noticed, and nothing is ever unpickled."""

import json
import pickle
import random

import pytest
import torch
from safetensors import SafetensorError

from tost._io import write_json
from tost.errors import CheckpointError
from tost.train.checkpoint import files as checkpoint
from tost.train.checkpoint.files import (
    CheckpointStore,
    load_tensors,
    pack_rng,
    resolve_checkpoint,
    restore_rng,
    save_tensors,
)


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return CheckpointStore(folder, keep=2)


def write(store, step, best=False):
    folder = store.prepare(step)
    save_tensors(folder / "model.safetensors", {"w": torch.full((3,), float(step))})
    write_json(folder / "state.json", {"step": step})
    return store.commit(step, best=best)


def steps_in(store):
    return sorted(int(path.name.removeprefix("step-")) for path in store.folder.glob("step-*"))


def test_newest_checkpoints_and_the_best_are_kept(store):
    for step in (10, 20, 30, 40):
        write(store, step, best=step == 10)
    assert steps_in(store) == [10, 30, 40]
    assert (store.folder / "last").resolve() == store.path(40)
    assert (store.folder / "best").resolve() == store.path(10)
    write(store, 50, best=True)
    assert steps_in(store) == [40, 50]


def damage(store, *steps):
    for step in steps:
        (store.path(step) / "model.safetensors").write_bytes(b"x")


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def name_in_manifest(folder, name):
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), name: {"bytes": 1, "sha256": ""}}))


def test_new_work_survives_damaged_checkpoints_of_later_steps(store):
    store = CheckpointStore(store.folder, keep=3)
    for step in (5, 55, 60):
        write(store, step)
    damage(store, 55, 60)
    start = store.newest([].append)
    assert start == store.path(5)
    aside = store.go_on(5, start)
    assert sorted(path.name for path in aside) == ["set-aside-1-step-00000055", "set-aside-1-step-00000060"]
    assert (store.folder / "last").resolve() == start
    for step in (10, 15, 20):
        write(store, step)
    assert steps_in(store) == [10, 15, 20]
    assert all(path.is_dir() for path in aside)


def test_damaged_checkpoints_do_not_count_as_kept(store):
    for step in (10, 20):
        write(store, step)
    damage(store, 20)
    store = CheckpointStore(store.folder, keep=2)  # that of the next process
    write(store, 30)
    assert steps_in(store) == [10, 20, 30]
    write(store, 40)
    assert steps_in(store) == [30, 40]


def test_a_checkpoint_that_was_set_aside_can_be_gone_back_to(store):
    for step in (10, 20):
        write(store, step, best=step == 20)
    (aside,) = store.go_on(10, store.path(10))
    assert not (store.folder / "best").is_symlink()
    write(store, 20)
    (other,) = store.go_on(20, aside)
    assert other.name == "set-aside-2-step-00000020"
    assert not aside.exists()
    assert store.newest(pytest.fail) == store.path(20)
    assert store.go_on(20, store.path(20)) == []


def test_a_new_run_in_the_folder_of_an_old_one_sets_all_aside(store):
    write(store, 10)
    assert len(store.go_on(0, None)) == 1
    assert store.newest(pytest.fail) is None
    assert not (store.folder / "last").is_symlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "model.safetensors has 1 bytes instead of"),
        (lambda folder: flip(folder / "model.safetensors"), "model.safetensors does not match its hash"),
        (lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[1]"), "manifest.json does not list model.safetensors"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json does not list model.safetensors"),
        (lambda folder: (folder / "manifest.json").write_text("3"), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 10**6), "manifest.json cannot be read"),
        (lambda folder: name_in_manifest(folder, "../state.json"), "names '../state.json', which is not a file of"),
    ],
)
def test_damaged_checkpoint_is_passed_over_with_one_line(store, damage, message):
    write(store, 10)
    damage(write(store, 20))
    lines = []
    assert store.newest(lines.append) == store.path(10)
    assert len(lines) == 1
    assert "step-00000020 is damaged" in lines[0]
    assert message in lines[0]


def test_unfinished_checkpoint_is_invisible_and_swept_away(store):
    write(store, 10)
    folder = store.prepare(20)
    (folder / "model.safetensors").write_bytes(b"half")
    assert store.newest(pytest.fail) == store.path(10)
    write(store, 30)
    assert not folder.exists()


class Payload:
    """A pickle that would create a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path, writer):
    victim, bait = tmp_path / "executed", tmp_path / "model.safetensors"
    if writer == "pickle":
        bait.write_bytes(pickle.dumps(Payload(victim)))
    else:
        torch.save(Payload(victim), bait)
    with pytest.raises(CheckpointError, match=r"is a pickle or PyTorch archive.*never opened"):
        load_tensors(bait)
    assert not victim.exists()


def test_other_bad_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no file"):
        load_tensors(tmp_path / "absent.safetensors")
    text = tmp_path / "text.safetensors"
    text.write_text("hello world, this is not a tensor")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_tensors(text)
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        resolve_checkpoint(text, pytest.fail)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        resolve_checkpoint(tmp_path, pytest.fail)


def test_tied_and_strided_tensors_are_stored(tmp_path):
    weight = torch.randn(4, 3)
    save_tensors(tmp_path / "x.safetensors", {"a": weight, "b": weight, "c": weight.t(), "d": torch.zeros(0)})
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert torch.equal(loaded["a"], weight)
    assert torch.equal(loaded["b"], weight)
    assert torch.equal(loaded["c"], weight.t())
    assert loaded["d"].numel() == 0


def test_random_state_survives_json():
    packed = json.loads(json.dumps(pack_rng()))
    expected = (random.random(), torch.rand(3))
    random.random()
    restore_rng(packed)
    assert random.random() == expected[0]
    assert torch.equal(torch.rand(3), expected[1])


def test_random_state_of_every_device_is_kept(monkeypatch):
    """A graphics card has a generator of its own, from which dropout on it draws."""
    states = [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3, 4], dtype=torch.uint8)]
    restored = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: restored.update({device: state}))
    restore_rng(json.loads(json.dumps(pack_rng())))
    assert {device: state.tolist() for device, state in restored.items()} == {0: [1, 2], 1: [3, 4]}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    restored.clear()
    restore_rng(json.loads(json.dumps(pack_rng())))
    assert list(restored) == [0]


def test_only_what_is_read_is_hashed(store, monkeypatch):
    path = write(store, 10)
    hashed = []
    monkeypatch.setattr(checkpoint, "sha256_of", lambda file: hashed.append(file.name) or "")
    assert "does not match" in checkpoint.verify(path, ["model.safetensors"])
    assert hashed == ["model.safetensors"]
    monkeypatch.undo()
    (path / "state.json").write_text("damaged")
    assert resolve_checkpoint(path, pytest.fail, ["model.safetensors"]) == path
    assert resolve_checkpoint(store.folder.parent, pytest.fail, ["model.safetensors"]) == path
    with pytest.raises(CheckpointError, match="is damaged"):
        resolve_checkpoint(path, pytest.fail)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    save_tensors(file, {"a": torch.ones(2)})

    def fails(tensors, path):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        save_tensors(file, {"a": torch.zeros(2)})
    assert torch.equal(load_tensors(file)["a"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
