"""Runs of a plan: their settings, folders and states. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from tost._yaml import flatten, write_value
from tost.errors import ConfigError
from tost.recipes import load_config
from tost.sweep.equal import equal_width
from tost.sweep.plan import Arm, Plan
from tost.train.config import RunConfig
from tost.train.history import read_record

OUTPUT = "output.txt"
"""Output of a run's process, beside the files that the run itself writes."""

_SEED = "train.seed"
_START = "train.init_from"
_MOST_DIFFERENCES = 8


class State(StrEnum):
    """What a run's folder holds."""

    new = "new"
    interrupted = "interrupted"
    failed = "failed"
    finished = "finished"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed.

    Attributes:
        arm: Name of the arm.
        seed: Seed of weights, data order and dropout.
        config: Configuration, as `tost train` takes it.
        changes: All changes to it, the seed and the weights to start from included.
        settings: What the two amount to.
        folder: The run folder.
        after: Name of the run of this sweep that it starts from; None if it does not depend on any.
        trial: The value of what the plan tunes, as a change; empty if it tunes nothing.
    """

    arm: str
    seed: int
    config: str
    changes: tuple[str, ...]
    settings: RunConfig
    folder: Path
    after: str | None = None
    trial: str = ""

    @property
    def name(self) -> str:
        """``arm/seed0``, or ``arm/optim.lr=0.001/seed0``; also the place of its folder."""
        return run_name(self.arm, self.seed, self.trial)

    @property
    def arguments(self) -> list[str]:
        """What follows ``tost`` on the command line that carries it out, or goes on with it."""
        return ["train", self.config, *self.changes, "--out", str(self.folder), "--resume", "auto"]


def run_name(arm: str, seed: int, trial: str = "") -> str:
    """Return the name of the run of an arm with a seed."""
    return "/".join([arm, *([trial] if trial else []), f"seed{seed}"])


def expand(plan: Plan, changes: Sequence[str], out: Path, *, name: str, start: Path | None = None) -> list[Run]:
    """Return the runs of a plan, all arms with the first seed first.

    Where the plan tunes something, runs with the other seeds are there as soon as the trials of their arm are finished.

    Args:
        plan: What to run.
        changes: ``key=value`` texts for all arms, or ``PATTERN:key=value`` for those whose name matches a shell
            pattern; they win over those of the plan.
        out: Folder of the sweep.
        name: What to call the plan in messages.
        start: Folder of the other sweep whose weights arms with ``after: PLAN/ARM`` start from.

    Raises:
        ConfigError: A configuration or a change is wrong, or the weights to start from are not there. All problems are
            listed, each once, with the arms that have it.
    """
    for change in changes:
        pattern, text = _addressed(change)
        if not any(fnmatchcase(arm, pattern) for arm in plan.arms):
            arms = ", ".join(plan.arms)
            raise ConfigError(f"{change}: no arm matches {pattern}, so {text} has no effect; arms: {arms}")

    @cache  # the same for all seeds, and a width takes a while to find
    def given(arm: str, trial: str) -> tuple[str, ...]:
        made = _given_at_equal_size(plan, arm, trial, changes)
        for others in plan.measure.values():
            _load(plan, arm, (*made, *others))
        return made

    found: dict[str, Run] = {}
    problems: dict[str, dict[str, None]] = {}  # the arms of each, in order
    for seed in plan.seeds:
        for arm in _in_order(plan):
            if seed not in plan.seeds_of(arm):
                continue
            for trial in _trials(plan, arm, seed, found.values()):
                try:
                    found[run_name(arm, seed, trial)] = _make(
                        plan, arm, seed, trial, given(arm, trial), out, start, found
                    )
                except ConfigError as error:
                    problems.setdefault(str(error), {})[arm] = None
    if problems:
        texts = [f"\n  arm {', '.join(arms)}: " + text.replace("\n", "\n  ") for text, arms in problems.items()]
        raise ConfigError(f"{name} cannot be run:" + "".join(texts))
    order = list(plan.arms)
    return sorted(found.values(), key=lambda run: (plan.seeds.index(run.seed), order.index(run.arm)))


def _trials(plan: Plan, arm: str, seed: int, runs: Iterable[Run]) -> list[str]:
    """Return with which values of what is tuned an arm is run with a seed."""
    if plan.tune is None:
        return [""]
    if seed == plan.seeds_of(arm)[0]:
        return plan.tune.trials()
    best = chosen_trial(plan, arm, runs)
    return [] if best is None else [best]


def chosen_trial(plan: Plan, arm: str, runs: Iterable[Run]) -> str | None:
    """Return the value, as a change, with which an arm did best; None as long as a trial is not finished.

    Args:
        plan: A plan that tunes something.
        arm: The arm.
        runs: Runs of the sweep, those of other arms and seeds among them.
    """
    trials = [run for run in runs if run.arm == arm and run.seed == plan.seeds_of(arm)[0]]
    if any(state_of(run) is not State.finished for run in trials):
        return None
    best = _best_folder([run.folder for run in trials], plan)
    return next((run.trial for run in trials if run.folder == best), None)


def _best_folder(folders: Iterable[Path], plan: Plan) -> Path | None:
    """Return the run folder with the best metric at its end; None if there is no folder."""
    worst = math.inf if plan.mode == "min" else -math.inf
    best: Callable[..., Path | None] = min if plan.mode == "min" else max
    return best(
        folders,
        key=lambda folder: read_record(folder / "summary.json").get("final", {}).get(plan.metric, worst),
        default=None,
    )


def _in_order(plan: Plan) -> list[str]:
    """Return the arms such that each follows the one that it starts from."""

    def depth(name: str) -> int:
        after = plan.arms[name].after
        return 0 if after is None or "/" in after else 1 + depth(after)

    return sorted(plan.arms, key=depth)


def _make(
    plan: Plan,
    name: str,
    seed: int,
    trial: str,
    given: Sequence[str],
    out: Path,
    start: Path | None,
    made: Mapping[str, Run],
) -> Run:
    arm = plan.arms[name]
    after, checkpoint = _find_start(plan, arm, seed, start, made)
    everything = (*given, f"{_SEED}={seed}", *([f"{_START}={write_value(str(checkpoint))}"] if checkpoint else []))
    return Run(
        arm=name,
        seed=seed,
        config=arm.config or plan.config,
        changes=everything,
        settings=_load(plan, name, everything),
        folder=out / run_name(name, seed, trial),
        after=after,
        trial=trial,
    )


def _given_at_equal_size(plan: Plan, name: str, trial: str, changes: Sequence[str]) -> tuple[str, ...]:
    """Return the changes for a trial of an arm, with the width that makes it as large as the plan asks."""
    given = _given(plan, name, changes)
    _refuse_reserved(given, plan.arms[name])
    given += [trial] if trial else []
    if plan.equal is not None:
        task = plan.task_of(name)[0]
        like = f"{task}_{plan.equal}" if task else plan.equal
        if name != like:
            given.append(equal_width(_load(plan, name, given), _load(plan, like, _given(plan, like, changes))))
    return tuple(given)


def _given(plan: Plan, name: str, changes: Sequence[str]) -> list[str]:
    """Return the changes for an arm: those of the plan, of its task, its own, and those of the command line."""
    addressed = [text for pattern, text in map(_addressed, changes) if fnmatchcase(name, pattern)]
    task = plan.tasks.get(plan.task_of(name)[0])
    return [*plan.set, *(task.set if task else []), *plan.arms[name].set, *addressed]


def _load(plan: Plan, name: str, changes: Sequence[str]) -> RunConfig:
    try:
        return load_config(plan.arms[name].config or plan.config, changes)
    except ConfigError as error:
        # The changes may just as well come from the plan.
        raise ConfigError(str(error).replace(" (command line)", " (changed)")) from None


def _addressed(change: str) -> tuple[str, str]:
    """Return the pattern of the arms that a change is for, and the change itself."""
    pattern, colon, _ = change.partition("=")[0].rpartition(":")
    return (pattern, change.removeprefix(f"{pattern}:")) if colon else ("*", change)


def _refuse_reserved(changes: Sequence[str], arm: Arm) -> None:
    keys = {change.partition("=")[0] for change in changes}
    if _SEED in keys:
        raise ConfigError(f"{_SEED} is set for every run by the sweep; write seeds: [...] in the plan, or give --seeds")
    if _START in keys and arm.after:
        raise ConfigError(f"{_START} is set by the sweep, because the arm starts after {arm.after}; remove one of them")


def _find_start(
    plan: Plan, arm: Arm, seed: int, start: Path | None, made: Mapping[str, Run]
) -> tuple[str | None, Path | None]:
    """Return the run that an arm starts from, if it is of this sweep, and the checkpoint.

    Of another sweep that tunes something, it is the run with the value that did best with this seed.
    """
    if arm.after is None:
        return None, None
    sweep, _, source = arm.after.rpartition("/")
    name = run_name(source, seed)
    if not sweep:
        if name not in made:
            raise ConfigError(f"it starts after {source}, which has problems")
        run = made[name]
        best = run.settings.checkpoint.best_metric is not None
        return name, run.folder.absolute() / "checkpoints" / ("best" if best else "last")
    if start is None:
        raise ConfigError(f"it starts from the arm {source} of the sweep {sweep}; give the folder of that with --from")
    tuned = start.absolute().glob(run_name(source, seed, "*"))
    folder = _best_folder(tuned, plan) or start.absolute() / name
    found = [link for link in (folder / "checkpoints" / name for name in ("best", "last")) if link.exists()]
    if not found:
        place = start / name
        raise ConfigError(f"it starts from {place}, where there is no checkpoint; run `tost sweep {sweep}` first")
    return None, found[0]


def select(runs: Sequence[Run], pattern: str) -> list[Run]:
    """Return the runs whose arm or name matches a shell pattern.

    Raises:
        ConfigError: There are none; the message lists the arms.
    """
    chosen = [run for run in runs if fnmatchcase(run.arm, pattern) or fnmatchcase(run.name, pattern)]
    if not chosen:
        arms = ", ".join(dict.fromkeys(run.arm for run in runs))
        raise ConfigError(f"no run matches {pattern!r}; give an arm or a run, such as {runs[0].name}. Arms: {arms}")
    return chosen


def unfinished(runs: Sequence[Run], chosen: Sequence[Run]) -> list[Run]:
    """Return those of the chosen runs that are not finished.

    Args:
        runs: All runs of the sweep.
        chosen: The runs to look at.

    Raises:
        ConfigError: One of them starts from a run that is neither finished nor chosen.
    """
    waiting = [run for run in chosen if state_of(run) is not State.finished]
    names = {run.name for run in waiting}
    sources = {run.name: run for run in runs}
    for run in waiting:
        if run.after is not None and run.after not in names and state_of(sources[run.after]) is not State.finished:
            raise ConfigError(f"{run.name} starts from {run.after}, which is not finished; choose that as well")
    return waiting


def state_of(run: Run) -> State:
    """Return how far a run has got, by the files in its folder."""
    if not (run.folder / "config.yaml").exists():
        return State.new
    status = read_record(run.folder / "summary.json").get("status")
    return State(status) if status in (State.failed, State.finished) else State.interrupted


def check_folders(runs: Sequence[Run]) -> None:
    """Make sure that what the folders hold already was made with the settings that are asked for now.

    Raises:
        ConfigError: It was not; the message lists what differs.
    """
    problems = [f"\n  {run.folder}: {text}" for run in runs if (text := _difference(run))]
    if problems:
        raise ConfigError(
            "runs with other settings are in the way:" + "".join(problems) + "\nGive another --out, or remove them."
        )


def _difference(run: Run) -> str:
    path = run.folder / "config.yaml"
    if not path.exists():
        return ""
    try:
        # Read anew, not compared by the stored hash: a key that this version added has its default in both.
        there = flatten(load_config(str(path)).model_dump(mode="json"))
    except ConfigError as error:
        return f"its config.yaml is not usable by this version: {error!s}".replace("\n", "\n    ")
    here = flatten(run.settings.model_dump(mode="json"))
    different = [
        f"{key} is {write_value(there.get(key))} there and {write_value(here.get(key))} now"
        for key in dict.fromkeys([*there, *here])
        if there.get(key) != here.get(key)
    ]
    shown = different[:_MOST_DIFFERENCES]
    more = f"; and {len(different) - len(shown)} more" if len(different) > len(shown) else ""
    return "; ".join(shown) + more
