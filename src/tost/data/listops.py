"""Small ListOps: nested operations on digits, whose value is the class.

The grammar is that of the Long Range Arena. A node below the deepest level is an operation with probability 1/4, else a
digit; an operation is one of four and has 2 to `max_args` arguments, each a node one level deeper. Expressions are kept
if ``min_length < length < max_length``, and if they have not occurred before, in either split.
"""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tost.data._random import mix
from tost.data.dataset import DataBundle, TensorDataset, fingerprint
from tost.data.options import DataInfo, ListOpsOptions
from tost.errors import ConfigError

__all__ = ["PAD", "SYMBOLS", "ListOpsGenerator", "build_listops"]

PAD = 0
SYMBOLS = ("<pad>", "[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789")
"""The meaning of every id. The order is part of the data: a saved model relies on it."""

_OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
_FIRST_OPERATOR, _CLOSE, _ZERO = SYMBOLS.index("[MIN"), SYMBOLS.index("]"), SYMBOLS.index("0")
_OPERATION_PROBABILITY = 0.25
_VALIDATION, _TRAIN = 0, 1
# Sensible options accept one draw in ten or so; this many failures in a row mean that there is nothing left to find.
_MAX_DRAWS = 50_000


class _TooLongError(Exception):
    """The expression being drawn cannot be kept any more."""


class ListOpsGenerator:
    """Draws expressions.

    Args:
        options: Limits of the expressions.
        seed: Example i of a split is drawn by a generator that is seeded with this number, the split and i.
    """

    def __init__(self, options: ListOpsOptions, seed: int) -> None:
        self.options, self.seed = options, seed
        self._seen: set[bytes] = set()

    def split(self, number: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return expressions that none of this generator's splits held before.

        Args:
            number: Which split; another number gives other examples.
            count: How many.

        Returns:
            Ids padded with `PAD`, ``[count, max_length]``, and values ``[count]``.

        Raises:
            ConfigError: The limits allow too few different expressions.
        """
        ids = np.full((count, self.options.max_length), PAD, dtype=np.uint8)
        values = np.empty(count, dtype=np.uint8)
        for index in range(count):
            tokens, values[index] = self._new_example(Random(mix(self.seed, number, index)))
            ids[index, : len(tokens)] = np.frombuffer(tokens, dtype=np.uint8)
        return ids, values

    def _new_example(self, random: Random) -> tuple[bytes, int]:
        for _ in range(_MAX_DRAWS):
            tokens = bytearray()
            try:
                # A root that is a digit is always too short, so the draw starts with an operation.
                value = self._operation(random, 1, tokens)
            except _TooLongError:
                continue
            if len(tokens) > self.options.min_length and (expression := bytes(tokens)) not in self._seen:
                self._seen.add(expression)
                return expression, value
        limits = {key: getattr(self.options, key) for key in ("max_depth", "max_args", "min_length", "max_length")}
        raise ConfigError(
            f"found only {len(self._seen)} different ListOps expressions with {limits}, and {_MAX_DRAWS} draws brought "
            "no new one; ask for fewer samples (train_count, validation_count) or widen the limits."
        )

    def _operation(self, random: Random, depth: int, tokens: bytearray) -> int:
        """Append one operation at this depth and return its value. Draws use nothing but `Random.random`.

        Its sequence is the only one that Python promises never to change.
        """
        uniform, options = random.random, self.options
        operator = int(uniform() * len(_OPERATORS))
        tokens.append(_FIRST_OPERATOR + operator)
        arguments = []
        for _ in range(2 + int(uniform() * (options.max_args - 1))):
            if depth + 1 < options.max_depth and uniform() <= _OPERATION_PROBABILITY:
                arguments.append(self._operation(random, depth + 1, tokens))
            else:
                digit = int(uniform() * 10)
                tokens.append(_ZERO + digit)
                arguments.append(digit)
            if len(tokens) + depth >= options.max_length:  # every open operation still needs its bracket
                raise _TooLongError
        tokens.append(_CLOSE)
        return _apply(operator, arguments)


def _apply(operator: int, arguments: list[int]) -> int:
    match _OPERATORS[operator]:
        case "[MIN":
            return min(arguments)
        case "[MAX":
            return max(arguments)
        case "[MED":
            ordered, middle = sorted(arguments), len(arguments) // 2
            # The mean of the two middle ones is cut to an integer where there are two.
            return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
        case _:
            return sum(arguments) % 10


def build_listops(options: ListOpsOptions, seed: int) -> DataBundle:
    """Return expressions: inputs int64 ``[max_length]``, mask bool of the same shape, targets int64 ``[]``.

    No expression occurs twice, within a split or between them. The validation set does not depend on `train_count`.

    Args:
        options: Limits of the expressions, and how many.
        seed: Decides which are drawn.

    Raises:
        ConfigError: The limits allow too few different expressions.
    """
    generator = ListOpsGenerator(options, seed)
    validation = _rows(*generator.split(_VALIDATION, options.validation_count))
    train = _rows(*generator.split(_TRAIN, options.train_count))
    info = DataInfo(
        **vars(options.shape()), name="listops", fingerprint=fingerprint(*train.values(), *validation.values())
    )
    return DataBundle(train=TensorDataset(train), validation=TensorDataset(validation), info=info)


def _rows(ids: NDArray[np.uint8], values: NDArray[np.uint8]) -> dict[str, Tensor]:
    return {"inputs": torch.from_numpy(ids), "targets": torch.from_numpy(values), "mask": torch.from_numpy(ids != PAD)}
