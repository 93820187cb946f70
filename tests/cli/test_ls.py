from __future__ import annotations

import json

import pytest

from tost.cli import _ls
from tost.data import list_data
from tost.models import list_models
from tost.ops import operators
from tost.recipes import list_configs, list_tasks

LISTS = {
    "configs": list_configs(),
    "tasks": list_tasks(),
    "models": list_models(),
    "data": list_data(),
    "ops": sorted(operators()),
}


@pytest.mark.parametrize(("kind", "names"), LISTS.items())
def test_ls_is_one_line_per_entry_or_json(run, kind, names):
    outcome = run("ls", kind)
    assert (outcome.code, outcome.err) == (0, "")
    rows = [line.split("\t") for line in outcome.out.splitlines()]
    assert [row[0] for row in rows] == names
    assert len({len(row) for row in rows}) == 1
    assert all(cell and cell == cell.strip() for row in rows for cell in row)
    content = json.loads(run("ls", kind, "--json").out)
    assert content["kind"] == kind
    assert [entry["name"] for entry in content["entries"]] == names


def test_ls_takes_a_pattern(run):
    out = run("ls", "models", "tost_lm_*").out
    assert [line.split("\t")[:2] for line in out.splitlines()] == [
        [f"tost_lm_{size}{kind}", "language_modeling"] for size in ("base", "large", "medium") for kind in ("", "_plus")
    ]


def test_ls_without_a_match_says_so(run, monkeypatch):
    assert run("ls", "data", "z*") == (0, "", "no data match 'z*'; `tost ls data` lists all\n")
    monkeypatch.setitem(_ls._LISTS, "ops", lambda pattern: [])
    assert run("ls", "ops") == (0, "", "there are no ops yet\n")
    assert json.loads(run("ls", "data", "z*", "--json").out)["entries"] == []
