"""ListOps: nested operations on digits, and their values.

The grammar is that of the Long Range Arena. A node below the deepest level is an operation with probability 1/4, else a
digit; an operation is one of four and has 2 to `max_args` arguments, each a node one level deeper. Expressions are kept
if ``min_length < length < max_length``, and if they have not occurred before, in either split.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import median

import numpy as np
from numpy.typing import NDArray

from tost.data._random import mix
from tost.data.toy.options import ListOpsOptions
from tost.errors import ConfigError

PAD = 0
SYMBOLS = ("<pad>", "[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789")
"""The meaning of every id. The order is part of the data: a saved model relies on it."""

_OPERATORS: tuple[Callable[[list[int]], int], ...] = (
    min,
    max,
    lambda numbers: int(median(numbers)),  # the mean of the two middle ones is cut to an integer where there are two
    lambda numbers: sum(numbers) % 10,
)
"""What the operators compute, in the order of their ids."""
_FIRST_OPERATOR, _CLOSE, _ZERO = SYMBOLS.index("[MIN"), SYMBOLS.index("]"), SYMBOLS.index("0")
_OPERATION_PROBABILITY = 0.25
SPLITS = {"val": 0, "train": 1, "test": 2}
"""The numbers of the splits. They are part of the data, as the seed is."""

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
            tokens, values[index] = self.example(number, index, self._seen.__contains__)
            self._seen.add(tokens)
            ids[index, : len(tokens)] = np.frombuffer(tokens, dtype=np.uint8)
        return ids, values

    def example(self, number: int, index: int, is_taken: Callable[[bytes], bool]) -> tuple[bytes, int]:
        """Return one expression.

        Args:
            number: Which split.
            index: Which of its examples; each has its own sequence of draws.
            is_taken: Tells of the ids of an expression whether to pass it over.

        Returns:
            The ids of the first expression that is not taken, and its value.

        Raises:
            ConfigError: The limits allow too few different expressions.
        """
        random = Random(mix(self.seed, number, index))
        for _ in range(_MAX_DRAWS):
            tokens = bytearray()
            try:
                # A root that is a digit is always too short, so the draw starts with an operation.
                value = self._operation(random, 1, tokens)
            except _TooLongError:
                continue
            if len(tokens) > self.options.min_length and not is_taken(expression := bytes(tokens)):
                return expression, value
        limits = {key: getattr(self.options, key) for key in ("max_depth", "max_args", "min_length", "max_length")}
        raise ConfigError(
            f"found only {len(self._seen) or index} different ListOps expressions with {limits}, and {_MAX_DRAWS} "
            "draws brought no new one; ask for fewer samples (train_count, validation_count or count) or widen the "
            "limits."
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
        return _OPERATORS[operator](arguments)


def listops_text(tokens: bytes) -> str:
    """Write an expression as the official files do: a binary tree, every node of it in parentheses.

    The operator and its first argument are a pair, that and the second argument, and so on; the last pair holds the
    closing bracket.

    Args:
        tokens: Ids, without padding.

    Example:
        >>> listops_text(bytes([SYMBOLS.index(symbol) for symbol in ("[MAX", "2", "9", "]")]))
        '( ( ( [MAX 2 ) 9 ) ] )'
    """
    stack: list[list[str]] = [[]]
    for token in tokens:
        if token == _CLOSE:
            operator, *arguments = stack.pop()
            pairs = "( " * (len(arguments) + 1)
            stack[-1].append(f"{pairs}{operator} {' ) '.join(arguments)} ) ] )")
        elif token >= _ZERO:
            stack[-1].append(SYMBOLS[token])
        else:
            stack.append([SYMBOLS[token]])
    ((text,),) = stack
    return text
