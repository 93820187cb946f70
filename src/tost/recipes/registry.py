"""Which recipes and configurations exist, and how a configuration is found by its name. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tost.data import find_data, list_data
from tost.errors import ConfigError
from tost.models import list_models, model_spec
from tost.train.config import RegularizeConfig, RunConfig
from tost.train.config import load_config as load_file
from tost.train.config.rules import Rule

if TYPE_CHECKING:
    from tost.train.task import Task

__all__ = [
    "RecipeSpec",
    "config_summary",
    "find_config",
    "find_recipe",
    "get_task",
    "list_configs",
    "list_recipes",
    "load_config",
]

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class RecipeSpec:
    """A kind of training.

    Attributes:
        name: What a configuration says under ``recipe``; also the ``task`` of the data sets it trains on.
        description: One line for tables.
        build: The class that carries it out, as ``"module:name"`` below ``tost.recipes``.
    """

    name: str
    description: str
    build: str


_RECIPES = {
    spec.name: spec
    for spec in (
        RecipeSpec(
            name="classification",
            description="one label per sequence: images read pixel by pixel, or tokens with padding",
            build="classification:Classification",
        ),
        RecipeSpec(
            name="image_classification",
            description="one label per image, with label smoothing, Mixup and CutMix",
            build="image_classification:ImageClassification",
        ),
        RecipeSpec(
            name="language_modeling",
            description="the next token of a text",
            build="language_modeling:LanguageModeling",
        ),
    )
}


def list_recipes(pattern: str = "*") -> list[str]:
    """Return the names of the recipes that match a shell pattern, sorted."""
    return sorted(name for name in _RECIPES if fnmatchcase(name, pattern))


def find_recipe(name: str) -> RecipeSpec:
    """Return the recipe called `name`.

    Raises:
        ConfigError: There is none; the message lists those that exist.
    """
    if problem := _known_recipe(name):
        raise ConfigError(problem)
    return _RECIPES[name]


def get_task(name: str) -> Task:
    """Return the object that carries out a recipe; loads torch.

    Raises:
        ConfigError: There is no such recipe.
    """
    module, _, factory = find_recipe(name).build.partition(":")
    task: Task = getattr(import_module(f"tost.recipes.{module}"), factory)()
    return task


def list_configs(pattern: str = "*") -> list[str]:
    """Return the names of the built-in configurations that match a shell pattern, sorted.

    Args:
        pattern: Such as ``"demo/*"``.

    Returns:
        Names that `find_config` and `load_config` know: paths below the folder of configurations, without the suffix.
    """
    names = (path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))
    return sorted(name for name in names if fnmatchcase(name, pattern))


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
    if name in list_configs():
        return CONFIGS / f"{name}.yaml"
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
    """Return the first line of a built-in configuration's header: what it is."""
    first = find_config(name).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def load_config(name: str, overrides: Sequence[str] = ()) -> RunConfig:
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
    return load_file(find_config(name), overrides, name=name, rules=_RULES)


def _known_recipe(name: str) -> str:
    if name in _RECIPES:
        return ""
    close = get_close_matches(name, _RECIPES, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"there is no recipe {name}; {meant}The recipes are: {', '.join(list_recipes())}"


def _trains_the_model(model: str, recipe: str) -> str:
    try:
        tasks = model_spec(model).tasks
    except ConfigError:
        return ""  # reported where it is looked up
    if recipe not in _RECIPES or tasks is None or recipe in tasks:
        return ""
    fitting = ", ".join(list_models(task=recipe))
    return f"{model} is a model for {', '.join(tasks)}, but the recipe {recipe} trains: {fitting}"


def _trains_on_the_data(data: str, recipe: str) -> str:
    if recipe not in _RECIPES or find_data(data).task in (None, recipe):
        return ""
    fitting = [name for name in list_data() if find_data(name).task in (None, recipe)]
    return f"{data} is for the recipe {find_data(data).task}, but this is {recipe}, which takes: {', '.join(fitting)}"


def _regularizes(section: RegularizeConfig, recipe: str) -> str:
    changed = sorted(name for name, value in section if value != getattr(RegularizeConfig(), name))
    if not changed or recipe == "image_classification" or recipe not in _RECIPES:
        return ""
    return f"{', '.join(changed)} given, but the recipe {recipe} does not regularize; leave the section out"


def _keeps_images_whole(context: int, recipe: str) -> str:
    if context == 1 or recipe != "image_classification":
        return ""
    return f"{context} processes cannot share an image; set it to 1, every process then takes images of its own"


_RULES = (
    Rule(("recipe",), _known_recipe),
    Rule(("model.name", "recipe"), _trains_the_model),
    Rule(("data.name", "recipe"), _trains_on_the_data),
    Rule(("regularize", "recipe"), _regularizes),
    Rule(("parallel.context", "recipe"), _keeps_images_whole),
)
