"""Learning rates as functions of the step, in the exact forms of the code bases that the paper's experiments use.

Written as functions rather than as torch schedulers: the rate of a step can be computed without running the steps
before it, so there is nothing to save or restore.
"""

from __future__ import annotations

import math

from tost.train.config import ScheduleConfig


def learning_rate(step: int, *, config: ScheduleConfig, peak: float, total: int) -> float:
    """Return the learning rate of a step.

    Args:
        step: Steps done before this one: 0 for the first.
        config: The form and its numbers.
        peak: The highest rate, reached at the end of the warm-up.
        total: Steps of the whole run.

    Returns:
        The rate that step `step` uses.
    """
    t, warmup = step, config.warmup_steps
    if config.epoch_steps:  # the rate is that of the beginning of an epoch
        t = max(0, step // config.epoch_steps - config.lag) * config.epoch_steps
    if config.name == "one_cycle":
        return _one_cycle(t, warmup, peak, total)
    if t < warmup and config.warmup_first_step == "zero":  # fairseq, older nanoGPT: the first is at the starting rate
        return config.warmup_from + t * (peak - config.warmup_from) / warmup
    if t < warmup:
        return peak * (t + 1) / (warmup + 1)  # nanoGPT today: no step is lost at rate 0
    begin = warmup if config.decay_from == "warmup" else 0
    progress = min(1.0, (t - begin) / max(1, total - begin))
    match config.name:
        case "constant":
            return peak
        case "cosine":
            return config.min_lr + 0.5 * (peak - config.min_lr) * (1 + math.cos(math.pi * progress))
        case "linear":
            return config.min_lr + (peak - config.min_lr) * (1 - progress)
        case "inverse_sqrt":
            return max(config.min_lr, peak * math.sqrt(max(1, warmup) / max(1, t)))
    raise AssertionError(config.name)


def _one_cycle(t: int, warmup: int, peak: float, total: int) -> float:
    """Linear from peak / 25 up to the peak and down to peak / 250,000, with the ends that torch's OneCycleLR has."""
    start, end = peak / 25, peak / 250_000
    top, bottom = max(1, warmup - 1), max(1, total - 1)
    if t <= top:
        return start + (peak - start) * t / top
    return peak + (end - peak) * min(1.0, (t - top) / max(1, bottom - top))
