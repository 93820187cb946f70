"""A training step of whole language models on one long text, each in a process of its own: time and peak memory.

Run as ``python -m tost.bench.generate.train``, it does what the JSON object on its standard input says and prints
another one. A process does nothing else, so that its memory is that of one model and its heap is fresh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter

import psutil
import torch
from torch import Tensor, nn

from tost.bench.generate.gpt2 import HuggingFaceGPT2
from tost.bench.harness.peak import RETURN_AT_ONCE, forget_peak, peak_memory
from tost.errors import TostError
from tost.models import create_model

__all__ = ["CONTENDERS", "Outcome", "TrainStep", "run_in_process", "take_step"]

CONTENDERS = ("tost_lm_base", "transformers GPT-2", "transformers GPT-2, our loss")
_SHORT = 16  # tokens of the step that comes first, to load what is loaded on first use


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """One step: forward, loss and backward, batch 1.

    Attributes:
        contender: One of `CONTENDERS`.
        tokens: Length of the text.
        depth: Layers.
        vocab_size: Ids; None for the model's own.
        threads: Threads of torch.
    """

    contender: str
    tokens: int
    depth: int = 12
    vocab_size: int | None = None
    threads: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step took: seconds, and by how many bytes memory grew at most. Weights exist before, gradients do not."""

    seconds: float
    peak_bytes: int
    loss: float


def run_in_process(step: TrainStep) -> Outcome:
    """Take a step in a fresh process.

    Raises:
        TostError: The process failed; the message ends with its last words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tost.bench.generate.train"],
        input=json.dumps(asdict(step)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | RETURN_AT_ONCE,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing; it may have run out of memory"]
        raise TostError(f"a training step of {step.contender} failed with code {done.returncode}: {last[0]}")
    return Outcome(**json.loads(done.stdout))


def take_step(step: TrainStep) -> Outcome:
    """Take a step in this process."""
    torch.set_num_threads(step.threads)
    torch.manual_seed(0)
    model, loss = _build(step)
    # Ids below any vocabulary in use; what they are makes no difference.
    ids = torch.randint(1000 if step.vocab_size is None else step.vocab_size, (1, step.tokens))
    loss(ids[:, :_SHORT]).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    before: int = psutil.Process().memory_info().rss
    forget_peak()
    started = perf_counter()
    value = loss(ids)
    value.backward()  # type: ignore[no-untyped-call]
    seconds = perf_counter() - started
    return Outcome(seconds=seconds, peak_bytes=max(0, peak_memory() - before), loss=value.item())


def _build(step: TrainStep) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    sizes = {} if step.vocab_size is None else {"vocab_size": step.vocab_size}
    if step.contender == "tost_lm_base":
        model = create_model("tost_lm_base", depth=step.depth, max_length=step.tokens, **sizes)
        return model, lambda ids: model.loss(ids[:, :-1], ids[:, 1:])  # type: ignore[operator]
    gpt2 = HuggingFaceGPT2(max_length=step.tokens, depth=step.depth, **sizes)
    gpt2.train()
    return gpt2, gpt2.chunked_loss if step.contender.endswith("our loss") else gpt2.loss


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(take_step(TrainStep(**json.load(sys.stdin))))) + "\n")
