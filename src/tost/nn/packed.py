"""Token mixers on packed sequences: those that know them are given the packing, others a padded batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tost.nn._checks import refuse_context
from tost.ops import Packing


def mix(mixer: nn.Module, x: Tensor, mask: Tensor | None, packing: Packing | None) -> Tensor:
    """Call ``mixer(x, mask)``, on each sequence alone where several are packed.

    A mixer whose class has ``takes_packing = True`` is called as ``mixer(x, mask, packing=packing)``. Any other one
    sees the sequences as a batch that is padded to the longest of them.

    Args:
        mixer: Mixes tokens, from ``[B, N, C]`` to ``[B, N, C]``.
        x: Tokens, ``[B, N, C]``.
        mask: Real tokens, bool ``[B, N]``.
        packing: Where the sequences begin; None if each row is one.

    Raises:
        BackendError: Sequences are packed, and processes share them.
    """
    mixed: Tensor
    if packing is None:
        mixed = mixer(x, mask)
    elif getattr(mixer, "takes_packing", False):
        mixed = mixer(x, mask, packing=packing)
    else:
        refuse_context("a packed batch")
        rows = packing.rows()
        mixed = rows.put(mixer(rows.take(x), rows.mask(mask)), x)
    return mixed


def mix_with_state(
    mixer: Any, x: Tensor, state: Any, mask: Tensor | None, packing: Packing | None
) -> tuple[Tensor, Any]:
    """Call ``mixer.forward_with_state(x, state, mask)`` as `mix` does; states have an entry for each sequence."""
    if packing is None:
        mixed, after = mixer.forward_with_state(x, state, mask)
    elif getattr(mixer, "takes_packing", False):
        mixed, after = mixer.forward_with_state(x, state, mask, packing=packing)
    else:
        refuse_context("a packed batch")
        rows = packing.rows()
        mixed, after = mixer.forward_with_state(rows.take(x), state, rows.mask(mask))
        mixed = rows.put(mixed, x)
    return mixed, after
