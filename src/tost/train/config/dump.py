"""Writing of a configuration as YAML that explains itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from pydantic import BaseModel

from tost._options import defaults_of
from tost._yaml import write_value
from tost.data import DataOptions
from tost.train.config.schema import ModelConfig, RunConfig, data_option_class, default_options, model_option_class

_WIDTH = 120
_WIDEST_ENTRY = 36  # longer entries do not push all the comments to the right


def dump_config(config: RunConfig, *, comments: bool = True) -> str:
    """Return a configuration as YAML that loads to the same configuration again.

    Args:
        config: What to write.
        comments: Whether each key is followed by what it means, its unit and its default.
    """
    rows: list[_Row] = []
    for name, field in RunConfig.model_fields.items():
        section = getattr(config, name)
        if not isinstance(section, BaseModel):
            rows.append(_Row(0, name, section, f"{field.description}; required"))
            continue
        rows.append(_Row(0, name, None, field.description or "", is_section=True))
        values = section.model_dump(mode="json")
        if isinstance(section, ModelConfig):
            rows += _section_rows(ModelConfig, {"name": values.pop("name")}, depth=1)
            defaults = default_options(section.name, config.data)
            rows += _section_rows(model_option_class(section.name), values, depth=1, defaults=defaults)
            continue
        options = values.pop("options", {})
        rows += _section_rows(type(section), values, depth=1)
        if isinstance(section, DataOptions):
            rows.append(_Row(1, "options", {}, "options of this data set", is_section=bool(options)))
            rows += _section_rows(data_option_class(section.name), options, depth=2)
    return _render(rows, comments=comments)


@dataclass(frozen=True)
class _Row:
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


def _section_rows(
    schema: type[BaseModel], values: Mapping[str, Any], *, depth: int, defaults: Mapping[str, Any] | None = None
) -> Iterator[_Row]:
    """Yield a row for each value of a section.

    Args:
        schema: Holds the order, the descriptions and the defaults.
        values: Value by field, as plain data; those without a field come last, without a comment.
        depth: How many sections the fields are inside of.
        defaults: Defaults that replace those of the schema; what is not in it is required.
    """
    fields = schema.model_fields
    defaults = defaults_of(schema) if defaults is None else defaults
    for name in (name for name in fields if name in values):
        default = defaults.get(name)
        shown = write_value(list(default) if isinstance(default, tuple) else default)
        note = f"default {shown}" if name in defaults else "required"
        yield _Row(depth, name, values[name], f"{fields[name].description or name}; {note}")
    yield from (_Row(depth, name, value, "") for name, value in values.items() if name not in fields)


def _render(rows: Sequence[_Row], *, comments: bool) -> str:
    """Return rows as the text of a YAML file."""
    column = 2 + max(len(row.entry) for row in rows if len(row.entry) <= _WIDEST_ENTRY)
    lines: list[str] = []
    for row in rows:
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
