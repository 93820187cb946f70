"""Tasks by name. Loads no torch until a task is created."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tost._lazy import load
from tost._plugins import Registry
from tost.errors import ConfigError

if TYPE_CHECKING:
    from tost.train.task import Task

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
        build="tost.recipes.classification:ImageClassification",
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
        build="tost.recipes.language_modeling:TokenPrediction",
        description="answers at some tokens of a sequence, from what came before: the probes",
        bases=("language_modeling",),
        regularizes=False,
    ),
)
TASKS: Registry[TaskSpec] = Registry("task", "tost.tasks", _adapt, _BUILT_IN)
