"""Reading ListOps as it was released: ``basic_train.tsv`` and so on, a header, then source and target.

Parentheses add nothing to the brackets and are left out. The ids of the symbols are fixed, see
`tost.data.lra.grammar.SYMBOLS`; 16 stands for an unknown one, which does not occur, and 17 ends a sequence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tost.data.dataset import DataBundle
from tost.data.lra.grammar import SYMBOLS
from tost.data.lra.options import LraListOpsOptions
from tost.data.lra.readers.layout import find_release, lines_of, sequence_bundle
from tost.data.lra.sequences import IdsInMemory
from tost.errors import ConfigError

_END = 17
_CLOSE = SYMBOLS.index("]")
_BAD = 255
_OPERATORS = {name.encode(): bytes([0x80 + place]) for place, name in enumerate(SYMBOLS) if name.startswith("[")}
_SHOWN = 40


_CODES = {
    **{code[0]: code[0] - 0x80 for code in _OPERATORS.values()},
    **{ord(name): place for place, name in enumerate(SYMBOLS) if len(name) == 1},
    ord("X"): _CLOSE,  # as others write it after they took the brackets off
}
_IDS = bytes(_CODES.get(code, _BAD) for code in range(256))


def build_lra_listops(options: LraListOpsOptions, path: str) -> DataBundle:
    """Return ListOps: inputs int64 ``[length]``, mask bool of the same shape, targets int64 ``[]``."""
    names = [f"basic_{split}.tsv" for split in ("train", options.validation_split)]
    folder = find_release(Path(path), "listops-1000", names)
    splits = [_read(folder / name, brackets=options.brackets) for name in names]
    return sequence_bundle(splits, options, _END, {"folder": str(folder)})


def _read(path: Path, *, brackets: bool) -> tuple[IdsInMemory, Tensor, Tensor]:
    """Return the expressions, their values, and their numbers."""
    ids, ends, targets, total = bytearray(), [], [], 0
    with path.open("rb") as file:
        lines = lines_of(file, path)
        header = next(lines, b"").rstrip(b"\r\n").split(b"\t")
        if header != [b"Source", b"Target"]:
            raise ConfigError(
                f"{path} begins with {len(header)} columns, {_shown(header[0])!r}; it must begin with the line "
                "Source<tab>Target."
            )
        for number, line in enumerate(lines, start=2):
            expression, value = _parse(line.rstrip(b"\r\n"), f"{path}, line {number}")
            if not brackets:
                expression = expression.replace(bytes([_CLOSE]), b"")
            ids += expression
            total += len(expression)
            ends.append(total)
            targets.append(value)
    if not targets:
        raise ConfigError(f"{path} holds a header and nothing else; it is incomplete.")
    source = IdsInMemory(np.frombuffer(ids, dtype=np.uint8), np.array(ends, dtype=np.int64))
    return source, torch.tensor(targets), torch.arange(len(targets))


def _shown(data: bytes) -> str:
    return data[:_SHOWN].decode("utf-8", errors="replace")


def _parse(line: bytes, where: str) -> tuple[bytes, int]:
    columns = line.split(b"\t")
    if len(columns) != 2:
        raise ConfigError(f"{where} has {len(columns)} columns; it must have two, an expression and its value.")
    source, target = columns
    if len(target) != 1 or not target.isdigit():
        raise ConfigError(f"{where} has the value {_shown(target)!r}; it must be a digit, 0 to 9.")
    for name, code in _OPERATORS.items():
        source = source.replace(name, code)
    expression = source.translate(_IDS, b"() ")
    words = source.count(b" ") + 1  # of one byte each by now, if they are what they should be
    symbols = len(expression) + source.count(b"(") + source.count(b")")
    if not expression or _BAD in expression or words != symbols:
        raise ConfigError(
            f"{where} is no ListOps expression: {_shown(columns[0])!r}; the symbols are {', '.join(SYMBOLS[1:])} and "
            "parentheses, with one space between them."
        )
    return expression, int(target)
