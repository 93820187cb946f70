"""Plans of sweeps: their schema, the built-in ones, and how they are read. Loads no torch.

::

    title: What is compared, in one line.
    config: small/cifar10             # what all arms start from
    metric: top1                      # what the table shows
    percent: true                     # a share in [0, 1] there, a percentage here
    seeds: [0, 1]
    set: [train.steps=2000]           # changes for all arms
    source: where the reference values come from
    arms:
      tost: {}
      vit: {set: [model.name=vit_mini], note: equal parameters, reference: 91.2}
      tuned: {config: small/other, after: tost}
    levels: {majority: 17.0}          # what is reached without learning, for comparison; needs a source too
    tasks: {text: {chance: 50}}       # arms are named TASK_SETTING, such as text_tost: one table over tasks
    tune: {key: optim.lr, values: [1e-3, 3e-3]}  # each arm tries all of them with the first seed and keeps the best
    equal: vit                        # MLPs as wide as it takes to have the parameters of this arm (or setting)
    states: true                      # also show how much the mixers of language models remember
    measure: {long: [data.options.length=512]}  # also evaluate the trained weights with these changes
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tost._options import Key, Keys, Problem, keys_of, options_error, translate
from tost._yaml import Document, read_document
from tost.errors import ConfigError

PLANS = Path(__file__).parent / "plans"

# Arms name folders, and placeholders in text, whose parts are separated by dots.
_ARM_NAME = r"[a-z][a-z0-9_]*"
_Seed = Annotated[int, Field(ge=0, lt=2**32)]


class _Part(BaseModel):
    """Frozen and strict: no unknown keys, no conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Arm(_Part):
    """One of the settings that a sweep compares.

    Attributes:
        config: Configuration of its runs; None: that of the plan.
        set: ``key=value`` texts on top of those of the plan.
        after: Arm whose weights it starts from, or ``PLAN/ARM`` for an arm of another sweep.
        seeds: Those seeds of the plan that it is run with; None: all of them.
        reference: Published value of the metric for this setting.
        note: What is special about it.
    """

    config: str | None = Field(default=None, min_length=1)
    set: list[str] = Field(default=[])
    after: str | None = Field(default=None, pattern=rf"^([^/]+/)?{_ARM_NAME}$")
    seeds: list[_Seed] | None = Field(default=None, min_length=1)
    reference: float | None = Field(default=None, allow_inf_nan=False)
    note: str = ""


class TaskColumn(_Part):
    """One of the tasks of a plan that compares settings over several tasks.

    Attributes:
        set: ``key=value`` texts for its arms, on top of those of the plan.
        chance: What guessing reaches, as the metric is shown.
        extra: Whether averages are taken without it, and again with it; without a result it then counts at chance.
    """

    set: list[str] = Field(default=[])
    chance: float = Field(allow_inf_nan=False)
    extra: bool = False


class Tune(_Part):
    """A setting that every arm chooses for itself, from the same values.

    Attributes:
        key: Dotted key, such as ``optim.lr``.
        values: What each arm tries with the first seed; the one with the best metric is used for all seeds.
    """

    key: str = Field(min_length=1)
    values: list[float] = Field(min_length=2)

    def trials(self) -> list[str]:
        """Return the changes to try."""
        return [f"{self.key}={value:g}" for value in self.values]


class Plan(_Part):
    """Runs that belong together: every arm with every seed.

    Attributes:
        title: What is compared, in one line.
        config: Configuration that the arms start from.
        metric: Validation metric that the table shows.
        mode: Whether the lowest or the highest value is best.
        percent: Whether the metric is a share in [0, 1] that is shown as a percentage.
        seeds: Seeds of the runs of every arm.
        set: ``key=value`` texts for all arms.
        source: Where the reference values and the levels come from.
        levels: Values of the metric, as it is shown, that need no training, such as that of guessing, by name.
        tasks: Tasks by name, if arms are settings on several tasks; arms are then named ``TASK_SETTING``.
        tune: What every arm chooses for itself before its other seeds are run.
        equal: Arm, or setting where there are tasks, whose number of parameters all others get, by the width of their
            MLPs.
        states: Whether the size of each arm's state is part of the results; for language models.
        measure: ``key=value`` texts with which the finished runs are evaluated once more, by the name of the column.
        arms: Settings by name.
    """

    title: str = Field(min_length=1)
    config: str = Field(min_length=1)
    metric: str = Field(min_length=1)
    mode: Literal["min", "max"] = "max"
    percent: bool = False
    seeds: list[_Seed] = Field(default=[0], min_length=1)
    set: list[str] = Field(default=[])
    source: str = ""
    levels: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default={})
    tasks: dict[str, TaskColumn] = Field(default={})
    tune: Tune | None = None
    equal: str | None = None
    states: bool = False
    measure: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], list[str]] = Field(default={})
    arms: dict[str, Arm] = Field(min_length=1)

    def seeds_of(self, arm: str) -> list[int]:
        """Return the seeds that an arm is run with."""
        chosen = self.arms[arm].seeds
        return [seed for seed in self.seeds if chosen is None or seed in chosen]

    def task_of(self, arm: str) -> tuple[str, str]:
        """Return the task and the setting in the name of an arm; the task is empty if the plan has none."""
        task = max((name for name in self.tasks if arm.startswith(f"{name}_")), key=len, default="")
        return task, arm.removeprefix(f"{task}_") if task else arm

    def measured_as(self, name: str) -> str:
        """Return what the metric of the plan is called where it was measured with the changes of this name."""
        return f"{self.metric}_{name}"

    @property
    def shown(self) -> float:
        """What a value of the metric is multiplied by where it is shown."""
        return 100.0 if self.percent else 1.0


def list_plans(pattern: str = "*") -> list[str]:
    """Return the names of the built-in plans that match a shell pattern, sorted."""
    return sorted(path.stem for path in PLANS.glob("*.yaml") if fnmatchcase(path.stem, pattern))


def find_plan(name: str) -> Path:
    """Return the file of a plan.

    Args:
        name: A built-in name, or the path of a YAML file.

    Raises:
        ConfigError: There is neither such a name nor such a file.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise ConfigError(f"{name}: there is no such file; `tost ls sweeps` lists the built-in plans")
    if name in list_plans():
        return PLANS / f"{name}.yaml"
    close = get_close_matches(name, list_plans(), n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"{name}: not a built-in plan; {meant}`tost ls sweeps` lists them, the path of your own ends in .yaml"
    )


def plan_summary(name: str) -> str:
    """Return the title of a plan."""
    return load_plan(name).title


def load_plan(name: str) -> Plan:
    """Read a plan, built in or not.

    Args:
        name: A built-in name, or the path of a YAML file.

    Returns:
        The plan. Its configurations and changes have not been looked at: `tost.sweep.expand` does that.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong. All problems are listed, each with its key, its
            line, what was given and what is needed.
    """
    document = read_document(find_plan(name))
    plan, problems = None, []
    try:
        plan = Plan.model_validate(document.values)
    except ValidationError as error:
        problems += translate(error, _known_keys(document.values))
    problems += _cross_check(document.values)
    if problems or plan is None:
        raise options_error(f"{name} cannot be used", problems, partial(_origin, document=document))
    return plan


def _known_keys(values: dict[str, Any]) -> Keys:
    """Return the keys of a plan, with those of each arm, level and task that it names."""
    keys = keys_of(Plan)
    keys |= keys_of(Tune, "tune.")
    for section, schema in (("arms", Arm), ("levels", None), ("measure", None), ("tasks", TaskColumn)):
        found = values.get(section)
        for name in found if isinstance(found, dict) else ():
            keys[f"{section}.{name}"] = Key(Plan, section)
            keys |= keys_of(schema, f"{section}.{name}.") if schema else {}
    return keys


def _cross_check(values: dict[str, Any]) -> list[Problem]:
    """Return what is wrong between keys, as far as these are of the right kind."""
    arms = values.get("arms")
    if not isinstance(arms, dict):
        return []
    known = {name: arm for name, arm in arms.items() if isinstance(arm, dict)}
    problems = [problem for name in arms for problem in _check_name(name, values.get("tasks"))]
    problems += [problem for name, arm in known.items() for problem in _check_after(name, arm.get("after"), arms)]
    if values.get("tune") is not None and (late := [name for name, arm in known.items() if arm.get("after")]):
        problems.append(Problem("tune", f"an arm that starts from another one cannot be tuned, as {late[0]} would be"))
    if isinstance(equal := values.get("equal"), str):
        tasks = values.get("tasks") or {}
        problems += [
            Problem("equal", f"there is no arm {name} in this plan; the arms are: {', '.join(arms)}")
            for name in ([f"{task}_{equal}" for task in tasks] if isinstance(tasks, dict) and tasks else [equal])
            if name not in arms
        ]
    has_reference = any("reference" in arm for arm in known.values())
    if (has_reference or values.get("levels")) and not values.get("source"):
        given = "a reference" if has_reference else "levels"
        problems.append(Problem("source", f"missing; there is {given}, so name the source of the values"))
    seeds = values.get("seeds", [0])
    problems += [problem for name, arm in known.items() for problem in _check_seeds(name, arm, known, seeds)]
    if isinstance(seeds, list) and len(set(map(str, seeds))) < len(seeds):
        problems.append(Problem("seeds", f"{seeds} given; every seed once"))
    return problems


def _check_name(name: str, tasks: Any) -> Iterator[Problem]:
    """Yield what is wrong with the name of an arm."""
    if not re.fullmatch(_ARM_NAME, name):
        yield Problem(f"arms.{name}", "an arm is named with small letters, digits and _, a letter first")
    if isinstance(tasks, dict) and tasks and not any(name.startswith(f"{task}_") for task in tasks):
        yield Problem(f"arms.{name}", f"an arm is named TASK_SETTING, and the tasks are: {', '.join(tasks)}")


def _check_seeds(name: str, arm: dict[str, Any], arms: dict[str, dict[str, Any]], seeds: Any) -> list[Problem]:
    """Return what is wrong with the seeds that an arm chooses."""
    wanted = arm.get("seeds", seeds)
    if not isinstance(wanted, list) or not isinstance(seeds, list):
        return []
    if unknown := [seed for seed in wanted if seed not in seeds]:
        return [Problem(f"arms.{name}.seeds", f"{unknown} given; an arm takes some of the plan's seeds, {seeds}")]
    first = arms.get(arm.get("after") or "", {}).get("seeds", seeds)
    if isinstance(first, list) and (missing := [seed for seed in wanted if seed not in first]):
        text = f"{missing} given, but {arm['after']}, which it starts from, is not run with them; choose among {first}"
        return [Problem(f"arms.{name}.seeds", text)]
    return []


def _check_after(name: str, after: Any, arms: dict[str, Any]) -> list[Problem]:
    """Return what is wrong with the arm that `name` starts from."""
    if not isinstance(after, str) or "/" in after:
        return []
    key = f"arms.{name}.after"
    if after not in arms:
        close = get_close_matches(after, arms, n=1)
        meant = f"did you mean {close[0]}?" if close else f"the arms are: {', '.join(arms)}"
        return [Problem(key, f"there is no arm {after} in this plan; {meant}")]
    seen = [name]
    while isinstance(after, str) and after in arms:
        if after in seen:
            return [Problem(key, f"{' after '.join([*seen, after])}: no arm could be the first; remove one of these")]
        seen.append(after)
        after = arms[after].get("after") if isinstance(arms[after], dict) else None
    return []


def _origin(key: str, *, document: Document) -> str:
    """Say on which line a key stands; if it does not, where the section is that it would be in."""
    while key:
        if key in document.lines:
            return f"line {document.lines[key]}"
        key = key.rpartition(".")[0]
    return ""
