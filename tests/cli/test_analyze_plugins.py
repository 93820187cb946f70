"""`tost analyze` with analyses of other packages: by entry point, and by a name that is typed."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

import tost.analysis as analysis
import tost.cli._analyze
from tests.models.tiny import make_tiny
from tost.errors import ConfigError
from tost.train.checkpoint.model import save_model

pytest_plugins = ["tests.analysis.stranger"]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save_model(make_tiny("tost_lm_base", vocab_size=256, depth=1), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.usefixtures("installed")
def test_the_command_line_runs_an_analysis_of_an_installed_package(run, folder, tmp_path):
    importlib.reload(tost.cli._analyze)
    assert "count-parameters  from the package stranger" in run("analyze", "--help").out
    outcome = run("analyze", str(folder), "count-parameters", "--out", str(tmp_path / "out"), "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out.splitlines()[-1])["results"]["count-parameters"]
    assert found["summary"]["parameters"] > 1000
    assert [file.rpartition("/")[2] for file in found["files"]] == ["count-parameters.json", "count-parameters.csv"]


@pytest.mark.usefixtures("stranger")
def test_a_typed_name_may_be_imported_and_no_other(run, folder, tmp_path):
    with pytest.raises(ConfigError, match="only you can allow it"):
        analysis.find_analysis("stranger.looks:plain_count")
    (tmp_path / "text.txt").write_text("a text of some length, or so it seems")
    options = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--layers", "0", "--json"]
    outcome = run("analyze", str(folder), "stranger.looks:plain_count", *options)
    assert outcome.code == 0, outcome.err
    stored = json.loads((tmp_path / "out" / "count-parameters.json").read_text())
    assert stored["layers"] == [0]
    assert analysis.find_analysis("stranger.looks:plain_count").summary == "How many parameters there are."
    assert analysis.find_analysis("stranger.looks:count").name == "count-parameters", "as its decorator describes it"
