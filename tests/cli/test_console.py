from __future__ import annotations

import json
import re
import sys

import pytest

from tost._progress import Pace
from tost.cli import _console

HEADERS = ("name", "ms")
ROWS = [("tost", "1.05"), ("a longer name", "12.5")]


def pretend_terminal(monkeypatch) -> None:
    """Make stdout and stderr a terminal; not a fixture, because pytest replaces both between set-up and test."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    for variable in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)


def test_piped_table_is_aligned_and_tab_separated(capsys):
    _console.show_table(HEADERS, ROWS, title="Times", labels=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["Times", "name         \t  ms", "tost         \t1.05", "a longer name\t12.5", ""]


def test_terminal_table_is_drawn_in_colour(capsys, monkeypatch):
    pretend_terminal(monkeypatch)
    _console.show_table(HEADERS, [("kept [1]", "3")], title="Times", labels=1)
    out = capsys.readouterr().out
    assert "\x1b[1m" in out
    assert "───" in out
    assert "kept [1]" in out  # square brackets are text, not markup


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_is_respected(capsys, monkeypatch, no_color):
    pretend_terminal(monkeypatch)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    with _console.progress(1) as steps:
        steps.start("one")
        steps.finish("done")
    # Movements of the cursor and bold face remain; colours are 30 to 37 and 90 to 97.
    coloured = re.search("\x1b\\[(?:[39][0-7]|38;.*?)m", capsys.readouterr().err) is not None
    assert coloured != no_color


def test_plain_progress_is_one_line_per_step_or_part(capsys):
    with _console.progress(2) as steps:
        for name in ("first", "second"):
            steps.start(name)
            steps.finish("fine")
    assert capsys.readouterr() == ("", "[1/2] first: fine\n[2/2] second: fine\n")
    with _console.progress() as progress:
        for part in ("write a", "write b", "check a"):
            progress.update(1, 2, part)
    assert capsys.readouterr() == ("", "write a: 1 of 2\ncheck a: 1 of 2\n")


def test_long_steps_are_not_silent(capsys, monkeypatch):
    monkeypatch.setattr(_console, "Pace", lambda: Pace(seconds=0))
    with _console.progress(4) as progress:
        progress.start("first")
        progress.beat()
        progress.finish("fine")
        progress.start("second")
        progress.beat()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["first: 0 of 4 (0%), 0s so far", "[1/4] first: fine", "second: 1 of 4 (25%), eta 0s"]


def test_work_of_unknown_length_says_where_it_is(capsys, monkeypatch):
    monkeypatch.setattr(_console, "Pace", lambda: Pace(seconds=0))
    with _console.progress() as progress:
        progress.note("gate: comparing both")
        progress.beat()
    assert capsys.readouterr().err.splitlines() == ["gate: comparing both", "gate: comparing both: 0s so far"]
    pretend_terminal(monkeypatch)
    with _console.progress() as progress:
        progress.note("first [not markup]")
    captured = capsys.readouterr()
    assert "first [not markup]" in captured.err
    assert captured.out == ""


def test_a_notebook_gets_lines(capsys, monkeypatch):
    pretend_terminal(monkeypatch)
    assert _console.is_live()
    monkeypatch.setenv("JPY_PARENT_PID", "1")  # what `!tost` in a notebook sees, besides something like a terminal
    assert not _console.is_live()


def test_json_is_one_line_of_legal_json(capsys):
    _console.show_json({"text": "two\nlines", "value": 1.5})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"text": "two\nlines", "value": 1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        _console.show_json({"value": float("nan")})


def test_text_from_files_cannot_control_a_terminal(capsys, monkeypatch):
    _console.show("a\x1b[31mb\u202ec")
    assert capsys.readouterr().out == "a\u241b[31mb\ufffdc\n"
    pretend_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    _console.log("log \x1b[31m\x9b2J\u202e")
    _console.show("shown \x1b[31m\x9b2J\u202e")
    _console.show_table(("a", "b"), [("cell \x9b2J\u202e", "\x07")])
    captured = capsys.readouterr()
    assert captured.err == "log ␛[31m�2J�\n"
    assert "shown ␛[31m�2J�\n" in captured.out
    assert "cell �2J�" in captured.out
    assert not {"\x9b", "\u202e", "\x07"} & set(captured.out)
