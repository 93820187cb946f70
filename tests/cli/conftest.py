"""Runs the command line inside the test process, which saves importing torch again and again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tost.cli import main


class Outcome(NamedTuple):
    """What a user sees of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., Outcome]:
    """Run `tost` with arguments."""

    def run_command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tost", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return Outcome(int(exit_info.value.code or 0), captured.out, captured.err)

    return run_command


@pytest.fixture
def refuse(run) -> Callable[..., Outcome]:
    """Run `tost` with a mistake: exit code 2, a hint in the message, no result and no traceback."""

    def run_refused(hint: str, *arguments: str) -> Outcome:
        outcome = run(*arguments)
        assert (outcome.code, outcome.out) == (2, "")
        assert hint in " ".join(outcome.err.split())
        assert "Traceback" not in outcome.err
        return outcome

    return run_refused
