"""Rules that tie several keys of a configuration together.

A rule is applied whenever the keys that it reads are valid by themselves, whatever else is wrong: one look at a
configuration finds all its problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tost._options import Problem
from tost.data import DataOptions, find_data
from tost.data.registry import DATA_SETS
from tost.errors import ConfigError
from tost.models import list_models, model_spec
from tost.train.registry import task_spec

UNKNOWN: Any = object()
"""Stands for the value of a key that is missing or wrong."""


@dataclass(frozen=True)
class Rule:
    """A rule about several keys.

    Attributes:
        keys: Dotted keys, separated by spaces; a problem is reported at the first.
        check: Takes their values. Returns whether the rule is broken, or what is wrong.
        message: What is wrong if `check` returns true; ``{0}`` stands for the value of the first key, and so on.
    """

    keys: str
    check: Callable[..., object]
    message: str = ""


def broken_rules(value: Callable[[str], Any]) -> Iterator[Problem]:
    """Yield a problem for every broken rule.

    Args:
        value: Returns the value of a dotted key, or `UNKNOWN`.
    """
    for rule in RULES:
        keys = rule.keys.split()
        values = [value(key) for key in keys]
        with suppress(ConfigError):  # a name that does not exist has a problem by itself
            if not any(one is UNKNOWN for one in values) and (found := rule.check(*values)):
                yield Problem(keys[0], found if isinstance(found, str) else rule.message.format(*values))


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


def _hides(share: float | None, recipe: str) -> str:
    if task_spec(recipe).hides == (share is not None):
        return ""
    if share is None:
        return f"the recipe {recipe} needs the share of the inputs that it hides, such as 0.3; set it"
    return f"{share} given, but the recipe {recipe} hides nothing; leave it out"


def _fits(option: str, has: str, remedy: str = "set it to {}", *, at_least: bool = False) -> Rule:
    """Return the rule that an option of the model fits the attribute of that name of the data's shape."""

    def check(given: Any, data: DataOptions) -> str:
        needed = getattr(data.shape(), option)
        if given is None or needed is None or given == needed or (at_least and given >= needed):
            return ""
        return _misfit(given, data, has.format(needed), remedy.format(needed))

    return Rule(f"model.{option} data", check)


def _is_long_enough(length: int | None, data: DataOptions, position: str | None) -> str:
    needed = data.shape().length
    # Only language models run beyond their last position; a classifier keeps to its length whatever its positions are.
    endless = data.shape().num_classes is None and position in ("sinusoidal", "none")
    if length is None or needed is None or length >= needed or endless:
        return ""
    return _misfit(length, data, f"has sequences of {needed}", "make it at least that, or let the data be shorter")


def _takes_the_size(size: int | Sequence[int] | None, data: DataOptions) -> str:
    needed = data.shape().image_size
    if size is None or needed is None or ((size, size) if isinstance(size, int) else tuple(size)) == needed:
        return ""
    return _misfit(size, data, f"has images of {needed[0]} x {needed[1]} pixels", "let the two agree")


def _misfit(given: object, data: DataOptions, has: str, remedy: str) -> str:
    return f"{given} does not fit the data: {data.name} {has}; {remedy}, or leave it out to have it follow the data"


RULES: tuple[Rule, ...] = (
    Rule("recipe", _is_task),
    Rule("model.name recipe", _trains_the_model),
    Rule("data.name recipe", _trains_on_the_data),
    Rule("train.hide recipe", _hides),
    Rule(
        "train.chunk recipe",
        lambda chunk, recipe: chunk is not None and not task_spec(recipe).chunks,
        "{0} given, but the recipe {1} takes its sequences as a whole; leave it out",
    ),
    Rule(
        "parallel.context recipe",
        lambda context, recipe: context > 1 and "image_classification" in _kinds(recipe),
        "{0} processes cannot share a sample of {1}; set it to 1, every process then takes its own",
    ),
    *(
        Rule(
            f"regularize.{key} recipe",
            lambda value, recipe: value > 0 and not task_spec(recipe).regularizes,
            "{0} given, but the recipe {1} does not regularize; leave the section out",
        )
        for key in ("label_smoothing", "mixup", "cutmix")
    ),
    Rule(
        "train.batch_size train.accumulate",
        lambda batch_size, accumulate: batch_size % accumulate != 0,
        "{0} is not a multiple of train.accumulate ({1}), so micro-batches would differ in size; change one of them",
    ),
    Rule(
        "train.batch_size train.accumulate regularize.mixup regularize.cutmix",
        lambda batch, parts, mixup, cutmix: (mixup or cutmix) and batch % parts == 0 and batch // parts % 2,
        "{0} in {1} micro-batches is an odd number of images each; Mixup and CutMix mix pairs, make it even",
    ),
    Rule(
        "train.clip_norm train.clip_value",
        lambda norm, value: norm is not None and value is not None,
        "{0} given together with train.clip_value ({1}); gradients are clipped one way: set one to null",
    ),
    Rule(
        "train.chunk parallel.context",
        lambda chunk, context: chunk is not None and chunk % context,
        "{0} tokens cannot be shared by {1} processes (parallel.context); make it a multiple of that",
    ),
    Rule(
        "train.truncate train.chunk",
        lambda truncate, chunk: truncate is not None and chunk is None,
        "{0} counts pieces, but texts are taken as a whole; set train.chunk, too, or leave it out",
    ),
    Rule(
        "train.init_from",
        lambda source: source == "?",
        "missing; this configuration starts from trained weights: give a run, a checkpoint, a converted model or a "
        ".safetensors file, or null to start from random ones",
    ),
    Rule(
        "schedule.warmup_steps train.steps",
        lambda warmup, steps: warmup > steps,
        "{0} is longer than the run of {1} train.steps; shorten the warm-up or train longer",
    ),
    Rule(
        "schedule.name schedule.warmup_steps",
        lambda name, warmup: warmup < {"one_cycle": 2, "inverse_sqrt": 1}.get(name, 0),
        "{0} has its peak at the end of the warm-up, but schedule.warmup_steps is {1}; set it to 2 or more",
    ),
    Rule(
        "schedule.min_lr optim.lr",
        lambda floor, peak: floor > peak,
        "{0} is above the peak optim.lr ({1}); a schedule ends at or below its peak",
    ),
    Rule(
        "schedule.warmup_from optim.lr",
        lambda start, peak: start > peak,
        "{0} is above the peak optim.lr ({1}); a warm-up rises",
    ),
    Rule(
        "checkpoint.best_metric evaluate.every",
        lambda metric, every: metric is not None and not every,
        "{0} would be measured at the end only, because evaluate.every is 0; set that to a number of steps",
    ),
    Rule(
        "evaluate.telemetry evaluate.every",
        lambda telemetry, every: telemetry and not every,
        "true would show the end only, because evaluate.every is 0; set that to a number of steps",
    ),
    _fits("input", "has {}"),
    _fits("vocab_size", "has {} different tokens", "make it at least that", at_least=True),
    _fits("in_features", "has {} numbers per element"),
    _fits("num_classes", "has {} classes", "make it at least that", at_least=True),
    _fits("in_chans", "has images of {} channels"),
    Rule("model.image_size data", _takes_the_size),
    Rule("model.max_length data model.position", _is_long_enough),
)
