"""`tost generate`: continue a text, shown as it comes."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from tost._io import read_text
from tost._progress import Pace, format_progress
from tost._text import printable
from tost.cli import _console
from tost.cli._arguments import Device, Ema, Source, load_source
from tost.errors import INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from torch import nn

    from tost.generation import TextStream, TokenStream

USUAL_LENGTH = 256
START = "\n"
"""The prompt where none is given."""

Precision = Literal["float32", "bfloat16"]
"""Arithmetic of the model."""

Storage = Literal["fp32", "bf16", "int8"]
"""How matrices are stored while tokens are generated."""


class _Generated(NamedTuple):
    """A text, and why it ended: length, positions, stop, interrupt or pipe."""

    text: str
    tokens: int
    seconds: float
    ended: str


def generate(
    source: Source,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue; - reads it from stdin. Default: stdin, or a line break.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the text to continue.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=0, help=f"Tokens to generate. Default: {USUAL_LENGTH}, or what positions allow.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token; 1: as the model has it.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this probability.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: fewer tokens that came before.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Repeats a text. Default: a new one, shown at the end.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends it, not shown; can be repeated.")] = None,
    state: Annotated[Path | None, typer.Option(help="Resume a text from a saved state.")] = None,
    save_state: Annotated[Path | None, typer.Option(help="Save the state of the text, to resume it later.")] = None,
    ema: Ema = False,
    device: Device = "auto",
    dtype: Annotated[Precision | None, typer.Option(help="Arithmetic. Default: that of the weights.")] = None,
    weights: Annotated[
        Storage | None, typer.Option(help="Fewer bits: rounded, and faster. Default: bf16 if trained or stored so.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the text.")] = False,
) -> None:
    """Continue a text with a trained language model. Ctrl-C ends it and keeps what is there."""
    text = _read_prompt(prompt, prompt_file, continues=state is not None)
    if save_state is not None and (save_state.is_dir() or not save_state.absolute().parent.is_dir()):
        raise ConfigError(f"--save-state {save_state} cannot be written; give a file in a folder that exists")
    if "" in (stop or []):
        raise ConfigError("--stop is empty, so that no text could be generated; leave it out")
    import torch

    from tost import generation
    from tost._machine import choose_device, read_bandwidth
    from tost.generation.native import step_bytes
    from tost.train.tokenizer import require_tokenizer

    # Mistakes in the options are found before the weights are read.
    sampling = generation.Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty
    )
    place = choose_device(device)
    model = load_source(source, ema=ema)
    tokenizer = require_tokenizer(model, source)
    model = model.to(place, dtype=None if dtype is None else getattr(torch, dtype))
    storage = (weights or "fp32") if dtype else _choose_storage(model, source, weights)
    generator = torch.Generator()
    before = None if state is None else generation.load_state(state, model, generator=generator)
    if seed is None and before is None:
        seed = generator.seed() % 2**32  # short enough to type
    if seed is not None:
        generator.manual_seed(seed)
    ids = None if text is None else torch.tensor([tokenizer.encode(text)])
    prompt_tokens = 0 if ids is None else ids.shape[1]
    started = perf_counter()
    stream = generation.stream_tokens(
        model, ids, max_new_tokens=max_new_tokens, sampling=sampling, generator=generator, state=before, weights=storage
    )
    reading = perf_counter() - started
    done = _run(stream, max_new_tokens, generation.TextStream(tokenizer.decoder(), stop or []), show=not json)
    if save_state is not None:
        generation.save_state(save_state, stream.continuation, model, generator=generator)
    share = None  # of what the memory can deliver
    if place.type == "cpu" and done.tokens and done.seconds > 0:
        size = step_bytes(model, storage)
        share = size * done.tokens / done.seconds / read_bandwidth(size)
    if json:
        numbers = {
            "weights": storage,
            "bandwidth_share": share,
            "tokens": done.tokens,
            "seconds": done.seconds,
            "prompt_tokens": prompt_tokens,
            "seed": seed,
        }
        _console.show_json({"text": done.text, "ended": done.ended, **numbers, "prompt_seconds": reading})
    elif done.ended != "pipe":
        rate = done.tokens / done.seconds if done.seconds > 0 else 0.0
        parts = [f"{done.tokens} tokens in {done.seconds:.2f} s ({rate:.0f} tokens/s)"]
        parts += [] if share is None else [f"{storage} weights, {share:.0%} of the memory bandwidth"]
        parts += [f"prompt of {prompt_tokens} tokens in {reading:.2f} s"] if prompt_tokens else []
        parts += [f"state {generation.state_bytes(stream.continuation.state) / 1000:.1f} kB"]
        parts += [f"seed {seed}"] if seed is not None else []
        reasons = {"positions": "no positions are left", "stop": "stop text", "interrupt": "interrupted"}
        parts += [reasons[done.ended]] if done.ended in reasons else []
        _console.log("; ".join(parts))
    if done.ended == "interrupt":
        raise typer.Exit(INTERRUPTED)


def _choose_storage(model: nn.Module, source: Path, wanted: Storage | None) -> Storage:
    """Return how matrices are stored: by default ``bf16`` for weights trained or stored so, if the native step runs.

    Weights stored in bf16 become float32 for that step, which loses nothing.
    """
    import torch

    from tost.generation.native import native_obstacles
    from tost.train.checkpoint.model import trained_precision

    stored = all(p.dtype == torch.bfloat16 for p in model.parameters())
    low = stored or trained_precision(source) == "bf16"
    if stored:
        model.float()
    storage = wanted or ("bf16" if low and not native_obstacles(model) else "fp32")
    if stored and storage == "fp32":
        model.bfloat16()
    return storage


def _read_prompt(prompt: str | None, file: Path | None, *, continues: bool) -> str | None:
    """Return the text to continue, its bytes as they are; None to continue a saved state without one."""
    if prompt is not None and file is not None:
        raise ConfigError("--prompt and --prompt-file are both given; keep one of the two")
    given = prompt is not None or file is not None
    if file is not None:
        prompt = read_text(file, "prompt")
    elif prompt == "-" or not (given or continues or sys.stdin.isatty()):
        prompt = sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")
    if given and not prompt and not continues:
        raise ConfigError("the prompt is empty; a text needs at least one character to begin with")
    return prompt or (None if continues else START)


def _run(stream: TokenStream, wanted: int | None, text: TextStream, *, show: bool) -> _Generated:
    """Generate, and show the text as it comes, until something ends it."""
    count, ended = wanted, "length"
    if count is None:
        limited = stream.room is not None and stream.room <= USUAL_LENGTH
        count, ended = (stream.room, "positions") if limited else (USUAL_LENGTH, "length")
    pieces: list[str] = []
    tokens, started = 0, perf_counter()
    pace = None if show and sys.stdout.isatty() else Pace()  # a text in a terminal shows its progress itself

    def take(piece: str) -> None:
        pieces.append(piece)
        if show:
            _write(piece)

    try:
        for token in islice(stream, count):
            tokens += 1
            take(text.feed(token.tolist()))
            if text.stopped:
                ended = "stop"
                break
            if pace is not None and pace.due():
                _console.log(format_progress("tokens", tokens, count or 0, pace.elapsed))
    except KeyboardInterrupt:
        ended = "interrupt"
    except BrokenPipeError:
        ended = "pipe"
    seconds = perf_counter() - started
    try:
        take(text.finish())
        if show:
            _write("\n")
    except BrokenPipeError:
        ended = "pipe"
        # Discard the rest of the buffer of stdout when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _Generated("".join(pieces), tokens, seconds, ended)


def _write(text: str) -> None:
    """Write generated text to stdout at once: exact in a pipe, without control characters on a terminal."""
    if text:
        safe = printable(text) if sys.stdout.isatty() else text
        sys.stdout.buffer.write(safe.encode())
        sys.stdout.buffer.flush()
