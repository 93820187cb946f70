"""The map from equations to code, and the reference: every name in them exists, and nothing public is missing."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml

import tost
from tests.test_docs import load_script

ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs" / "equations.md"
REFERENCE = ROOT / "docs" / "api"
# Written for one command or one page; what users may build on is in the reference.
NOT_IN_THE_REFERENCE = {"tost.bench", "tost.cli", "tost.testing"}


class Row(NamedTuple):
    """A row of the map: the paper's side, what is said there, names of code, names of tests."""

    paper: str
    claim: str
    code: tuple[str, ...]
    tests: tuple[str, ...]


def rows_of(text: str) -> list[Row]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "paper":
            code = re.findall(r"`([\w/]+\.py:[\w.]+)`", cells[2])
            tests = re.findall(r"`([\w/]+\.py::\w+)`", cells[3])
            found.append(Row(cells[0].strip("| "), cells[1], tuple(code), tuple(tests)))
    return found


ROWS = rows_of(MAP.read_text())


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names that a file defines at its top level, and those of its classes with the class in front."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
    return frozenset(found)


def test_map_is_read_and_complete():
    papers = " ".join(row.paper for row in ROWS)
    numbers = {
        int(number) for part in re.findall(r"Eq\. \([^A-Za-z]*\)", papers) for number in re.findall(r"\d+", part)
    }
    assert numbers == set(range(1, 12)), "the numbered equations of the main text"
    assert set(re.findall(r"Algorithm (\d)", papers)) == set("1234")
    assert {"Theorem 1", "Theorem 2", "Corollary 1"} <= set(re.findall(r"(?:Theorem|Corollary) \d", papers))
    assert all(bool(row.code) == bool(row.tests) for row in ROWS), "a function without a test, or the reverse"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.paper)
def test_every_name_in_the_map_exists(row):
    for name in row.code:
        file, _, symbol = name.partition(":")
        assert symbol in names_in(ROOT / "src" / "tost" / file), f"{MAP.name}: {name} does not exist"
    for name in row.tests:
        file, _, test = name.partition("::")
        assert test in names_in(ROOT / "tests" / file), f"{MAP.name}: {name} does not exist"


def test_a_wrong_name_is_noticed():
    (row,) = rows_of("| Eq. (1) | rate | `objective.py:no_such` | `objective/test_rates.py::test_no_such` |")
    with pytest.raises(AssertionError, match="no_such"):
        test_every_name_in_the_map_exists(row)


@pytest.mark.parametrize("normalize", [False, True], ids=["equation 10", "appendix C.1"])
def test_memberships_are_those_of_the_paper(normalize):
    torch.manual_seed(0)
    z, u = torch.randn(7, 6, dtype=torch.float64), torch.randn(3, 6, 2, dtype=torch.float64)  # tokens; bases of heads
    projected = np.einsum("kdp,nd->kpn", u.numpy(), z.numpy())  # U_k^T Z, tokens in columns as in the paper
    if normalize:
        projected = projected / np.linalg.norm(projected, axis=2, keepdims=True)
    logits = 1.5 * (projected**2).sum(axis=1).T  # 1 / (2 eta) = 1.5
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    w = torch.einsum("nd,kdp->nkp", z, u)[None]
    pi = tost.membership(w, torch.full((3,), 1.5, dtype=torch.float64), normalize=normalize)
    assert np.allclose(pi[0].numpy(), expected, atol=1e-12)


def public_modules() -> list[str]:
    """Packages of tost, its single modules, and the bridges to other libraries."""
    source = ROOT / "src" / "tost"
    inside = [path for folder in (source, source / "integrations") for path in folder.iterdir()]
    found = {path.stem for path in inside if not path.name.startswith("_") and path.suffix == ".py"}
    found |= {path.name for path in inside if (path / "__init__.py").exists() and not path.name.startswith("_")}
    bridges = {path.stem for path in (source / "integrations").iterdir()}
    names = {f"tost.integrations.{name}" if name in bridges else f"tost.{name}" for name in found}
    return sorted(names - {"tost.integrations"} - NOT_IN_THE_REFERENCE)


@pytest.mark.parametrize("module", public_modules())
def test_every_public_module_is_in_the_reference(module):
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    assert re.search(rf"^::: {re.escape(module)}$", pages, flags=re.MULTILINE), f"docs/api has no `::: {module}`"
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_with_an_order_of_its_own_leaves_nothing_out(page):
    text = page.read_text()
    for module in re.findall(r"^::: (\S+)\n    options: {members: false}$", text, flags=re.MULTILINE):
        listed = {
            name.rpartition(".")[2] for name in re.findall(rf"^::: {re.escape(module)}\.(\S+)$", text, re.MULTILINE)
        }
        assert listed == set(importlib.import_module(module).__all__)


def test_front_page_of_the_reference_names_everything():
    listed = set(re.findall(r"^\| \[`(?:tost\.)?(\w+)`\]", (REFERENCE / "tost.md").read_text(), flags=re.MULTILINE))
    assert listed == {name for name in tost.__all__ if not isinstance(getattr(tost, name), ModuleType)}


def test_every_page_is_in_the_navigation():
    def pages(node: object) -> set[str]:
        if isinstance(node, str):
            return {node}
        return {page for child in (node.values() if isinstance(node, dict) else node) for page in pages(child)}

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [next(iter(section)) for section in nav] == ["Start", "Use", "Understand", "Results", "Extend", "Reference"]
    assert pages(nav) >= {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


@pytest.fixture(scope="module")
def griffe_extension():
    return load_script("website/docstrings")


def test_docstrings_become_markdown(griffe_extension):
    text = "Say.\n\n.. code-block:: text\n\n    y = -pi * w\n\nExample:\n    >>> 1\n    1"
    assert griffe_extension.as_markdown(text) == "Say.\n\n    y = -pi * w\n\nExamples:\n    >>> 1\n    1"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Field(16, description='edge of a patch, P')", "Edge of a patch, P."),
        ("Field(default=1)", None),
        ("16", None),
        ("None", None),
    ],
)
def test_fields_are_documented_by_their_description(griffe_extension, value, expected):
    assert griffe_extension.described(value) == expected
