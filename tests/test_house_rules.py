"""What a reviewer would ask for: folders that can be searched by eye, no dead modules, one spelling, plain words."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tost"
FILES_PER_FOLDER = 20
FILES_PER_PREFIX = 2
AS_IN_LINES = 12

STEMS = (
    "amorti authori canoni categori characteri customi discreti emphasi equali factori finali generali initiali "
    "itemi lineari locali materiali maximi memori minimi modulari neutrali normali optimi organi paralleli "
    "parameteri parametri penali prioriti quanti randomi reali recogni regulari reorgani seriali speciali stabili "
    "standardi summari symboli symmetri synchroni tokeni utili vectori visuali"
)
BRITISH_S = re.compile(
    rf"(?:{'|'.join(STEMS.split())})s(?:e|es|ed|er|ers|ing|able|ation|ations)(?![a-z])"
    r"|analys(?:e|ed|er|ers|ing)(?![a-z])",
    re.IGNORECASE,
)
# Old names that are read, and a typo that a test makes on purpose.
SPELLED_OTHERWISE = {
    "src/tost/train/config/files.py": "regularise",
    "tests/regression/make_run.py": "regularise",
}
STILTED = re.compile(r"\b(?:of ours|nobody|one door)\b", re.IGNORECASE)
AS_IN = re.compile(r"^\s*\w+: As in `")


def texts() -> list[Path]:
    """Everything that people read: code, tests, documentation, templates; not what programs have written."""
    folders = {
        "src": ("py", "pyi", "md", "yaml", "h", "cpp"),
        "tests": ("py",),
        "fuzz": ("py",),
        "docs": ("md",),
        "scripts": ("py", "yaml"),
    }
    folders |= {"examples": ("py",), "results": ("md",), ".github": ("yml", "md")}
    found = [path for folder, ends in folders.items() for end in ends for path in (ROOT / folder).rglob(f"*.{end}")]
    found += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "setup.py")]
    return sorted(path for path in found if path != Path(__file__) and "egg-info" not in str(path))


def places(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number} {found[0].strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := pattern.search(line))
    ]


def listed(title: str, found: list[str]) -> str:
    return f"{title}:\n  " + "\n  ".join(found)


def folders() -> dict[Path, list[str]]:
    """Names of the Python files in each folder of the package."""
    found: dict[Path, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        found.setdefault(path.parent.relative_to(SOURCE.parent), []).append(path.stem)
    return found


def test_no_folder_is_crowded():
    crowded = [f"{len(names)} files: {folder}" for folder, names in folders().items() if len(names) > FILES_PER_FOLDER]
    assert not crowded, listed(f"more than {FILES_PER_FOLDER} Python files, make sub-packages", crowded)


def test_a_prefix_does_not_stand_for_a_folder():
    found = []
    for folder, names in folders().items():
        prefixes = Counter(name.lstrip("_").partition("_")[0] for name in names if "_" in name.strip("_"))
        found += [f"{folder}/{prefix}_*: {n} files" for prefix, n in prefixes.items() if n > FILES_PER_PREFIX]
    assert not found, listed("files that share a prefix, make a sub-package", found)


def module_name(path: Path) -> str:
    parts = ["tost", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named_modules(path: Path) -> set[str]:
    """Modules that a file imports or names in a text such as ``"tost.cli._train:train"``."""
    package = module_name(path) if path.stem == "__init__" else module_name(path).rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [parent, node.module]))
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            found |= {name, f"{package}.{name.lstrip('.')}"}
    return found


def test_every_module_is_used():
    """Modules that users import or run are in the reference; every other one is named by a module of the package."""
    files = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi")]
    names = {path: named_modules(path) for path in files}
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    unused = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = module_name(path)
        if path.stem in ("__init__", "__main__") or f"::: {name}" in reference:
            continue
        folder = f"{name.rpartition('.')[0]}."  # as in f"tost.data.readers.{name}"
        if not any({name, folder} & found for file, found in names.items() if file != path):
            unused.append(str(path.relative_to(ROOT)))
    assert not unused, listed("modules that nothing imports", unused)


def test_one_spelling():
    found = [
        place
        for place in places(BRITISH_S, texts())
        if SPELLED_OTHERWISE.get(place.partition(":")[0]) != place.rpartition(" ")[2]
    ]
    found += [str(path.relative_to(ROOT)) for path in texts() if BRITISH_S.search(path.stem)]
    assert not found, listed("spelled with s, everywhere else with z", found)


@pytest.mark.parametrize("word", ["normalise", "Optimiser", "re_initialised", "analyse", "summarises", "tokenisation"])
def test_spelling_with_s_is_seen(word):
    assert BRITISH_S.search(word)


@pytest.mark.parametrize(
    "word", ["normalize", "analysis", "analyses", "optimistic", "precise", "otherwise", "parallelism"]
)
def test_other_words_are_left_alone(word):
    assert not BRITISH_S.search(word)


def test_plain_words():
    found = places(STILTED, texts())
    assert not found, listed("stilted, see CONTRIBUTING", found)


def test_arguments_are_described_once():
    found = places(AS_IN, [path for path in texts() if path.suffix == ".py"])
    assert len(found) <= AS_IN_LINES, listed("arguments that only refer to another function", found)
