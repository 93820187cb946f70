"""Runs the program as a user does, in a process of its own: registries and imported plug-ins last as long as it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
Tost = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tost_in(tmp_path) -> Tost:
    """Run ``tost`` with these arguments in a temporary folder; `path` is searched for installed packages."""

    def run(*arguments: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        search = os.pathsep.join(str(folder) for folder in (path, SOURCE) if folder is not None)
        return subprocess.run(
            [sys.executable, "-c", "from tost.cli import main; main()", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": search, "COLUMNS": "200", **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run
