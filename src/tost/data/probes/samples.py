"""Samples of the probes, drawn as they are needed: in training no sample comes twice.

Each sample has inputs, int64 ``[length]``, and targets, int64 ``[length]``: the answer at the tokens that ask, and
`IGNORED` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tost.data._random import mix
from tost.data.dataset import Batch, DataBundle, Dataset, fingerprint
from tost.data.probes.options import (
    BracketsOptions,
    InductionOptions,
    MostFrequentOptions,
    ProbeOptions,
    RecallOptions,
    SelectiveCopyOptions,
)
from tost.data.spec import DataInfo

IGNORED = -100
"""The target of a token that does not ask."""

Ids = NDArray[np.int64]
Pair = tuple[Ids, Ids]
Draw = Callable[[np.random.Generator], Pair]
_TRAIN, _VALIDATION = 0, 1


class Probe(Dataset):
    """Samples of a probe: the seed and the number of a draw decide each of them.

    Args:
        stages: Each returns inputs and targets of one sample: one for every epoch, of which the last goes on.
        count: Number of samples; in training, per epoch.
        seed: Decides which they are.
        draws: Draw new ones in every epoch.
    """

    def __init__(self, stages: Sequence[Draw], count: int, seed: int, *, draws: bool) -> None:
        self.stages, self.count, self.seed, self.draws = stages, count, seed, draws

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return self.count

    def gather(self, indices: Tensor) -> Batch:
        """Return samples as a batch; shorter ones end in zeros that do not ask, which no answer depends on."""
        rows = [self._draw(index) for index in indices.tolist()]
        inputs, targets = zip(*rows, strict=True)
        return {"inputs": _stack(inputs, 0), "targets": _stack(targets, IGNORED)}

    def _draw(self, index: int) -> Pair:
        stage = self.stages[min(index // self.count, len(self.stages) - 1)]
        return stage(np.random.default_rng(mix(self.seed, index)))


def _stack(rows: Sequence[Ids], padding: int) -> Tensor:
    length = max(len(row) for row in rows)
    return torch.from_numpy(np.stack([np.pad(row, (0, length - len(row)), constant_values=padding) for row in rows]))


def _unasked(length: int) -> Ids:
    return np.full(length, IGNORED)


def draw_recall(options: RecallOptions, rng: np.random.Generator) -> Pair:
    """Draw ``k1 v1 k2 v2 ...``, then blanks with every key somewhere among them, which asks for its value."""
    keys = 1 + rng.choice(options.num_keys, options.pairs, replace=False)
    values = 1 + options.num_keys + rng.integers(options.num_values, size=options.pairs)
    inputs, targets, told = np.zeros(options.length, np.int64), _unasked(options.length), 2 * options.pairs
    inputs[0:told:2], inputs[1:told:2] = keys, values
    places = told + rng.choice(options.length - told, options.pairs, replace=False)
    inputs[places], targets[places] = keys, values
    return inputs, targets


def draw_induction(options: InductionOptions, rng: np.random.Generator) -> Pair:
    """Draw symbols with a mark among them and the mark again at the end, which asks what followed the first one."""
    inputs, targets = rng.integers(1, 1 + options.symbols, size=options.length), _unasked(options.length)
    first = rng.integers(options.length - 2)
    inputs[first] = inputs[-1] = 0
    targets[-1] = inputs[first + 1]
    return inputs, targets


def draw_selective_copy(options: SelectiveCopyOptions, rng: np.random.Generator) -> Pair:
    """Draw symbols among blanks, then as many marks, which ask for the symbols in their order."""
    symbols = 2 + rng.integers(options.symbols, size=options.count)
    inputs, targets, told = np.zeros(options.length, np.int64), _unasked(options.length), options.length - options.count
    inputs[np.sort(rng.choice(told, options.count, replace=False))] = symbols
    inputs[told:], targets[told:] = 1, symbols
    return inputs, targets


def draw_most_frequent(options: MostFrequentOptions, rng: np.random.Generator) -> Pair:
    """Draw symbols, one of which occurs more often than any other, then a mark, which asks for it."""
    targets = _unasked(options.length)
    while True:
        symbols = rng.integers(1, 1 + options.symbols, size=options.length - 1)
        most, second = np.sort(np.bincount(symbols, minlength=3))[[-1, -2]]
        if most > second:
            targets[-1] = np.bincount(symbols).argmax()
            return np.append(symbols, 0), targets


def draw_brackets(options: BracketsOptions, rng: np.random.Generator) -> Pair:
    """Draw brackets, 0 to open and 1 to close, none closed before it was opened; each asks how many are open."""
    inputs, targets, depth = rng.integers(2, size=options.length), np.zeros(options.length, np.int64), 0
    for place in range(options.length):
        if depth in (0, options.max_depth):
            inputs[place] = depth > 0
        depth += 1 - 2 * inputs[place]
        targets[place] = depth
    return inputs, targets


_DRAWS: dict[type[ProbeOptions], Callable[[Any, np.random.Generator], Pair]] = {
    RecallOptions: draw_recall,
    InductionOptions: draw_induction,
    SelectiveCopyOptions: draw_selective_copy,
    MostFrequentOptions: draw_most_frequent,
    BracketsOptions: draw_brackets,
}


def build_probe(options: ProbeOptions, seed: int) -> DataBundle:
    """Return samples of the probe that the options belong to.

    Args:
        options: What to draw, and how many.
        seed: Decides which are drawn.
    """
    draw = _DRAWS[type(options)]
    stages = [partial(draw, stage) for stage in (*options.training_stages(), options)]
    train = Probe(stages, options.train_count, mix(seed, _TRAIN), draws=True)
    validation = Probe(stages[-1:], options.validation_count, mix(seed, _VALIDATION), draws=False)
    held_out = validation.gather(torch.arange(len(validation)))
    return DataBundle(train=train, validation=validation, info=DataInfo(fingerprint=fingerprint(*held_out.values())))
