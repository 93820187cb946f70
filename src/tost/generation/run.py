"""Generate text from prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from tost.generation.decode import CHUNK_SIZE, State
from tost.generation.native import Weights
from tost.generation.sampling import Sampling
from tost.generation.stream import ENDED, Continuation, Generators, stream_tokens


class Generation(NamedTuple):
    """Generated texts, and the state to continue them.

    Attributes:
        tokens: The new tokens, int64 ``[B, M]``; `ENDED` (-1) after the stop token of a row.
        lengths: How many each row has, the stop token included, int64 ``[B]``.
        continuation: Pass it as ``state`` to continue.
    """

    tokens: Tensor
    lengths: Tensor
    continuation: Continuation


class _Reading(TypedDict, total=False):
    """Arguments of `stream_tokens` that `generate_with_state` passes on."""

    generator: Generators | None
    mask: Tensor | None
    state: Continuation | State | None
    chunk_size: int
    weights: Weights


class _Options(_Reading, total=False):
    """Arguments of `generate` that do not decide its return type."""

    temperature: float
    top_k: int | None
    top_p: float | None
    repetition_penalty: float
    stop_tokens: Sequence[int]
    on_token: Callable[[Tensor], object] | None


@overload
def generate(model: nn.Module, ids: Tensor, *, max_new_tokens: int, **options: Unpack[_Options]) -> Tensor: ...


@overload
def generate(
    model: nn.Module, ids: Sequence[Tensor], *, max_new_tokens: int, **options: Unpack[_Options]
) -> list[Tensor]: ...


def generate(
    model: nn.Module,
    ids: Tensor | Sequence[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_tokens: Sequence[int] = (),
    generator: Generators | None = None,
    mask: Tensor | None = None,
    state: Continuation | State | None = None,
    chunk_size: int = CHUNK_SIZE,
    weights: Weights = "fp32",
    on_token: Callable[[Tensor], object] | None = None,
) -> Tensor | list[Tensor]:
    """Continue texts with a causal language model, at a cost per token that does not depend on their length.

    The prompt is read in chunks into the model's state; then every token costs one step. The logits are those of a
    forward pass over the whole text. Dropout is off, and no gradients are recorded.

    Args:
        model: A causal language model.
        ids: Prompts: one tensor ``[B, N]``, or a list of B tensors ``[N_b]``. Every row continues as it would alone.
        max_new_tokens: Tokens per row, at most.
        temperature: 0 takes the likeliest token; see `Sampling`, also for the options that follow.
        top_k: Draw from the k likeliest tokens only; None for all.
        top_p: Draw from the likeliest tokens that together have this probability; None for all.
        repetition_penalty: Makes tokens of the prompt and of the text less likely if above 1.
        stop_tokens: Ids that end a row.
        generator: Source of randomness. One for all rows; or a list of one per row, so that each row draws as it would
            alone; None for torch's own. The same seed gives the same text, whatever the chunk size.
        mask: Real tokens of a tensor of prompts, bool ``[B, N]``; padding may stand anywhere.
        state: What came before the prompts: the ``continuation`` of an earlier generation, or a state of the model.
        chunk_size: Tokens of the prompts that are read at once; decides the memory, not the result.
        weights: How matrices are stored while tokens are generated: ``"fp32"`` as they are, or rounded to ``"bf16"`` or
            ``"int8"``, which takes less time per token and a copy of them. The prompts are read with the model's own.
        on_token: Called with every token as it comes, int64 ``[B]``, -1 for rows that have ended.

    Returns:
        For a tensor of prompts ``[B, N + M]``: the prompts as they are, followed by M new tokens, where M is what the
        longest row got; a row that ended earlier repeats its stop token. For a list, a list of tensors ``[N_b + M_b]``,
        each cut where it ends.

    Raises:
        ConfigError: The model cannot generate, the prompts are empty or not in its vocabulary, an option is out of
            range, or the text would be longer than the model has positions. It is raised before any work is done.

    Example:
        >>> import torch, tost
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> prompt = torch.randint(256, (2, 10))
        >>> tost.generate(model, prompt, max_new_tokens=5, temperature=0).shape
        torch.Size([2, 15])
    """
    done = generate_with_state(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            stop_tokens=stop_tokens,
        ),
        generator=generator,
        mask=mask,
        state=state,
        chunk_size=chunk_size,
        weights=weights,
        on_token=on_token,
    )
    if isinstance(ids, Tensor):
        new = done.tokens.where(done.tokens != ENDED, done.continuation.last.unsqueeze(1))
        return torch.cat((ids.to(new), new), dim=1)
    lengths = done.lengths.tolist()
    return [torch.cat((row.to(done.tokens), done.tokens[b, : lengths[b]])) for b, row in enumerate(ids)]


def generate_with_state(
    model: nn.Module,
    ids: Tensor | Sequence[Tensor] | None,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    on_token: Callable[[Tensor], object] | None = None,
    **reading: Unpack[_Reading],
) -> Generation:
    """Generate text as `generate` does, and return the state to continue it.

    A text may be generated in any number of pieces: with the same generator it is the text of one piece. Arguments are
    those of `generate`, with one object for all that is about sampling:

    Args:
        ids: Prompts; None to go on with `state` as it is.
        sampling: How tokens are chosen; by default drawn from the model's distribution as it is.

    Returns:
        The new tokens, without the prompts, and the continuation.

    Raises:
        ConfigError: As `generate` does.

    Example:
        >>> import torch, tost
        >>> from tost.generation import generate_with_state
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> first = generate_with_state(model, torch.randint(256, (1, 10)), max_new_tokens=5)
        >>> second = generate_with_state(model, None, max_new_tokens=5, state=first.continuation)
        >>> second.tokens.shape
        torch.Size([1, 5])
    """
    stream = stream_tokens(model, ids, max_new_tokens=max_new_tokens, sampling=sampling, **reading)
    steps: list[Tensor] = []
    for tokens in stream:
        steps.append(tokens)
        if on_token is not None:
            on_token(tokens)
    after = stream.continuation
    tokens = torch.stack(steps, dim=1) if steps else after.last.new_empty(len(after.last), 0)
    return Generation(tokens, (tokens != ENDED).sum(dim=1), after)
