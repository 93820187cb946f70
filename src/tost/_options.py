"""Options that users choose, and messages about what is wrong with them. Loads no torch.

Models, mixers, data sets, tasks and the sections of a configuration are pydantic classes. This is the one place where
findings of pydantic become sentences: the key, what was given, what is needed, what was probably meant.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Self, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ErrorType

from tost._text import closest, count
from tost._yaml import show_value, write_value
from tost.errors import ConfigError

Schema = TypeVar("Schema", bound=BaseModel)
# Strict, because a lenient parser reads `true` as 1 layer and 11.0 as 11.
# Sizes of tensors and loops: more is a slip of the finger, and torch itself counts with 64 bits.
Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Depth = Annotated[int, Field(ge=1, le=10_000, strict=True)]
Switch = Annotated[bool, Field(strict=True)]

_MOST_SUGGESTIONS = 50  # finding similar words is slow
_NUMBERS = {"integer": "a whole number", "number": "a number"}
_IN_WORDS = {**_NUMBERS, "boolean": "true or false", "string": "text", "null": "null"}
# Findings of pydantic itself; everything else was raised by a validator, with its own message.
_STANDARD = frozenset(get_args(ErrorType)) - {"value_error", "assertion_error"}


def option(default: Any, description: str, **bounds: Any) -> Any:
    """Return a field of options that may be left out, with bounds as `pydantic.Field` takes them."""
    return Field(default, description=description, **bounds)


class Options(BaseModel):
    """Checked options: unknown keys are errors, and values cannot change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __hash__(self) -> int:
        return hash(repr(self))  # values may be dictionaries

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options exclude each other.

        Args:
            values: Options, each valid by itself. Those that are not are left out, and so is what involves them.

        Returns:
            One sentence per conflict, with the values and the remedy.
        """
        return []

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if found := self.conflicts(dict(self)):
            raise ValueError("; ".join(found))
        return self


def options_of_signature(
    function: Callable[..., Any], *, skip: Collection[str] = (), base: type[BaseModel] = Options
) -> type[BaseModel]:
    """Make a class of options from the keyword arguments of a function or constructor.

    Args:
        function: Its annotated arguments become fields, described by the ``Args:`` section of its docstring; those
            without a default are required.
        skip: Arguments that are passed by tost itself.
        base: Class to derive from.

    Returns:
        A class whose fields are the arguments. A function with ``**kwargs`` takes any further key.
    """
    target = function.__init__ if inspect.isclass(function) else function
    hints, described = _hints(target), _described(function, target)
    fields: dict[str, Any] = {}
    extra = "forbid"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif name not in skip and parameter.kind is not parameter.VAR_POSITIONAL:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), Field(default, description=described.get(name)))
    config = ConfigDict(frozen=True, extra=extra, arbitrary_types_allowed=True)  # type: ignore[typeddict-item]
    configured = type(base.__name__, (base,), {"model_config": config, "__module__": __name__})
    return create_model(f"{function.__name__}Options", __base__=configured, __doc__=inspect.getdoc(function), **fields)


def _hints(function: Any) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except NameError:  # an annotation that only type checkers import
        return {name: hint for name, hint in getattr(function, "__annotations__", {}).items() if isinstance(hint, type)}


def _described(*documented: Any) -> dict[str, str]:
    """Return what docstrings say about arguments, in sections ``Args:`` with one indented entry per argument."""
    found: dict[str, str] = {}
    for one in documented:
        text = inspect.getdoc(one) or ""
        section = re.search(r"^Args:\n((?:[ \t]+.*(?:\n|$)|\n)+)", text, flags=re.MULTILINE)
        entries = re.split(r"^ {4}(\w+)(?: \([^)]*\))?:", section[1], flags=re.MULTILINE) if section else []
        for name, description in zip(entries[1::2], entries[2::2], strict=True):
            found.setdefault(name, " ".join(description.split()).removesuffix("."))
    return found


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
        return _json_schema(self.owner)["properties"][self.name]


class _LenientSchema(GenerateJsonSchema):
    """Describes a value that has no form in JSON by an empty schema."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}


@cache
def _json_schema(owner: type[BaseModel]) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    return owner.model_json_schema(schema_generator=_LenientSchema)


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


def defaults_of(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the default of every field that has one."""
    fields = schema.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}


def check_options(
    schema: type[Schema],
    values: Mapping[str, Any],
    *,
    prefix: str = "",
    keys: Keys | None = None,
    unknown: Collection[str] = (),
) -> tuple[Schema | None, list[Problem]]:
    """Validate options and find all their problems at once.

    Args:
        schema: Class of the options.
        values: By name.
        prefix: What stands in front of their keys, such as ``model.``.
        keys: Keys to suggest for one that does not exist; those of `schema` if None.
        unknown: Options whose values are not known yet; conflicts that involve them are not looked for.

    Returns:
        The options, None if something is wrong, and what is wrong.
    """
    try:
        return schema.model_validate(values), []
    except ValidationError as error:
        problems = translate(error, keys_of(schema, prefix) if keys is None else keys, prefix=prefix)
    section = prefix.removesuffix(".")
    wrong = {problem.key.removeprefix(prefix).partition(".")[0] for problem in problems if problem.key != section}
    # Pydantic looks for conflicts only once every field is valid; look for them among those that are.
    complete = {**defaults_of(schema), **values}
    usable = {name: value for name, value in complete.items() if name not in {*wrong, *unknown}}
    conflicts = schema.conflicts(usable) if issubclass(schema, Options) else []
    if conflicts:
        problems = [problem for problem in problems if problem.key != section]
    return None, problems + [Problem(section, text) for text in conflicts]


def options_error(
    heading: str, problems: Iterable[Problem], origin: Callable[[str], str] = lambda key: ""
) -> ConfigError:
    """Return the error that lists problems, one to a line.

    Args:
        heading: What cannot be used; the number of problems is added to it.
        problems: What is wrong.
        origin: Returns where a dotted key was set; empty if nowhere.
    """
    lines = []
    for problem in dict.fromkeys(problems):
        place = origin(problem.key)
        key = f"{problem.key} ({place})" if place else problem.key
        lines.append(f"\n  {key}: ".replace("\n  : ", "\n  ") + problem.text.replace("\n", "\n    "))
    return ConfigError(f"{heading}, {count(len(lines), 'problem')}:" + "".join(lines))


def translate(error: ValidationError, keys: Keys, *, prefix: str = "") -> list[Problem]:
    """Put the findings of pydantic into words.

    Args:
        error: What validation raised.
        keys: All keys that exist.
        prefix: What stands in front of the keys of the class that was validated, such as ``model.``.

    Returns:
        One problem per finding. Its key is the section, or empty, if it is not about a single key.
    """
    found = []
    suggestions = 0
    for entry in error.errors(include_url=False):
        path = (prefix + ".".join(map(str, entry["loc"]))).removesuffix(".")
        key = path  # or the longest legal one that it starts with
        while key and key not in keys:
            key = key.rpartition(".")[0]
        is_entry = key != path and bool(key) and keys[key].schema.get("type") == "array"
        if entry["type"] == "extra_forbidden" or (key != path and not is_entry):
            suggestions += 1
            text = f"unknown key; {suggestion(path, keys)}" if suggestions <= _MOST_SUGGESTIONS else "unknown key"
        elif not key or (entry["type"] not in _STANDARD and not entry["msg"].startswith("Input should")):
            text = str(entry.get("ctx", {}).get("error", entry["msg"]))
        else:
            schema = _entry_schema(keys[key].schema) if is_entry else keys[key].schema
            given = "missing" if entry["type"] == "missing" else f"{show_value(entry['input'])} given"
            describes = {"type", "anyOf", "enum", "const", "$ref", "allOf"} & set(schema)
            needed = f"needs {needs(schema)}" if describes else f"{entry['msg'][0].lower()}{entry['msg'][1:]}"
            text = f"{given}; {needed}{_hint(entry['input'], schema)}"
        found.append(Problem(path, text))
    return found


def needs(schema: Mapping[str, Any]) -> str:
    """Describe the values that a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(needs(option) for option in schema["anyOf"])
    if choices := _choices(schema):
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(write_value, choices))
    if schema.get("type") == "array":
        length = f" of {len(schema['prefixItems'])}" if "prefixItems" in schema else ""
        return f"a list{length}, each entry {needs(_entry_schema(schema))}"
    return _IN_WORDS.get(schema.get("type", ""), "keys and their values, indented below it") + _bounds(schema)


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
    if not section:  # a short name, and few others
        likely = likely or get_close_matches(key, siblings, n=1)
    if likely:
        return f"did you mean {' or '.join(likely[:3])}?"
    names = [other.rpartition(".")[2] for other in siblings]
    return f"the keys here are: {', '.join(names)}" if names else f"{section} takes no keys"


def _entry_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what an entry of a list may be; the lists of a configuration have entries of one kind."""
    return schema["prefixItems"][0] if "prefixItems" in schema else schema["items"]


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", []))


def _bounds(schema: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    found = [f"{sign} {schema[name]:.12g}" for name, sign in signs.items() if name in schema]
    found += [f"a multiple of {schema['multipleOf']:.12g}"] if "multipleOf" in schema else []
    return f" {' and '.join(found)}" if found else ""


def _hint(value: Any, schema: Mapping[str, Any]) -> str:
    """Return what to do about a word that is nearly right."""
    if not isinstance(value, str):
        return ""
    variants = schema.get("anyOf", [schema])
    if value.lower() == "none" and {"type": "null"} in variants:
        return "; write null for none"
    close = closest(value, [str(choice) for variant in variants for choice in _choices(variant)])
    return f"; did you mean {close}?" if close else ""
