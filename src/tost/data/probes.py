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

from tost.data import embedded
from tost.data._random import mix
from tost.data.dataset import IGNORED, Batch, DataBundle, Dataset, fingerprint
from tost.data.spec import DataInfo

Ids = NDArray[np.int64]
Draw = Callable[[np.random.Generator], tuple[Ids, Ids]]
_TRAIN, _VALIDATION = 0, 1


class Probe(Dataset):
    """Samples of a probe: the seed and the number of a draw decide each of them.

    Args:
        stages: Each returns inputs and targets of one sample: one for every epoch, of which the last is for all later.
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
        inputs, targets = zip(*map(self._draw, indices.tolist()), strict=True)
        return {"inputs": _stack(inputs, 0), "targets": _stack(targets, IGNORED)}

    def _draw(self, index: int) -> tuple[Ids, Ids]:
        stage = self.stages[min(index // self.count, len(self.stages) - 1)]
        return stage(np.random.default_rng(mix(self.seed, index)))


def _stack(rows: Sequence[Ids], padding: int) -> Tensor:
    length = max(len(row) for row in rows)
    return torch.from_numpy(np.stack([np.pad(row, (0, length - len(row)), constant_values=padding) for row in rows]))


def draw_recall(options: embedded.RecallOptions, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw ``k1 v1 k2 v2 ...``, then blanks with every key somewhere among them, which asks for its value."""
    keys = 1 + rng.choice(options.num_keys, options.pairs, replace=False)
    values = 1 + options.num_keys + rng.integers(options.num_values, size=options.pairs)
    inputs, targets = np.zeros(options.length, np.int64), np.full(options.length, IGNORED)
    shown = 2 * options.pairs
    inputs[0:shown:2], inputs[1:shown:2] = keys, values
    places = shown + rng.choice(options.length - shown, options.pairs, replace=False)
    inputs[places], targets[places] = keys, values
    return inputs, targets


def draw_induction(options: embedded.InductionOptions, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw symbols with a mark among them and the mark again at the end, which asks what followed the first one."""
    inputs, targets = rng.integers(1, 1 + options.symbols, size=options.length), np.full(options.length, IGNORED)
    first = rng.integers(options.length - 2)
    inputs[first] = inputs[-1] = 0
    targets[-1] = inputs[first + 1]
    return inputs, targets


def draw_selective_copy(options: embedded.SelectiveCopyOptions, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw symbols among blanks, then as many marks, which ask for the symbols in their order."""
    symbols = 2 + rng.integers(options.symbols, size=options.count)
    inputs, targets = np.zeros(options.length, np.int64), np.full(options.length, IGNORED)
    shown = options.length - options.count
    inputs[np.sort(rng.choice(shown, options.count, replace=False))] = symbols
    inputs[shown:], targets[shown:] = 1, symbols
    return inputs, targets


def draw_most_frequent(options: embedded.MostFrequentOptions, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw symbols, one of which occurs more often than any other, then a mark, which asks for it."""
    targets = np.full(options.length, IGNORED)
    while True:
        symbols = rng.integers(1, 1 + options.symbols, size=options.length - 1)
        most, second = np.sort(np.bincount(symbols, minlength=3))[[-1, -2]]
        if most > second:
            targets[-1] = np.bincount(symbols).argmax()
            return np.append(symbols, 0), targets


def draw_brackets(options: embedded.BracketsOptions, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Draw brackets, 0 to open and 1 to close, none closed before it was opened; each asks how many are open."""
    inputs, targets, depth = rng.integers(2, size=options.length), np.zeros(options.length, np.int64), 0
    for place in range(options.length):
        if depth in (0, options.max_depth):
            inputs[place] = depth > 0
        depth += 1 - 2 * inputs[place]
        targets[place] = depth
    return inputs, targets


_DRAWS: dict[type[embedded.ProbeOptions], Callable[[Any, np.random.Generator], tuple[Ids, Ids]]] = {
    embedded.RecallOptions: draw_recall,
    embedded.InductionOptions: draw_induction,
    embedded.SelectiveCopyOptions: draw_selective_copy,
    embedded.MostFrequentOptions: draw_most_frequent,
    embedded.BracketsOptions: draw_brackets,
}


def build_probe(options: embedded.ProbeOptions, seed: int) -> DataBundle:
    """Return samples of the probe that the options belong to.

    Args:
        options: What to draw, and how many.
        seed: Decides which are drawn.
    """
    epochs = [options]
    if isinstance(options, embedded.RecallOptions):
        shorter = [{"length": length, "pairs": min(options.pairs, length // 4)} for length in options.first_lengths]
        epochs = [*(options.model_copy(update=changed) for changed in shorter), options]
    stages = [partial(_DRAWS[type(options)], stage) for stage in epochs]
    train = Probe(stages, options.train_count, mix(seed, _TRAIN), draws=True)
    validation = Probe(stages[-1:], options.validation_count, mix(seed, _VALIDATION), draws=False)
    held_out = validation.gather(torch.arange(len(validation)))
    return DataBundle(train=train, validation=validation, info=DataInfo(fingerprint=fingerprint(*held_out.values())))
