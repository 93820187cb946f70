"""What the API reference is told about our docstrings. An extension of griffe, which mkdocs.yml names.

Docstrings here are Google style with equations in ``.. code-block:: text``, and options of models and configurations
carry their description in ``Field(description=...)``. Neither is Markdown, which is what the reference is set from.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

__all__ = ["HouseStyle", "as_markdown", "described"]

DIRECTIVE = re.compile(r"^[ ]*\.\. code-block:: \w+\n\n?", flags=re.MULTILINE)
EXAMPLE = re.compile(r"^Example:$", flags=re.MULTILINE)
# Called by torch only.
HIDDEN = {"extra_repr"}


def as_markdown(text: str) -> str:
    """Return a docstring that Markdown understands: equations are indented blocks, without the directive in front.

    Args:
        text: The docstring. A section ``Example`` becomes ``Examples``, the name under which griffe knows sessions.
    """
    return EXAMPLE.sub("Examples:", DIRECTIVE.sub("", text))


def described(value: object) -> str | None:
    """Return the description in ``Field(..., description="...")`` as a sentence, or None.

    Args:
        value: The expression that an attribute is given, as griffe holds it.
    """
    try:
        call = ast.parse(str(value), mode="eval").body
    except SyntaxError:
        return None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Field"):
        return None
    for keyword in call.keywords:
        if keyword.arg == "description" and isinstance(keyword.value, ast.Constant):
            text = str(keyword.value.value)
            return f"{text[0].upper()}{text[1:]}."
    return None


class HouseStyle(griffe.Extension):
    """Turns what griffe reads from the sources into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """List what lazy packages export: what their stubs import, since `__all__` is computed when they are loaded."""
        waiting = [pkg]
        for module in waiting:
            waiting += [child for child in module.modules.values() if not child.is_alias]
            stub = module.filepath if isinstance(module.filepath, list) else [module.filepath]
            if (
                module.exports is None
                and module.is_init_module
                and any((path.parent / "__init__.pyi").exists() for path in stub)
            ):
                aliases = [name for name, member in module.members.items() if member.is_alias]
                module.exports = [name for name in aliases if name not in ("attach", "annotations")]

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Set the docstring of an object in Markdown."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if obj.name in HIDDEN:
            obj.public = False

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Document a field by its description."""
        text = described(attr.value)
        if text is not None and attr.docstring is None:
            attr.docstring = griffe.Docstring(text, parent=attr)
