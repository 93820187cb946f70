"""The import rule, read from the syntax trees: who may import whom, and which third-party package may appear where.

Every import counts, inside functions and under ``TYPE_CHECKING`` too, and so does ``import_module("a literal name")``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "tost"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# From left to right: a module imports from its left or from its own package. Names in one tuple do not see each other.
# The empty name is the package's front page, `tost` itself: whoever stands to its right may use it as a user would.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("_io", "_lazy"),
    ("_env", "_machine", "_progress", "_text", "_tokenizer", "_torchvision", "_yaml"),
    ("_options", "_plugins"),
    ("testing",),
    ("ops",),
    ("objective",),
    ("parallel",),
    ("nn",),
    ("models",),
    ("data", "generation", "analysis"),
    ("train",),
    ("recipes",),
    ("pretrained", "report", "deploy"),
    ("",),
    ("bench", "explore", "integrations"),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Where each third-party package may be imported, as patterns below `tost.`; a pattern covers its submodules.
FROM_MODELS_ON = tuple(name for name, rank in RANK.items() if rank >= RANK["models"] and name not in ("", "cli"))
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "torch": (
        "_torchvision",
        "_machine",
        *(name for name in RANK if not name.startswith("_") and name not in ("", "errors")),
    ),
    "triton": ("ops.triton",),
    "numpy": ("_tokenizer", *FROM_MODELS_ON),
    "safetensors": ("models", "generation", "train", "integrations"),
    "timm": (
        "models.vision",
        "data.images",
        "analysis.class_attention",
        "recipes",
        "bench",
        "integrations",
    ),
    "torchvision": ("_torchvision", "models.vision", "data.images", "integrations"),
    "PIL": ("data", "analysis", "explore"),
    "transformers": ("bench", "integrations"),
    "tokenizers": ("data", "integrations"),
    "huggingface_hub": ("data",),
    "datasets": ("data",),
    "pyarrow": ("data",),
    "scipy": ("data",),
    "sklearn": ("data", "analysis"),
    "accelerate": ("train",),
    "onnxruntime": ("deploy",),
    "openvino": ("deploy",),
    "pydantic": ("_options", "models", "data", "train", "recipes", "bench"),
    "pydantic_core": ("_options", "models", "data", "train", "recipes"),
    "yaml": ("_yaml",),
    "psutil": ("train", "bench"),
    "matplotlib": ("analysis", "bench"),
    "jinja2": ("report",),
    "markupsafe": ("report",),
    "starlette": ("explore",),
    "uvicorn": ("explore",),
    "anyio": ("explore",),
    "rich": ("cli",),
    "typer": ("cli",),
    "click": ("cli",),
}


class Edge(NamedTuple):
    """One import: `source` is a module of the package, `target` is as far as the statement names it."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} (line {self.line})"


def module_name(path: Path, root: Path) -> str:
    """``root/ops/state.py`` -> ``tost.ops.state``, ``root/ops/__init__.py`` -> ``tost.ops``."""
    parts = [PACKAGE, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_edges(text: str, module: str, *, is_package: bool) -> list[Edge]:
    """Every import in the source `text` of `module`, in the order of the tree."""
    package = module if is_package else module.rpartition(".")[0]
    edges: list[Edge] = []
    for node in ast.walk(ast.parse(text)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            # `from tost import nn` means the layer tost.nn; deeper names do not change the layer but help the reader.
            targets = [f"{base}.{alias.name}" if base == PACKAGE else base for alias in node.names]
        elif isinstance(node, ast.Call) and (name := _literal_import(node)):
            targets = [_absolute(name, package)]
        edges += [Edge(module, target, getattr(node, "lineno", 0)) for target in dict.fromkeys(targets)]
    return edges


def _absolute(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *filter(None, [name[level:]])])


def _literal_import(node: ast.Call) -> str | None:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return None


def layer_of(module: str) -> str:
    """The first name below the package; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def problems(edge: Edge) -> Iterator[str]:
    """Why an edge is forbidden; nothing if it is allowed."""
    here = layer_of(edge.source)
    if edge.target.partition(".")[0] == PACKAGE:
        there = layer_of(edge.target) if layer_of(edge.target) in RANK else ""
        # The front page shows names of every layer; it loads them when they are asked for, so that no cycle arises.
        if here and here != there and RANK[there] >= RANK[here]:
            remedy = f"{there} is not to the left of {here}" if there else "import the name from the layer it is in"
            yield f"{edge}: {remedy}"
        return
    name = edge.target.partition(".")[0]
    if name in sys.stdlib_module_names:
        return
    if name not in THIRD_PARTY:
        yield f"{edge}: unknown third-party package {name}; if it is needed, add it to THIRD_PARTY with its places"
        return
    below = edge.source.partition(".")[2]
    if not any(fnmatch(below, pattern) or fnmatch(below, f"{pattern}.*") for pattern in THIRD_PARTY[name]):
        yield f"{edge}: {name} is only for {', '.join(THIRD_PARTY[name])}"


def check(root: Path) -> list[str]:
    """All violations below the package folder `root`."""
    found: list[str] = []
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.pyi")]):
        module = module_name(path, root)
        if (layer := layer_of(module)) and layer not in RANK:
            found.append(f"{module}: unknown top-level module {layer}; add it to LAYERS in {Path(__file__).name}")
            continue
        for edge in read_edges(path.read_text(), module, is_package=path.stem == "__init__"):
            found += problems(edge)
    return found


def test_package_obeys_the_layers():
    found = check(SOURCE)
    assert not found, "forbidden imports:\n  " + "\n  ".join(found)


@pytest.fixture
def verdict(tmp_path):
    """Write one synthetic module and return what the checker says about it."""

    def write_and_check(file: str, text: str) -> list[str]:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return check(tmp_path)

    return write_and_check


FORBIDDEN = {
    "absolute": ("ops/x.py", "import tost.nn.y\n", "tost.ops.x -> tost.nn.y (line 1)"),
    "from": ("ops/x.py", "\nfrom tost.nn.y import z\n", "tost.ops.x -> tost.nn.y (line 2)"),
    "from the package": ("ops/x.py", "from tost import nn\n", "tost.ops.x -> tost.nn (line 1)"),
    "relative": ("ops/tssa/x.py", "from ...nn import y\n", "tost.ops.tssa.x -> tost.nn (line 1)"),
    "relative in a package": ("ops/__init__.py", "from ..nn.y import z\n", "tost.ops -> tost.nn.y (line 1)"),
    "relative to the root": ("ops/x.py", "from .. import nn\n", "tost.ops.x -> tost.nn (line 1)"),
    "in a function": ("ops/x.py", "def f():\n    import tost.nn.y\n", "tost.ops.x -> tost.nn.y (line 2)"),
    "for typing": (
        "nn/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tost.models import M\n",
        "tost.nn.x -> tost.models (line 3)",
    ),
    "by name": (
        "ops/x.py",
        'import importlib\nimportlib.import_module("tost.nn")\n',
        "tost.ops.x -> tost.nn (line 2)",
    ),
    "sideways": ("data/x.py", "import tost.generation\n", "tost.data.x -> tost.generation (line 1)"),
    "within a line of the rule": ("ops/x.py", "import tost.objective\n", "tost.ops.x -> tost.objective (line 1)"),
    "front page": ("nn/x.py", "from tost import tssa\n", "tost.nn.x -> tost.tssa (line 1)"),
    "front page itself": ("train/x.py", "import tost\n", "tost.train.x -> tost (line 1)"),
    "third party": ("nn/x.py", "import timm.layers\n", "tost.nn.x -> timm.layers (line 1)"),
    "third party in the wrong file": (
        "models/language.py",
        "import timm\n",
        "tost.models.language -> timm (line 1)",
    ),
    "numpy in ops": ("ops/x.py", "import numpy as np\n", "tost.ops.x -> numpy (line 1)"),
    "torch in errors": ("errors.py", "import torch\n", "tost.errors -> torch (line 1)"),
    "third party in the front page": ("__init__.py", "import torch\n", "tost -> torch (line 1)"),
    "unheard of": ("ops/x.py", "import einops\n", "tost.ops.x -> einops (line 1): unknown third-party package"),
    "new top-level module": ("helpers.py", "", "tost.helpers: unknown top-level module helpers; add it to LAYERS"),
}
ALLOWED = {
    "left": ("nn/x.py", "from tost.ops import tssa\nfrom tost import objective\nimport torch\n"),
    "own package": ("ops/tssa/x.py", "from ..state import TSSAState\nfrom . import reference\nimport tost.ops\n"),
    "front page names": ("__init__.py", "from tost.nn import TSSAttention\n"),
    "front page from its right": ("bench/x.py", "import tost\nfrom tost import __version__\n"),
    "standard library": ("errors.py", "import json, os.path\nfrom collections import abc\n"),
    "timm for vision": ("models/vision/x.py", "import timm\n"),
    "pattern": ("integrations/x.py", "import timm\n"),
    "below a pattern": ("integrations/transformers/x.py", "import transformers\n"),
    "one file of a layer": ("data/images/x.py", "from timm.data import create_transform\n"),
}


@pytest.mark.parametrize(("file", "text", "message"), FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_checker_names_the_forbidden_edge(verdict, file, text, message):
    (found,) = verdict(file, text)
    assert found.startswith(message)


@pytest.mark.parametrize(("file", "text"), ALLOWED.values(), ids=ALLOWED.keys())
def test_checker_accepts_what_the_rule_allows(verdict, file, text):
    assert verdict(file, text) == []


def test_every_layer_appears_once():
    names = [name for layer in LAYERS for name in layer]
    assert len(names) == len(set(names))
    for package, places in THIRD_PARTY.items():
        unknown = {place.partition(".")[0] for place in places} - set(names)
        assert not unknown, f"THIRD_PARTY[{package!r}] names layers that do not exist: {unknown}"
