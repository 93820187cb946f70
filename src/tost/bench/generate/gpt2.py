"""GPT-2 of the transformers library, as a contender: the same sizes, without dropout, in its usual configuration."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.nn import linear_cross_entropy


def is_installed() -> bool:
    """Return whether transformers can be imported."""
    try:
        _classes()
    except ImportError:
        return False
    return True


def _classes() -> tuple[Any, Any]:
    import tost._torchvision  # noqa: F401  (transformers imports torchvision if it is there)

    # isort: split
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2Config, GPT2LMHeadModel


class HuggingFaceGPT2(nn.Module):
    """The model with the few functions that a measurement needs.

    Args:
        max_length: Positions.
        depth: Layers.
        vocab_size: Ids.

    Raises:
        ConfigError: transformers is not installed.
    """

    def __init__(self, *, max_length: int, depth: int = 12, vocab_size: int = 50_257) -> None:
        super().__init__()
        try:
            config, build = _classes()
        except ImportError as error:
            raise ConfigError(f"transformers cannot be imported ({error}); install tost[language].") from error
        sizes = {"n_positions": max_length, "n_layer": depth, "vocab_size": vocab_size}
        sizes |= dict.fromkeys(("bos_token_id", "eos_token_id"), vocab_size - 1)
        self.model: nn.Module = build(config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))

    def prefill(self, ids: Tensor) -> Any:
        """Read a prompt ``[B, N]``; returns the cache of its keys and values."""
        with torch.inference_mode():
            return cast(Any, self.model).transformer(ids, use_cache=True).past_key_values

    def step(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits after one token per row, ``[B]``, and the cache, which has grown by it."""
        with torch.inference_mode():
            return self.model(tokens.unsqueeze(1), past_key_values=cache, use_cache=True).logits, cache

    def loss(self, ids: Tensor) -> Tensor:
        """Return the loss as transformers computes it: all logits at once."""
        loss: Tensor = self.model(ids, labels=ids, use_cache=False).loss
        return loss

    def chunked_loss(self, ids: Tensor) -> Tensor:
        """Return the same loss by `tost.nn.linear_cross_entropy`, which never holds all logits."""
        hidden = cast(Any, self.model).transformer(ids, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden[:, :-1], cast(Any, self.model).lm_head.weight, ids[:, 1:])
