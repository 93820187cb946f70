"""Analyses of other packages: by decorator, and by entry point."""

from __future__ import annotations

import sys

import pytest

import tost
import tost.analysis as analysis
from tests.models.tiny import make_tiny
from tost.errors import ConfigError

pytest_plugins = ["tests.analysis.stranger"]
pytestmark = pytest.mark.usefixtures("own_registry")


def register(**options):
    @tost.register_analysis("mine", **options)
    def mine(model, samples, *, control=None):
        """Nothing much.

        In more words.
        """
        return analysis.subspace_coherence(control or model)

    return mine


def test_a_decorated_function_is_found_listed_and_run():
    model, other = make_tiny("tost_mini", depth=1), make_tiny("tost_mini", depth=2)
    mine = register(needs="tssa", data="")
    assert analysis.find_analysis("mine").function() is mine
    assert analysis.find_analysis("mine").summary == "Nothing much."
    assert analysis.list_analyses()[-1] == "mine"
    assert analysis.list_analyses("m*") == ["membership-maps", "mine"]
    assert "mine" in analysis.applicable(model)
    assert "mine" not in analysis.applicable(make_tiny("vit_mini"))
    assert analysis.analyze("mine", model, analysis.Samples(), layers=[7]).layers == (0,), "it has no argument layers"
    assert analysis.analyze("mine", model, analysis.Samples(), control=other).layers == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"), [({"needs": "tsa"}, "needs='tsa'"), ({"data": "pictures"}, "data='pictures'")]
)
def test_unknown_needs_and_data_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        register(**options)


def test_a_name_is_taken_once():
    register()
    with pytest.raises(ConfigError, match="there is an analysis 'mine' already"):
        register()
    with pytest.raises(ConfigError, match="'heads' already"):
        tost.register_analysis("heads")(lambda model, samples: None)


def test_a_typo_is_answered_with_the_registered_name():
    register()
    with pytest.raises(ConfigError, match=r"no analysis 'mien'; did you mean 'mine'\? analyses: class-attention"):
        analysis.find_analysis("mien")


def test_a_result_must_be_one():
    tost.register_analysis("wrong", data="")(lambda model, samples: 3)
    with pytest.raises(ConfigError, match=r"wrong returned int; an analysis returns a tost\.analysis\.Result"):
        analysis.analyze("wrong", make_tiny("tost_mini", depth=1), analysis.Samples())


def test_entry_points_are_listed_without_being_imported(installed):
    assert analysis.list_analyses()[-1] == "count-parameters"
    line = {"name": "count-parameters", "description": "from the package stranger"}
    assert analysis.describe_analyses()[-1] == line
    assert "stranger" not in sys.modules
    assert analysis.find_analysis("count-parameters").summary == "how many there are"
    assert "stranger.looks" in sys.modules
    assert analysis.describe_analyses()[-1] == {**line, "description": "how many there are"}
