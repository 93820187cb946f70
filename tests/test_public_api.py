"""The contract with users: signatures, docstrings, annotations, light imports.

Signatures are compared as text, without annotations: a renamed argument, a changed default or an argument that stops
being keyword-only is a breaking change and has to be made here as well, on purpose.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

import pytest

import tost
import tost.objective
import tost.ops

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tost"

SIGNATURES = {
    "tssa": (
        "(w, temperature, *, mask=None, cu_seqlens=None, segment_ids=None, normalize=True, block_size=1, "
        "backend='auto', overwrite=False)"
    ),
    "membership": "(w, temperature, *, mask=None, cu_seqlens=None, segment_ids=None, normalize=True)",
    "causal_tssa": ("(w, temperature, bias=None, *, mask=None, cu_seqlens=None, segment_ids=None, backend='auto')"),
    "causal_tssa_with_state": (
        "(w, temperature, bias=None, *, mask=None, cu_seqlens=None, segment_ids=None, state=None, backend='auto', "
        "overwrite=False)"
    ),
    "causal_tssa_step": "(w, temperature, bias=None, *, state=None, backend='auto')",
    "causal_membership": ("(w, temperature, bias=None, *, mask=None, cu_seqlens=None, segment_ids=None, state=None)"),
    "gated_tssa": "(w, write, *, mask=None, cu_seqlens=None, segment_ids=None, backend='auto')",
    "gated_tssa_with_state": (
        "(w, write, *, mask=None, cu_seqlens=None, segment_ids=None, state=None, backend='auto')"
    ),
    "available_backends": "(op)",
    "TSSAState.empty": "(batch_size, num_heads, head_dim, *, dtype=torch.float32, device=None)",
    "TSSAState.merge": "(self, other)",
    "TSSAState.to": "(self, device=None, dtype=None)",
    "TSSAState.detach": "(self)",
    "GatedState.empty": "(batch_size, num_heads, head_dim, *, block_size=1, dtype=torch.float32, device=None)",
    "Packing.from_cu_seqlens": "(cu_seqlens, num_tokens)",
    "Packing.from_segment_ids": "(segment_ids)",
    "TSSAttention.forward": "(self, x, mask=None, *, packing=None, grid=None, attn_mask=None, is_causal=False)",
    "CausalTSSAttention.forward": "(self, x, mask=None, *, packing=None, carry=None, attn_mask=None, is_causal=True)",
    "CausalTSSAttention.forward_with_state": "(self, x, state=None, mask=None, *, packing=None)",
    "GatedTSSAttention.forward": "(self, x, mask=None, *, packing=None, carry=None, attn_mask=None, is_causal=True)",
    "GatedTSSAttention.forward_with_state": "(self, x, state=None, mask=None, *, packing=None)",
    "load_official": "(path_or_state_dict, *, weights='model', **overrides)",
    "load_model": "(path, *, ema=False)",
    "replace_attention": (
        "(model, *, layers=None, causal=None, num_heads=None, source='value', plus=False, block_size=8, backend='auto')"
    ),
    "load_pretrained": "(name)",
    "export": (
        "(model, path, *, format='onnx', image_size=None, calibration=None, tokenizer=None, opset=20, force=False)"
    ),
    "objective.coding_rate": "(z, eps, *, f=LOG, mask=None, centered=False)",
    "objective.compression_rate": "(z, pi, eps, *, f=LOG, mask=None, centered=False)",
    "objective.rate_reduction": "(z, pi, eps, *, f=LOG, mask=None, centered=False)",
    "objective.variational_compression": "(z, pi, u, eps, *, f=LOG, mask=None, block_size=1, centered=False)",
    "objective.variational_gradient": "(z, pi, u, eps, *, f=LOG, mask=None, block_size=1, centered=False)",
}
# Constructors may gain keyword-only options; what comes by position may not change.
POSITIONAL = {
    "TSSAttention": ["embed_dim", "num_heads"],
    "BlockTSSAttention": ["embed_dim", "num_heads"],
    "CausalTSSAttention": ["embed_dim", "num_heads", "max_length"],
    "GatedTSSAttention": ["embed_dim", "num_heads", "max_length"],
}
HEAVY = ("timm", "transformers", "matplotlib", "accelerate", "datasets", "torchvision", "sklearn", "typer", "rich")

FUNCTION_LINES_P95 = 50
UNANCHORED_NOTE = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\((#\d+|v\d+\.\d+)\))")


def find(name: str) -> object:
    found: object = tost
    for part in name.split("."):
        found = getattr(found, part)
    return found


def plain_signature(function: object) -> str:
    assert callable(function)
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return text.replace(repr(tost.objective.LOG), "LOG")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_contract(name):
    assert plain_signature(find(name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", POSITIONAL)
def test_constructor_positional_arguments_are_the_contract(name):
    parameters = inspect.signature(find(name)).parameters.values()
    by_position = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_position == POSITIONAL[name]
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters), "unknown options must not be swallowed"


def test_states_are_three_statistics_and_the_position():
    assert tost.TSSAState._fields == ("squares", "weighted_squares", "mass", "position")
    assert tost.GatedState._fields == ("mean", "covariance", "mass", "position")
    assert all(callable(getattr(tost.TSSAState, name)) for name in ("empty", "merge", "to", "detach"))


def test_front_page_resolves_every_name():
    for name in tost.__all__:
        assert getattr(tost, name) is not None
    assert set(tost.__all__) <= set(dir(tost))
    assert {name.partition(".")[0] for name in SIGNATURES} - {"ops", "objective"} <= set(tost.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tost.no_such_name


@pytest.mark.parametrize(
    ("statement", "refused"),
    [
        ("import tost", ("torch", "numpy", *HEAVY)),
        ("import tost; tost.tssa, tost.TSSAttention, tost.objective", HEAVY),
    ],
    ids=["bare", "operators"],
)
def test_import_is_light(statement, refused):
    probe = f"import sys; {statement}; print(*(set(sys.modules) & set({refused!r})))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == [], f"`{statement}` loads {done.stdout.strip()}"


class Definition(NamedTuple):
    """A function or class with the place where it stands."""

    path: Path
    qualified_name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.node.lineno} {self.qualified_name}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def definitions(path: Path) -> Iterator[Definition]:
    def visit(node: ast.AST, prefix: str) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                yield Definition(path, name, child)
                name += "" if isinstance(child, ast.ClassDef) else ".<local>"
            yield from visit(child, name)

    yield from visit(tree(path), "")


def python_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def public_modules() -> list[Path]:
    return [p for p in python_files() if not any(map(is_private, p.relative_to(SOURCE).with_suffix("").parts))]


@cache
def all_definitions() -> list[Definition]:
    return [definition for path in python_files() for definition in definitions(path)]


def functions() -> list[Definition]:
    return [d for d in all_definitions() if not isinstance(d.node, ast.ClassDef)]


def report(title: str, places: list[str]) -> str:
    return f"{title}:\n  " + "\n  ".join(places)


def test_every_public_name_has_a_docstring():
    bare = [str(path.relative_to(ROOT)) for path in python_files() if not ast.get_docstring(tree(path))]
    for path in public_modules():
        for definition in definitions(path):
            hidden = any(part.startswith(("_", "<")) for part in definition.qualified_name.split("."))
            decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in definition.node.decorator_list}
            if not hidden and not decorators & {"overload", "setter"} and not ast.get_docstring(definition.node):
                bare.append(str(definition))
    assert not bare, report("without a docstring", bare)


def test_every_argument_and_return_is_annotated():
    bare: list[str] = []
    for definition in functions():
        node = definition.node
        # Arguments of GPU kernels have types of the compiler's own, which calls decide.
        if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += filter(None, [node.args.vararg, node.args.kwarg])
        bare += [f"{definition}({a.arg})" for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        bare += [f"{definition} -> ?"] if node.returns is None else []
    assert not bare, report("without an annotation", bare)


def test_every_package_lists_its_names():
    # Within a package an underscore marks what is private; a second list of the other names would only repeat them.
    bare: list[str] = []
    for path in (path for path in public_modules() if path.name == "__init__.py"):
        body = tree(path).body
        targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
        targets += [name for target in targets if isinstance(target, ast.Tuple) for name in target.elts]
        only_docstring = len(body) == 1 and isinstance(body[0], ast.Expr)
        if not only_docstring and "__all__" not in [getattr(target, "id", "") for target in targets]:
            bare.append(str(path.relative_to(ROOT)))
    assert not bare, report("without __all__", bare)


def test_package_is_marked_as_typed():
    assert (SOURCE / "py.typed").is_file()


def test_functions_are_short():
    spans = sorted((d.node.end_lineno - d.node.lineno + 1, str(d)) for d in functions())
    percentile = spans[ceil(0.95 * len(spans)) - 1][0]
    longest = [f"{lines} lines: {place}" for lines, place in reversed(spans) if lines > FUNCTION_LINES_P95]
    assert percentile <= FUNCTION_LINES_P95, report(f"95th percentile is {percentile} lines", longest)


def test_notes_to_self_have_an_anchor():
    bare = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for suffix in ("*.py", "*.cpp", "*.h")
        for path in SOURCE.rglob(suffix)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNANCHORED_NOTE.search(line)
    ]
    assert not bare, report("notes without an issue (#12) or a version (v0.3)", bare)


@pytest.mark.parametrize(
    ("line", "is_bare"),
    [
        ("# TODO later", True),
        ("# FIXME(me): this", True),
        ("# TODO(#12): widen", False),
        ("# TODO(v0.3): drop", False),
        ("TODOS", False),
    ],
)
def test_note_pattern(line, is_bare):
    assert bool(UNANCHORED_NOTE.search(line)) is is_bare
