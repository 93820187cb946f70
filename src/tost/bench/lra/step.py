"""A training step of a long-range model on sequences of one length, in a process of its own: time and peak memory.

Run as ``python -m tost.bench.lra.step``, it does what the JSON object on its standard input says and prints another
one. A process does nothing else, so that its memory is that of one model and its heap is fresh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from tost.bench.harness.peak import RETURN_AT_ONCE, forget_peak, peak_memory
from tost.errors import TostError
from tost.models import create_model, model_options

__all__ = ["LraStep", "Trainer", "Usage", "run_in_process", "take_step"]

_SHORT = 16  # tokens of the pass that comes first, to load what is loaded on first use


@dataclass(frozen=True, kw_only=True)
class LraStep:
    """One step: forward, cross-entropy, backward and AdamW, on random tokens without padding.

    Attributes:
        model: Registered model of token sequences.
        options: Options that replace the model's own.
        tokens: Length of the sequences, N.
        batch: Sequences, B.
        threads: Threads of torch.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    tokens: int
    batch: int = 1
    threads: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a step took.

    Attributes:
        seconds: Its time; it is the first of its length.
        peak_bytes: By how much memory grew at most. Weights exist before; gradients and AdamW's moments do not.
        process_bytes: The most memory that the whole process had during the step.
        loss: Cross-entropy.
    """

    seconds: float
    peak_bytes: int
    process_bytes: int
    loss: float


class Trainer:
    """A model with its optimiser and one batch.

    Args:
        step: What to train.
    """

    def __init__(self, step: LraStep) -> None:
        torch.manual_seed(0)
        options = {"dropout": 0.0, "max_length": step.tokens, **step.options}
        chosen: Any = model_options(step.model, options)
        self.model = create_model(step.model, **options).train()
        # Steps too small to change anything: all repetitions do the same work.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.ids = torch.randint(chosen.vocab_size, (step.batch, step.tokens))
        self.targets = torch.randint(chosen.num_classes, (step.batch,))

    def loss(self, tokens: int | None = None) -> Tensor:
        """Return the cross-entropy of the batch, or of the first `tokens` of each sequence."""
        logits: Tensor = self.model(self.ids[:, :tokens])
        return F.cross_entropy(logits, self.targets)

    def step(self) -> float:
        """Take a step and return its loss."""
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def take_step(step: LraStep) -> Usage:
    """Take a step in this process."""
    torch.set_num_threads(step.threads)
    trainer = Trainer(step)
    trainer.loss(_SHORT).backward()  # type: ignore[no-untyped-call]
    trainer.optimizer.zero_grad(set_to_none=True)
    before: int = psutil.Process().memory_info().rss
    forget_peak()
    started = perf_counter()
    loss = trainer.step()
    seconds, most = perf_counter() - started, peak_memory()
    return Usage(seconds=seconds, peak_bytes=max(0, most - before), process_bytes=most, loss=loss)


def run_in_process(step: LraStep) -> Usage:
    """Take a step in a fresh process.

    Raises:
        TostError: The process failed; the message ends with its last words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tost.bench.lra.step"],
        input=json.dumps(asdict(step)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | RETURN_AT_ONCE,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing; it may have run out of memory"]
        raise TostError(f"a training step of {step.model} {step.options} failed with code {done.returncode}: {last[0]}")
    return Usage(**json.loads(done.stdout))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(take_step(LraStep(**json.load(sys.stdin))))) + "\n")
