"""Conditions that tie several keys of a configuration together.

Each rule names the keys it reads. It is applied whenever these are right by themselves, whatever else is wrong, so that
one look at a configuration finds all its problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tost._options import Problem
from tost.data import DataOptions
from tost.errors import ConfigError

UNKNOWN: Any = object()
"""Stands for the value of a key that is missing or wrong."""


@dataclass(frozen=True)
class Rule:
    """A condition on several keys.

    Attributes:
        keys: Dotted keys whose values `check` takes, in this order; the problem is reported at the first.
        check: Returns what is wrong, or an empty string.
    """

    keys: tuple[str, ...]
    check: Callable[..., str]


def unless(holds: Callable[..., object], message: str, *keys: str) -> Rule:
    """Return a rule from a condition.

    Args:
        holds: Whether values of the keys go together.
        message: What is wrong if they do not; ``{0}`` stands for the value of the first key, and so on.
        keys: Dotted keys.
    """
    return Rule(keys, lambda *values: "" if holds(*values) else message.format(*values))


def broken_rules(rules: Sequence[Rule], value: Callable[[str], Any]) -> Iterator[Problem]:
    """Yield a problem for every rule that is broken.

    Args:
        rules: What to check.
        value: Returns the value of a dotted key, or `UNKNOWN`.
    """
    for rule in rules:
        values = [value(key) for key in rule.keys]
        with suppress(ConfigError):  # a name that does not exist, which is reported by itself
            if not any(one is UNKNOWN for one in values) and (text := rule.check(*values)):
                yield Problem(rule.keys[0], text)


def _accumulate(batch_size: int, accumulate: int) -> str:
    if batch_size % accumulate == 0:
        return ""
    return (
        f"{batch_size} is not a multiple of train.accumulate ({accumulate}), so micro-batches would differ in size; "
        f"use {max(1, batch_size // accumulate) * accumulate}, or another train.accumulate"
    )


def _needs_warm_up(name: str, warmup: int) -> str:
    least = {"one_cycle": 2, "inverse_sqrt": 1}.get(name, 0)
    if warmup >= least:
        return ""
    return f"{name} needs schedule.warmup_steps >= {least}, got {warmup}; its peak is where the warm-up ends"


def _start_is_used(start: float, first: str, name: str) -> str:
    if start == 0 or (first == "zero" and name != "one_cycle"):
        return ""
    if name == "one_cycle":
        return f"{start} has no effect on the schedule one_cycle, which starts at optim.lr / 25; remove it"
    return f"{start} has no effect while schedule.warmup_first_step is {first}; set that to zero, or remove this"


def _decay_has_a_start(start: str, name: str, warmup: int) -> str:
    if start == "warmup":
        return ""
    if name not in ("cosine", "linear"):
        return f"{start} has no effect on the schedule {name}; remove it, or choose cosine or linear"
    return "" if warmup else f"{start} has no effect without schedule.warmup_steps; remove it"


def _pairs_are_mixed(batch_size: int, accumulate: int, mixup: float, cutmix: float) -> bool:
    return not (mixup or cutmix) or bool(batch_size % accumulate) or batch_size // accumulate % 2 == 0


def _fits(option: str, has: str, remedy: str = "set it to {}", *, at_least: bool = False) -> Rule:
    """Return the rule that an option of the model fits the data.

    Args:
        option: Its name, which is also that of the attribute of the data's shape.
        has: What the data has, with a place for the value.
        remedy: What to do about it.
        at_least: Whether a larger value fits too.
    """

    def check(given: Any, data: DataOptions) -> str:
        needed = getattr(data.shape(), option)
        if given is None or needed is None or given == needed or (at_least and given >= needed):
            return ""
        return _misfit(given, data, has.format(needed), remedy.format(needed))

    return Rule((f"model.{option}", "data"), check)


def _is_long_enough(length: int | None, data: DataOptions, position: str | None, after_end: str | None) -> str:
    needed = data.shape().length
    # Only language models run beyond their last position; a classifier keeps to its length whatever its positions are.
    endless = data.shape().num_classes is None and (position in ("sinusoidal", "none") or after_end == "repeat")
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


_BATCH = ("train.batch_size", "train.accumulate")
_MIXING = ("regularize.mixup", "regularize.cutmix")
RULES: tuple[Rule, ...] = (
    Rule(_BATCH, _accumulate),
    unless(
        lambda norm, value: norm is None or value is None,
        "{0} given together with train.clip_value ({1}); gradients are clipped one way: set one to null",
        *("train.clip_norm", "train.clip_value"),
    ),
    unless(
        lambda warmup, steps: warmup <= steps,
        "{0} is longer than the run of {1} train.steps; shorten the warm-up or train longer",
        *("schedule.warmup_steps", "train.steps"),
    ),
    unless(
        lambda chunk, context: chunk is None or chunk % context == 0,
        "{0} tokens cannot be shared by {1} processes (parallel.context); make it a multiple of that",
        *("train.chunk", "parallel.context"),
    ),
    unless(
        lambda truncate, chunk: truncate is None or chunk is not None,
        "{0} counts pieces, but texts are taken as a whole; set train.chunk, too, or leave it out",
        *("train.truncate", "train.chunk"),
    ),
    Rule(("schedule.name", "schedule.warmup_steps"), _needs_warm_up),
    unless(
        lambda floor, name: floor == 0 or name not in ("constant", "one_cycle"),
        "{0} has no effect on the schedule {1}; remove it, or choose cosine, linear or inverse_sqrt",
        *("schedule.min_lr", "schedule.name"),
    ),
    unless(
        lambda floor, peak: floor <= peak,
        "{0} is above the peak optim.lr ({1}); a schedule ends at or below its peak",
        *("schedule.min_lr", "optim.lr"),
    ),
    Rule(("schedule.warmup_from", "schedule.warmup_first_step", "schedule.name"), _start_is_used),
    unless(
        lambda start, peak: start <= peak,
        "{0} is above the peak optim.lr ({1}); a warm-up rises",
        *("schedule.warmup_from", "optim.lr"),
    ),
    unless(
        lambda first, name: first == "one" or name != "one_cycle",
        "{0} has no effect on the schedule one_cycle, whose warm-up has its own form; remove it",
        *("schedule.warmup_first_step", "schedule.name"),
    ),
    unless(
        lambda source: source != "?",
        "missing; this configuration starts from trained weights: give a run, a checkpoint, a converted model or a "
        ".safetensors file, or null to start from random ones",
        "train.init_from",
    ),
    Rule(("schedule.decay_from", "schedule.name", "schedule.warmup_steps"), _decay_has_a_start),
    unless(
        lambda lag, epoch: lag == 0 or epoch > 0,
        "{0} has no effect while schedule.epoch_steps is 0; set that to the number of steps of an epoch",
        *("schedule.lag", "schedule.epoch_steps"),
    ),
    unless(
        lambda statistics, everything: not (statistics and everything),
        "true has no effect next to optim.decay_all, which decays every parameter; remove one of the two",
        *("optim.decay_statistics", "optim.decay_all"),
    ),
    unless(
        lambda prob, mixup, cutmix: prob == 1 or mixup > 0 or cutmix > 0,
        "{0} has no effect without regularize.mixup or regularize.cutmix; set one of them, or remove this",
        *("regularize.mix_prob", *_MIXING),
    ),
    unless(
        lambda prob, mixup, cutmix: prob == 0.5 or (mixup > 0 and cutmix > 0),
        "{0} has no effect unless regularize.mixup and regularize.cutmix are both set; remove it",
        *("regularize.switch_prob", *_MIXING),
    ),
    unless(
        _pairs_are_mixed,
        "{0} in {1} micro-batches is an odd number of images each; Mixup and CutMix mix pairs, make it even",
        *(*_BATCH, *_MIXING),
    ),
    unless(
        lambda metric, every: metric is None or every > 0,
        "{0} would be measured at the end only, because evaluate.every is 0; set that to a number of steps",
        *("checkpoint.best_metric", "evaluate.every"),
    ),
    unless(
        lambda telemetry, every: not telemetry or every > 0,
        "true would show the end only, because evaluate.every is 0; set that to a number of steps",
        *("evaluate.telemetry", "evaluate.every"),
    ),
    _fits("input", "has {}"),
    _fits("vocab_size", "has {} different tokens", "make it at least that", at_least=True),
    _fits("in_features", "has {} numbers per element"),
    _fits("num_classes", "has {} classes", "make it at least that", at_least=True),
    _fits("in_chans", "has images of {} channels"),
    Rule(("model.image_size", "data"), _takes_the_size),
    Rule(("model.max_length", "data", "model.position", "model.after_last_position"), _is_long_enough),
)
