from __future__ import annotations

import json

import torch

import tost
from tost._env import VARIABLES
from tost._machine import fast_precision
from tost.cli import _info
from tost.ops.triton.tiles import TARGET_NAMES


def test_info_ends_with_json(run):
    outcome = run("info", "--json")
    found = json.loads(outcome.out.splitlines()[-1])
    assert outcome.code == 0
    assert found["versions"]["tost"] == tost.__version__
    assert found["packages"]["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["precision"] == fast_precision(torch.device("cpu"))
    assert found["devices"][0].startswith("cpu")
    for op in ("tssa", "causal_tssa"):
        assert found["backends"][op] == tost.available_backends(op)
    assert {entry["name"] for entry in found["variables"]} == {variable.name for variable in VARIABLES}


def test_info_names_every_backend_and_variable(run):
    out = run("info").out
    assert "{" not in out
    for word in ["native", "torch", "reference", "ready", *(variable.name for variable in VARIABLES)]:
        assert word in out
    assert all(variable.help in out for variable in VARIABLES)
    assert ", ".join(TARGET_NAMES) in out


def test_info_shows_the_reason_of_a_missing_backend(run, monkeypatch):
    reason = "the native library was not built [no compiler]"
    monkeypatch.setattr(tost, "available_backends", lambda op: {"native": reason, "reference": "ready"})
    assert reason in run("info").out


def test_info_warns_of_another_distribution(run, monkeypatch):
    assert "another distribution" not in run("info").err
    monkeypatch.setattr(_info, "version", lambda name: "1.0")
    assert "another distribution called tost is installed and may shadow this one" in run("info").err


def test_info_reports_a_wrong_variable_as_a_mistake(refuse, monkeypatch):
    monkeypatch.setenv("TOST_BACKEND", "fastest")
    refuse("TOST_BACKEND='fastest' is not understood", "info")
