"""Reading and writing of YAML, in the part of it that configurations need.

Files are parsed to PyYAML's nodes and the values are made here, for three reasons: no tag can create a Python object,
the line of every key is kept, and scalars follow YAML 1.2, so that ``1e-3`` is a number and ``no`` is a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import yaml

from tost._io import read_at_most
from tost.errors import ConfigError

# Bounded, because Python does not read numbers of thousands of digits; a longer one is an infinite float.
_INT = re.compile(r"[-+]?[0-9][0-9_]{0,300}")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:e[-+]?[0-9]+)?|[-+]?\.inf|\.nan", flags=re.IGNORECASE
)
_RESOLVERS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("null", re.compile(r"~|null|Null|NULL|"), "~nN\0"),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
)
_TAG = "tag:yaml.org,2002:"
MAX_BYTES = 2**20
"""The largest configuration that is read."""
MAX_DEPTH = 50
_MOST_SHOWN = 200
_TOO_DEEP = "nested too deeply for a configuration"


@dataclass(frozen=True)
class Document:
    """The mapping that a file holds, and the line of each of its keys.

    Attributes:
        values: Nested dictionaries, lists and scalars.
        lines: Line by dotted key, counted from 1.
    """

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """Parses and tags, and never constructs objects."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own protocol

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        # An alias can make a document that contains itself, or one that is exponentially large.
        if isinstance(event, yaml.AliasEvent):
            raise _refusal(event, "an alias (*name) is not supported; write the value out")
        if self.depth == MAX_DEPTH:  # PyYAML takes time with the square of the depth
            raise _refusal(event, _TOO_DEEP)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        # Brackets are looked at far ahead of what is composed, as all of it could be a key.
        if self.flow_level == MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def scan_flow_scalar_non_spaces(self, double: Any, start_mark: Any) -> Any:
        try:
            return super().scan_flow_scalar_non_spaces(double, start_mark)
        except (ValueError, OverflowError):  # "\\U00110000" and beyond
            raise yaml.MarkedYAMLError(
                problem="an escape names no character that there is", problem_mark=start_mark
            ) from None


class _Dumper(yaml.SafeDumper):
    """Quotes whatever would not come back as the same text, be it read here or by a YAML 1.1 program."""

    def represent_text(self, text: str) -> yaml.Node:
        # Line breaks and control characters are only safe as escapes.
        return self.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _RESOLVERS:
    _whole = re.compile(rf"(?:{_pattern.pattern})\Z", _pattern.flags)
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", _whole, ["" if first == "\0" else first for first in _first])
    _Dumper.add_implicit_resolver(f"{_TAG}{_name}", _whole, ["" if first == "\0" else first for first in _first])
_Dumper.add_representer(str, _Dumper.represent_text)


def read_document(path: Path) -> Document:
    """Read a configuration file.

    Args:
        path: A YAML file whose top level is a mapping.

    Returns:
        Its values and the lines of its keys.

    Raises:
        ConfigError: The file is missing or is not such a file; the message has its name and, where there is one, the
            line.
    """
    try:
        content = read_at_most(path, MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes, which no configuration is; it was not read")
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; `tost ls configs` lists the built-in names") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a folder; give the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    node = _compose(text, place=str(path))
    if node is None:
        raise ConfigError(f"{path}: the file holds nothing; it needs keys such as `recipe: classification`")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path}:{_line(node)}: the file holds {_kind(node)}; it needs keys such as `recipe: classification`"
        )
    lines: dict[str, int] = {}
    try:
        values = _value(node, prefix="", lines=lines)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_describe(error, text, place=str(path))) from None
    return Document(values, lines)


def parse_value(text: str) -> Any:
    """Return what `text` means as the right-hand side of ``key=value``: a scalar or a list, null if it is empty.

    Raises:
        ConfigError: It is not one; the message states what to quote.
    """
    quote = "put quotes around it that reach the program, as in 'key=\"text\"'"
    try:
        node = _compose(text, place="")
        if node is None:
            return None
        if isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{text!r} is a mapping; set one key at a time, and if it is meant as text, {quote}")
        if text[node.end_mark.index :].strip():
            raise ConfigError(f"{text!r} would lose what follows its '#', a comment in YAML; {quote}")
        return _value(node, prefix="", lines={})
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{text!r} is not a YAML value ({error.problem}); if it is meant as text, {quote}") from None


def write_value(value: Any) -> str:
    """Return a value as YAML on one line, such that reading it gives the value back."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=inf, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("...").removesuffix("\n")


def flatten(values: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one dictionary, keys joined by the separator."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, separator, f"{name}{separator}") if isinstance(value, Mapping) else {name: value}
    return flat


def show_value(value: Any, *, longest: int = 60) -> str:
    """Return a value as a message shows it: as YAML, or as Python writes it if YAML cannot; cut where it gets long."""
    try:
        text = write_value(value)
    except yaml.YAMLError:
        text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


def _compose(text: str, *, place: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        if not place and isinstance(error, yaml.MarkedYAMLError):
            raise
        raise ConfigError(_describe(error, text, place=place)) from None


def _value(node: yaml.Node, *, prefix: str, lines: dict[str, int]) -> Any:
    """Turn a node into dictionaries, lists and scalars, and note the line of each key below `prefix`."""
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, prefix=prefix, lines=lines)
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return [_value(item, prefix=f"{prefix}{index}.", lines=lines) for index, item in enumerate(node.value)]
    text = node.value
    match node.tag.removeprefix(_TAG) if isinstance(node, yaml.ScalarNode) else None:
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int" if _INT.fullmatch(text):
            return int(text.replace("_", ""))
        case "float" if _FLOAT.fullmatch(text):
            return float(re.sub(r"_|\.(?=[in])", "", text.lower()))
    raise _refusal(node, f"{_kind(node)} with the tag {node.tag} is not supported; write plain text or a number")


def _mapping(node: yaml.MappingNode, *, prefix: str, lines: dict[str, int]) -> dict[str, Any]:
    if node.tag != f"{_TAG}map":
        raise _refusal(node, f"a mapping with the tag {node.tag} is not supported")
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_TAG}str":
            raise _refusal(key_node, f"a key must be a word, not {_kind(key_node)}")
        key = key_node.value
        if key in values:
            first = lines[prefix + key]
            raise _refusal(key_node, f"the key {prefix + key} is given twice, first on line {first}; keep one")
        lines[prefix + key] = _line(key_node)
        values[key] = _value(value_node, prefix=f"{prefix}{key}.", lines=lines)
    return values


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return f"the single value {node.value!r}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _refusal(where: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


def _describe(error: yaml.YAMLError, text: str, *, place: str) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{place}: not readable as YAML ({str(error).splitlines()[0]})"
    mark = error.problem_mark
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    where = f"{place}:{mark.line + 1}"
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"{where}: the line is indented with a tab; YAML takes spaces only"
    problem = error.problem or "not readable as YAML"
    shown = line.strip()[:_MOST_SHOWN]
    return f"{where}: {problem}\n    {shown}" if shown else f"{where}: {problem}"
