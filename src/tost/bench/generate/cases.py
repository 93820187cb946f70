"""What is measured about language models at work, and how much of it. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Part", "Scale"]


class Part(StrEnum):
    """What can be measured."""

    PREFILL = "prefill"
    DECODE = "decode"
    BATCH = "batch"
    TRAIN = "train"
    QUALITY = "quality"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
        contexts: Tokens that came before a timed one.
        baseline_contexts: The same for GPT-2, whose cost grows with them.
        prompt: Tokens of the prompt in the part prefill.
        train_tokens: Lengths of the texts of training steps.
        batches: Texts at a time.
        repeats: Timed tokens of each contender and case.
        rounds: Timed prompts and training steps of each contender and case.
        depth: Layers of all models.
        vocab_size: Ids of all models; None for their own.
    """

    contexts: tuple[int, ...] = (128, 1024, 8192, 65_536)
    baseline_contexts: tuple[int, ...] = (1024, 8192)
    prompt: int = 8192
    train_tokens: tuple[int, ...] = (4096, 8192)
    batches: tuple[int, ...] = (1, 8)
    repeats: int = 40
    rounds: int = 2
    depth: int = 12
    vocab_size: int | None = None

    @classmethod
    def quick(cls) -> Scale:
        """Return a scale for a demonstration: two layers, short texts."""
        return cls(
            contexts=(64, 512),
            baseline_contexts=(64, 512),
            prompt=512,
            train_tokens=(256,),
            repeats=5,
            rounds=1,
            depth=2,
            vocab_size=4096,
        )
