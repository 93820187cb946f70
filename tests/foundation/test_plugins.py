from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import pytest

from tost import _plugins
from tost._plugins import Registry, allow, load_foreign
from tost.errors import ConfigError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package outside the tree whose import leaves a trace, with an entry point in the group ``tost.tests``."""
    trace = tmp_path / "imported"
    (tmp_path / "stranger.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).touch()\n\nclass Thing:\n    pass\n"
    )
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tost.tests]\nthing = stranger:Thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield trace
    sys.modules.pop("stranger", None)


class Thing(NamedTuple):
    name: str
    found: Any
    description: str = "one of them"


def make(group: str = "tost.tests") -> Registry[Thing]:
    return Registry("thing", group, Thing, [Thing("built_in", None)])


def test_entry_points_are_listed_without_being_loaded(package):
    registry = make()
    assert registry.names() == ["built_in", "thing"]
    assert registry.names("b*") == ["built_in"]
    assert "thing" in registry
    assert not package.exists()
    assert registry.get("thing")[1].__name__ == "Thing"
    assert package.exists()


def test_unknown_names_get_a_suggestion(package):
    with pytest.raises(ConfigError, match=r"no thing 'thin'; did you mean 'thing'\? things: built_in, thing\."):
        make().get("thin")


def test_names_are_unique_and_plain():
    registry = make("tost.none")
    registry.add("mine", ("mine", 1))
    with pytest.raises(ConfigError, match="there is a thing 'mine' already"):
        registry.add("mine", ("mine", 2))
    with pytest.raises(ConfigError, match="cannot be the name of a thing"):
        registry.add("a:b", ("a:b", 2))


def test_foreign_code_is_not_imported_unless_allowed(package):
    with pytest.raises(ConfigError, match=r"code outside tost.*--plugin stranger.*TOST_PLUGINS=stranger"):
        make("tost.none").get("stranger:Thing")
    assert not package.exists()
    allow("stranger")
    assert os.environ["TOST_PLUGINS"] == "stranger"
    assert make("tost.none").get("stranger:Thing")[1].__name__ == "Thing"


def test_allowing_a_module_does_not_allow_its_neighbours(package):
    allow("strange", "stranger.sub")
    with pytest.raises(ConfigError, match="code outside tost"):
        load_foreign("stranger:Thing")


def test_missing_foreign_objects_are_named(package):
    allow("stranger", "no_such_package")
    with pytest.raises(ConfigError, match=r"stranger has no 'Thin'; did you mean 'Thing'\?"):
        load_foreign("stranger:Thin")
    with pytest.raises(ConfigError, match="there is no module 'no_such_package'"):
        load_foreign("no_such_package:x")
    with pytest.raises(ConfigError, match="not the name of a package"):
        allow("../x")


def test_a_broken_import_inside_a_plugin_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    allow("broken_plugin")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        _plugins.load_foreign("broken_plugin:x")
