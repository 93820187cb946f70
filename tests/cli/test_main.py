"""The command line as a whole: help, mistakes, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import tost
from tost.cli import _info
from tost.errors import BackendError, ConfigError


def test_help_lists_every_command(run):
    outcome = run("--help")
    assert outcome.code == 0
    listed = [line.split()[0] for line in outcome.out.partition("Commands:")[2].strip().splitlines()]
    names = "ls cat cp validate train eval generate analyze report explore compare export convert info bench data"
    assert listed == names.split()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--plugin", "my_package", "ls", "ops"],
        ["ls", "--plugin=my_package", "ops"],
        ["ls", "ops", "--plugin", "my_package"],
    ],
    ids=["before", "between", "behind"],
)
def test_plugins_are_allowed_wherever_the_option_stands(run, monkeypatch, arguments):
    monkeypatch.setattr("tost.cli._ls._LISTS", {"ops": lambda pattern: [{"name": os.environ["TOST_PLUGINS"]}]})
    monkeypatch.setenv("TOST_PLUGINS", "other")
    assert run(*arguments) == (0, "other,my_package\n", "")


def test_missing_extra_is_named(tmp_path):
    code = "import sys; sys.modules['accelerate'] = None; from tost.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "demo/digits", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs the package accelerate" in done.stderr
    assert "pip install 'tost-transformer[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_version(run):
    assert run("--version") == (0, f"tost {tost.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["inof"], "Did you mean 'info'?"),
        (["bench", "op"], "Did you mean 'ops'?"),
        (["bench", "ops", "--token", "1"], "--tokens"),
        (["bench", "ops", "--op", "tsa"], "'tssa', 'causal_tssa'"),
        (["ls", "modelz"], "'models'"),
        (["bench", "model", "--size", "224"], "is not a list of sizes with batches"),
        (["bench", "attention", "--figure", "nine"], "nine"),
        (["bench", "ops", "--tokens", "many"], "write for example --tokens 1024,4096"),
        (["bench", "ops", "--repeats", "1"], "greater than or equal to 3"),
        (["bench", "ops", "--width", "10", "--heads", "3"], "choose a width that is a multiple of the heads"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_exit_2_and_say_what_to_do(refuse, arguments, hint):
    refuse(hint, *arguments)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BackendError("no backend"), 1, "BackendError: no backend"),
        (ConfigError("bad value"), 2, "ConfigError: bad value"),
        (MemoryError(), 1, "not enough memory (MemoryError)"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "not enough memory ([enforce"),
        (OSError(12, "Cannot allocate memory"), 1, "not enough memory"),
        (OSError(30, "Read-only file system", "runs/x"), 1, "the system refused: [Errno 30] Read-only file system: "),
    ],
)
def test_failures_are_one_line_without_traceback(run, monkeypatch, error, code, message):
    def fail():
        raise error

    monkeypatch.setattr(_info, "collect", fail)
    outcome = run("info")
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith(message)
    assert outcome.err.count("\n") == 1


def test_interrupt_exits_130(run, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(_info, "collect", interrupt)
    assert run("info").code == 130


def test_a_bug_keeps_its_traceback(run, monkeypatch):
    def fail():
        raise RuntimeError("a bug")

    monkeypatch.setattr(_info, "info", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("info")


def test_a_model_too_large_for_memory_is_told_in_a_line(run, tmp_path):
    # Its first tensor, a vector per byte, takes 0.5 TB: it is refused at once, before any memory is filled.
    sizes = ("model.embed_dim=500000000", "model.num_heads=2")
    outcome = run("train", "demo/stdlib_bytes", *sizes, "--out", str(tmp_path / "run"))
    assert outcome.code == 1
    assert "not enough memory" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("setting", ["model.depth=100000000", f"train.steps={10**250}", f"train.batch_size={10**30}"])
def test_absurd_numbers_are_refused(refuse, setting):
    outcome = refuse(f"{setting.partition('=')[0]} (command line)", "validate", "demo/digits", setting)
    assert " and <= 1" in outcome.err
