"""Tokens as they are generated, from a state of constant size: memory does not grow with the number of tokens.

Shapes: B rows (texts), V ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.generation.decode import (
    CHUNK_SIZE,
    State,
    check_causal,
    context_limit,
    device_of,
    join_rows,
    prefill,
    select_rows,
    state_bytes,
)
from tost.generation.native import Weights, make_step
from tost.generation.prompts import Prompts, align_prompts
from tost.generation.sampling import Sampling, choose, draw_noise

ENDED = -1
"""Stands for the token of a row that has ended."""

Generators = torch.Generator | Sequence[torch.Generator]


class Continuation(NamedTuple):
    """Generation state from which texts can be continued: the model's state and the last tokens.

    Attributes:
        state: State of the model before the last token; None if that is the first.
        last: Last token of each row, which the model has not read yet, int64 ``[B]``.
        seen: Tokens that each text contains, for the repetition penalty, bool ``[B, V]``.
    """

    state: State | None
    last: Tensor
    seen: Tensor

    def select(self, rows: Tensor | Sequence[int]) -> Continuation:
        """Return some of the texts; one that is taken several times can be continued in several ways.

        Args:
            rows: Which, ``[R]``.
        """
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.last.device)
        return Continuation(select_rows(self.state, index), self.last[index], self.seen[index])

    def bytes(self) -> int:
        """Return the memory that this takes."""
        return state_bytes(tuple(self))


class _Moment(NamedTuple):
    """Where a stream stands. A step makes a new one, so that an interrupt never finds half of it.

    Attributes:
        left: Tokens that may still come; None for no limit.
        rows: Rows that have not ended, int64 [R].
        state: State of the model for these rows.
        parked: Rows that have ended, with their states.
        last: Last token of every row, [B].
        seen: Tokens that came before, [B, V].
        read: Number of tokens that the model has read of every row, [B], on the CPU.
    """

    left: int | None
    rows: Tensor
    state: State | None
    parked: tuple[tuple[Tensor, State], ...]
    last: Tensor
    seen: Tensor
    read: Tensor


class TokenStream(Iterator[Tensor]):
    """An iterator over the tokens of B texts; `stream_tokens` makes one.

    Each item is int64 ``[B]``: the next token of every row, `ENDED` for rows that have ended. The iteration ends with
    the last row, or after the number of tokens that was asked for. No token is kept. An interrupt, between two tokens
    or within one, leaves the stream where it was.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Prompts,
        before: tuple[State | None, Tensor],
        *,
        max_new_tokens: int | None,
        sampling: Sampling,
        generator: Generators | None,
        chunk_size: int,
        weights: Weights,
    ) -> None:
        self._step, self._sampling, self._generator = make_step(model, weights), sampling, generator
        self._limit = context_limit(model)
        (ids, mask), (state, seen) = prompts, before
        self._stops = torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=ids.device)
        read = _position(state, len(ids)) + prompts.lengths.cpu() - 1
        self._check_room(read, 0 if max_new_tokens is None else max_new_tokens)
        early = None if mask is None else mask[:, :-1]
        self._now = _Moment(
            left=max_new_tokens,
            rows=torch.arange(len(ids), device=ids.device),
            state=prefill(model, ids[:, :-1], state, mask=early, chunk_size=chunk_size),
            parked=(),
            last=ids[:, -1].clone(),
            seen=seen.scatter(1, ids, torch.ones_like(ids, dtype=torch.bool)),
            read=read,
        )

    def __next__(self) -> Tensor:
        now = self._now
        if now.left == 0 or self.ended:
            raise StopIteration
        self._check_room(self._active(now.read), 1)
        logits, state = self._step(self._active(now.last), now.state)
        noise = None
        if not self._sampling.greedy:
            # One draw for every row, ended or not: a row's numbers do not depend on when the others end.
            noise = self._active(draw_noise(now.last.shape[0], logits.shape[-1], self._generator))
        tokens = choose(logits, self._active(now.seen), self._sampling, noise)
        result = torch.full_like(now.last, ENDED)
        result[now.rows] = tokens
        self._now = self._after(tokens, state)
        return result

    @property
    def ended(self) -> bool:
        """Whether every row has ended with a stop token."""
        return self._now.rows.numel() == 0

    @property
    def room(self) -> int | None:
        """How many tokens can come before a row has used up the model's positions; None if there is no such limit."""
        if self._limit is None:
            return None
        return 0 if self.ended else self._limit - int(self._active(self._now.read).max())

    @property
    def continuation(self) -> Continuation:
        """Generation state at this point, for a new stream or another process. It does not change."""
        now = self._now
        if not now.parked:
            return Continuation(now.state, now.last, now.seen)
        parts = now.parked if self.ended else (*now.parked, (now.rows, now.state))
        order = torch.cat([rows for rows, _ in parts]).argsort()
        return Continuation(select_rows(join_rows([state for _, state in parts]), order), now.last, now.seen)

    def _active(self, x: Tensor) -> Tensor:
        """Return the rows of x [B, ...] that have not ended."""
        rows = self._now.rows
        return x if rows.shape[0] == x.shape[0] else x[rows.to(x.device)]

    def _after(self, tokens: Tensor, state: State) -> _Moment:
        """Return where the stream stands after a step; rows that end leave the batch, and no longer cost anything."""
        left, rows, _, parked, last, seen, read = self._now
        last, seen, read = last.clone(), seen.clone(), read.clone()
        last[rows] = tokens
        seen[rows, tokens] = True
        read[rows.cpu()] += 1
        over = torch.isin(tokens, self._stops) if self._stops.numel() else None
        if over is not None and bool(over.any()):
            gone, kept = over.nonzero()[:, 0], (~over).nonzero()[:, 0]
            parked = (*parked, (rows[gone], select_rows(state, gone)))
            rows, state = rows[kept], select_rows(state, kept)
        return _Moment(None if left is None else left - 1, rows, state, parked, last, seen, read)

    def _check_room(self, read: Tensor, count: int) -> None:
        """Refuse to read `count` more tokens if the model has no positions for them."""
        if self._limit is None or int(read.max()) + count <= self._limit:
            return
        room = self._limit - int(read.max())
        remedy = f"Generate at most {room} more tokens" if room > 0 else "Begin with a shorter text"
        raise ConfigError(
            f"the model would have to read {int(read.max()) + count} tokens, but it has learned positions for "
            f"max_length={self._limit}. {remedy}, or train a model with position=none, whose texts have no limit."
        )


def stream_tokens(
    model: nn.Module,
    ids: Tensor | Sequence[Tensor] | None,
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    generator: Generators | None = None,
    mask: Tensor | None = None,
    state: Continuation | State | None = None,
    chunk_size: int = CHUNK_SIZE,
    weights: Weights = "fp32",
) -> TokenStream:
    """Read prompts, and return an iterator over the tokens that follow.

    Arguments are those of `generate_with_state`, except:

    Args:
        max_new_tokens: Tokens per row; None for no limit.

    Returns:
        The iterator. Its ``continuation`` is the state to go on from.

    Raises:
        ConfigError: As `generate` does. Without `max_new_tokens` a model with learned positions raises when they are
            used up, after it gave out all tokens until then.

    Example:
        >>> import itertools, torch, tost
        >>> from tost.generation import Sampling, stream_tokens
        >>> options = {"embed_dim": 64, "depth": 2, "num_heads": 4, "vocab_size": 256, "position": "none"}
        >>> model = tost.create_model("tost_lm_base", **options)
        >>> endless = stream_tokens(model, torch.tensor([[1, 2, 3]]), sampling=Sampling(temperature=0.8))
        >>> len([token for token in itertools.islice(endless, 1000)])
        1000
    """
    size = check_causal(model).options.vocab_size
    device = device_of(model)
    sampling = sampling or Sampling()
    if max_new_tokens is not None and max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens={max_new_tokens} cannot be generated; it needs at least 0.")
    if unknown := [token for token in sampling.stop_tokens if not 0 <= token < size]:
        raise ConfigError(f"stop_tokens {unknown} are not in the vocabulary, which has ids from 0 to {size - 1}.")
    before, seen = None, None
    if isinstance(state, Continuation):
        state, before, seen = state
        if seen.shape[1] != size:
            raise ConfigError(
                f"the state to go on with belongs to a model of {seen.shape[1]} ids, but this one has {size}; "
                "pass it to the model that made it."
            )
        ids = torch.empty(len(before), 0, dtype=torch.int64) if ids is None else ids
    if ids is None:
        raise ConfigError("there is no prompt; give ids, or a Continuation as state to go on with.")
    prompts = align_prompts(ids, mask=mask, before=before, vocab_size=size, device=device)
    if isinstance(generator, Sequence) and len(generator) != len(prompts.ids):
        raise ConfigError(f"there are {len(generator)} generators, but {len(prompts.ids)} rows; give one each, or one.")
    if seen is None:
        seen = torch.zeros(len(prompts.ids), size, dtype=torch.bool, device=device)
    return TokenStream(
        model,
        prompts,
        (state, seen.to(device)),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        generator=generator,
        chunk_size=chunk_size,
        weights=weights,
    )


def _position(state: State | None, batch_size: int) -> Tensor:
    """Return the number of tokens that each row has read, int64 [B]; 0 for a state that does not tell."""
    position: Tensor | None = getattr(state, "position", None)
    if position is None:
        return torch.zeros(batch_size, dtype=torch.int64)
    if position.shape != (batch_size,):
        raise ConfigError(
            f"the state holds {position.numel()} sequences, but there are {batch_size} prompts; "
            "pass the state that came from the same batch."
        )
    return position.cpu()
