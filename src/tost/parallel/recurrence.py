"""Linear recurrences over ranks, ``h[n] = a[n] h[n-1] + v[n]``: each rank needs h where the rank before it ends.

Over a rank's tokens h is the product of their factors a times what it was before, plus what the rank adds of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tost.parallel._autograd import at_ranks, gather_sums
from tost.parallel._channel import Channel, untraced


@untraced
def recurrence_ends(product: Tensor, end: Tensor, start: Tensor, *, channel: Channel) -> tuple[Tensor, Tensor]:
    """Return h before this rank's first token, and after the last token of all ranks.

    Each rank sends ``2 B C`` numbers forward and as many for every rank backward, in one collective each, whatever the
    length of the sequence.

    Args:
        product: Product of the factors of this rank's tokens, ``[B, C]``; ones where it has no tokens.
        end: h after them from zero, ``[B, C]``; zeros where it has no tokens.
        start: h before the whole sequence, ``[B, C]``, the same on every rank.
        channel: The ranks that share the sequence.

    Returns:
        Two tensors ``[B, C]``; the second is the same on every rank.
    """
    everyone = gather_sums(torch.stack((product, end)), channel)
    states = at_ranks(start, everyone[:, 1], everyone[:, 0])
    return states[channel.rank], states[-1]
