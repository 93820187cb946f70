"""An analysis from another package, which is on the path for the duration of a test."""

from __future__ import annotations

import importlib
import sys

import pytest

from tost._plugins import Registry
from tost.analysis import registry

MODULE = '''
"""An analysis from elsewhere."""

from dataclasses import dataclass

import tost
from tost.analysis import Result


@dataclass(frozen=True)
class Count(Result):
    name = "count-parameters"
    parameters: int
    layers: object

    def summary(self):
        return {"parameters": self.parameters}


def plain_count(model, samples, *, layers=None):
    """How many parameters there are.

    And a second paragraph.
    """
    return Count(sum(p.numel() for p in model.parameters()), layers)


@tost.register_analysis("count-parameters", summary="how many there are", data="")
def count(model, samples):
    return plain_count(model, samples)
'''
ENTRY_POINTS = "[tost.analyses]\ncount-parameters = stranger.looks:count\n"


@pytest.fixture
def own_registry(monkeypatch):
    """Keep what a test registers to itself."""
    empty = Registry("analysis", "tost.analyses", registry._adapt, registry._BUILT_IN, plural="analyses")
    monkeypatch.setattr(registry, "_ANALYSES", empty)
    monkeypatch.delenv("TOST_PLUGINS", raising=False)


@pytest.fixture
def stranger(tmp_path, monkeypatch, own_registry):
    """A package on the path that is not installed: nothing announces its analysis."""
    package = tmp_path / "site" / "stranger"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "looks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    yield tmp_path / "site"
    for name in [name for name in sys.modules if name.partition(".")[0] == "stranger"]:
        del sys.modules[name]


@pytest.fixture
def installed(stranger):
    """The same with an entry point."""
    metadata = stranger / "stranger-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
