"""Exit codes and messages of runs of several processes."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tost.cli import _train


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
