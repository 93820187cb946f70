"""The documentation, executed: code blocks run, commands exist, links lead somewhere, numbers are generated."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXECUTED = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Made by the benchmark program, so they may be missing for as long as no measurement is stored.
GENERATED = {ROOT / "docs" / "img" / "speed.svg"}
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("ops_*.json"))
SHELLS = ("console", "shell", "sh", "bash")


class Block(NamedTuple):
    """A fenced code block: its language, its text, and the line of the page on which the text starts."""

    language: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    opened: tuple[str, int] | None = None
    lines = page.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = (line[3:].strip(), number + 1)
        else:
            language, first = opened
            found.append(Block(language, "\n".join(lines[first - 1 : number - 1]), first))
            opened = None
    assert opened is None, f"the block that opens on line {opened[1] - 1 if opened else 0} is never closed"
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        if block.language == "python":
            # Blank lines in front make a traceback point at the line of the page.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_states_its_language(page):
    assert [block for block in blocks(page.read_text()) if block.language not in ("python", "text", *SHELLS)] == []


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@cache
def help_of(words: tuple[str, ...]) -> str:
    """What the program itself says about a command; empty if it does not know it."""
    program = [sys.executable, "-c", "from tost.cli import main; main()"]
    shown = subprocess.run([*program, *words, "--help"], capture_output=True, text=True, check=False)
    return shown.stdout if shown.returncode == 0 else ""


def commands_of(page: str) -> list[tuple[str, ...]]:
    """Shell commands of a page: the lines of its shell blocks, and inline code that starts with `make` or `tost`."""
    found: list[tuple[str, ...]] = []
    prose = page
    for block in blocks(page):
        prose = prose.replace(block.text, "")
        if block.language in SHELLS:
            lines = [line for line in block.text.splitlines() if block.language != "console" or line.startswith("$ ")]
            found += [tuple(shlex.split(line.removeprefix("$ "), comments=True)) for line in lines]
    found += [tuple(code.split()) for code in re.findall(r"`((?:make|tost) [a-z][^`]*)`", prose)]
    return [command for command in found if command]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page):
    commands = commands_of(page.read_text())
    for command in commands:
        if command[0] == "tost":
            words = tuple(takewhile(lambda word: not word.startswith("-"), command[1:]))
            options = {word.partition("=")[0] for word in command if word.startswith("-")}
            assert help_of(words), f"the program has no command `tost {' '.join(words)}`"
            unknown = {option for option in options if option not in help_of(words)}
            assert not unknown, f"`tost {' '.join(words)}` does not take {', '.join(sorted(unknown))}"
    wrong = [command for command in commands if command[0] == "make" and command[1] not in make_targets()]
    assert wrong == [], f"the Makefile has no such target: {wrong}; it has {sorted(make_targets())}"
    strangers = {command[0] for command in commands} - {"tost", "make", "pip", "python"}
    assert strangers == set(), "programs that a reader may not have"


def test_readme_names_the_two_commands_that_set_everything_up():
    commands = commands_of((ROOT / "README.md").read_text())
    assert ("make", "demo") in commands
    assert ("make", "test") in commands


def test_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert str(citation["version"]) == project["version"]
    assert citation["license"] == project["license"]
    assert citation["preferred-citation"]["title"] in (ROOT / "README.md").read_text().replace("\n  ", " ")


def anchor(heading: str) -> str:
    """The identifier that a heading gets: lower case, words joined by hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page):
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    broken: list[str] = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() and (path not in GENERATED or RESULTS):
            broken.append(target)
        elif fragment and path.exists():
            headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
            broken += [target] if fragment not in map(anchor, headings) else []
    assert broken == []


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))  # as if the script were run
        spec.loader.exec_module(module)
    return module


def test_numbers_of_the_readme_and_measured_plots_are_generated():
    assert load_script("update_readme").main(["--check"]) == 0, "run `python scripts/update_readme.py`"


def test_results_page_is_generated():
    script = load_script("update_results")
    assert (ROOT / "docs" / "results.md").read_text() == script.generate(), "run `python scripts/update_results.py`"


def test_page_of_the_papers_tables_is_generated():
    script = load_script("update_paper_tables")
    page = (ROOT / "docs" / "paper-tables.md").read_text()
    assert page == script.generate(), "run `python scripts/update_paper_tables.py`"


@pytest.fixture
def result(tmp_path):
    """A stored measurement in the form that the benchmark program writes, with two contenders and one length."""
    case = {"op": "tssa", "mode": "fwd", "batch": 1, "tokens": 4096, "width": 384, "heads": 8, "dtype": "float32"}
    content = {
        "complete": True,
        "gate": {"passed": True},
        "environment": {
            "cpu": "A CPU",
            "threads": 2,
            "torch": "9.9",
            "tost": "0.0",
            "measured": "2001-02-03T04:05:06Z",
        },
        "contenders": {"limit": "the projections", "tost": "ours", "sdpa": "softmax attention"},
        "rows": [
            {**case, "contender": "limit", "ratio_to_limit_median": 1.0},
            {**case, "contender": "tost", "ratio_to_limit_median": 1.0625},
            {**case, "contender": "sdpa", "ratio_to_limit_median": None},
        ],
    }
    path = tmp_path / "ops_a-cpu_200102.json"
    path.write_text(json.dumps(content))
    return path


def test_update_readme_fills_the_block_and_nothing_else(result):
    script = load_script("update_readme")
    before = f"above\n{script.START}\nold\n{script.END}\nbelow\n"
    after = script.updated(before, result)
    assert after.startswith(f"above\n{script.START}\n")
    assert after.endswith(f"\n{script.END}\nbelow\n")
    assert "| `tssa` | fwd | 384 / 8 | 4,096 | 1.06 | skipped |" in after
    assert "A CPU, 2 threads, torch 9.9, tost 0.0, 2001-02-03." in after
    assert "old" not in after
    assert script.updated(after, result) == after


@pytest.mark.parametrize("broken", ["no markers", "{END} {START}", "{START} {END} {START} {END}"])
def test_update_readme_refuses_a_page_without_its_block(result, broken):
    script = load_script("update_readme")
    with pytest.raises(SystemExit, match="exactly one"):
        script.updated(broken.format(START=script.START, END=script.END), result)


def test_update_readme_takes_the_newest_complete_green_result(result, tmp_path):
    script = load_script("update_readme")
    content = json.loads(result.read_text())
    for year, change in {2010: {"complete": False}, 2011: {"gate": {"passed": False}}}.items():
        machine = {**content["environment"], "measured": f"{year}-01-01T00:00:00Z"}
        newer = json.dumps({**content, **change, "environment": machine})
        (tmp_path / f"ops_a-cpu_{year}01.json").write_text(newer)
    assert script.stored("ops", tmp_path) == result
    result.unlink()
    with pytest.raises(SystemExit, match="tost bench ops"):
        script.stored("ops", tmp_path)


def test_example_ends_with_its_picture(tmp_path):
    command = [sys.executable, ROOT / "examples" / "operator_tour.py", "--out", tmp_path, "--lengths", "64", "256"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("picture: ")
    assert Path(last.removeprefix("picture: ")).stat().st_size > 10_000
