from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tost
from tests.integrations.official.networks import language_state, vision_state
from tests.integrations.official.test_parity import same
from tost.integrations.official import to_official
from tost.train.checkpoint.model import save_model


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    state = vision_state(depth=1, class_depth=1)
    torch.save({"model": state, "model_ema": {name: 2 * tensor for name, tensor in state.items()}}, "theirs.pth")
    return state


def test_there_and_back_again(run, state):
    outcome = run("convert", "theirs.pth", "--out", "ours")
    assert (outcome.code, outcome.err) == (0, "")
    rows = dict(line.split("\t", 1) for line in outcome.out.splitlines() if "\t" in line)
    shown = {name.strip(): value.strip() for name, value in rows.items()}
    parameters = sum(p.numel() for p in tost.load_model("ours").parameters())
    assert shown["parameters"] == f"{parameters:,}"
    assert (shown["embed_dim"], shown["depth"], shown["mixer"]) == ("16", "1", "tssa")
    assert run("convert", "ours", "--out", "again.pth").code == 0
    content = torch.load("again.pth", weights_only=True)
    assert list(content) == ["model"]
    assert same(content["model"], state)


def test_language_model(run):
    state = language_state()
    torch.save({"model": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}, "iter_num": 3}, "ckpt.pt")
    assert run("convert", "ckpt.pt", "--out", "ours", "dropout=0.1").code == 0
    model = tost.load_model("ours")
    assert model.options.dropout == 0.1
    assert same(to_official(model), state)


def test_json_is_the_last_line(run, state):
    outcome = run("convert", "theirs.pth", "--out", "ours", "--json", "drop_path=0.1", "layer_scale=1e-3")
    summary = json.loads(outcome.out.splitlines()[-1])
    assert (summary["source"], summary["out"], summary["form"]) == ("theirs.pth", "ours", "tost")
    assert summary["options"] == tost.load_model("ours").options.model_dump(mode="json")
    assert (summary["options"]["drop_path"], summary["options"]["layer_scale"]) == (0.1, 1e-3)
    assert summary["bytes"] == sum(file.stat().st_size for file in Path("ours").iterdir())
    assert summary["model"].startswith("tost_")


def test_averages(run, refuse, state):
    assert run("convert", "theirs.pth", "--out", "ours", "--weights", "ema").code == 0
    assert torch.equal(tost.load_model("ours").cls_token, 2 * state["cls_token"])
    refuse("no moving average", "convert", "ours", "--out", "again.pth", "--weights", "ema")


def test_the_same_form_strips_the_rest(run, state):
    assert run("convert", "theirs.pth", "--to", "official", "--out", "lean.pth").code == 0
    assert same(torch.load("lean.pth", weights_only=True)["model"], state)
    assert Path("lean.pth").stat().st_size < Path("theirs.pth").stat().st_size
    run("convert", "theirs.pth", "--out", "ours")
    assert run("convert", "ours", "--to", "tost", "--out", "copy").code == 0
    assert Path("copy/model.safetensors").read_bytes() == Path("ours/model.safetensors").read_bytes()


def test_overwrites_only_by_force(run, refuse, state):
    run("convert", "theirs.pth", "--out", "ours")
    for arguments in (["theirs.pth", "--out", "ours"], ["ours", "--out", "theirs.pth"]):
        before = Path("theirs.pth").read_bytes()
        refuse("left as it is; add --force", "convert", *arguments)
        assert Path("theirs.pth").read_bytes() == before
        assert run("convert", *arguments, "--force").code == 0
    assert same(torch.load("theirs.pth", weights_only=True)["model"], state)
    assert sorted(path.name for path in Path().iterdir()) == ["ours", "theirs.pth"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.pth", "--out", "x"], "CheckpointError: cannot read nothing.pth: No such file"),
        (["text.pth", "--out", "x"], "CheckpointError: text.pth is neither a PyTorch checkpoint"),
        (["theirs.pth", "--out", "x", "depth=3"], "contradicts the checkpoint: depth=3 (the file: 1)"),
        (["theirs.pth", "--out", "x", "heads=3"], "heads: unknown key; did you mean num_heads?"),
        (["theirs.pth", "--out", "x", "depth"], "'depth' is not an option of a model; write key=value"),
        (["theirs.pth", "--out", "x", "depth=1", "depth=1"], "depth is given twice"),
        (["theirs.pth", "--out", "no/such/x"], "the folder no/such does not exist"),
        (["theirs.pth", "--out", "theirs.pth", "--force"], "is the source itself"),
        (["theirs.pth", "--out", "text.pth", "--force"], "exists and is not a folder"),
        (["ours", "--out", "no/such/x.pth"], "the folder no/such does not exist"),
        (["ours", "--out", "folder"], "folder is none, write for example --out folder/model.pth"),
        (
            ["ours", "--out", "x.safetensors"],
            "PyTorch files only; x.safetensors is none, write for example --out x.pth",
        ),
        (["ours", "--out", "x.pth", "depth=1"], "depth=1: a folder of this package has all options"),
        (["ours", "--out", "x.pth"], "CheckpointError: the authors' code has no conv_width=3"),
        (["folder", "--out", "x.pth"], "CheckpointError: folder holds no checkpoint"),
        (["theirs.pth"], "Missing option '--out'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_exit_2_and_leave_nothing_behind(refuse, state, arguments, message):
    Path("text.pth").write_text("hello, world")
    Path("folder").mkdir()
    save_model(
        tost.create_model("tost_tiny_patch16_224", embed_dim=16, depth=1, num_heads=2, num_classes=3, conv_width=3),
        "ours",
    )
    refuse(message, "convert", *arguments)
    assert sorted(path.name for path in Path().iterdir()) == ["folder", "ours", "text.pth", "theirs.pth"]


def test_a_disk_that_cannot_be_written_exits_1(run, state, monkeypatch):
    save_model(tost.load_official("theirs.pth"), "ours")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    outcome = run("convert", "ours", "--out", "x.pth")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == "StorageError: cannot write x.pth: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("out", ["ours", "again.pth"])
def test_a_read_only_folder_is_told_in_a_line(run, state, monkeypatch, out):
    save_model(tost.create_model("tost_tiny_patch16_224", depth=1, class_depth=1, embed_dim=16, num_heads=2), "mine")

    def refuse(*arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    outcome = run("convert", "mine", "--out", out, "--to", "official" if out.endswith(".pth") else "tost")
    assert outcome.code == 1
    assert outcome.err.startswith("StorageError: cannot write ")
    assert "Read-only file system" in outcome.err
    assert outcome.err.count("\n") == 1
