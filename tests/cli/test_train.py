"""Folders and exit codes of `tost train`."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.train.runs import TINY
from tost.cli import _train


@pytest.mark.parametrize(("config", "folder"), [("demo/digits", "runs/demo/digits"), ("sub/mine.yaml", "runs/mine")])
def test_the_default_folder_has_the_name_of_the_configuration(run, tmp_path, monkeypatch, config, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(run("cat", "demo/digits").out)
    done = run("train", config, *TINY, "train.steps=2", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["out"] == folder
    assert (tmp_path / folder / "summary.json").is_file()


def test_two_runs_are_not_mixed_in_one_folder(run, refuse, tmp_path):
    for name in ("a", "b"):
        assert run("train", "demo/digits", *TINY, "train.steps=2", "--out", str(tmp_path / name)).code == 0
    start = str(tmp_path / "a" / "checkpoints" / "last")
    refuse("already holds a run", "train", "demo/digits", *TINY, "--resume", start, "--out", str(tmp_path / "b"))


@pytest.mark.parametrize(
    "command",
    [
        ("train", "demo/digits", "--out", "run"),
        ("eval", "demo/digits", "train.init_from=run"),
        ("generate", "run", "--prompt", "a"),
    ],
    ids=lambda command: command[0],
)
def test_a_gpu_that_is_not_there_is_refused_before_anything_is_done(refuse, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    hint = "--device cuda was given, but torch finds no CUDA device here; use --device cpu or auto."
    refuse(hint, *command, "--device", "cuda")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("before", "after", "code", "expected"),
    [
        ("interrupted", None, -9, -9),  # a resumed run that was killed before it wrote anything
        ("interrupted", "interrupted", 1, 130),
        (None, "interrupted", 1, 130),
        (None, None, 1, 1),
        ("finished", "failed", 1, 1),
        ("interrupted", "finished", 0, 0),
    ],
)
def test_exit_code_of_several_processes(tmp_path, monkeypatch, before, after, code, expected):
    """Which summary tells that a run was interrupted: its own, not the one that it found."""

    def write(status, seconds):
        if status:
            (tmp_path / "summary.json").write_text(json.dumps({"status": status, "seconds": seconds}))

    class Process:
        pid = 0

        def __init__(self, command, **options):
            pass

        def wait(self):
            write(after, 2)
            return code

    write(before, 1)
    monkeypatch.setattr(_train.subprocess, "Popen", Process)
    monkeypatch.setattr(_train.signal, "signal", lambda number, handler: None)
    assert _train._launch(2, tmp_path) == expected


def failure(rank, code):
    return {rank: ProcessFailure(local_rank=rank, pid=123, exitcode=code, error_file="/dev/null")}


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (None, 0, ""),
        (SignalException("stopped", signal.SIGTERM), 143, ""),
        (ChildFailedError("tost", failure(0, 2)), 2, ""),  # it has said why
        (ChildFailedError("tost", failure(1, -9)), 1, "process 1 was ended by SIGKILL"),
    ],
)
def test_torchrun_leaves_no_traceback(monkeypatch, capsys, raised, code, message):
    def run(arguments):
        if raised is not None:
            raise raised

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr(_train.logging, "disable", lambda level: None)
    assert _train.torchrun(["--standalone", "script.py"]) == code
    assert message in capsys.readouterr().err
