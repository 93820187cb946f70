"""GPT-2 of the transformers library, as a contender: the same sizes, without dropout, in its usual configuration."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.nn import linear_cross_entropy


def is_installed() -> bool:
    """Return whether transformers is installed."""
    return find_spec("transformers") is not None


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
        import tost._torchvision  # noqa: F401  (transformers imports torchvision if it is there)

        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise ConfigError(
                f"transformers cannot be imported ({error}); run: pip install 'tost-transformer[language]'."
            ) from error
        sizes: dict[str, Any] = {"n_positions": max_length, "n_layer": depth, "vocab_size": vocab_size}
        sizes |= dict.fromkeys(("bos_token_id", "eos_token_id"), vocab_size - 1)
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes))  # type: ignore[no-untyped-call]

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
        return self.model(ids, labels=ids, use_cache=False).loss

    def chunked_loss(self, ids: Tensor) -> Tensor:
        """Return the same loss by `tost.nn.linear_cross_entropy`, which never holds all logits."""
        hidden = cast(Any, self.model).transformer(ids, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden[:, :-1], cast(Any, self.model).lm_head.weight, ids[:, 1:])
