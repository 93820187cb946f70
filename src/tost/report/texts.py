"""Generated text for the page. Loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from tost.generation import Sampling, context_limit, stream_tokens
from tost.report.samples import LoadedRun

LENGTH = 300
_BEGINNING = 48  # tokens of the validation text that are continued if no prompt is given
TEMPERATURE, TOP_K, SEED = 0.8, 40, 0


@dataclass(frozen=True)
class Passage:
    """A prompt and its continuation.

    Attributes:
        prompt: The prompt.
        text: The generated text.
        tokens: Number of generated tokens.
        seconds: Time that they took, the prompt included.
        settings: Sampling options, in words.
    """

    prompt: str
    text: str
    tokens: int
    seconds: float
    settings: str


def continue_prompts(run: LoadedRun, prompts: Sequence[str], *, length: int = LENGTH) -> list[Passage]:
    """Continue texts with the model of a run.

    Args:
        run: A run of language modelling.
        prompts: Texts to continue; if there are none, the beginning of its validation text.
        length: Tokens to generate, at most; fewer if the model has fewer positions.

    Raises:
        ConfigError: The model does not generate, or a prompt cannot be written with its tokens.
    """
    tokenizer = run.tokenizer
    if tokenizer is None:
        return []
    given = list(prompts)
    if not given and run.samples.text is not None:
        given = [tokenizer.decode(run.samples.text[0][0, :_BEGINNING].tolist())]
    limit = context_limit(run.model)
    settings = f"temperature {TEMPERATURE}, the {TOP_K} likeliest tokens, seed {SEED}"
    passages = []
    for prompt in given:
        ids = torch.tensor([tokenizer.encode(prompt)])
        count = length if limit is None else max(0, min(length, limit - ids.shape[1]))
        generator = torch.Generator().manual_seed(SEED)
        began = perf_counter()
        sampling = Sampling(temperature=TEMPERATURE, top_k=min(TOP_K, tokenizer.vocab_size))
        stream = stream_tokens(run.model, ids, max_new_tokens=count, sampling=sampling, generator=generator)
        tokens = [int(token) for token in stream]
        passages.append(Passage(prompt, tokenizer.decode(tokens), len(tokens), perf_counter() - began, settings))
    return passages
