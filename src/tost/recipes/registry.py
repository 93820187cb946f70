"""Tasks and built-in configurations by name. Loads no torch until a task is created."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tost._lazy import load
from tost._plugins import Registry
from tost.data import find_data
from tost.data.registry import DATA_SETS
from tost.errors import ConfigError
from tost.models import list_models, model_spec
from tost.train.config import RegularizeConfig, RunConfig
from tost.train.config import load_config as load_file
from tost.train.config.rules import Rule

if TYPE_CHECKING:
    from tost.train.task import Task

CONFIGS = Path(__file__).parent / "configs"

TaskClass = TypeVar("TaskClass", bound="type[Task]")


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A registered task.

    Attributes:
        name: Value of ``recipe`` in a configuration.
        build: Its class, or ``"module:Class"``, which is loaded when a task is created.
        description: One line for tables.
        bases: Tasks whose classes its class derives from; it trains their models and takes their data too.
        regularizes: Whether it reads the section ``regularize`` of a configuration.
        chunks: Whether it follows ``train.chunk``.
        hides: Whether it needs ``train.hide``.
    """

    name: str
    build: str | type[Task]
    description: str = ""
    bases: tuple[str, ...] = ()
    regularizes: bool = True
    chunks: bool = False
    hides: bool = False

    def create(self) -> Task:
        """Return a new task; loads torch."""
        return load(self.build)() if isinstance(self.build, str) else self.build()


def register_task(name: str, *, description: str = "") -> Callable[[TaskClass], TaskClass]:
    """Register a class of tasks, so that ``recipe`` in a configuration can refer to it.

    Args:
        name: Value of ``recipe``. Models and data sets that are not for all tasks name it in their registration.
        description: One line for ``tost ls tasks``; by default the first line of the docstring.

    Returns:
        A decorator that returns the class unchanged. The class derives from `tost.train.Task` and is called without
        arguments. If it derives from the class of another task, such as `tost.recipes.classification.Classification`,
        it trains the models of that task and takes its data too.

    Raises:
        ConfigError: The name is taken or cannot be a name, or the class is no task.

    Example:
        >>> import tost
        >>> from tost.train import BatchResult, Task
        >>> @tost.register_task("forecasting")
        ... class Forecasting(Task):
        ...     '''Squared error of real numbers.'''
        ...     def compute(self, model, batch):
        ...         error = model(batch["inputs"]) - batch["targets"]
        ...         return BatchResult(error.square().mean(dim=-1).sum())
    """

    def register(found: TaskClass) -> TaskClass:
        TASKS.add(name, _adapt(name, found, description))
        return found

    return register


def list_tasks(pattern: str = "*") -> list[str]:
    """Return the names of the tasks that match a shell pattern, sorted."""
    return TASKS.names(pattern)


def task_spec(name: str) -> TaskSpec:
    """Return the task of this name; what names there are, and the errors, are those of `tost.data.find_data`."""
    return TASKS.get(name)


def get_task(name: str) -> Task:
    """Return a new task by name; loads torch.

    Raises:
        ConfigError: There is no such task, see `task_spec`.
    """
    return task_spec(name).create()


def _adapt(name: str, found: Any, description: str = "") -> TaskSpec:
    """Make the spec of a class."""
    from tost.train.task import Task  # to have a class of tasks, torch was loaded

    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise ConfigError(f"{name!r} refers to {found!r}, but a task is a class that derives from tost.train.Task.")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{found.__name__} is no task yet; it lacks: {', '.join(missing)}.")
    classes = {f"{cls.__module__}:{cls.__qualname__}" for cls in found.__mro__} | set(found.__mro__)
    bases = [spec for spec in TASKS.loaded() if spec.build in classes]
    return TaskSpec(
        name=name,
        build=found,
        description=description or (inspect.getdoc(found) or "").partition("\n")[0],
        bases=tuple(spec.name for spec in bases),
        chunks=any(spec.chunks for spec in bases),
    )


_BUILT_IN = (
    TaskSpec(
        name="classification",
        build="tost.recipes.classification:Classification",
        description="one label per sequence: images read pixel by pixel, or tokens with padding",
        regularizes=False,
    ),
    TaskSpec(
        name="image_classification",
        build="tost.recipes.image_classification:ImageClassification",
        description="one label per image, with label smoothing, Mixup and CutMix",
    ),
    TaskSpec(
        name="masked_prediction",
        build="tost.recipes.masked_prediction:MaskedPrediction",
        description="hidden parts of sequences and images: pretraining on a task's own inputs",
        bases=("classification", "image_classification"),
        regularizes=False,
        hides=True,
    ),
    TaskSpec(
        name="language_modeling",
        build="tost.recipes.language_modeling:LanguageModeling",
        description="the next token of a text",
        regularizes=False,
        chunks=True,
    ),
    TaskSpec(
        name="token_prediction",
        build="tost.recipes.token_prediction:TokenPrediction",
        description="answers at some tokens of a sequence, from what came before: the probes",
        bases=("language_modeling",),
        regularizes=False,
    ),
)
TASKS: Registry[TaskSpec] = Registry("task", "tost.tasks", _adapt, _BUILT_IN)


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


def _is_task(name: str) -> str:
    try:
        task_spec(name)
    except ConfigError as error:
        return str(error)
    return ""


def _kinds(recipe: str) -> set[str]:
    return {recipe, *task_spec(recipe).bases}


def _trains_the_model(model: str, recipe: str) -> str:
    tasks = model_spec(model).tasks
    if tasks is None or set(tasks) & _kinds(recipe):
        return ""
    fitting = ", ".join(list_models(task=recipe))
    return f"{model} is a model for {', '.join(tasks)}, but the recipe {recipe} trains: {fitting}"


def _trains_on_the_data(data: str, recipe: str) -> str:
    needed = find_data(data).task
    if needed is None or needed in _kinds(recipe):
        return ""
    fitting = sorted(spec.name for spec in DATA_SETS.loaded() if spec.task in (None, recipe))
    return f"{data} is for the recipe {needed}, but this is {recipe}, which takes: {', '.join(fitting)}"


def _regularizes(section: RegularizeConfig, recipe: str) -> str:
    changed = sorted(name for name, value in section if value != getattr(RegularizeConfig(), name))
    if not changed or task_spec(recipe).regularizes:
        return ""
    return f"{', '.join(changed)} given, but the recipe {recipe} does not regularize; leave the section out"


def _takes_pieces(chunk: int | None, recipe: str) -> str:
    if chunk is None or task_spec(recipe).chunks:
        return ""
    return f"{chunk} given, but the recipe {recipe} takes its sequences as a whole; leave it out"


def _hides(share: float | None, recipe: str) -> str:
    if task_spec(recipe).hides == (share is not None):
        return ""
    if share is None:
        return f"the recipe {recipe} needs the share of the inputs that it hides, such as 0.3; set it"
    return f"{share} given, but the recipe {recipe} hides nothing; leave it out"


def _keeps_samples_whole(context: int, recipe: str) -> str:
    if context == 1 or "image_classification" not in _kinds(recipe):
        return ""
    return f"{context} processes cannot share a sample of {recipe}; set it to 1, every process then takes its own"


_RULES = (
    Rule(("recipe",), _is_task),
    Rule(("model.name", "recipe"), _trains_the_model),
    Rule(("data.name", "recipe"), _trains_on_the_data),
    Rule(("regularize", "recipe"), _regularizes),
    Rule(("parallel.context", "recipe"), _keeps_samples_whole),
    Rule(("train.chunk", "recipe"), _takes_pieces),
    Rule(("train.hide", "recipe"), _hides),
)
