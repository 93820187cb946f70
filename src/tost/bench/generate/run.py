"""Language models at work: the time of a generated token by context, of a batch, of a prompt, of a training step.

A token cannot take less time than reading every weight once. That limit is measured in the same rounds, twice: with
torch's matrix-vector products, and with those of the native library, which are faster. The gate is that prompts and
tokens are those of a pass over the whole text by the reference operators in float64.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.bench.generate.cases import GenerateScale, Part
from tost.bench.generate.gpt2 import HuggingFaceGPT2, is_installed
from tost.bench.harness.gate import NETWORK_BOUND, Check
from tost.bench.harness.passes import Usage, measure_step
from tost.bench.harness.timing import Round, Spread, Trial, interleave, ratios, spread, spread_of, warm_up
from tost.bench.harness.worker import run_in_process
from tost.generation import decode_step, prefill
from tost.generation.decode import State, state_bytes
from tost.generation.native import WEIGHTS, Weights, native_obstacles
from tost.generation.step import make_step
from tost.models import LanguageToST, create_model
from tost.ops import _library as library
from tost.testing import relative_rms

OURS, BASELINE, HUGGING_FACE = "tost_lm_base", "gpt2_base", "transformers GPT-2"
BLOCKS = f"{OURS}, blocks of 8"
TORCH_LIMIT, OUR_LIMIT = "weights alone, torch", "weights alone, ours"
TRAINED = (OURS, HUGGING_FACE, f"{HUGGING_FACE}, our loss")
_SHORT = 64  # tokens of prompts whose length does not matter
_FIRST = 16  # tokens of the training step that comes first, to load what is loaded on first use


@dataclass(frozen=True, kw_only=True)
class GenerateRow:
    """One contender in one case.

    Attributes:
        part: What was measured.
        contender: Who.
        tokens: Context, length of the prompt, or of the text; 0 where there is none.
        batch: Texts at a time.
        weights: How matrices were stored.
        seconds: One token of every text, the prompt, or the training step.
        ratios: Time of this contender over that of others, by their name, from pairs in one round.
        peak_bytes: Growth of memory during a training step.
        state_bytes: Memory of the state, per text.
        loss: Mean loss per token in nats, in the part quality, which has no times.
    """

    part: Part
    contender: str
    tokens: int
    batch: int = 1
    weights: Weights = "fp32"
    seconds: Spread | None = None
    ratios: dict[str, Spread] = field(default_factory=dict)
    peak_bytes: int | None = None
    state_bytes: int | None = None
    loss: float | None = None

    @property
    def median(self) -> float:
        """The median of the times; not a number if there are none."""
        return math.nan if self.seconds is None else self.seconds.median


@dataclass(kw_only=True)
class GenerateResults:
    """Everything measured so far."""

    rows: list[GenerateRow] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """One step: forward, loss and backward, batch 1.

    Attributes:
        contender: One of `TRAINED`.
        tokens: Length of the text.
        depth: Layers.
        vocab_size: Ids; None for the model's own.
    """

    contender: str
    tokens: int
    depth: int = 12
    vocab_size: int | None = None


def take_step(step: TrainStep) -> Usage:
    """Take a step in this process."""
    torch.manual_seed(0)
    model, loss = _build(step)
    # Ids below any vocabulary in use; what they are makes no difference.
    ids = torch.randint(1000 if step.vocab_size is None else step.vocab_size, (1, step.tokens))
    loss(ids[:, :_FIRST]).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)

    def run() -> float:
        found = loss(ids)
        found.backward()  # type: ignore[no-untyped-call]
        return found.item()

    return measure_step(run)


def step_in_process(step: TrainStep) -> Usage:
    """Take a step in a fresh process.

    Raises:
        TostError: The process failed.
    """
    return run_in_process(take_step, step, label=f"a training step of {step.contender}")


def _build(step: TrainStep) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    sizes = {} if step.vocab_size is None else {"vocab_size": step.vocab_size}
    if step.contender == OURS:
        model = create_model(OURS, depth=step.depth, max_length=step.tokens, **sizes)
        return model, lambda ids: model.loss(ids[:, :-1], ids[:, 1:])  # type: ignore[operator]
    gpt2 = HuggingFaceGPT2(max_length=step.tokens, depth=step.depth, **sizes)
    gpt2.train()
    return gpt2, gpt2.chunked_loss if step.contender.endswith("our loss") else gpt2.loss


def check_generation() -> list[Check]:
    """Compare prompts in pieces, steps of every kind, and the loss, with a float64 pass of the reference operators."""
    checks: list[Check] = []
    for name in (OURS, BLOCKS, f"{OURS}_plus", BASELINE):
        sizes = {"embed_dim": 128, "num_heads": 2, "depth": 2, "vocab_size": 301, "max_length": 64}
        torch.manual_seed(0)
        model = _create(name, **sizes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        backend = {} if name == BASELINE else {"backend": "reference"}
        exact = _create(name, **sizes, **backend).double()
        exact.load_state_dict(model.state_dict())
        ids = torch.randint(301, (3, 40), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = exact(ids)[:, -1]
            state = prefill(model, ids[:, :-1], chunk_size=7)
            found = {"step": make_step(model)(ids[:, -1], state)[0]}
            found["model's own step"] = decode_step(model, ids[:, -1], state)[0]
        checks += [
            Check(name=f"{name} {what}", error=relative_rms(value, expected), bound=NETWORK_BOUND)
            for what, value in found.items()
        ]
    return checks


def _create(name: str, **options: Any) -> nn.Module:
    """Create one of our models, by its name or as `BLOCKS`."""
    return create_model(OURS, block_size=8, **options) if name == BLOCKS else create_model(name, **options)


def measure_generation(scale: GenerateScale, *, watch: Callable[[str], None]) -> Iterator[list[GenerateRow]]:
    """Measure part after part.

    Args:
        scale: What to measure; the part quality is about trained models, see `measure_quality`.
        watch: Called with a line when something starts.

    Yields:
        The rows of a case.
    """
    bench = _Bench(scale, watch)
    for measure in (bench.prefill, bench.decode, bench.batch, bench.train):  # timed prompts are not read again
        if measure.__name__ in scale.part:
            yield from measure()
        gc.collect()


class _Bench:
    """Holds the models, and the states after the prompts that were read."""

    def __init__(self, scale: GenerateScale, watch: Callable[[str], None]) -> None:
        self._scale, self._watch = scale, watch
        longest = max(*scale.contexts, *scale.baseline_contexts, scale.prompt, _SHORT)
        self._longest = longest + scale.repeats + 16  # every timed token makes the text longer
        self._models: dict[str, Any] = {}
        self._states: dict[tuple[str, int], State] = {}

    def _model(self, name: str) -> Any:
        if name not in self._models:
            torch.manual_seed(0)
            sizes: dict[str, Any] = {"depth": self._scale.depth, "max_length": self._longest}
            sizes |= {} if self._scale.vocab_size is None else {"vocab_size": self._scale.vocab_size}
            model = HuggingFaceGPT2(**sizes) if name == HUGGING_FACE else _create(name, **sizes)
            self._models[name] = model.eval()
        return self._models[name]

    def _baselines(self) -> tuple[str, ...]:
        return (BASELINE, HUGGING_FACE) if is_installed() else (BASELINE,)

    def _read(self, name: str, tokens: int, batch: int = 1) -> State:
        """Read a prompt; returns the state after it."""
        model, ids = self._model(name), torch.randint(1000, (batch, tokens), generator=torch.Generator().manual_seed(0))
        return model.prefill(ids) if name == HUGGING_FACE else prefill(model, ids)

    def _state(self, name: str, tokens: int) -> State:
        """Return the state after a prompt; with TSSA one pass over the longest prompt gives all of them."""
        if (name, tokens) not in self._states:
            self._watch(f"{name}: reading a prompt of {tokens} tokens")
            if name != OURS:
                self._states[name, tokens] = self._read(name, tokens)
                return self._states[name, tokens]
            ids = torch.randint(1000, (1, max(self._scale.contexts)), generator=torch.Generator().manual_seed(0))
            state, begin = None, 0
            for end in sorted(self._scale.contexts):
                state = prefill(self._model(name), ids[:, begin:end], state)
                self._states[name, end], begin = state, end
        return self._states[name, tokens]

    def prefill(self) -> Iterator[list[GenerateRow]]:
        names, tokens = (OURS, *self._baselines()), self._scale.prompt
        self._watch(f"prefill: {tokens} tokens, batch 1")
        for name in names:
            self._read(name, _SHORT)

        def read(name: str) -> None:
            self._states[name, tokens] = self._read(name, tokens)

        trials = {name: Trial(partial(read, name)) for name in names}
        rounds = interleave(trials, repeats=dict.fromkeys(names, self._scale.rounds))
        yield [_row(Part.PREFILL, name, tokens, rounds, (OURS,)) for name in names]

    def decode(self) -> Iterator[list[GenerateRow]]:
        scale = self._scale
        cases = [(OURS, context) for context in scale.contexts]
        cases += [(name, context) for context in scale.baseline_contexts for name in (BLOCKS, *self._baselines())]
        calls: dict[str, Callable[[], object]] = {}
        sizes: dict[str, int | None] = {}
        for name, context in cases:
            model, state, key = self._model(name), self._state(name, context), _at(name, context)
            calls[key] = _Text(model.step if name == HUGGING_FACE else make_step(model), state)
            sizes[key] = None if name == HUGGING_FACE else state_bytes(state)
        limits = _limits(self._model(OURS))
        self._watch(f"decode: contexts {', '.join(map(str, scale.contexts))}, batch 1")
        # All in the same rounds: contexts are compared with each other too.
        rounds = _time(limits | calls, scale.repeats)
        rows = [_row(Part.DECODE, name, 0, rounds, tuple(limits)) for name in limits]
        for name, context in cases:
            others = (*limits, _at(OURS, context), _at(OURS, scale.contexts[0]))
            key = _at(name, context)
            rows.append(_row(Part.DECODE, name, context, rounds, others, key=key, state_bytes=sizes[key]))
        yield rows

    def batch(self) -> Iterator[list[GenerateRow]]:
        model = self._model(OURS)
        calls: dict[tuple[Weights, int], Callable[[], object]] = {}
        kinds: list[Weights] = ["fp32"] if native_obstacles(model) else list(WEIGHTS)
        for batch in self._scale.batches:
            state = self._read(OURS, _SHORT, batch)
            for kind in kinds:
                calls[kind, batch] = _Text(make_step(model, kind), state, batch)
        self._watch(f"batch: {', '.join(map(str, self._scale.batches))} texts at a time, context {_SHORT}")
        names = {f"{kind} {batch}": call for (kind, batch), call in calls.items()}
        rounds = _time(names, self._scale.repeats)
        first = (f"fp32 {self._scale.batches[0]}",)
        yield [
            _row(Part.BATCH, OURS, _SHORT, rounds, first, key=f"{kind} {batch}", batch=batch, weights=kind)
            for kind, batch in calls
        ]

    def train(self) -> Iterator[list[GenerateRow]]:
        self._models.clear()  # what follows happens in other processes, which need the memory
        self._states.clear()
        names, scale = TRAINED if is_installed() else TRAINED[:1], self._scale
        for tokens in scale.train_tokens:
            rounds: list[Round] = []
            peaks: dict[str, int] = {}
            for _ in range(scale.rounds):
                rounds.append({})
                for name in names:
                    self._watch(f"train: a step of {name} on {tokens} tokens")
                    step = TrainStep(contender=name, tokens=tokens, depth=scale.depth, vocab_size=scale.vocab_size)
                    done = step_in_process(step)
                    rounds[-1][name] = done.seconds
                    peaks[name] = max(done.peak_bytes, peaks.get(name, 0))
            yield [_row(Part.TRAIN, name, tokens, rounds, names[1:], peak_bytes=peaks[name]) for name in names]


class _Text:
    """Some texts that get a token longer with every call."""

    def __init__(self, step: Callable[[Tensor, State], tuple[object, State]], state: State, batch: int = 1) -> None:
        self._step, self._state, self._tokens = step, state, torch.arange(batch)

    def __call__(self) -> object:
        logits, self._state = self._step(self._tokens, self._state)
        return logits


def _at(name: str, context: int) -> str:
    return f"{name} at {context}"


def _row(
    part: Part, name: str, tokens: int, rounds: Sequence[Round], others: Sequence[str], *, key: str = "", **more: Any
) -> GenerateRow:
    """Make a row of the times that stand under `key` in the rounds; that is the name unless it has several."""
    own = key or name
    return GenerateRow(
        part=part,
        contender=name,
        tokens=tokens,
        seconds=spread_of(rounds, own),
        ratios={other: spread(ratios(rounds, own, other)) for other in others if other in rounds[0]},
        **more,
    )


def _time(calls: Mapping[str, Callable[[], object]], repeats: int) -> list[Round]:
    trials = {name: Trial(call) for name, call in calls.items()}
    with torch.no_grad():
        for trial in trials.values():
            warm_up(trial, runs=3)
        return interleave(trials, repeats=dict.fromkeys(trials, repeats))


def _limits(model: LanguageToST) -> dict[str, Callable[[], object]]:
    """Return what reads every matrix of a model once, and does nothing else."""
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    matrices = [weight.detach() for weight in (*linear, *([model.tokens.weight] if model.head is None else []))]
    inputs = {matrix.shape[1]: torch.randn(1, matrix.shape[1]) for matrix in matrices}

    def by_torch() -> None:
        for matrix in matrices:
            F.linear(inputs[matrix.shape[1]], matrix)

    found: dict[str, Callable[[], object]] = {TORCH_LIMIT: by_torch}
    if not native_obstacles(model):
        found[OUR_LIMIT] = _our_limit(matrices, inputs)
    return found


def _our_limit(matrices: Sequence[Tensor], inputs: Mapping[int, Tensor]) -> Callable[[], object]:
    """Return the same by the native library: steps of models that have an output layer and nothing else."""
    ones = {width: torch.ones(width) for width in inputs}
    outputs = [torch.empty(len(matrix)) for matrix in matrices]
    steps = []
    for matrix, output in zip(matrices, outputs, strict=True):
        width = matrix.shape[1]
        step = library.Step(B=1, C=width, H=1, hidden=0, depth=0, norm=library.Norm(ones[width].data_ptr(), None, 1.0))
        step.threads, step.head = library.num_threads(), library.Matrix(matrix.data_ptr(), None, None, *matrix.shape)
        step.x, step.logits = inputs[width].data_ptr(), output.data_ptr()
        steps.append(step)
    alive = (matrices, inputs, ones, outputs)  # the library holds addresses only

    def by_us() -> object:
        for step in steps:
            library.run_step(torch.float32, step)
        return alive

    return by_us
