"""ListOps: nested operations on digits, and their values, in memory or as files in the official layout.

The grammar is that of the Long Range Arena. A node below the deepest level is an operation with probability 1/4, else a
digit; an operation is one of four and has 2 to `max_args` arguments, each a node one level deeper. Expressions are kept
if ``min_length < length < max_length``, and if they have not occurred before, in any split.

Files are ``listops-1000/basic_train.tsv`` and so on, a header, then source and target. Every thousand examples are a
file until all are there. An example is decided by the seed, its split and its number. Should two be the same, which is
rare, the later one is drawn again when the files are joined.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tost._io import atomic_path
from tost.data._pool import share_work
from tost.data._random import mix
from tost.data.dataset import DataBundle, TensorDataset, fingerprint
from tost.data.embedded import ListOpsLimits, ListOpsOptions
from tost.data.lra.options import ListOpsFilesOptions
from tost.data.prepare import Report
from tost.data.spec import DataInfo
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

FOLDER = "listops-1000"
"""Folder in the official release; the number means nothing."""
_PART = 1000  # examples of a unit of work

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

    def __init__(self, options: ListOpsLimits, seed: int) -> None:
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
        limits = {key: getattr(self.options, key) for key in ListOpsLimits.model_fields}
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
    sets = []
    for split, count in (("val", options.validation_count), ("train", options.train_count)):
        ids, values = map(torch.from_numpy, generator.split(SPLITS[split], count))
        sets.append(TensorDataset({"inputs": ids, "targets": values, "mask": ids != PAD}))
    validation, train = sets
    info = DataInfo(fingerprint=fingerprint(*train.rows.values(), *validation.rows.values()))
    return DataBundle(train=train, validation=validation, info=info)


class _Part(NamedTuple):
    path: Path
    options: ListOpsFilesOptions
    split: str
    first: int
    size: int

    def line(self, index: int, is_taken: Callable[[bytes], bool]) -> bytes:
        tokens, value = ListOpsGenerator(self.options, self.options.seed).example(SPLITS[self.split], index, is_taken)
        return f"{listops_text(tokens)}\t{value}\n".encode("ascii")


def prepare_listops(options: ListOpsFilesOptions, out: Path, *, workers: int, report: Report) -> dict[str, object]:
    """Generate ListOps; see `tost.data.prepare.prepare`."""
    folder, counts = out / FOLDER, options.counts()
    drafts = folder / "parts"  # until they are joined
    parts = [
        _Part(drafts / f"{split}-{first:08d}.tsv", options, split, first, min(_PART, count - first))
        for split, count in counts.items()
        for first in range(0, count, _PART)
    ]
    facts: dict[str, object] = {**counts, "folder": str(folder)}
    if not drafts.exists() and all((folder / f"basic_{split}.tsv").is_file() for split in counts):
        return {**facts, "already there": True}
    missing = [part for part in parts if not part.path.is_file()]
    share_work(_write_part, missing, workers=workers, report=report, total=options.count, what="examples")
    facts["fingerprint"] = _join(parts, counts, folder)[:12]
    shutil.rmtree(drafts)
    return facts


def _write_part(part: _Part) -> None:
    with atomic_path(part.path, sync=False) as draft, draft.open("wb") as file:
        file.writelines(part.line(index, lambda tokens: False) for index in range(part.first, part.first + part.size))


def _join(parts: list[_Part], counts: dict[str, int], folder: Path) -> str:
    """Join the parts without repetitions; return the SHA-256 of all."""
    seen: set[bytes] = set()
    digest = hashlib.sha256()
    # The splits in the order of their numbers, so that the validation set does not depend on the size of the others.
    for split in sorted(counts, key=SPLITS.__getitem__):
        with atomic_path(folder / f"basic_{split}.tsv", sync=False) as draft, draft.open("wb") as file:
            file.write(b"Source\tTarget\n")
            for part in (part for part in parts if part.split == split):
                for index, line in enumerate(part.path.read_bytes().splitlines(keepends=True), part.first):
                    if _key(line) in seen:
                        line = part.line(index, lambda tokens: _key(listops_text(tokens).encode()) in seen)
                    seen.add(_key(line))
                    file.write(line)
                    digest.update(line)
    return digest.hexdigest()


def _key(line: bytes) -> bytes:
    return hashlib.blake2b(line.partition(b"\t")[0], digest_size=16).digest()
