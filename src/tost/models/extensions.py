"""Options of models and mixers that follow from `tost.nn.Extensions`. Loads no torch.

Every field of `Extensions` that is made with `option` is an option under the same name. What it does and its default
are written there only.
"""

from __future__ import annotations

from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union, get_args, get_type_hints

from pydantic import Field, create_model

from tost._options import Options
from tost.nn.extensions import Extensions


def _strict(kind: Any, limits: dict[str, Any]) -> Any:
    if isinstance(kind, UnionType):
        return Union[tuple(_strict(each, limits) for each in get_args(kind))]  # noqa: UP007 - made of parts
    return Annotated[kind, Field(strict=True, **limits)] if kind in (bool, int) else kind


def _definitions(causal: bool) -> dict[str, Any]:
    """Return the pydantic fields. Whole numbers and switches are strict: ``true`` is not 1, and 8.0 is not 8."""
    hints = get_type_hints(Extensions)
    found: dict[str, Any] = {}
    for field in fields(Extensions):
        kind, meta = hints[field.name], field.metadata
        if meta.get("causal", not causal) not in (None, causal):
            continue
        found[field.name] = (
            _strict(kind, meta["limits"]),
            Field(field.default, description=f"{meta['description']} (extension)"),
        )
    return found


class _Extended(Options):
    def extensions(self) -> Extensions:
        """Return the extensions among these options."""
        names = {field.name for field in fields(Extensions)} & set(type(self).model_fields)
        return Extensions(**{name: getattr(self, name) for name in names})


if TYPE_CHECKING:
    ExtensionOptions: TypeAlias = _Extended
    CausalExtensionOptions: TypeAlias = _Extended
else:
    ExtensionOptions = create_model("ExtensionOptions", __base__=_Extended, **_definitions(causal=False))
    ExtensionOptions.__doc__ = "Extensions of TSSA."
    CausalExtensionOptions = create_model("CausalExtensionOptions", __base__=_Extended, **_definitions(causal=True))
    CausalExtensionOptions.__doc__ = "Extensions of causal TSSA."
