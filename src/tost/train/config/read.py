"""Reading of a configuration: a file, overrides, and everything that is wrong with the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from tost._options import Keys, Problem, check_options, keys_of, options_error, translate
from tost._yaml import parse_value
from tost.data import DataOptions
from tost.errors import ConfigError
from tost.train.config.rules import RULES, UNKNOWN, Rule, broken_rules
from tost.train.config.schema import RunConfig, data_option_class, default_options, model_option_class
from tost.train.config.upgrade import read_run_document


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, name: str = "", rules: Sequence[Rule] = ()
) -> RunConfig:
    """Read the configuration of a run from a file.

    `tost.recipes.load_config` takes the names of built-in configurations as well.

    Args:
        path: YAML file.
        overrides: ``key=value`` texts that are applied in order; keys are dotted, values are YAML scalars or lists.
        name: What to call the configuration in messages; the path if empty.
        rules: Conditions to check besides those that hold for every run.

    Returns:
        The configuration, complete: defaults and all options of the model are filled in.

    Raises:
        ConfigError: The file cannot be read, or something in it or in the overrides is wrong. All problems are listed,
            each with its dotted key, where it was set, what was given and what is needed.
    """
    document = read_run_document(Path(path))
    values = document.values
    written = [_dig(values, key) for key in ("model.name", "data.name")]
    problems, overridden = _apply(overrides, values)
    if isinstance(chosen := _dig(values, "model.name"), str) and chosen != written[0]:
        _drop_options_of_another("model.", values["model"], model_option_class, chosen, overridden)
    if isinstance(chosen := _dig(values, "data.name"), str) and chosen != written[1]:
        options = values["data"].get("options")
        _drop_options_of_another("data.options.", options, data_option_class, chosen, overridden)
    try:
        config = RunConfig.model_validate(values, context={"skip_rules": True})
        problems += broken_rules((*RULES, *rules), config.value)
    except ValidationError as error:
        problems += _find_problems(values, error, (*RULES, *rules))
    if problems:
        origin = partial(_origin, overridden=overridden, lines=document.lines)
        raise options_error(f"{name or path} cannot be used", problems, origin)
    return config


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


def _drop_options_of_another(
    prefix: str, options: Any, find: Callable[[str], type[BaseModel]], name: str, overridden: set[str]
) -> None:
    """Leave out what a file sets for its own model or data, where that of the command line has no such option."""
    try:
        known = find(name).model_fields
    except ConfigError:
        return  # reported where the name is looked up
    for key in [*options] if isinstance(options, dict) else []:
        if key not in ("name", *known) and f"{prefix}{key}" not in overridden:
            del options[key]


def _origin(key: str, *, overridden: set[str], lines: Mapping[str, int]) -> str:
    """Return where a key was set; if it was not, where the section is that it would be in."""
    while key:
        if key in overridden:
            return "command line"
        if key in lines:
            return f"line {lines[key]}"
        if any(other.startswith(f"{key}.") for other in overridden):
            return "command line"
        key = key.rpartition(".")[0]
    return ""


def _find_problems(values: Mapping[str, Any], error: ValidationError, rules: Sequence[Rule]) -> list[Problem]:
    """Return everything that is wrong with values that validation refused."""
    keys = _known_keys(values)
    data, model_problems = _read_data(values)
    model_problems += _check_model(values, keys, data)
    # A problem that has no key comes from completing the model, which is looked at in detail here.
    problems = [problem for problem in translate(error, keys) if problem.key or not model_problems] + model_problems
    look_up = partial(_look_up, values=values, keys=keys, wrong=[problem.key for problem in problems])
    return problems + list(broken_rules(rules, look_up))


def _known_keys(values: Mapping[str, Any]) -> Keys:
    """Return the keys of a configuration, those of its model and of its data set included."""
    keys = keys_of(RunConfig)
    del keys["model.options"]
    for prefix, find in (("model.", model_option_class), ("data.options.", data_option_class)):
        name = _dig(values, f"{prefix.partition('.')[0]}.name")
        if isinstance(name, str):
            try:
                keys |= keys_of(find(name), prefix)
            except ConfigError:
                continue  # a wrong name is reported with the section
    return keys


def _read_data(values: Mapping[str, Any]) -> tuple[DataOptions | None, list[Problem]]:
    """Return the data, None if something is wrong with it, and what is missing for its samples to have a shape."""
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
    full = default_options(name, data) | given
    # Without the data, nothing is known about the options that it decides.
    missing = () if data else {*SUPPLIED, *(key for key in schema.model_fields if key not in full)}
    _, found = check_options(schema, full, prefix="model.", keys=keys, unknown=missing)
    return [problem for problem in found if problem.key.removeprefix("model.") not in {*missing} - {*given}]


SUPPLIED = ("input", "vocab_size", "in_features", "num_classes", "max_length", "in_chans", "image_size")
"""Options of models that a data set may decide."""


def _look_up(key: str, *, values: Mapping[str, Any], keys: Keys, wrong: Sequence[str]) -> Any:
    """Return a single value of a configuration of which other parts may be wrong, or `UNKNOWN`."""
    if any(f"{key}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{key}.") for bad in wrong):
        return UNKNOWN
    if key not in keys:
        return None  # an option that this model does not have
    field = keys[key].owner.model_fields[keys[key].name]
    raw = _dig(values, key)
    if raw is UNKNOWN:
        if key.startswith("model."):
            return None  # it will be what the data demands
        return UNKNOWN if field.is_required() else field.get_default(call_default_factory=True)
    return _validator(keys[key].owner, keys[key].name).validate_python(raw)


@cache
def _validator(owner: type[BaseModel], name: str) -> TypeAdapter[Any]:
    """Return what checks a single field."""
    field = owner.model_fields[name]
    annotation: Any = Annotated[field.annotation, field]
    return TypeAdapter(annotation)


def _dig(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested dictionaries, or `UNKNOWN`."""
    for part in key.split("."):
        values = values.get(part, UNKNOWN) if isinstance(values, Mapping) else UNKNOWN
    return values
