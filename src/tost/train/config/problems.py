"""What is wrong with a configuration, said for people: the key, what was given, what is needed, what was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core.core_schema import ErrorType

from tost.errors import ConfigError
from tost.train.config.yaml import write_value

__all__ = ["Key", "Keys", "Problem", "config_error", "keys_of", "needs", "suggestion", "translate"]

_LONGEST_VALUE = 60
# Findings of pydantic itself; everything else was raised by a validator, in words of its own.
_STANDARD = frozenset(get_args(ErrorType)) - {"value_error", "assertion_error"}


@dataclass(frozen=True)
class Problem:
    """One thing to correct: the dotted key it is about, and the sentence about it."""

    key: str
    text: str


@dataclass(frozen=True)
class Key:
    """A legal key: the class that has it as a field, and the field's name."""

    owner: type[BaseModel]
    name: str

    @property
    def schema(self) -> Mapping[str, Any]:
        """What the key may hold, as a JSON schema."""
        found: Mapping[str, Any] = self.owner.model_json_schema()["properties"][self.name]
        return found


Keys = dict[str, Key]
"""Every legal key of a configuration by its dotted name; sections are keys too."""


def keys_of(schema: type[BaseModel], prefix: str = "") -> Keys:
    """Return the keys of a schema and of the schemas in it.

    Args:
        schema: Where to look.
        prefix: What stands in front of its keys, such as ``data.options.``; may be empty.
    """
    keys: Keys = {}
    for name, field in schema.model_fields.items():
        keys[prefix + name] = Key(schema, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= keys_of(field.annotation, f"{prefix}{name}.")
    return keys


def config_error(name: str, problems: Iterable[Problem], origin: Callable[[str], str]) -> ConfigError:
    """Return the error that lists all problems of a configuration.

    Args:
        name: The configuration, as the user called it.
        problems: What is wrong.
        origin: Says where a dotted key was set; empty if nowhere.
    """
    lines = []
    for problem in dict.fromkeys(problems):
        place = origin(problem.key)
        key = f"{problem.key} ({place})" if place else problem.key
        lines.append(f"\n  {key}: " + problem.text.replace("\n", "\n    "))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError(f"{name} cannot be used, {count}:" + "".join(lines))


def translate(error: ValidationError, keys: Keys, *, prefix: str = "") -> list[Problem]:
    """Put the findings of pydantic into our words.

    Args:
        error: What validation raised.
        keys: All keys that exist.
        prefix: What stands in front of the keys of the class that was validated, such as ``model.``.

    Returns:
        One problem per finding. Its key is the section, or empty, if it is not about a single key.
    """
    found = []
    for entry in error.errors(include_url=False):
        path = (prefix + ".".join(map(str, entry["loc"]))).removesuffix(".")
        key = _nearest(path, keys)
        is_entry = key != path and bool(key) and _is_list(keys[key].schema)
        if entry["type"] == "extra_forbidden" or (key != path and not is_entry):
            text = f"unknown key; {suggestion(path, keys)}"
        elif not key or (entry["type"] not in _STANDARD and not entry["msg"].startswith("Input should")):
            text = str(entry.get("ctx", {}).get("error", entry["msg"]))
        else:
            schema = _entry_schema(keys[key].schema) if is_entry else keys[key].schema
            given = "missing" if entry["type"] == "missing" else f"{_shown(entry['input'])} given"
            text = f"{given}; needs {needs(schema)}{_hint(entry['input'], schema)}"
        found.append(Problem(path, text))
    return found


def needs(schema: Mapping[str, Any]) -> str:
    """Say in words what values a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(needs(option) for option in schema["anyOf"])
    if choices := _choices(schema):
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(write_value, choices))
    match schema.get("type"):
        case "integer":
            return "a whole number" + _bounds(schema)
        case "number":
            return "a number" + _bounds(schema)
        case "boolean":
            return "true or false"
        case "string":
            return "text"
        case "null":
            return "null"
        case "array" if "prefixItems" in schema:
            return f"a list of {len(schema['prefixItems'])}, each entry {needs(_entry_schema(schema))}"
        case "array":
            return f"a list, each entry {needs(_entry_schema(schema))}"
        case _:
            return "keys and their values, indented below it"


def suggestion(key: str, keys: Iterable[str]) -> str:
    """Return the advice for a key that does not exist: the likeliest others, or those that exist at its place."""
    known = [other for other in keys if not key.startswith(f"{other}.")]
    if key in known:
        return f"write {key.rpartition('.')[2]} indented below {key.rpartition('.')[0]}"
    section, _, name = key.rpartition(".")
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    # In this order: misspelt at its place, right name at another place, misspelt section, misspelt at another place.
    likely = get_close_matches(key, siblings, n=1, cutoff=0.75)
    likely = likely or [other for other in known if other.rpartition(".")[2] == name]
    likely = likely or get_close_matches(key, known, n=1, cutoff=0.75)
    likely = likely or [other for other in known if get_close_matches(name, [other.rpartition(".")[2]], cutoff=0.8)]
    if likely:
        return f"did you mean {' or '.join(likely[:3])}?"
    names = [other.rpartition(".")[2] for other in siblings]
    return f"the keys here are: {', '.join(names)}" if names else f"{section} takes no keys"


def _nearest(path: str, keys: Keys) -> str:
    """Return the longest legal key that a path starts with; empty if there is none."""
    while path and path not in keys:
        path = path.rpartition(".")[0]
    return path


def _is_list(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "array"


def _entry_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what an entry of a list may be; the lists of a configuration have entries of one kind."""
    found: Mapping[str, Any] = schema["prefixItems"][0] if "prefixItems" in schema else schema["items"]
    return found


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", []))


def _bounds(schema: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    found = [f"{sign} {schema[name]:.12g}" for name, sign in signs.items() if name in schema]
    return f" {' and '.join(found)}" if found else ""


def _shown(value: Any) -> str:
    text = write_value(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _hint(value: Any, schema: Mapping[str, Any]) -> str:
    """Return what to do about a word that is nearly right."""
    if not isinstance(value, str):
        return ""
    variants = schema.get("anyOf", [schema])
    if value.lower() == "none" and {"type": "null"} in variants:
        return "; write null for none"
    close = get_close_matches(value, [str(choice) for variant in variants for choice in _choices(variant)], n=1)
    return f"; did you mean {close[0]}?" if close else ""
