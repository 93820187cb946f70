"""Gathering of a configuration from a file and overrides, together with everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from tost.data import DataOptions, find_data
from tost.errors import ConfigError
from tost.models import model_options
from tost.models.options import ModelOptions
from tost.train.config.problems import Keys, Problem, config_error, keys_of, translate
from tost.train.config.rules import UNKNOWN, Rule, broken_rules
from tost.train.config.yaml import parse_value, read_document

__all__ = ["collect", "data_option_class", "default_options", "model_option_class"]

Config = TypeVar("Config", bound=BaseModel)

_SUPPLIED = ("input", "vocab_size", "in_features", "num_classes", "max_length", "in_chans", "image_size")
"""Options of models that a data set may decide."""


def collect(schema: type[Config], path: Path, overrides: Sequence[str], *, name: str, rules: Sequence[Rule]) -> Config:
    """Read a file, apply overrides, validate.

    Args:
        schema: Class of the configuration. It has sections ``model`` and ``data``, and leaves rules between keys alone
            when the validation context says ``skip_rules``.
        path: YAML file.
        overrides: ``key=value`` texts.
        name: What to call the configuration in messages.
        rules: Conditions between keys.

    Raises:
        ConfigError: With all problems.
    """
    document = read_document(path)
    values = document.values
    problems, overridden = _apply(overrides, values)
    keys = _known_keys(schema, values)
    data, found = _read_data(values)
    model_problems = found + _check_model(values, keys, data)
    config = None
    try:
        config = schema.model_validate(values, context={"skip_rules": True})
    except ValidationError as error:
        # A problem that has no key comes from completing the model, which was looked at in detail.
        problems += [problem for problem in translate(error, keys) if problem.key or not model_problems]
    problems += model_problems
    problems += broken_rules(rules, _Values(values, keys, [problem.key for problem in problems]))
    if problems or config is None:
        raise config_error(name, problems, partial(_origin, overridden=overridden, lines=document.lines))
    return config


def model_option_class(name: str) -> type[ModelOptions]:
    """Return the class that knows the options of a model.

    Raises:
        ConfigError: There is no such model.
    """
    return type(model_options(name, {}))


def data_option_class(name: str) -> type[BaseModel]:
    """Return the class that knows the options of a data set.

    Raises:
        ConfigError: There is no such data set.
    """
    return find_data(name).options


def default_options(name: str, data: DataOptions) -> dict[str, Any]:
    """Return the options that a model has if none is given: what the data demands, else what is registered.

    Raises:
        ConfigError: There is no such model.
    """
    registered = model_options(name, {}).model_dump(mode="json")
    demanded = data.shape().model_options()
    return registered | {key: value for key, value in demanded.items() if key in registered}


def _apply(overrides: Sequence[str], values: dict[str, Any]) -> tuple[list[Problem], set[str]]:
    """Write ``key=value`` texts into nested dictionaries; return what is wrong with them, and the keys they set."""
    problems: list[Problem] = []
    done: set[str] = set()
    for text in overrides:
        key, equals, value = text.partition("=")
        *sections, last = parts = key.split(".")
        if not equals or not all(part.isidentifier() for part in parts):
            problems.append(Problem(text, "not an override; write key=value, for example train.steps=100"))
            done.add(text)
            continue
        place: Any = values
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        done.add(key)
        if not isinstance(place, dict):
            problems.append(Problem(key, f"{key.rpartition('.')[0]} holds a single value, nothing below it"))
            continue
        try:
            place[last] = parse_value(value)
        except ConfigError as error:
            problems.append(Problem(key, str(error)))
    return problems, done


def _origin(key: str, *, overridden: set[str], lines: Mapping[str, int]) -> str:
    """Say where a key was set; if it was not, where the section is that it would be in."""
    while key:
        if key in overridden:
            return "command line"
        if key in lines:
            return f"line {lines[key]}"
        if any(other.startswith(f"{key}.") for other in overridden):
            return "command line"
        key = key.rpartition(".")[0]
    return ""


def _known_keys(schema: type[BaseModel], values: Mapping[str, Any]) -> Keys:
    """Return the keys of a configuration, those of its model and of its data set included."""
    keys = keys_of(schema)
    del keys["model.options"]
    for section, prefix, find in (
        ("model", "model.", model_option_class),
        ("data", "data.options.", data_option_class),
    ):
        name = _dig(values, f"{section}.name")
        if isinstance(name, str):
            try:
                keys |= keys_of(find(name), prefix)
            except ConfigError:
                continue  # a wrong name is reported by those who look at it
    return keys


def _read_data(values: Mapping[str, Any]) -> tuple[DataOptions | None, list[Problem]]:
    """Return the data, None if something is wrong with it, and what it must be told for its samples to have a shape."""
    try:
        data = DataOptions.model_validate(values.get("data"))
        data.shape()
    except ValidationError:
        return None, []  # reported with the other keys
    except ConfigError as error:
        return None, [Problem("data.options", str(error))]
    return data, []


def _check_model(values: Mapping[str, Any], keys: Keys, data: DataOptions | None) -> list[Problem]:
    """Return what is wrong with the name and the options of the model."""
    name = _dig(values, "model.name")
    if not isinstance(name, str):
        return []
    try:
        schema = model_option_class(name)
    except ConfigError as error:
        return [Problem("model.name", str(error))]
    given = {key: value for key, value in values["model"].items() if key != "name"}
    full = {**(default_options(name, data) if data else model_options(name, {}).model_dump()), **given}
    try:
        schema.model_validate(full)
    except ValidationError as error:
        found = [problem for problem in translate(error, keys, prefix="model.") if problem.key != "model"]
        wrong = {problem.key.split(".")[1] for problem in found}
        if data is None:  # what it would have supplied is not known
            wrong |= set(_SUPPLIED)
        usable = {key: value for key, value in full.items() if key not in wrong}
        return found + [Problem("model", text) for text in schema.conflicts(usable)]
    return []


class _Values:
    """Looks up single values of a configuration of which other parts may be wrong."""

    def __init__(self, values: Mapping[str, Any], keys: Keys, wrong: Sequence[str]) -> None:
        self._values, self._keys, self._wrong = values, keys, wrong

    def __call__(self, key: str) -> Any:
        if any(f"{key}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{key}.") for bad in self._wrong):
            return UNKNOWN
        if key not in self._keys:
            return None  # an option that this model does not have
        field = self._keys[key].owner.model_fields[self._keys[key].name]
        raw = _dig(self._values, key)
        if raw is UNKNOWN:
            if key.startswith("model."):
                return None  # it will be what the data demands
            return UNKNOWN if field.is_required() else field.get_default(call_default_factory=True)
        annotation: Any = Annotated[field.annotation, field]
        return TypeAdapter(annotation).validate_python(raw)


def _dig(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested dictionaries, or `UNKNOWN`."""
    for part in key.split("."):
        values = values.get(part, UNKNOWN) if isinstance(values, Mapping) else UNKNOWN
    return values
