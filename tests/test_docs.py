"""The documentation, executed: code blocks run, commands exist, links lead somewhere, numbers are generated."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import yaml

import tost
from tost.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The page on plug-ins has files in place of a session; see tests/plugins.
ELSEWHERE = ("extend",)
EXECUTED = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem not in ELSEWHERE)]
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
    known = ("python", "text", "yaml", "toml", *SHELLS)
    assert [block for block in blocks(page.read_text()) if block.language not in known] == []


def test_paths_of_the_guide_for_contributors_exist():
    paths = re.findall(r"`((?:src|tests|scripts|\.ci)/[\w./-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@cache
def help_of(words: tuple[str, ...]) -> str:
    """What the program itself says about a command; empty if it does not know it."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as shown, redirect_stderr(StringIO()):
        patch.setattr(sys, "argv", ["tost", *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            main()
    return "" if ended.value.code else shown.getvalue()


def commands_of(page: str) -> list[tuple[str, ...]]:
    """Shell commands of a page: the lines of its shell blocks, and inline code that starts with `make` or `tost`."""
    found: list[tuple[str, ...]] = []
    prose = page
    for block in blocks(page):
        prose = prose.replace(block.text, "")
        if block.language in SHELLS:
            lines = block.text.splitlines()  # with prompts among them, the others are output
            lines = [line for line in lines if line.startswith("$ ")] or lines
            found += [tuple(shlex.split(line.removeprefix("$ "), comments=True)) for line in lines]
    found += [tuple(code.split()) for code in re.findall(r"`((?:make|tost) [a-z][^`]*)`", prose)]
    return [command for command in found if command]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "CHANGELOG"], ids=name_of)
def test_commands_exist(page):
    commands = commands_of(page.read_text())
    for command in commands:
        if command[0] == "tost":
            words = tuple(takewhile(lambda word: not word.startswith("-"), command[1:]))
            options = {word.partition("=")[0] for word in command if word.startswith("-")}
            assert help_of(words), f"the program has no command `tost {' '.join(words)}`"
            unknown = {option for option in options if option not in help_of(words) + help_of(())}
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
    assert str(citation["version"]) == tost.__version__
    assert citation["license"] == project["license"]
    assert citation["preferred-citation"]["title"] in (ROOT / "README.md").read_text().replace("\n  ", " ")


def anchor(heading: str) -> str:
    """The identifier that a heading gets: lower case, words joined by hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page):
    text = page.read_text()
    for block in blocks(text):
        text = text.replace(block.text, "")
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


def test_every_picture_is_shown_somewhere():
    text = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in (ROOT / "docs" / "img").iterdir() if path.name not in text] == []


def test_numbers_of_the_readme_and_measured_plots_are_generated():
    assert load_script("update_readme").main(["--check"]) == 0, "run `python scripts/update_readme.py`"


def test_pages_of_research_are_generated():
    from research.pages import update

    assert update(check=True) == 0, "run `python -m research pages`"


def test_the_times_of_the_explorer_are_those_that_are_stored(tmp_path):
    script = load_script("update_explore")
    page = (ROOT / "docs" / "explore.md").read_text()
    assert page == script.generate(), "run `python scripts/update_explore.py`"
    stored = json.loads(script.FILE.read_text())
    stored["times"]["keystroke"] |= {"median_seconds": 0.0333, "slowest_seconds": 3.0}
    (tmp_path / "explore.json").write_text(json.dumps(stored))
    assert "| 33 ms | 3.0 s | " in script.generate(tmp_path / "explore.json")


def test_the_page_of_promises_is_up_to_date():
    script = load_script("update_promises")
    assert (ROOT / "docs" / "promises.md").read_text() == script.generate(), "run `python scripts/update_promises.py`"


def test_the_page_of_promises_shows_what_is_stored(tmp_path):
    script = load_script("update_promises")
    found = {"about": "a run killed", "counted": "kills", "counts": {"kills": 1200, "compared": 7}}
    other = {"about": "a full disk", "counted": "times", "counts": {"kills": 3, "compared": 3, "refused": 2}}
    scenarios = {"train": {**found, "differences": ["weights"], "seconds": 90.0}}
    scenarios |= {"full-disk": {**other, "differences": [], "seconds": 1.0}}
    stored = {"tost": "9.9", "cpu": "A CPU", "date": "2001-02-03", "scenarios": scenarios}
    (tmp_path / "stress.json").write_text(json.dumps(stored))
    target = {
        "name": "tar",
        "inputs": 5_000_000,
        "seconds": 7200.0,
        "coverage": 812,
        "quiet_inputs": 9_000,
        "quiet_seconds": 61.0,
        "problems": 0,
    }
    (tmp_path / "fuzz.json").write_text(json.dumps({"targets": [target], "tost": "9.9", "date": "2001-02-03T04:05:06"}))
    run = {"sanitizer": "thread", "isa": "avx2", "tests": 41, "seconds": 61, "problems": 1}
    (tmp_path / "sanitize.json").write_text(json.dumps({"runs": [run], "tost": "9.9", "date": "2001-02-03"}))
    text = script.generate(tmp_path)
    assert (
        "1,200 kills and 3 other disturbances in 2 scenarios, 10 comparisons with an undisturbed run, "
        "1 differences in `train` (tost 9.9" in text
    )
    assert "5,000,000 inputs to 1 parsers in 2 h 0 min of processor time, 0 problems" in text
    assert "ThreadSanitizer: 41 tests on `avx2`, 1 problems. (tost 9.9" in text


@pytest.fixture
def result(tmp_path):
    """A stored measurement in the form that the benchmark program writes, with a few contenders and lengths."""
    case = {"op": "tssa", "mode": "fwd+bwd", "batch": 1, "tokens": 1024, "width": 384, "heads": 8, "dtype": "float32"}
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
        "rows": [
            {**case, "contender": "limit", "seconds_median": 0.01},
            {**case, "contender": "tost", "seconds_median": 0.0106},
            {**case, "contender": "sdpa", "seconds_median": None},
            {**case, "contender": "xca", "seconds_median": 0.03},
            {**case, "contender": "tost", "mode": "fwd", "seconds_median": 0.004},
            {**case, "contender": "tost", "tokens": 4096, "seconds_median": 0.05},
            {**case, "contender": "tost", "tokens": 65_536, "seconds_median": 1.2345},
        ],
    }
    path = tmp_path / "ops_a-cpu_200102.json"
    path.write_text(json.dumps(content))
    return path


def test_speed_is_shown_in_milliseconds_and_only_where_it_is_wanted(result):
    shown = load_script("update_readme").render_speed(json.loads(result.read_text()))
    assert "| `tssa` | 384 / 8 | 1,024 | 10.6 |  | skipped | 10.0 |" in shown
    assert "| `tssa` | 384 / 8 | 65,536 | 1,234 |  |  |  |" in shown
    assert "4,096" not in shown
    assert "A CPU, 2 threads, torch 9.9, tost 0.0, 2001-02-03." in shown


def test_whole_models_are_shown_in_every_runtime_and_in_their_best(result, tmp_path):
    script = load_script("update_readme")
    path = tmp_path / "model_a-cpu_200102.json"
    path.write_text(result.read_text())  # the form of earlier revisions
    assert script.whole_models(tmp_path) is None
    case = {"model": "a", "size": 224, "batch": 8, "limit": 0, "of_product": 0.5}
    rows = [
        {**case, "path": "torch fp32", "seconds": {"median": 0.2}},
        {**case, "path": "OpenVINO fp32", "seconds": {"median": 0.0501}},
        {**case, "path": "torch fp32", "size": 4096, "limit": 8192, "seconds": None},
    ]
    machine = {"gflops": {"float32": 200.0}, "gbytes": 20.0}
    path.write_text(json.dumps(json.loads(result.read_text()) | {"rows": rows, "machine": machine}))
    measured = script.whole_models(tmp_path)
    assert "| 8 x 224 px | `a` | 200 (50%) | 50.1 (50%) |" in script.render_models(measured)
    assert "| 4,096 tokens | `a` | does not fit |  |" in script.render_models(measured)
    assert "200 GFLOP/s in float32" in script.render_models(measured)
    assert "| 8 x 224 px | `a` 50.1 (OpenVINO fp32) |" in script.render_best(measured)


def test_cost_of_blocks_has_a_column_for_each_machine_that_passed(result, tmp_path):
    content = json.loads(result.read_text())
    rows = [
        {**row, "block_size": 8, "ratio_to_limit_median": 1.064} for row in content["rows"] if row["tokens"] == 1024
    ]
    for cpu, block_size, passed in (("A", 8, True), ("B", 8, True), ("C", 8, False), ("D", 16, True)):
        place = {**content["environment"], "cpu": cpu, "native": {"isa": "avx2"}}
        stored = {**content, "environment": place, "gate": {"passed": passed}}
        stored["rows"] = [{**row, "block_size": block_size} for row in rows]
        (tmp_path / f"ops-selection_{cpu}.json").write_text(json.dumps(stored))
    shown = load_script("update_readme").render_blocks(tmp_path).splitlines()
    assert shown[0] == "| operator | width / heads | tokens | pass | A, avx2, 2001-02-03 | B, avx2, 2001-02-03 |"
    assert shown[2:] == [
        "| `tssa` | 384 / 8 | 1,024 | with backward | 1.06 | 1.06 |",
        "| `tssa` | 384 / 8 | 1,024 | forward | 1.06 | 1.06 |",
    ]


def test_update_readme_fills_its_blocks_and_nothing_else():
    script = load_script("update_readme")
    before = "above\n<!-- a:start -->\nold\n<!-- a:end -->\nbetween\n<!-- b:start -->\n<!-- b:end -->\nbelow\n"
    after = script.updated(before, {"a": "new", "b": "text"})
    assert after == (
        "above\n<!-- a:start -->\nnew\n<!-- a:end -->\nbetween\n<!-- b:start -->\ntext\n<!-- b:end -->\nbelow\n"
    )
    assert script.updated(after, {"a": "new", "b": "text"}) == after


@pytest.mark.parametrize("broken", ["no markers", "{END} {START}", "{START} {END} {START} {END}"])
def test_update_readme_refuses_a_page_without_its_block(broken):
    page = broken.format(START="<!-- a:start -->", END="<!-- a:end -->")
    with pytest.raises(SystemExit, match="exactly one"):
        load_script("update_readme").updated(page, {"a": "text"})


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


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 130


# Arguments that keep each example short, and what its last line has to be.
EXAMPLES = {
    "swap_attention": (["--tokens", "128"], r"    128 tokens, token statistics: [\d.]+ s"),
    "train_on_tensors": (["--steps", "20"], r"accuracy on new series: (0\.[5-9]\d|1\.00) .*"),
    "stream_text": (["--piece", "500"], r"continuation: b.+"),
    "look_inside": (["--steps", "2"], r"pictures.membership-maps\.png"),
    "hf_trainer": (["--steps", "2"], r"continuation: b.import .+"),
    "own_task": (["train.steps=20"], r"mean squared error: \d.*"),
    "distill": (["--model", "model", "--text", "text.txt", "--layers", "0", "--steps", "2"], "saved student"),
}


LONG = ("look_inside", "hf_trainer", "distill")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in EXAMPLES])
def test_example_runs(name, tmp_path):
    arguments, last = EXAMPLES[name]
    if name == "distill":
        from tests.integrations.replace.models import letters_tokenizer, make

        make("encoder_bert").save_pretrained(tmp_path / "model")
        letters_tokenizer().save_pretrained(tmp_path / "model")
        (tmp_path / "text.txt").write_text("a first text\nand another one\n" * 8)
    command = [sys.executable, ROOT / "examples" / f"{name}.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert re.fullmatch(last, done.stdout.splitlines()[-1]), done.stdout


def test_examples_are_short_and_use_public_names_only():
    whole = ROOT / "examples" / "tost_in_one_file.py"  # without tost; it has tests of its own
    paths = sorted({*(ROOT / "examples").glob("*.py")} - {whole})
    assert [path.stem for path in paths] == sorted(EXAMPLES)
    for path in paths:
        text = path.read_text()
        assert len(text.splitlines()) < 60, path
        names = re.findall(r"^(?:from|import) (tost[\w.]*)", text, flags=re.MULTILINE)
        assert set(names) <= {*("tost", "tost.data", "tost.integrations.transformers", "tost.recipes", "tost.train")}, (
            path
        )
        assert not re.search(r"\b(tost|analysis|model)(\.\w+)*\._\w", text), path
