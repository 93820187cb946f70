"""Token mixers on packed sequences: those that know them are given the packing, others a padded batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tost.errors import ConfigError
from tost.nn._checks import refuse_context
from tost.ops import Packing


def mix(
    mixer: nn.Module,
    x: Tensor,
    mask: Tensor | None,
    packing: Packing | None,
    grid: tuple[int, int] | None = None,
) -> Tensor:
    """Call ``mixer(x, mask)``, on each sequence alone where several are packed.

    A mixer whose class has ``takes_packing = True`` is called as ``mixer(x, mask, packing=packing)``. Any other one
    sees the sequences as a batch that is padded to the longest of them. One with ``takes_grid = True`` is called as
    ``mixer(x, mask=mask, grid=grid)``.

    Args:
        mixer: Mixes tokens, from ``[B, N, C]`` to ``[B, N, C]``; a convolution, for example.
        x: Tokens, ``[B, N, C]``.
        mask: Real tokens, bool ``[B, N]``.
        packing: Where the sequences begin; None if each row is one.
        grid: Rows and columns of the tokens, if they have any.

    Raises:
        BackendError: Sequences are packed, and processes share them.
        ConfigError: Sequences are packed, but the mixer works on a grid.
    """
    mixed: Tensor
    if getattr(mixer, "takes_grid", False):
        if packing is not None:
            raise ConfigError(
                f"{type(mixer).__name__} works on the grid of one image, but the batch is packed; use a model without "
                "convolutions in its blocks, or images of one size."
            )
        mixed = mixer(x, mask=mask, grid=grid)
    elif packing is None:
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
