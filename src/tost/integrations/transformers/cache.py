"""The state of a model inside the cache classes of transformers.

A layer of such a cache holds the state of one block. With TSSA that is a fixed number of numbers per sequence, however
long the text is; with softmax attention it grows.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer, StaticLayer

from tost.nn.state import BlockState, MixerState

LayerState = MixerState | BlockState


class StateLayer(LinearAttentionLayer, CacheLayerMixin):
    """One layer of a cache: the state of one block, as the recurrent states of a linear attention layer.

    A state is a nesting of tensors with the batch as the first axis; its tensors are ``recurrent_states``, in order.
    Those of a fixed size keep their memory, so that a compiled step finds them where they were.

    Args:
        grows: The state becomes larger with the text, as in softmax attention.
    """

    is_croppable = False

    def __init__(self, *, grows: bool = False) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=0)
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        self.grows = grows
        self.mask_length = 0  # of the layer of a static cache that it replaces: the length of the masks for all layers
        self.mask_slides = False
        self.is_compileable = not grows
        self.count: Tensor | None = None  # a tensor, since a compiled step would be compiled again for every number
        self.form: Any = None  # the state with 0 for its tensors: pytree's own description cannot be copied
        self.device: Any = None
        self.dtype: Any = None

    def read(self) -> LayerState | None:
        """Return the state, or None before the first token."""
        if not any(self.has_previous_state.values()):
            return None
        return cast(LayerState, pytree.tree_unflatten(self.recurrent_states.values(), pytree.tree_structure(self.form)))

    def write(self, state: LayerState, num_tokens: int) -> None:
        """Keep the state after `num_tokens` more tokens, padding included."""
        leaves, self.form = pytree.tree_leaves(state), pytree.tree_map(lambda _: 0, state)
        self.number_of_states = len(leaves)
        if self.count is None:
            self.count = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
        self.count += num_tokens
        for index, leaf in enumerate(leaves):
            held = self.recurrent_states.get(index)
            if held is None or self.grows or held.shape != leaf.shape or held.requires_grad or leaf.requires_grad:
                self.recurrent_states[index] = leaf if self.grows or leaf.requires_grad else leaf.clone()
            else:
                held.copy_(leaf)
            self.is_recurrent_states_initialized[index] = self.has_previous_state[index] = True
            self.is_conv_states_initialized[index] = False
        self.device, self.dtype = leaves[0].device, leaves[0].dtype

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, padding included."""
        return 0 if self.count is None else int(self.count)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of a mask over all tokens."""
        return self.mask_length or self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        """Forget everything; the memory stays where it is."""
        self.has_previous_state = dict.fromkeys(self.has_previous_state, False)
        if self.count is not None:
            self.count.zero_()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the states of some sequences, in the order of `indices`."""
        self.reorder_cache(cast(torch.LongTensor, indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if (first := self.recurrent_states.get(0)) is not None:
            self.batch_select_indices(torch.arange(len(first), device=self.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget the last tokens: they are parts of sums.

        Raises:
            ValueError: Always, but for 0 tokens.
        """
        if tokens_to_remove:
            raise ValueError(
                f"the state of a ToST cannot go back by {abs(tokens_to_remove)} tokens: it holds sums over all of "
                "them. Keep a copy of the cache from before (copy.deepcopy), or read the text again."
            )

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse keys and values.

        Raises:
            ValueError: Always.
        """
        raise ValueError("this cache layer holds the state of a ToST, not keys and values; use it with TostForCausalLM")


def adopt(cache: Cache | None, depth: int, *, grows: bool) -> Cache:
    """Return a cache of `StateLayer` for each block: the given one, if it has them or was not used, or a new one."""
    if cache is None:
        cache = DynamicCache()
    if not isinstance(cache, Cache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}; it needs a Cache of transformers, or None.")
    if len(cache.layers) == depth and all(isinstance(layer, StateLayer) for layer in cache.layers):
        return cache
    if any(map(_used, cache.layers)):
        raise ValueError(
            f"past_key_values holds {len(cache.layers)} layers of another model, but this one has {depth} layers; pass "
            "what this model returned, an empty DynamicCache, or None."
        )
    cache.layers = [StateLayer(grows=grows) for _ in range(depth)]
    cache.layer_class_to_replicate = None
    return cache


def adopt_layer(cache: Cache, index: int) -> StateLayer:
    """Return a layer of a cache whose other layers may hold keys and values, as a `StateLayer` in its place."""
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, StateLayer):
        return layer
    if _used(layer):
        raise ValueError(
            f"layer {index} of past_key_values holds keys and values of softmax attention, but this layer "
            "is TSSA; pass what this model returned, an empty DynamicCache, or None."
        )
    cache.layers[index] = state = StateLayer()
    if isinstance(layer, StaticLayer):
        state.mask_length = layer.max_cache_len
        state.mask_slides = layer.is_sliding
    return state


def _used(layer: Any) -> bool:
    """Tell whether a cache layer of any kind holds something."""
    if isinstance(layer, StateLayer):
        return layer.get_seq_length() > 0
    states = getattr(layer, "has_previous_state", {})
    return any(states.values()) or (isinstance(layer, CacheLayerMixin) and bool(layer.get_seq_length()))
