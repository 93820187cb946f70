"""How the next token is chosen from its logits: pure functions, and the options that combine them.

Shapes: logits [B, V] (batch, vocabulary), seen [B, V], ids [B].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from tost.errors import ConfigError

# Most texts have their mass in a few hundred tokens; finding these takes a tenth of the time of sorting all of them.
_FIRST_LOOK = 1024
# torch.rand has steps of 2^-24; half a step stands for what lies below the first one.
_SMALLEST = 2.0**-25


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, and which tokens end a text.

    The order is fixed: repetition penalty, temperature, top-k, top-p, draw.

    Attributes:
        temperature: Divides the logits; below 1 the likely tokens gain. 0 takes the likeliest token (greedy), of equal
            ones that with the smallest id.
        top_k: Draw from the k likeliest tokens only; see `keep_top_k`. None for all.
        top_p: Draw from the likeliest tokens that together have this probability; see `keep_top_p`. None for all.
        repetition_penalty: Makes tokens that came before less likely if above 1; see `penalize`.
        stop_tokens: Ids that end the text of a row; the one that did is its last token.

    Raises:
        ConfigError: A value is out of its range; every problem is in the message.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    stop_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            problems.append(f"temperature={self.temperature!r}: needs a number of at least 0, where 0 is greedy")
        if self.top_k is not None and not (_is_integer(self.top_k) and self.top_k >= 1):
            problems.append(f"top_k={self.top_k!r}: needs a whole number of at least 1, or None for all tokens")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            problems.append(f"top_p={self.top_p!r}: needs a number above 0 and at most 1, or None for all tokens")
        if not (_is_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            problems.append(f"repetition_penalty={self.repetition_penalty!r}: needs a number above 0; 1 is neutral")
        if not (isinstance(self.stop_tokens, Iterable) and all(map(_is_integer, self.stop_tokens))):
            problems.append(f"stop_tokens={self.stop_tokens!r}: needs a sequence of token ids, such as [0]")
        if problems:
            raise ConfigError("\n  ".join(["these sampling options cannot be used:", *problems]))
        object.__setattr__(self, "stop_tokens", tuple(int(token) for token in self.stop_tokens))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Move the logits of tokens that came before by a factor.

    A positive logit is divided by `penalty`, a negative one multiplied: above 1 both make the token less likely. This
    is the rule of CTRL (Keskar et al. 2019). It asks whether a token came, not how often, so that it takes one bit per
    entry of the vocabulary, however long the text is.

    Args:
        logits: ``[B, V]``.
        seen: Tokens that came before, bool ``[B, V]``.
        penalty: The factor; 1 changes nothing.

    Returns:
        ``[B, V]``.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Leave out all but the k likeliest tokens.

    Kept is every token that is at least as likely as the k-th likeliest. Tokens that tie with it are all kept, so that
    the result does not depend on the order of the vocabulary.

    Args:
        logits: ``[B, V]``.
        k: How many, at least 1; more than V keeps all.

    Returns:
        ``[B, V]``, minus infinity where a token is left out.
    """
    if k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Leave out all but the likeliest tokens that together have probability p (the nucleus).

    Kept is every token for which the tokens that are likelier than it have less than `p` together. The likeliest is
    therefore always kept, and tokens that tie with the last one are all kept.

    Args:
        logits: ``[B, V]``; minus infinity where a token has been left out already.
        p: Probability, above 0; 1 keeps all.

    Returns:
        ``[B, V]``, minus infinity where a token is left out.
    """
    if p >= 1:
        return logits
    total = logits.double().logsumexp(dim=-1, keepdim=True)
    for count in (_FIRST_LOOK, logits.shape[-1]):
        likeliest = logits.topk(min(count, logits.shape[-1]), dim=-1).values
        mass = (likeliest - total).exp().cumsum(dim=-1)
        if bool((mass[..., -1] >= p).all()):
            break
    # The last one that is needed; rounding may leave the sum over all tokens just below p.
    last = (mass < p).sum(dim=-1, keepdim=True).clamp_max(likeliest.shape[-1] - 1)
    return logits.masked_fill(logits < likeliest.gather(-1, last), -math.inf)


def prepare(logits: Tensor, seen: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits of the distribution that is drawn from, float32 or better, minus infinity for excluded tokens.

    Args:
        logits: As the model gives them, ``[B, V]``.
        seen: Tokens that came before, bool ``[B, V]``.
        sampling: The options, with a temperature above 0.

    Returns:
        ``[B, V]``. The softmax of it are the probabilities; the largest entry of a row is 0.

    Raises:
        ConfigError: A row has no largest logit, because there is a NaN or an infinity in it.
    """
    logits, peak, _ = _start(logits, seen, sampling)
    # The largest is 0 then, so that a small temperature leads to minus infinity, never to infinity.
    logits = (logits - peak.unsqueeze(-1)) / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    return logits


def _start(logits: Tensor, seen: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Return the penalized logits, the largest of each row, and where that is."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.repetition_penalty != 1:
        logits = penalize(logits, seen, sampling.repetition_penalty)
    peak, place = logits.max(dim=-1)
    if not bool(peak.isfinite().all()):
        raise ConfigError(
            f"the model's logits reach {peak.tolist()}, so no token can be chosen; its weights are damaged, or its "
            "arithmetic overflows: check the checkpoint, or use float32."
        )
    return logits, peak, place


def draw_noise(
    batch_size: int, vocab_size: int, generator: torch.Generator | Sequence[torch.Generator] | None
) -> Tensor:
    """Draw for each row and token a number that follows the Gumbel distribution.

    Adding it to logits and taking the largest draws from their softmax. A rounding error of size e in the logits then
    changes the outcome with a probability of about e. Looking up one uniform number in the cumulated probabilities is
    far more delicate if the vocabulary is large, and the same seed should give the same text however a prompt is cut.

    Args:
        batch_size: B.
        vocab_size: V.
        generator: One for all rows; or one per row, so that no row depends on the others; or None for torch's own.

    Returns:
        float32 ``[B, V]`` on the device of the generator.
    """
    if isinstance(generator, Sequence):
        return torch.cat([draw_noise(1, vocab_size, one) for one in generator])
    device = None if generator is None else generator.device
    waiting = -torch.rand(batch_size, vocab_size, generator=generator, device=device).neg_().log1p_()
    return -waiting.clamp_(min=_SMALLEST).log_()


def choose(logits: Tensor, seen: Tensor, sampling: Sampling, noise: Tensor | None) -> Tensor:
    """Choose one token per row.

    Args:
        logits: As the model gives them, ``[B, V]``.
        seen: Tokens that came before, bool ``[B, V]``.
        sampling: The options.
        noise: From `draw_noise`, ``[B, V]``; None if the temperature is 0.

    Returns:
        Ids, int64 ``[B]``.

    Raises:
        ConfigError: As `prepare` does.
    """
    if noise is None:
        return _start(logits, seen, sampling)[2]
    scores = prepare(logits, seen, sampling)
    return (scores + noise.to(scores)).argmax(dim=-1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
