"""Writing of a configuration as YAML that explains itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from pydantic import BaseModel

from tost.train.config.yaml import write_value

__all__ = ["Row", "render", "section_rows"]

_WIDTH = 120
_WIDEST_ENTRY = 36  # longer entries do not push all the comments to the right


@dataclass(frozen=True)
class Row:
    """One key of a YAML file.

    Attributes:
        depth: How many sections it is inside of.
        key: Its last name.
        value: Its value as plain data.
        comment: What it means.
        is_section: Whether other keys follow in place of a value.
    """

    depth: int
    key: str
    value: Any
    comment: str
    is_section: bool = False

    @property
    def entry(self) -> str:
        """The line without its comment."""
        return f"{'  ' * self.depth}{self.key}:" + ("" if self.is_section else f" {write_value(self.value)}")


def section_rows(
    schema: type[BaseModel], values: Mapping[str, Any], *, depth: int, defaults: Mapping[str, Any] | None = None
) -> Iterator[Row]:
    """Yield a row for each field of a schema that has a value.

    Args:
        schema: Holds the order, the descriptions and the defaults.
        values: Value by field, as plain data.
        depth: How many sections the fields are inside of.
        defaults: Defaults that replace those of the schema.
    """
    for name, field in schema.model_fields.items():
        if name not in values:
            continue
        comment = field.description or name
        if defaults is None and field.is_required():
            comment += "; required"
        else:
            default = field.get_default(call_default_factory=True) if defaults is None else defaults[name]
            comment += f"; default {write_value(list(default) if isinstance(default, tuple) else default)}"
        yield Row(depth, name, values[name], comment)


def render(rows: Iterable[Row], *, comments: bool) -> str:
    """Return rows as the text of a YAML file."""
    listed = list(rows)
    column = 2 + max(len(row.entry) for row in listed if len(row.entry) <= _WIDEST_ENTRY)
    lines: list[str] = []
    for row in listed:
        if comments and row.is_section and row.depth == 0:
            lines.append("")
        if not comments or not row.comment:
            lines.append(row.entry)
            continue
        first, *others = _wrapped(row.comment, _WIDTH - column - 2)
        lines.append(f"{row.entry:<{column - 2}}  # {first}")
        lines += [f"{'':<{column}}# {other}" for other in others]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int) -> list[str]:
    """Break a comment into lines, but not between `default` and its value."""
    before, default, value = text.rpartition("; default ")
    glued = f"{before}; default\N{NO-BREAK SPACE}{value}" if default else text
    lines = wrap(glued, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
