"""`tost bench generate`: a generated token by context, several texts, a prompt, a training step, beside GPT-2.

A token cannot take less time than reading every weight once. That limit is measured in the same rounds, by torch's
matrix-vector products and by those of the native library. The gate: prompts and tokens equal a pass over the whole text
by the reference operators in float64.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost._text import Table, grouped
from tost.bench.harness import (
    NETWORK_BOUND,
    Benchmark,
    Check,
    Gate,
    Round,
    Row,
    Trial,
    cell,
    columns,
    interleave,
    plain,
    ratios,
    run_in_process,
    spread,
    spread_of,
    warm_up,
    watch_peak,
    with_quartiles,
)
from tost.bench.ops import check_operators
from tost.generation import decode_step, prefill
from tost.generation.decode import State, state_bytes
from tost.generation.native import WEIGHTS, make_step, native_obstacles
from tost.models import LanguageToST, create_model
from tost.nn import linear_cross_entropy
from tost.testing import relative_rms

PARTS = ("prefill", "decode", "batch", "train")
OURS, BASELINE, HUGGING_FACE = "tost_lm_base", "gpt2_base", "transformers GPT-2"
PLUS = f"{OURS}_plus"
LIMIT = "weights alone, torch"
TRAINED = (OURS, HUGGING_FACE, f"{HUGGING_FACE}, our loss")
_SHORT = 64  # tokens of prompts whose length does not matter


class HuggingFaceGPT2(nn.Module):
    """GPT-2 of the transformers library, without dropout, with the functions that a measurement needs."""

    def __init__(self, *, max_length: int, depth: int = 12, vocab_size: int = 50_257) -> None:
        super().__init__()
        import tost._torchvision  # noqa: F401, I001  transformers may import torchvision, prepared here for CPU builds
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes: dict[str, Any] = {"n_positions": max_length, "n_layer": depth, "vocab_size": vocab_size}
        sizes |= dict.fromkeys(("bos_token_id", "eos_token_id"), vocab_size - 1)
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model: Any = GPT2LMHeadModel(GPT2Config(**sizes))  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Any:
        """Read a prompt ``[B, N]``; returns the cache of its keys and values."""
        return self.model.transformer(ids, use_cache=True).past_key_values

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits after one token per row, ``[B]``, and the cache, which has grown by it."""
        return self.model(tokens.unsqueeze(1), past_key_values=cache, use_cache=True).logits, cache

    def loss(self, ids: Tensor, *, ours: bool) -> Tensor:
        """Return the loss as transformers computes it, all logits at once, or by `tost.nn.linear_cross_entropy`."""
        if not ours:
            return self.model(ids, labels=ids, use_cache=False).loss
        hidden = self.model.transformer(ids, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden[:, :-1], self.model.lm_head.weight, ids[:, 1:])


@dataclass(frozen=True)
class TrainStep:
    """One step of a contender: forward, loss and backward on one text of `tokens` tokens."""

    contender: str
    tokens: int
    sizes: dict[str, int]


@dataclass(frozen=True)
class StepUsage:
    """Time and growth of memory of a training step; weights exist before, gradients do not."""

    seconds: float
    peak_bytes: int


def take_step(step: TrainStep) -> StepUsage:
    """Take a training step in this process."""
    torch.manual_seed(0)
    if step.contender == OURS:
        model: Any = create_model(OURS, max_length=step.tokens, **step.sizes)
        loss: Callable[[Tensor], Tensor] = lambda ids: model.loss(ids[:, :-1], ids[:, 1:])  # noqa: E731
    else:
        model = HuggingFaceGPT2(max_length=step.tokens, **step.sizes).train()
        loss = partial(model.loss, ours=step.contender.endswith("our loss"))
    ids = torch.randint(1000, (1, step.tokens))
    loss(ids[:, :16]).backward()  # type: ignore[no-untyped-call]  # loads what is loaded on first use
    model.zero_grad(set_to_none=True)
    with watch_peak() as peak:
        seconds = Trial(lambda: loss(ids).backward()).seconds()  # type: ignore[no-untyped-call]
    return StepUsage(seconds, peak[0])


def check_generation() -> list[Check]:
    """Compare prompts in pieces and steps of every kind with a float64 pass of the reference operators."""
    checks: list[Check] = []
    for name in (OURS, PLUS, BASELINE):
        sizes = {"embed_dim": 128, "num_heads": 2, "depth": 2, "vocab_size": 301, "max_length": 64}
        torch.manual_seed(0)
        model = create_model(name, **sizes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        backend = {} if name == BASELINE else {"backend": "reference"}
        exact = create_model(name, **sizes, **backend).double()
        exact.load_state_dict(model.state_dict())
        ids = torch.randint(301, (3, 40), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = exact(ids)[:, -1]
            state = prefill(model, ids[:, :-1], chunk_size=7)
            found = {"step": make_step(model)(ids[:, -1], state)[0]}
            found["model's own step"] = decode_step(model, ids[:, -1], state)[0]
        checks += [
            Check(f"{name} {what}", relative_rms(value, expected), NETWORK_BOUND) for what, value in found.items()
        ]
    return checks


@dataclass
class Generate(Benchmark):
    """Time language models: a token by context, batches, prompts, training steps, beside GPT-2.

    Attributes:
        part: Parts to measure.
        repeats: Timed tokens of each contender and case.
        rounds: Timed prompts and training steps of each.
        quick: Measure two layers and short texts for a demonstration.
    """

    name: ClassVar[str] = "generate"
    heading: ClassVar[str] = "Language models at work"
    checked: ClassVar[str] = "operators, prompts and tokens with the reference"
    introduction: ClassVar[str] = (
        "Contenders took turns; a ratio compares two times of one round. Medians, with quartiles in brackets. All "
        "models have the base size, fresh weights and float32 arithmetic."
    )
    selects: ClassVar[tuple[str, ...]] = ("part",)

    part: tuple[str, ...] = PARTS
    repeats: int = 40
    rounds: int = 2
    quick: bool = False

    def __post_init__(self) -> None:
        if self.quick:
            self.repeats, self.rounds = min(self.repeats, 5), 1
        self._contexts = (64, 512) if self.quick else (128, 1024, 8192, 65_536)
        self._baseline_contexts = (64, 512) if self.quick else (1024, 8192)
        self._prompt = 512 if self.quick else 8192
        self._train_tokens = (256,) if self.quick else (4096, 8192)
        self._sizes = {"depth": 2, "vocab_size": 4096} if self.quick else {}
        self._baselines = (BASELINE, HUGGING_FACE) if find_spec("transformers") else (BASELINE,)
        self._models: dict[str, Any] = {}
        self._states: dict[tuple[str, int], Any] = {}

    @property
    def steps(self) -> int:
        """One per part, and one per length of training steps."""
        return len(self.part) + ("train" in self.part) * (len(self._train_tokens) - 1)

    def about(self) -> dict[str, Any]:
        """Return the sizes that are measured."""
        sizes = {"contexts": self._contexts, "prompt": self._prompt, "train_tokens": self._train_tokens}
        return {"scale": {"repeats": self.repeats, "rounds": self.rounds, **sizes, **self._sizes}}

    def check(self) -> Gate:
        """Compare operators, prompts and tokens with the reference."""
        gate = check_operators(["causal_tssa"])
        gate.checks += check_generation()
        return gate

    def measure(self, results: dict[str, Any], watch: Callable[[str], None]) -> Iterator[str]:
        """Measure all parts; the training steps last, in other processes, which need the memory of the models."""
        parts = (self.measure_prefill, self.measure_decode, self.measure_batch, self.measure_train)
        for part, measure in zip(PARTS, parts, strict=True):
            if part in self.part:
                watch(part)
                for rows in measure():
                    results["rows"] += rows
                    yield ", ".join(f"{row['contender']} {row['seconds']['median']:.3g} s" for row in rows)
                gc.collect()

    def _model(self, name: str) -> Any:
        if name not in self._models:
            torch.manual_seed(0)
            longest = max(*self._contexts, self._prompt) + self.repeats + 16  # every timed token lengthens the text
            sizes = {"max_length": longest, **self._sizes}
            self._models[name] = HuggingFaceGPT2(**sizes) if name == HUGGING_FACE else create_model(name, **sizes)
        return self._models[name].eval()

    def _read(self, name: str, tokens: int, batch: int = 1) -> Any:
        """Return the state after a prompt, and keep it for later parts."""
        ids = torch.randint(1000, (batch, tokens), generator=torch.Generator().manual_seed(0))
        model = self._model(name)
        state = model.prefill(ids) if name == HUGGING_FACE else prefill(model, ids)
        if batch == 1:
            self._states[name, tokens] = state
        return state

    def measure_prefill(self) -> Iterator[list[Row]]:
        """Time a prompt."""
        names = (OURS, *self._baselines)
        for name in names:
            self._read(name, _SHORT)
        trials = {name: Trial(partial(self._read, name, self._prompt)) for name in names}
        rounds = interleave(trials, dict.fromkeys(names, self.rounds))
        yield [_row("prefill", name, self._prompt, rounds, (OURS,)) for name in names]

    def measure_decode(self) -> Iterator[list[Row]]:
        """Time a token after contexts of several lengths."""
        cases = [(OURS, context) for context in self._contexts]
        cases += [(name, context) for context in self._baseline_contexts for name in (PLUS, *self._baselines)]
        ours: LanguageToST = self._model(OURS)
        linear = [module.weight for module in ours.modules() if isinstance(module, nn.Linear)]
        matrices = [weight.detach() for weight in (*linear, *([ours.tokens.weight] if ours.head is None else []))]
        vectors = {matrix.shape[1]: torch.randn(1, matrix.shape[1]) for matrix in matrices}
        calls: dict[str, Callable[[], object]] = {
            LIMIT: lambda: [F.linear(vectors[matrix.shape[1]], matrix) for matrix in matrices]
        }
        bytes_of: dict[str, int | None] = {}
        for name, context in cases:
            state = self._states.get((name, context)) or self._read(name, context)
            model, key = self._model(name), f"{name} at {context}"
            calls[key] = _Text(model.step if name == HUGGING_FACE else make_step(model), state)
            bytes_of[key] = None if name == HUGGING_FACE else state_bytes(state)
        rounds = _time(calls, self.repeats)  # all in the same rounds: contexts are compared with each other too
        rows = [_row("decode", LIMIT, 0, rounds, ())]
        for name, context in cases:
            others, key = (LIMIT, f"{OURS} at {context}", f"{OURS} at {self._contexts[0]}"), f"{name} at {context}"
            rows.append(_row("decode", name, context, rounds, others, key=key, state_bytes=bytes_of[key]))
        yield rows

    def measure_batch(self) -> Iterator[list[Row]]:
        """Time a token of several texts at a time, with weights in fewer bits."""
        model = self._model(OURS)
        kinds = ["fp32"] if native_obstacles(model) else list(WEIGHTS)
        cases = [(kind, batch) for batch in (1, 8) for kind in kinds]
        calls = {
            f"{kind} {batch}": _Text(make_step(model, cast(Any, kind)), self._read(OURS, _SHORT, batch), batch)
            for kind, batch in cases
        }
        rounds = _time(calls, self.repeats)
        yield [
            _row("batch", OURS, _SHORT, rounds, ("fp32 1",), key=f"{kind} {batch}", batch=batch, weights=kind)
            for kind, batch in cases
        ]

    def measure_train(self) -> Iterator[list[Row]]:
        """Time training steps in processes of their own."""
        self._models.clear()
        self._states.clear()
        names = TRAINED if HUGGING_FACE in self._baselines else TRAINED[:1]
        for tokens in self._train_tokens:
            rounds: list[Round] = []
            peaks = dict.fromkeys(names, 0)
            for _ in range(self.rounds):
                rounds.append({})
                for name in names:
                    step = TrainStep(name, tokens, self._sizes)
                    usage = run_in_process(take_step, step, label=f"a training step of {name}")
                    rounds[-1][name] = usage.seconds
                    peaks[name] = max(usage.peak_bytes, peaks[name])
            yield [_row("train", name, tokens, rounds, names[1:], peak_bytes=peaks[name]) for name in names]

    def tables(self, results: Mapping[str, Any]) -> list[Table]:
        """Return one table per part."""
        first = self._contexts[0]
        tokens: Column = ("tokens", lambda row: f"{row['tokens']:,}")
        contender: Column = ("contender", lambda row: row["contender"])
        seconds: Column = ("seconds", lambda row: f"{_median(row):.2f}")
        shown: dict[str, tuple[str, list[Column]]] = {
            "decode": (
                "A token, by context (batch 1)",
                [
                    tokens,
                    contender,
                    ("ms/token", lambda row: f"{1e3 * _median(row):.2f}"),
                    ("/ weights alone", partial(_ratio, other=LIMIT)),
                    (f"/ {OURS}, same context", lambda row: _ratio(row, f"{OURS} at {row['tokens']}")),
                    (f"/ {OURS}, {first}", partial(_ratio, other=f"{OURS} at {first}")),
                    ("state kB", lambda row: cell(row.get("state_bytes"), ".1f", 1e-3)),
                ],
            ),
            "batch": (
                f"Several texts at a time, and matrices in fewer bits ({OURS})",
                [
                    ("weights", lambda row: row["weights"]),
                    ("texts", lambda row: str(row["batch"])),
                    ("ms/step", lambda row: f"{1e3 * _median(row):.2f}"),
                    ("tokens/s", lambda row: f"{row['batch'] / _median(row):.1f}"),
                ],
            ),
            "prefill": (
                "Reading a prompt (batch 1)",
                [
                    tokens,
                    contender,
                    seconds,
                    ("tokens/s", lambda row: f"{row['tokens'] / _median(row):.0f}"),
                    (f"/ {OURS}", partial(_ratio, other=OURS)),
                ],
            ),
            "train": (
                "Forward, loss and backward on one text (batch 1)",
                [
                    tokens,
                    contender,
                    seconds,
                    *((f"time / {other}", partial(_ratio, other=other)) for other in TRAINED[1:]),
                    ("peak MB", lambda row: cell(row["peak_bytes"], ".0f", 1e-6)),
                ],
            ),
        }
        by_part = grouped(results["rows"], lambda row: str(row["part"]))
        return [columns(title, by_part[part], cells, 2) for part, (title, cells) in shown.items() if part in by_part]


Column = tuple[str, Callable[[Row], str]]


def _median(row: Row) -> float:
    return float(row["seconds"]["median"])


def _ratio(row: Row, other: str) -> str:
    return with_quartiles(row["ratios"].get(other))


class _Text:
    """Texts that get a token longer with every call."""

    def __init__(self, step: Callable[[Tensor, State], tuple[object, State]], state: State, batch: int = 1) -> None:
        self._step, self._state, self._tokens = step, state, torch.arange(batch)

    def __call__(self) -> object:
        logits, self._state = self._step(self._tokens, self._state)
        return logits


def _row(
    part: str, name: str, tokens: int, rounds: Sequence[Round], others: Sequence[str], *, key: str = "", **more: Any
) -> Row:
    """Return a row of the times under `key` in the rounds; by default under the contender's name."""
    key = key or name
    quotients = {other: plain(spread(ratios(rounds, key, other))) for other in others if other in rounds[0]}
    row = {"part": part, "contender": name, "tokens": tokens, "seconds": plain(spread_of(rounds, key))}
    return {**row, "ratios": quotients, **more}


@torch.no_grad()
def _time(calls: Mapping[str, Callable[[], object]], repeats: int) -> list[Round]:
    trials = {name: Trial(call) for name, call in calls.items()}
    for trial in trials.values():
        warm_up(trial, runs=3)
    return interleave(trials, dict.fromkeys(trials, repeats))
