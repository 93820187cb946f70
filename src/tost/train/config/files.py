"""Reading and writing of configuration files. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from tost._io import read_json
from tost._options import Keys, Problem, check_options, defaults_of, keys_of, options_error, translate
from tost._yaml import Document, parse_value, read_document, write_value
from tost.data import DataOptions, find_data
from tost.errors import CheckpointError, ConfigError
from tost.models import list_models, model_spec
from tost.models.options import saved_options
from tost.train.config.rules import UNKNOWN, broken_rules
from tost.train.config.schema import ModelConfig, RunConfig, default_options

FORMAT = 3
"""Version of run folders and checkpoints that this code writes. It reads all up to this one; those of version 1 do not
have a number.

2: the section ``regularise`` of a configuration is ``regularize``.
3: some options of models have other names.
"""
SUPPLIED = ("input", "vocab_size", "in_features", "num_classes", "max_length", "in_chans", "image_size")
"""Options of models that a data set may decide."""
_FIND: Mapping[str, Callable[[str], Any]] = {"model.": model_spec, "data.options.": find_data}
"""How specs with options are found, by what stands in front of the keys of these options."""
_WIDTH = 120
_WIDEST_ENTRY = 36  # longer entries do not push all the comments to the right


@cache
def _built_in() -> dict[str, Path]:
    """Return the built-in configurations by name: paths below their folder, without the suffix."""
    spec = find_spec("tost")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "recipes/configs"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")}


def list_configs(pattern: str = "*") -> list[str]:
    """Return the names of the built-in configurations that match a shell pattern such as ``"demo/*"``, sorted."""
    return sorted(name for name in _built_in() if fnmatchcase(name, pattern))


def find_config(name: str) -> Path:
    """Return the file of a configuration.

    Args:
        name: A built-in name, or the path of a YAML file.

    Returns:
        The file. A path that ends in ``.yaml`` or ``.yml`` is returned as it is, whether or not there is a file.

    Raises:
        ConfigError: There is neither such a name nor such a file.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    if name in _built_in():
        return _built_in()[name]
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"{name} is a folder; give the YAML file in it, for example {path / 'config.yaml'}")
    close = get_close_matches(name, list_configs(), n=1) or list_configs(f"*/{name}")
    meant = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"{name}: neither a built-in configuration nor a file; {meant}`tost ls configs` lists the built-in ones, "
        "the path of your own ends in .yaml"
    )


def config_summary(name: str) -> str:
    """Return the first line of a built-in configuration's header."""
    first = find_config(name).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration, built in or not.

    Args:
        name: A built-in name, or the path of a YAML file.
        overrides: ``key=value`` texts that are applied in order; keys are dotted, values are YAML scalars or lists.

    Returns:
        The configuration, complete: defaults and all options of the model are filled in.

    Raises:
        ConfigError: There is no such configuration, it cannot be read, or something in it or in the overrides is wrong.
            All problems are listed, each with its dotted key, where it was set, what was given and what is needed.
    """
    document = read_run_document(find_config(str(name)))
    values = document.values
    written = {prefix: _dig(values, f"{prefix.partition('.')[0]}.name") for prefix in _FIND}
    problems, overridden = _apply(overrides, values)
    for prefix, before in written.items():
        section = prefix.partition(".")[0]
        if _dig(values, f"{section}.name") != before:
            _drop_options_of_another(values[section], prefix, overridden)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problems += _find_problems(values, error)
    if problems:
        origin = partial(_origin, overridden=overridden, lines=document.lines)
        raise options_error(f"{name} cannot be used", problems, origin)
    return config


def read_run_document(path: Path) -> Document:
    """Read a configuration file; the one of a run folder may have been written by an older version.

    Raises:
        ConfigError: The file cannot be read.
        CheckpointError: The run folder was written by a newer version.
    """
    document = read_document(path)
    record = path.with_name("env.json")
    if path.name == "config.yaml" and record.is_file():
        environment = read_json(record, error=ConfigError)
        version = environment.get("format", 1) if isinstance(environment, dict) else 1
        check_format(version, str(path.parent))
        if version < 2 and "regularise" in document.values:
            document.values["regularize"] = document.values.pop("regularise")
        model = document.values.get("model")
        if isinstance(model, dict) and str(model.get("name")) in list_models():  # others are reported later
            document.values["model"] = saved_options(model, model_spec(str(model.get("name"))).options)
    return document


def check_format(version: object, source: str) -> None:
    """Raise if a run folder or checkpoint has a format that this version does not read."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise CheckpointError(
            f"{source} has format {version!r}, which no version of tost writes; it was changed since."
        )
    if version > FORMAT:
        raise CheckpointError(
            f"{source} has format {version!r}, but this version of tost reads formats up to {FORMAT}; it was written "
            "by a newer version: update tost."
        )


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


def _drop_options_of_another(section: Any, prefix: str, overridden: set[str]) -> None:
    """Drop options of the file's model or data that the one of the command line does not have."""
    try:
        known = _FIND[prefix](section["name"]).options.model_fields
    except (ConfigError, TypeError, AttributeError):
        return  # reported where the name is checked
    options = section if prefix == "model." else section.get("options")
    for key in [*options] if isinstance(options, dict) else []:
        if key not in ("name", *known) and f"{prefix}{key}" not in overridden:
            del options[key]


def _origin(key: str, *, overridden: set[str], lines: Mapping[str, int]) -> str:
    """Return where a key, or else the section that it would be in, was set."""
    while key:
        if key in lines and key not in overridden:
            return f"line {lines[key]}"
        if any(f"{other}.".startswith(f"{key}.") for other in overridden):
            return "command line"
        key = key.rpartition(".")[0]
    return ""


def _find_problems(values: Mapping[str, Any], error: ValidationError) -> list[Problem]:
    """Return everything that is wrong with values that validation refused."""
    keys = _known_keys(values)
    data, model_problems = None, []
    try:
        data = DataOptions.model_validate(values.get("data"))
        data.shape()
    except ValidationError:
        pass  # reported with the other keys
    except ConfigError as problem:
        data, model_problems = None, [Problem("data.options", str(problem))]
    model_problems += _check_model(values, keys, data)
    # Problems without a key come from completing the model and from the rules, which are checked one by one here.
    problems = [problem for problem in translate(error, keys) if problem.key] + model_problems
    wrong = [problem.key for problem in problems]
    return problems + list(broken_rules(partial(_look_up, values=values, keys=keys, wrong=wrong)))


def _known_keys(values: Mapping[str, Any]) -> Keys:
    """Return the keys of a configuration, with those of its model and of its data set."""
    keys = keys_of(RunConfig)
    del keys["model.options"]
    for prefix, find in _FIND.items():
        name = _dig(values, f"{prefix.partition('.')[0]}.name")
        if isinstance(name, str):
            with suppress(ConfigError):  # a wrong name is reported with the section
                keys |= keys_of(find(name).options, prefix)
    return keys


def _check_model(values: Mapping[str, Any], keys: Keys, data: DataOptions | None) -> list[Problem]:
    """Return what is wrong with the name and the options of the model."""
    name = _dig(values, "model.name")
    if not isinstance(name, str):
        return []
    try:
        schema = model_spec(name).options
    except ConfigError as error:
        return [Problem("model.name", str(error))]
    given = {key: value for key, value in values["model"].items() if key != "name"}
    full = default_options(name, data, given) | given
    # Without the data, nothing is known about the options that it decides.
    missing = () if data else {*SUPPLIED, *(key for key in schema.model_fields if key not in full)}
    _, found = check_options(schema, full, prefix="model.", keys=keys, unknown=missing)
    return [problem for problem in found if problem.key.removeprefix("model.") not in {*missing} - {*given}]


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
            return None  # it will follow the data
        return UNKNOWN if field.is_required() else field.get_default(call_default_factory=True)
    annotation: Any = Annotated[field.annotation, field]
    return TypeAdapter(annotation).validate_python(raw)


def _dig(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested dictionaries, or `UNKNOWN`."""
    for part in key.split("."):
        values = values.get(part, UNKNOWN) if isinstance(values, Mapping) else UNKNOWN
    return values


def dump_config(config: RunConfig, *, comments: bool = True) -> str:
    """Return a configuration as YAML that loads to the same configuration again.

    Args:
        config: What to write.
        comments: Whether each key is followed by what it means, its unit and its default.
    """
    rows: list[tuple[str, str]] = []  # entry and comment
    for name, field in RunConfig.model_fields.items():
        section = getattr(config, name)
        if not isinstance(section, BaseModel):
            rows.append((f"{name}: {write_value(section)}", f"{field.description}; required"))
            continue
        rows.append((f"{name}:", field.description or ""))
        values = section.model_dump(mode="json")
        if isinstance(section, ModelConfig):
            rows += _rows(ModelConfig, {"name": values.pop("name")}, depth=1)
            defaults = default_options(section.name, config.data, section.options)
            rows += _rows(model_spec(section.name).options, values, depth=1, defaults=defaults)
            continue
        options = values.pop("options", {})
        rows += _rows(type(section), values, depth=1)
        if isinstance(section, DataOptions):
            rows.append(("  options:" if options else "  options: {}", "options of this data set"))
            rows += _rows(find_data(section.name).options, options, depth=2)
    column = 2 + max(len(entry) for entry, _ in rows if len(entry) <= _WIDEST_ENTRY)
    lines: list[str] = []
    for entry, comment in rows:
        if comments and entry.endswith(":") and not entry.startswith(" "):
            lines.append("")
        if not comments or not comment:
            lines.append(entry)
            continue
        first, *others = _wrapped(comment, _WIDTH - column - 2)
        lines.append(f"{entry:<{column - 2}}  # {first}")
        lines += [f"{'':<{column}}# {other}" for other in others]
    return "\n".join(lines) + "\n"


def _rows(
    schema: type[BaseModel], values: Mapping[str, Any], *, depth: int, defaults: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield entry and comment for each value of a section.

    Args:
        schema: Holds the order, the descriptions and the defaults.
        values: Value by field, as plain data; those without a field come last, without a comment.
        depth: How many sections the fields are inside of.
        defaults: Defaults that replace those of the schema; what is not in it is required.
    """
    defaults = defaults_of(schema) if defaults is None else defaults
    for name, field in schema.model_fields.items():
        if name in values:
            default = defaults.get(name)
            shown = write_value(list(default) if isinstance(default, tuple) else default)
            note = f"default {shown}" if name in defaults else "required"
            yield f"{'  ' * depth}{name}: {write_value(values[name])}", f"{field.description or name}; {note}"
    yield from (
        (f"{'  ' * depth}{name}: {write_value(value)}", "")
        for name, value in values.items()
        if name not in schema.model_fields
    )


def _wrapped(text: str, width: int) -> list[str]:
    """Break a comment into lines, but not between `default` and its value."""
    before, default, value = text.rpartition("; default ")
    glued = f"{before}; default\N{NO-BREAK SPACE}{value}" if default else text
    lines = wrap(glued, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
