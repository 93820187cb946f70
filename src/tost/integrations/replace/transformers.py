"""Attention layers of transformers' models: the families of BERT and Llama, ViT, GPT-2.

Shapes: hidden states [B, N, C], attention_mask [B, K] or [B, 1, N, K] with K tokens including those in the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from tost.integrations.replace.parts import LLAMA, TRANSFORMERS, Attention, Parts, read_linear, split_fused
from tost.integrations.transformers.cache import StateLayer, adopt_layer
from tost.nn import CausalTSSAttention, GatedTSSAttention
from tost.nn.masks import demand, read_attention_mask, read_packed_mask
from tost.ops import Packing
from tost.ops.packing import find_packing

IMPLEMENTATION = "tssa"
"""The attention implementation of a model without other attention: its masks stay [B, K], whatever the length."""

_REFUSED = {
    "encoder_hidden_states": "attention to another sequence is not self-attention",
    "output_attentions": "tokens meet in sums, so there are no weights between pairs of them",
}


class ReplacedAttention(nn.Module):
    """TSSA called as models of transformers call their self-attention.

    A causal layer keeps its state in the cache, in place of keys and values. Packed sequences are kept apart, as the
    mask over pairs, ``cu_seq_lens_q`` or ``seq_idx`` say, or ``position_ids`` that jump from one token to the
    next where there is no mask.

    Args:
        attention: The TSSA layer.
        layer_idx: Its place in the cache.
        windowed: The layer saw no further back than a window. TSSA does.
    """

    def __init__(self, attention: Attention, layer_idx: int | None, *, windowed: bool = False) -> None:
        super().__init__()
        self.attention, self.layer_idx, self.windowed = attention, layer_idx, windowed
        self.causal = isinstance(attention, CausalTSSAttention | GatedTSSAttention)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: Cache | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Mix the tokens.

        Args:
            hidden_states: Tokens, ``[B, N, C]``.
            attention_mask: Real tokens ``[B, K]``, or pairs of tokens ``[B, 1, N, K]``, bool or added to scores.
            past_key_values: The states of the layers; updated in place.
            **others: What else transformers passes to attention layers; rotary positions are among it and have nothing
                to act on.

        Returns:
            ``[B, N, C]``, and None in place of attention weights.

        Raises:
            ValueError: The mask leaves out pairs of tokens, or an argument asks for something that TSSA does not have.
        """
        for name, reason in _REFUSED.items():
            if others.get(name) is not None and others[name] is not False:
                raise ValueError(f"{name} was passed to attention that is replaced by TSSA: {reason}.")
        if past_key_values is not None and attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = self._of_tokens(attention_mask, past_key_values, hidden_states.shape[1])
        packing = self._packing(attention_mask, hidden_states, others)
        real = self._real(attention_mask, hidden_states, packed=packing is not None)
        if past_key_values is None:
            return self.attention(hidden_states, real, packing=packing), None
        if packing is not None:
            raise ValueError(
                "sequences are packed, and a cache was passed, which has one state per row; call the model with "
                "use_cache=False."
            )
        return self._continue(hidden_states, real, past_key_values), None

    def _of_tokens(self, mask: Tensor, cache: Cache, num_tokens: int) -> Tensor:
        """Return a mask [B, 1, N, K] with the new tokens last; those of a static cache end with its empty places."""
        layer = self._state_layer(cache)
        if not layer.mask_length:
            return mask
        if layer.mask_slides:
            raise ValueError(
                "past_key_values is a static cache with sliding windows, which layers replaced by TSSA cannot follow; "
                "use a DynamicCache (cache_implementation='dynamic')."
            )
        seen: Tensor | int = 0 if layer.count is None else layer.count
        places = (torch.arange(mask.shape[-1], device=mask.device) + seen + num_tokens) % mask.shape[-1]
        return mask.index_select(-1, places)

    def _state_layer(self, cache: Cache) -> StateLayer:
        """Return the layer of the cache that holds the state."""
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if not self.causal or self.layer_idx is None:
            raise ValueError(
                "a cache was passed to attention that is replaced by TSSA over all tokens; only causal layers continue "
                "from a state. Call the model with use_cache=False."
            )
        return adopt_layer(cache, self.layer_idx)

    def _packing(self, mask: Tensor | None, x: Tensor, others: dict[str, Any]) -> Packing | None:
        """Return how sequences are packed; None if each row is one."""
        shape = (x.shape[0], x.shape[1])
        cu_seqlens = others.get("cu_seq_lens_q", others.get("cu_seq_lens_k"))
        packing = find_packing(shape, cu_seqlens, others.get("seq_idx") if cu_seqlens is None else None)
        segments = None
        if mask is not None and mask.dim() > 2:
            segments = read_packed_mask(mask, *shape, causal=self.causal, windowed=self.windowed)
        elif mask is None and packing is None and (positions := others.get("position_ids")) is not None:
            jumps = positions.diff(dim=-1) != 1
            if torch.compiler.is_compiling():
                demand(
                    ~jumps.any(), "position_ids jump, as those of packed sequences; compiled models need cu_seq_lens_q."
                )
            elif bool(jumps.any()):
                segments = F.pad(jumps.cumsum(dim=-1), (1, 0)).expand(shape)
        if segments is None:
            return packing
        found = Packing.from_segment_ids(segments)
        if packing is not None and not torch.equal(packing.cu_seqlens, found.cu_seqlens):
            raise ValueError(
                f"cu_seq_lens_q or seq_idx say that sequences begin at {packing.cu_seqlens.tolist()}, but the mask "
                f"keeps them apart at {found.cu_seqlens.tolist()}; pass the position_ids of these sequences."
            )
        return found

    def _real(self, mask: Tensor | None, x: Tensor, *, packed: bool) -> Tensor | None:
        """Return which of the tokens x are real, bool [B, N]; None if all are. Packed ones have their pairs checked."""
        if mask is None:
            return None
        if mask.dim() == 2:
            mask = mask[:, None, None, -x.shape[1] :]
        causal, windowed = self.causal or packed, self.windowed or packed
        return read_attention_mask(mask, x.shape[0], x.shape[1], causal=causal, windowed=windowed)

    def _continue(self, x: Tensor, real: Tensor | None, cache: Cache) -> Tensor:
        layer = self._state_layer(cache)
        y, state = cast(Any, self.attention).forward_with_state(x, layer.read(), real)
        layer.write(state, x.shape[1])
        return y


def read(module: nn.Module) -> Parts | None:
    """Return the parts of an attention layer; None if it is none that can be replaced."""
    names: Any = TRANSFORMERS.get(type(module).__name__)
    if names is None or not type(module).__module__.startswith("transformers.models."):
        return None
    found: Any = module
    if getattr(found, "is_cross_attention", False):
        return None
    if len(names) == 2:
        name = cast(str, names[0])
        query, key, value = split_fused(read_linear(getattr(found, name), name, of=module))
    else:
        query, key, value = (read_linear(getattr(found, name), name, of=module) for name in names[:3])
    out = nn.Identity() if names[-1] is None else getattr(found, names[-1])
    drop = getattr(found, "resid_dropout", None)
    dropped = []
    if names is LLAMA and bool(found.is_causal):
        dropped.append("rotary positions")
    if hasattr(found, "q_norm"):
        dropped.append("norms of queries and keys")
    if _window(found) is not None:
        dropped.append("sliding windows")
    return Parts(
        query,
        key,
        value,
        out,
        num_heads=found.config.num_attention_heads,
        causal=bool(found.is_causal),
        max_length=getattr(found.config, "max_position_embeddings", 1024),
        out_drop=0.0 if drop is None else float(drop.p),
        dropped=tuple(dropped),
    )


def wrap(attention: Attention, module: nn.Module) -> nn.Module:
    """Return the TSSA layer in the form in which `module` is called."""
    return ReplacedAttention(attention, getattr(module, "layer_idx", None), windowed=_window(module) is not None)


def _window(module: Any) -> int | None:
    """Return how far back a layer looks; None for all the way."""
    if hasattr(module, "sliding_window"):
        return cast("int | None", module.sliding_window)
    return getattr(module.config, "sliding_window", None) if "Mistral" in type(module).__name__ else None


def finish(model: nn.Module, record: dict[str, Any]) -> None:
    """Record the replacement in the configuration, and build no masks over pairs if no layer needs them."""
    holders = [cast(Any, m) for m in model.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)]
    copied: dict[int, Any] = {}  # other models may share the configuration
    for module in holders:
        module.config = copy.deepcopy(module.config, copied)
    own = holders[0].config
    own.tost_attention = [*(getattr(own, "tost_attention", None) or []), record]
    # Attention of transformers that was left as it is, between sequences too, has a scale of its scores.
    if not any(type(m).__module__.startswith("transformers.") and hasattr(m, "scaling") for m in model.modules()):
        own._attn_implementation = IMPLEMENTATION


def _padding_mask(
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **sizes: Any,
) -> Tensor | None:
    """Return the mask of real tokens [B, K] as it is; one over pairs only where it is needed."""
    # Without a mask and a function of the user (use_vmap) it would say how sequences are packed, as position_ids do.
    windowed = local_size is not None and allow_is_causal_skip
    packed = attention_mask is None and not use_vmap
    if windowed or packed or mask_function in (causal_mask_function, bidirectional_mask_function):
        return attention_mask
    made: Tensor | None = sdpa_mask(
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        **sizes,
    )
    return made


AttentionMaskInterface.register(IMPLEMENTATION, _padding_mask)
