"""The two halves of generation: reading a prompt into a state, and advancing it by one token.

Shapes: ids [B, N] (batch, tokens), mask [B, N], tokens [B], logits [B, V] with vocabulary V. A state is whatever the
model returns: any nesting of tuples, lists and dictionaries of tensors, each with the batch as its first axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tost.errors import ConfigError

State = Any
CHUNK_SIZE = 1024
"""Tokens of a prompt that are read at once: enough to keep the processor busy, few enough to take little memory."""


class CausalModel(Protocol):
    """A language model that can continue from a state."""

    options: Any

    def forward_with_state(
        self, ids: Tensor, state: State | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the logits of tokens [B, N] that follow those in `state`, and the state after them."""


def check_causal(model: nn.Module) -> CausalModel:
    """Return the model if it can generate.

    Raises:
        ConfigError: It cannot, because it has no state to continue from.
    """
    if not callable(getattr(model, "forward_with_state", None)) or not hasattr(model, "options"):
        raise ConfigError(
            f"{type(model).__name__} cannot generate: it is not a causal language model. Use one, such as those that "
            "`tost ls models 'tost_lm_*'` lists."
        )
    return cast(CausalModel, model)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model; parameters that are offloaded, on the meta device, do not count."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def context_limit(model: nn.Module) -> int | None:
    """Return the number of tokens after which a model has no more positions; None if it runs without end."""
    options = check_causal(model).options
    learned = getattr(options, "position", "learned") == "learned"
    return options.max_length if learned else None


def prefill(
    model: nn.Module,
    ids: Tensor,
    state: State | None = None,
    *,
    mask: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> State | None:
    """Read tokens into the state of a model, without the cost of their logits.

    Args:
        model: A causal language model.
        ids: Tokens, int64 ``[B, N]``.
        state: What came before; None at the start.
        mask: Real tokens, bool ``[B, N]``.
        chunk_size: Tokens per row that are read at once. It decides the memory and changes nothing else.

    Returns:
        The state after these tokens; for N = 0 the one that was given.

    Raises:
        ConfigError: The model is not one, or `chunk_size` is not positive.

    Example:
        >>> import torch, tost
        >>> from tost.generation import decode_step, prefill
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> state = prefill(model, torch.randint(256, (1, 100)), chunk_size=30)
        >>> logits, state = decode_step(model, torch.tensor([7]), state)
        >>> logits.shape, state.position.tolist()
        (torch.Size([1, 256]), [101])
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size={chunk_size} reads nothing; it needs at least 1, such as {CHUNK_SIZE}.")
    run = getattr(model, "features_with_state", None) or check_causal(model).forward_with_state
    with torch.no_grad(), evaluating(model):
        for begin in range(0, ids.shape[1], chunk_size):
            piece = slice(begin, begin + chunk_size)
            _, state = run(ids[:, piece], state, None if mask is None else mask[:, piece])
    return state


def decode_step(
    model: nn.Module, tokens: Tensor, state: State | None, *, mask: Tensor | None = None
) -> tuple[Tensor, State]:
    """Advance every row by one token.

    Args:
        model: A causal language model.
        tokens: The next token of each row, int64 ``[B]``.
        state: What came before; None at the start. It is not changed.
        mask: Rows that advance, bool ``[B]``; the others stay where they are. None for all.

    Returns:
        Logits of the token after it, ``[B, V]``, which mean nothing for rows that stay, and the state.
    """
    real = None if mask is None else mask.unsqueeze(1)
    with torch.no_grad(), evaluating(model):
        logits, after = check_causal(model).forward_with_state(tokens.unsqueeze(1), state, real)
    return logits[:, -1], after


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off inside the block, and back on where they were on."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def select_rows(state: State, rows: Tensor) -> State:
    """Return the state of some rows, in the order of `rows`, int64 ``[R]``; a row may be taken several times."""
    return pytree.tree_map_only(Tensor, lambda x: x.index_select(0, rows), state)


def join_rows(states: Sequence[State]) -> State:
    """Return the states of several batches as one batch.

    Raises:
        ConfigError: They are not of one shape, as those of a model whose state grows with the text.
    """
    leaves, specs = zip(*map(pytree.tree_flatten, states), strict=True)
    return pytree.tree_unflatten([_join(*column) for column in zip(*leaves, strict=True)], specs[0])


def _join(*parts: Any) -> Any:
    if not isinstance(parts[0], Tensor):
        return parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        raise ConfigError(
            "the rows ended after different numbers of tokens, and this model's state grows with them, so they do not "
            "fit into one batch; generate these rows one by one."
        )
    return torch.cat(parts)


def state_bytes(state: State) -> int:
    """Return the memory that a state takes, in bytes."""
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
