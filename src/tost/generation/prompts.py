"""Prompts of different length as one batch.

Shapes: ids [B, N] (batch, tokens), mask [B, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tost.errors import ConfigError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Prompts(NamedTuple):
    """Token ids that end in the same column.

    Attributes:
        ids: int64 ``[B, N]``, padding in front; it holds the row's last token, which is a valid id.
        mask: Real tokens, bool ``[B, N]``; None if all are.
    """

    ids: Tensor
    mask: Tensor | None

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each row, int64 ``[B]``."""
        if self.mask is None:
            return torch.full(self.ids.shape[:1], self.ids.shape[1], device=self.ids.device)
        return self.mask.sum(dim=1)


def align_prompts(
    ids: Tensor | Sequence[Tensor],
    *,
    mask: Tensor | None = None,
    before: Tensor | None = None,
    vocab_size: int,
    device: torch.device | str | None = None,
) -> Prompts:
    """Check prompts and move their padding to the front, so that all of them end together.

    Args:
        ids: ``[B, N]``, or a sequence of B tensors ``[N_b]``.
        mask: Real tokens of ``[B, N]``, bool ``[B, N]``; padding may stand anywhere and hold any id.
        before: A token in front of every row, ``[B]``, such as the one that a continued text ends with.
        vocab_size: Number of valid ids.
        device: Where the result is wanted.

    Returns:
        Rows of at least one token each.

    Raises:
        ConfigError: The ids are not of this form, not in the vocabulary, or a row has none.
    """
    if not isinstance(ids, Tensor):
        ids, mask = _from_rows(ids, mask)
    if ids.dim() != 2 or ids.dtype not in _INTEGERS:
        raise ConfigError(
            f"ids have shape {tuple(ids.shape)} and dtype {ids.dtype}; generation needs token ids [B, N] of dtype "
            "torch.int64, or a list of tensors [N]. Use ids[None] for a single prompt."
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != ids.shape):
        raise ConfigError(
            f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, but ids have shape {tuple(ids.shape)}; it "
            "needs the same shape and dtype torch.bool, True for real tokens."
        )
    ids = ids.to(device=device, dtype=torch.int64)
    mask = None if mask is None else mask.to(device=device)
    if before is not None:
        ids, mask = _prepend(before.to(ids.device), ids, mask)
    empty = (torch.full(ids.shape[:1], ids.shape[1]) if mask is None else mask.sum(dim=1)) == 0
    if ids.shape[0] == 0 or bool(empty.any()):
        where = "there is no prompt" if ids.shape[0] == 0 else f"prompt {empty.nonzero()[0].item()} is empty"
        raise ConfigError(f"{where}; a text needs at least one token to begin with.")
    prompts = Prompts(ids, None) if mask is None or bool(mask.all()) else _right(ids, mask)
    low, high = (int(bound) for bound in prompts.ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"ids reach from {low} to {high}, but this model has vocab_size={vocab_size}, so ids from 0 to "
            f"{vocab_size - 1}. Use the tokenizer that the model was made for."
        )
    return prompts


def _from_rows(rows: Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pad rows in front to the length of the longest."""
    if mask is not None:
        raise ConfigError("a list of prompts needs no mask; leave it out, or pad the prompts to one tensor [B, N].")
    for index, row in enumerate(rows):
        if not isinstance(row, Tensor) or row.dim() != 1 or row.dtype not in _INTEGERS:
            found = f"a {type(row).__name__}"
            if isinstance(row, Tensor):
                found = f"of shape {tuple(row.shape)} and dtype {row.dtype}"
            hint = " Encode text first: torch.tensor([tokenizer.encode(text)])." if "str" in found else ""
            raise ConfigError(
                f"prompt {index} is {found}; prompts are tensors [N] of token ids, dtype torch.int64.{hint}"
            )
    longest = max((len(row) for row in rows), default=0)
    device = rows[0].device if rows else None
    ids = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool, device=device)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = True
    return ids, mask


def _prepend(before: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if before.shape != ids.shape[:1]:
        raise ConfigError(
            f"the text that is continued has {before.numel()} rows, but ids have shape {tuple(ids.shape)}; "
            "give one row per text."
        )
    ids = torch.cat((before.unsqueeze(1), ids), dim=1)
    return ids, None if mask is None else torch.cat((torch.ones_like(before, dtype=torch.bool).unsqueeze(1), mask), 1)


def _right(ids: Tensor, mask: Tensor) -> Prompts:
    """Move real tokens to the right in their order, and drop the columns that only hold padding."""
    order = mask.to(torch.int8).argsort(dim=1, stable=True)
    longest = int(mask.sum(dim=1).max())
    ids, mask = (x.gather(1, order)[:, ids.shape[1] - longest :] for x in (ids, mask))
    return Prompts(ids.where(mask, ids[:, -1:]), mask)
