"""The page "Your own model, data, task": its files are written as shown, its commands run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.test_docs import Block, blocks, commands_of

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


def files() -> dict[str, Block]:
    """The blocks of the page that are files, by the name in the sentence above each."""
    lines = PAGE.read_text().splitlines()
    found = {}
    for block in blocks(PAGE.read_text()):
        named = re.search(r"`(\w+\.(?:py|yaml|toml))`", " ".join(lines[max(0, block.line - 4) : block.line - 2]))
        if named and block.language in ("python", "yaml", "toml"):
            found[named[1]] = block
    return found


def commands(name: str) -> list[tuple[str, ...]]:
    """The commands of the page that run the example `name`, in their order."""
    shown = [command for command in commands_of(PAGE.read_text()) if command[0] == "tost"]
    return [
        command[1:] for command in shown if any(f"{name}.yaml" in word or f"runs/{name}" in word for word in command)
    ]


@pytest.fixture
def folder(tmp_path):
    for name, block in files().items():
        (tmp_path / name).write_text(block.text + "\n")
    return tmp_path


def test_page_has_the_files_of_two_examples_and_of_a_package():
    assert set(files()) == {"forecast.py", "forecast.yaml", "label.py", "label.yaml", "pyproject.toml"}


@pytest.mark.parametrize("name", [pytest.param("forecast", marks=pytest.mark.slow), "label"])
def test_commands_of_the_example_work(name, folder, tost_in):
    assert {command[0] for command in commands(name)} >= {"train", "eval"}
    for command in commands(name):
        done = tost_in(*command)
        assert done.returncode == 0, f"tost {' '.join(command)}\n{done.stdout}\n{done.stderr}"
    records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0]


def test_entry_points_of_the_page_are_those_of_its_files():
    targets = re.findall(r'^(\w+) = "forecast:(\w+)"$', files()["pyproject.toml"].text, flags=re.MULTILINE)
    code = files()["forecast.py"].text
    assert len(targets) == 3
    for name, target in targets:
        assert re.search(rf'@tost\.register_\w+\("{name}".*\)\n(?:class|def) {target}\b', code), name
