"""Schema and reader of plans. README.md describes the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tost.errors import ConfigError

__all__ = ["PLANS", "Arm", "Plan", "load_plan"]

PLANS = Path(__file__).parent / "plans"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Arm(_Part):
    """One setting.

    Attributes:
        config: Configuration of its runs in place of the plan's; ``{task}`` is replaced in plans over tasks.
        set: ``key=value`` texts on top of the plan's.
        seeds: Seeds of the plan that it is run with; None: all of them.
        reference: Published value of the metric.
        references: The same for every task of a plan, in order.
        note: Difference from the other arms.
    """

    config: str | None = None
    set: list[str] = []
    seeds: list[int] | None = None
    reference: float | None = None
    references: list[float | None] = []
    note: str = ""


class Task(_Part):
    """A column of a plan over tasks.

    Attributes:
        config: Configuration of its runs in place of the plan's.
        set: ``key=value`` texts on top of the plan's.
        chance: Metric of guessing, as it is shown.
        extra: Whether averages are also shown without this task; without a result it counts at chance.
    """

    config: str | None = None
    set: list[str] = []
    chance: float
    extra: bool = False


class Tune(_Part):
    """A key for which every arm tries the same values with its first seed, and keeps the best."""

    key: str
    values: list[float] = Field(min_length=2)


class Plan(_Part):
    """Arms, each run with every seed. Stored results hold the plan that they were made with.

    Attributes:
        title: Subject in one line.
        config: Configuration that the arms start from.
        metric: Validation metric of the table.
        mode: Whether the lowest or the highest value is best.
        percent: Whether the metric is a share in [0, 1] that is shown as a percentage.
        seeds: Seeds of every arm.
        set: ``key=value`` texts for all arms.
        source: Origin of references and levels.
        levels: Values without training, such as guessing, by name.
        tasks: Tasks; arms are then named ``TASK_SETTING``.
        tune: Key that every arm chooses for itself.
        equal: Arm (setting of tasks) whose number of parameters the others get, by the width of their MLPs.
        states: Whether the size of each arm's recurrent state is stored.
        measure: ``key=value`` texts with which finished runs are evaluated again, by the name of the column.
        arms: Settings by name; in a plan over tasks, ``settings`` names those that every task has.
    """

    title: str
    config: str
    metric: str
    mode: Literal["min", "max"] = "max"
    percent: bool = False
    seeds: list[int] = Field(default=[0], min_length=1)
    set: list[str] = []
    source: str = ""
    levels: dict[str, float] = {}
    tasks: dict[str, Task] = {}
    tune: Tune | None = None
    equal: str | None = None
    states: bool = False
    measure: dict[str, list[str]] = {}
    arms: dict[str, Arm] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _cross(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "settings" not in values:
            return values
        arms = {}
        for place, task in enumerate(values.get("tasks", {})):
            for name, setting in values["settings"].items():
                arm = {key: value for key, value in setting.items() if key != "references"}
                if "config" in arm:
                    arm["config"] = arm["config"].format(task=task)
                if references := setting.get("references", [])[place : place + 1]:
                    arm["reference"] = references[0]
                arms[f"{task}_{name}"] = arm
        return {**{key: value for key, value in values.items() if key != "settings"}, "arms": arms}

    @model_validator(mode="after")
    def _check(self) -> Plan:
        for name in self.arms:
            if self.tasks and not self.task_of(name)[0]:
                raise ValueError(f"arm {name}: the name is TASK_SETTING, with a task of {', '.join(self.tasks)}")
            if self.equal is not None and self.equal_arm(name) not in self.arms:
                raise ValueError(f"equal: there is no arm {self.equal_arm(name)}")
            if not self.seeds_of(name):
                raise ValueError(f"arm {name}: its seeds {self.arms[name].seeds} are not seeds of the plan")
        if not self.source and (self.levels or any(arm.reference is not None for arm in self.arms.values())):
            raise ValueError("source: name the origin of references and levels")
        return self

    def seeds_of(self, arm: str) -> list[int]:
        """Return the seeds of an arm."""
        chosen = self.arms[arm].seeds
        return [seed for seed in self.seeds if chosen is None or seed in chosen]

    def task_of(self, arm: str) -> tuple[str, str]:
        """Return the task and the setting of an arm; the task is empty if the plan has none."""
        task = max((name for name in self.tasks if arm.startswith(f"{name}_")), key=len, default="")
        return task, arm.removeprefix(f"{task}_") if task else arm

    def equal_arm(self, arm: str) -> str | None:
        """Return the arm whose number of parameters `arm` gets."""
        task, _ = self.task_of(arm)
        return f"{task}_{self.equal}" if task and self.equal else self.equal

    @property
    def scale(self) -> float:
        """Factor between a stored and a shown value of the metric."""
        return 100.0 if self.percent else 1.0


def load_plan(name: str) -> Plan:
    """Read a plan by its name, or by the path of a YAML file.

    Raises:
        ConfigError: There is no such plan, or it cannot be used.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else PLANS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in PLANS.glob("*.yaml")))
        raise ConfigError(f"{name}: no such plan; give the path of a YAML file, or one of {known}")
    try:
        return Plan.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path} cannot be used: {error}") from None
