"""Distributions: the wheel's tag, and a build without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel that was built on a machine whose compiler always fails."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src" / "tost", tree / "src" / "tost", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    program = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    no_compiler = {**os.environ, "CC": "false", "CXX": "false"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, env=no_compiler, capture_output=True, text=True, check=True
    )
    assert "the native CPU kernel was not built" in done.stderr
    (found,) = (tree / "dist").iterdir()
    return found


def test_one_wheel_serves_every_python(wheel):
    assert wheel.name.startswith("tost_transformer-0.1.0-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl"), "the library in it belongs to one platform"


def test_without_a_compiler_the_wheel_has_everything_else_and_the_reason(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        reason = archive.read("tost/ops/_native_build_error.txt").decode()
    assert "false" in reason
    assert "pip install -v" in reason
    assert not any(name.endswith(".so") for name in names)
    assert {"tost/__init__.py", "tost/__init__.pyi", "tost/py.typed", "tost/ops/csrc/library.h"} <= names
    assert any(name.startswith("tost/recipes/configs/") for name in names)
    assert {"tost/explore/static/app.js", "tost/pretrained/weights/bytes-tiny/model.safetensors"} <= names
    assert {"tost/pretrained/weights/index.json", "tost/pretrained/weights/digits-tiny/samples/3.png"} <= names
