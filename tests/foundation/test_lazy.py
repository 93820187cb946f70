from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tost

LAZY = sorted(Path(tost.__file__).parent.rglob("__init__.pyi"))


def package_of(stub: Path) -> str:
    return ".".join(["tost", *stub.parent.relative_to(Path(tost.__file__).parent).parts])


@pytest.mark.parametrize("package", [package_of(stub) for stub in LAZY])
def test_every_listed_name_can_be_loaded(package):
    module = __import__(package, fromlist=["x"])
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        _ = module.no_such_name


@pytest.mark.parametrize("stub", LAZY, ids=package_of)
def test_no_name_is_also_a_file_of_the_package(stub):
    """Importing the file would put the module in the place of the name."""
    inside = {path.stem for path in stub.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    named = {
        alias.name
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module != package_of(stub)
        for alias in node.names
    }
    assert not inside & named


def test_lazy_packages_load_no_torch():
    packages = ", ".join(package_of(stub) for stub in LAZY)
    probe = f"import sys; import {packages}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_front_page_knows_every_package():
    folder = Path(tost.__file__).parent
    found = {path.parent.name for path in folder.glob("*/__init__.py")} | {
        path.stem for path in folder.glob("[a-z]*.py")
    }
    names = sorted(found - {"cli", "sweep"})
    program = f"import tost\nfor name in {names}: assert getattr(tost, name).__name__ == f'tost.{{name}}', name"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert set(names) <= set(tost.__all__)


MISSING = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda c, name, *rest: None if name.split(".")[0] == {!r} else find(name, *rest))
{}
"""


@pytest.mark.parametrize(
    ("package", "extra", "code"),
    [
        ("timm", "vision", "import tost; tost.create_model('tost_mini')"),
        ("timm", "vision", "import tost.integrations.timm"),
        ("transformers", "language", "import tost.integrations.transformers"),
    ],
)
def test_a_missing_package_names_its_extra(package, extra, code):
    program = [sys.executable, "-c", MISSING.format(package, code)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert f"needs the package {package}" in last
    assert f"pip install 'tost-transformer[{extra}]'" in last
