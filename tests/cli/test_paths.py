"""Folders whose names are not UTF-8, and locales without UTF-8."""

import os
import subprocess
import sys

import pytest

TRAIN = (
    "train",
    "demo/listops",
    "data.options.train_count=32",
    "train.batch_size=4",
    "checkpoint.every=1",
    "--progress",
    "plain",
)


def tost(*arguments, **environment):
    program = [sys.executable, "-m", "tost.cli", *arguments]
    return subprocess.run(program, env={**os.environ, **environment}, capture_output=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("name", "environment"),
    [(b"r\xff", {}), ("d\u00e9j\u00e0".encode(), {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})],
    ids=["not UTF-8", "no UTF-8"],
)
def test_runs_in_folders_of_any_name(tmp_path, name, environment):
    folder = os.fsencode(tmp_path) + b"/" + name
    for steps in ("1", "2"):
        done = tost(*TRAIN, f"train.steps={steps}", "--out", folder, "--resume", "auto", **environment)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"finished at step 2" in done.stderr
