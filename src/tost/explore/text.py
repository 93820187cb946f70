"""Views of a text: groups, surprise, gains, memory; and generated texts."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from secrets import token_hex
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tost.analysis import LayerRecord, Surprise, capture, state_memory, surprise
from tost.analysis.heads import gains_of
from tost.analysis.result import entropy, plain, rounded
from tost.errors import ConfigError
from tost.explore.models import ExploredModel
from tost.generation import (
    ByteTokenizer,
    Continuation,
    Sampling,
    context_limit,
    prefill,
    state_bytes,
    stream_tokens,
)

MAX_TOKENS = 4096
"""Tokens of a text that is looked at."""
MAX_NEW_TOKENS = 2000
"""Tokens that are generated in one go."""
MAX_SECONDS = 120.0
"""Time that one go may take."""
PATIENCE = 2.0
"""Seconds that a request waits for another one about the same text, which the browser may have just stopped."""
SESSIONS = 8
"""Generated texts that can be continued; the oldest is dropped first."""


@dataclass
class Session:
    """A text that was generated, with the state after each of its tokens.

    Attributes:
        source: The model.
        ids: The text, prompt included.
        states: By number of tokens, the state to continue from.
    """

    source: ExploredModel
    ids: list[int]
    states: dict[int, Continuation] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Change the text, one request at a time.

        Raises:
            ConfigError: Another request is still changing it.
        """
        if not self._lock.acquire(timeout=PATIENCE):
            raise ConfigError("this text is being continued already; stop that, or wait for its end.")
        try:
            yield
        finally:
            self._lock.release()

    def go_back(self, position: int) -> bool:
        """Drop all but the first tokens.

        Args:
            position: How many to keep.

        Returns:
            Whether the state after them was saved.

        Raises:
            ConfigError: The text has fewer tokens, or is being continued.
        """
        with self.writing():
            if not 1 <= position <= len(self.ids):
                raise ConfigError(f"there is no token {position}; the text has {len(self.ids)}.")
            self.ids = self.ids[:position]
            self.states = {place: state for place, state in self.states.items() if place <= position}
            return position in self.states


class Sessions:
    """The last few generated texts, by a random name. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: dict[str, Session] = {}
        self._lock = threading.Lock()

    def add(self, session: Session) -> str:
        """Keep a text; return its name."""
        name = token_hex(8)
        with self._lock:
            self._known[name] = session
            while len(self._known) > SESSIONS:
                del self._known[next(iter(self._known))]
        return name

    def get(self, name: str) -> Session:
        """Return a text.

        Raises:
            ConfigError: It was forgotten, or never there.
        """
        with self._lock:
            if name not in self._known:
                raise ConfigError("this text is not kept any more; generate it again.")
            self._known[name] = self._known.pop(name)  # the last to be forgotten
            return self._known[name]


def encode(source: ExploredModel, text: str) -> Tensor:
    """Return a text as ids ``[1, N]``.

    Raises:
        ConfigError: The model reads images, or the text is empty or too long for it.
    """
    if source.kind != "text":
        raise ConfigError(f"{source.name} reads images; choose a language model.")
    if len(text) > MAX_TOKENS * 8:
        raise ConfigError(
            f"the text has {len(text):,} characters; at most {MAX_TOKENS:,} tokens are shown. Shorten it."
        )
    # A browser may send half of a character, which has no bytes.
    whole = text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
    return bounded(source, source.tokenizer.encode(whole))


def bounded(source: ExploredModel, ids: list[int]) -> Tensor:
    """Return ids as a tensor ``[1, N]``, unless there are none or too many; see `encode`."""
    limit = min(MAX_TOKENS, context_limit(source.model) or MAX_TOKENS)
    if len(ids) > limit:
        raise ConfigError(f"the text has {len(ids):,} tokens; {source.name} is shown at most {limit:,}. Shorten it.")
    if not ids:
        raise ConfigError("the text is empty; type something.")
    return torch.tensor([ids])


def strings(source: ExploredModel, ids: Tensor) -> list[str]:
    """Return how to write each token; bytes that are no text by themselves in hexadecimal."""
    numbers = ids.flatten().tolist()
    if source.tokenizer.vocab_size == ByteTokenizer.vocab_size:
        return [chr(number) if number < 128 else f"\\x{number:02x}" for number in numbers]
    return [source.tokenizer.decode([number]) for number in numbers]


def look(source: ExploredModel, ids: Tensor) -> dict[str, Any]:
    """Return the shares of the heads and the surprise of every token, which color a text."""
    found, records = _read(source, ids)
    written = list(found.tokens)
    result: dict[str, Any] = {"tokens": written, "bits": rounded(found.bits), "layers": 0, "heads": 0}
    result |= {"text": source.tokenizer.decode(ids[0].tolist()), "mean_bits": found.summary()["bits per token"]}
    if records:
        pi = torch.stack([record.share()[0] for record in records])
        result |= {"layers": pi.shape[0], "heads": pi.shape[2], "pi": rounded(pi)}
        result |= {"entropy": rounded(entropy(pi.double()).mean(dim=1))}
    return result


def _read(source: ExploredModel, ids: Tensor) -> tuple[Surprise, list[LayerRecord]]:
    """Run a model once over ids ``[1, N]``; return the surprise of every token, and records of TSSA layers, if any."""
    layers: AbstractContextManager[list[LayerRecord]] = nullcontext([])
    if source.has_groups():
        layers = capture(source.model)
    with source.lock, layers as records:
        return surprise(source.model, ids, strings(source, ids)), records


def look_at_token(source: ExploredModel, ids: Tensor, position: int) -> dict[str, Any]:
    """Return what the layers do at one token, and what may follow it.

    Returns:
        By layer, ``pi`` [H], the shares of the heads; ``gains`` [H, D], the gains D; in gated layers also ``nats`` [H],
        the coding-rate gain of the token, and ``distance`` [H], its distance from the prediction over its length.

    Raises:
        ConfigError: There is no such token.
    """
    if not 0 <= position < ids.shape[1]:
        raise ConfigError(f"there is no token {position}; the text has {ids.shape[1]}.")
    found, records = _read(source, ids[:, : position + 1])
    layers: dict[str, list[Any]] = {"pi": [], "gains": [], "nats": [], "distance": []}
    for record in records:
        statistics = record.statistics()
        layers["pi"].append(rounded(statistics.share()[0, -1]))
        layers["gains"].append(rounded(gains_of(statistics.blocks()[0, -1])))
        if record.layer.is_gated:
            error, w = (x[0, -1].norm(dim=-1) for x in (statistics.error(), statistics.w))
            layers["nats"].append(rounded(statistics.gain()[0, -1]))
            layers["distance"].append(rounded(error / w.clamp_min(1e-12)))
    expected = strings(source, found.expected[-1])
    follows = [{"token": token, "p": p} for token, p in zip(expected, rounded(found.probability[-1]), strict=True)]
    return {**layers, "follows": follows}


def memory(source: ExploredModel, ids: Tensor) -> dict[str, Any]:
    """Return the bytes of the state and of a softmax cache, and in TSSA layers the weight of the last tokens.

    Returns:
        ``mass`` is ``[L, H, recent]``, ``half_life`` ``[L, H, P]``; see `tost.analysis.StateMemory`.
    """
    with source.lock:
        model = source.model
        one, two, whole = (state_bytes(prefill(model, read)) for read in (ids[:, :1], ids[:, :1].expand(1, 2), ids))
        sizes = {"state_bytes": whole, "cache_bytes": softmax_bytes(source, ids.shape[1]), "grows": two > one}
        if not source.has_groups():
            return {**sizes, "recent": [], "mass": [], "half_life": []}
        found = state_memory(model, [ids])
    return {**sizes, "recent": list(found.recent), "mass": rounded(found.mass), "half_life": plain(found.half_life)}


def softmax_bytes(source: ExploredModel, tokens: int) -> int:
    """Return the bytes of the keys and values that softmax attention of this width and depth keeps, in float32."""
    options = source.saved.options
    return 2 * 4 * int(options["depth"]) * int(options["embed_dim"]) * tokens


def continue_text(session: Session, sampling: Sampling, count: int, seed: int | None) -> Generator[dict[str, Any]]:
    """Continue a text token by token from the state that was saved at its end, one request at a time.

    Args:
        session: The text.
        sampling: How tokens are chosen.
        count: How many tokens.
        seed: Repeats a text; None for a new one.

    Yields:
        ``{"token", "id"}`` for each token, and at the end why it ended, the speed and the size of the state.
    """
    source = session.source
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    with session.writing():
        saved = session.states.get(len(session.ids))
        ids = None if saved is not None else torch.tensor([session.ids])
        started = perf_counter()
        with source.lock:
            stream = stream_tokens(source.model, ids, sampling=sampling, generator=generator, state=saved)
            session.states[len(session.ids)] = stream.continuation
        taken, ended = 0, "length"
        begun = perf_counter()
        while taken < count:
            if perf_counter() - started > MAX_SECONDS:
                ended = "time"
                break
            if len(session.ids) >= MAX_TOKENS or stream.room == 0:
                ended = "room"
                break
            with source.lock:
                token = next(stream)
            session.ids.append(int(token))
            session.states[len(session.ids)] = stream.continuation
            taken += 1
            yield {"id": int(token), "token": strings(source, token)[0]}
        seconds = max(perf_counter() - begun, 1e-9)
    yield {
        "ended": ended,
        "tokens": taken,
        "rate": round(taken / seconds, 1),
        "state_bytes": state_bytes(stream.continuation.state),
        "cache_bytes": softmax_bytes(source, len(session.ids)),
        "resumed": saved is not None,
    }
