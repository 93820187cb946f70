"""Runs the program as a user does, in a process of its own: registries and imported plug-ins last as long as it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import run_tost

Tost = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tost_in(tmp_path) -> Tost:
    """Run ``tost`` with these arguments in a temporary folder; `path` is searched for installed packages."""

    def run(*arguments: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        search = () if path is None else (path,)
        return run_tost(*arguments, folder=tmp_path, search=search, COLUMNS="200", **variables)

    return run
