"""Arguments of transformers' models, checked and converted for the models of this package.

Shapes: attention_mask [B, N] or [B, M + N] with M tokens in the cache, labels [B, N].
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from tost.nn import token_positions
from tost.ops import Packing
from tost.ops.packing import find_packing

IGNORED = -100
_HARMLESS = {"tokenizer", "assistant_tokenizer"}  # generate() passes them on to whoever looks for stop strings
_HINTS = {
    "output_attentions": "tokens meet in sums, so there are no weights between pairs of them; tost.causal_membership "
    "returns the groups of tokens",
    "token_type_ids": "tokens have no types; leave it out",
    "cache_position": "the cache counts its tokens itself; leave it out",
    "head_mask": "heads cannot be masked",
}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuse what would change the result if the model knew it."""
    asked = [key for key in given if given[key] is not None and given[key] is not False and key not in _HARMLESS]
    if asked:
        reasons = "; ".join(f"{key}: {_HINTS.get(key, 'not known')}" for key in asked)
        raise ValueError(f"TostModel does not take these arguments. {reasons}.")


def check_prompt(mask: Tensor | None) -> None:
    """Refuse prompts whose last token is padding, which has no continuation."""
    if mask is None or mask.dim() != 2 or not bool((mask[:, -1] == 0).any()):
        return
    rows = (mask[:, -1] == 0).nonzero().flatten().tolist()
    raise ValueError(
        f"the attention_mask says that row {rows[0]} ends with padding, but a text continues from its last token; pad "
        "prompts on the left (tokenizer.padding_side = 'left'), and give every row at least one token."
    )


def read_mask(mask: Tensor | None, shape: torch.Size, cache: Cache | None) -> Tensor | None:
    """Return which of the tokens are real, bool [B, N]; None if all are, as far as can be seen."""
    if mask is None or len(shape) != 2:  # ids of another shape are refused by the model
        return None
    B, N = shape
    if torch.compiler.is_compiling():  # a graph that knows the number of tokens before would be made for each number
        return mask[:, -N:] != 0
    past = 0 if cache is None else cache.get_seq_length()
    if mask.dim() != 2 or mask.shape[0] != B or mask.shape[1] not in (N, past + N):
        wanted = f"[{B}, {N}]" + (f" or [{B}, {past + N}]" if past else "")
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but there are {B} sequences of {N} tokens"
            f"{f' after {past} others' if past else ''}; it needs shape {wanted}, 1 for real tokens and 0 for padding."
        )
    blind = mask.device.type != "cpu"  # looking at the data would wait for the device
    if not blind and mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"attention_mask holds values from {mask.min().item():g} to {mask.max().item():g}; it takes 1 for real "
            "tokens and 0 for padding. Numbers of packed sequences come as seq_idx; masks that are added to scores are "
            "not taken."
        )
    real = mask[:, mask.shape[1] - N :] != 0
    return None if not blind and bool(real.all()) else real


def read_packing(
    given: MutableMapping[str, Any], shape: torch.Size, mask: Tensor | None, start: Tensor | None
) -> Packing | None:
    """Remove the arguments of padding-free collators about packed sequences, and check the position_ids."""
    names = ("packing", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")
    packing: Packing | None
    packing, positions, queries, keys, sequences, *_ = (given.pop(name, None) for name in names)
    if queries is not None and keys is not None and queries is not keys and not torch.equal(queries, keys):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k differ, but tokens attend to their own sequence only; pass the same."
        )
    if packing is None:
        cu_seqlens = keys if queries is None else queries
        packing = find_packing(shape, cu_seqlens, sequences if cu_seqlens is None else None)
    # Without padding, positions that return to 0 begin a sequence.
    if packing is None and mask is None and start is None and _restart(positions, shape):
        assert positions is not None
        packing = Packing.from_segment_ids((positions == 0).cumsum(dim=1).expand(*shape))
    check_positions(positions, shape, mask, start, packing)
    return packing


def _restart(positions: Tensor | None, shape: torch.Size) -> bool:
    """Return whether the positions of packed sequences are given; not while compiling, which cannot look at them."""
    if positions is None or torch.compiler.is_compiling() or positions.shape[1:] != shape[1:]:
        return False
    return bool((positions[:, :1] == 0).all()) and bool((positions[:, 1:] == 0).any())


def check_positions(
    given: Tensor | None,
    shape: torch.Size,
    mask: Tensor | None,
    start: Tensor | None,
    packing: Packing | None = None,
) -> None:
    """Refuse position_ids other than the numbers of the real tokens, which the model counts itself."""
    if given is None:
        return
    fits = given.dim() == 2 and given.shape[0] in (1, shape[0]) and given.shape[1] == shape[1]
    if fits:
        same = given == token_positions(shape[1], mask=mask, start=start, device=given.device, packing=packing)
        same = (same if mask is None else same | ~mask).all()
        if torch.compiler.is_compiling():  # looking at the data would break the graph
            torch._assert_async(same, "position_ids are not the numbers of the real tokens")
            return
        fits = bool(same)
    if not fits:
        raise ValueError(
            f"position_ids {given.tolist() if given.numel() < 20 else tuple(given.shape)} are not the numbers of the "
            "real tokens from 0, which the model counts from the attention_mask and the cache. Leave them out. Those "
            "of packed sequences begin with 0 and return to 0 where the next one begins."
        )


def shift_targets(
    labels: Tensor | None, shifted: Tensor | None, mask: Tensor | None, shape: torch.Size
) -> Tensor | None:
    """Return the token that each token has to predict, int64 [B, N], -100 where there is none."""
    if labels is None and shifted is None:
        return None
    given = labels if shifted is None else shifted
    if given is None or given.shape != shape:
        raise ValueError(
            f"labels have shape {tuple(given.shape) if given is not None else None}, but the tokens {tuple(shape)}; "
            "there is one label per token, the token itself. The model shifts them."
        )
    if mask is not None:
        mask = mask[:, -shape[1] :] != 0
    if shifted is not None:
        targets = shifted
    else:
        own = given if mask is None else given.where(mask, IGNORED)
        targets = F.pad(own[:, 1:], (0, 1), value=IGNORED)
    return targets if mask is None else targets.where(mask, IGNORED)
