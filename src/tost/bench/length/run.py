"""Training steps on long sequences: the memory that they take and their time, by length.

Every point is a process of its own, in which a model takes one step, forward and backward, on one sequence. Beside the
time that passed there is the processor time of all threads, which other work on the machine disturbs less. The gate is
that gradients in pieces are those of the whole sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from tost._text import Table
from tost.bench.harness.device import free_bytes
from tost.bench.harness.gate import Check, GateResult
from tost.bench.harness.measurement import Measurement
from tost.bench.harness.passes import measure_step
from tost.bench.harness.table import cell, pivot, without_empty
from tost.bench.harness.worker import run_in_process
from tost.bench.length.cases import LengthScale, Way
from tost.errors import TostError
from tost.models import create_model, model_options, token_flops
from tost.models.language.model import LanguageToST
from tost.testing import relative_rms

BARS = {"memory": 1.3, "time": 1.1}
"""Largest accepted ratio of the longest sequence to the longest but one, in pieces."""
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-10}
"""Largest relative difference of gradients in pieces, all of them as one vector."""
MODELS = {Way.PIECES: "tost_lm_base", Way.WHOLE: "tost_lm_base", Way.GPT2: "gpt2_base"}

_PIECES_OF_CHECK = 16
_WARM = 16  # tokens of the step that comes first, to load what is loaded on first use


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way at one length: what a process measures."""

    way: Way
    tokens: int
    chunk: int
    width: int
    heads: int
    depth: int
    vocab_size: int

    @property
    def label(self) -> str:
        """One line for progress and error messages."""
        return f"{self.way}, {self.tokens:,} tokens"

    @property
    def flops(self) -> int:
        """Operations of a forward pass."""
        options: Any = model_options(MODELS[self.way], self._options() | {"max_length": self.tokens})
        return self.tokens * token_flops(options).total

    def build(self) -> LanguageToST:
        """Return the model; without learned positions it takes any length."""
        torch.manual_seed(0)
        return cast(LanguageToST, create_model(MODELS[self.way], **self._options()))

    def _options(self) -> dict[str, int | str]:
        sizes = {"embed_dim": self.width, "num_heads": self.heads, "depth": self.depth, "vocab_size": self.vocab_size}
        return sizes | {"position": "none"}


@dataclass(frozen=True, kw_only=True)
class PointUsage:
    """What a step took.

    Attributes:
        seconds: Time that passed.
        cpu_seconds: Processor time of all threads.
        peak_bytes: By how much memory grew at most. Weights and ids exist before, gradients do not.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class LengthRow:
    """One way at one length; `usage` is None where `note` says why."""

    way: Way
    tokens: int
    usage: PointUsage | None = None
    note: str = ""


@dataclass(kw_only=True)
class LengthResults:
    """All that was measured.

    Attributes:
        differences: Relative difference of the gradients in pieces, by dtype.
        rows: The points.
    """

    differences: dict[str, float] = field(default_factory=dict)
    rows: list[LengthRow] = field(default_factory=list)

    def row(self, way: Way, tokens: int) -> LengthRow | None:
        """Return a point; None if it is not there."""
        return next((row for row in self.rows if (row.way, row.tokens) == (way, tokens)), None)


class LengthMeasurement(Measurement[LengthScale, LengthResults]):
    """The benchmark `tost bench length`."""

    results = LengthResults
    heading = "Training steps by length"
    checked = "gradients in pieces with those of the whole sequence"

    def check(self) -> GateResult:
        """Compare the gradients of a narrow model of three layers, in pieces and whole."""
        self.differences = {dtype: difference(dtype, self.scale.checked_tokens) for dtype in BOUNDS}
        return GateResult(
            checks=tuple(
                Check(name=f"gradients, {dtype}", error=self.differences[dtype], bound=bound)
                for dtype, bound in BOUNDS.items()
            )
        )

    def measure(self, results: LengthResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Take one step at each point; what would take too long or too much memory is left out."""
        results.differences = {str(dtype).removeprefix("torch."): error for dtype, error in self.differences.items()}
        limit_bytes = self.scale.limit_bytes or free_bytes("cpu") * 3 // 4
        last: tuple[Point, PointUsage] | None = None
        sizes = {name: getattr(self.scale, name) for name in ("chunk", "width", "heads", "depth", "vocab_size")}
        for way, tokens in self.scale.cases:
            point, row = Point(way=way, tokens=tokens, **sizes), LengthRow(way=way, tokens=tokens)
            watch(point.label)
            known = last if last is not None and last[0].way is way else None
            note = refusal(point, *known, self.scale.limit_seconds, limit_bytes) if known else ""
            if not note:
                try:
                    usage = run_in_process(measure_point, point, label=point.label, limit_bytes=limit_bytes)
                    row, last = replace(row, usage=usage), (point, usage)
                except TostError as error:
                    note = str(error).removeprefix(f"{point.label}: ")
            results.rows.append(replace(row, note=note))
            yield note or _told(results.rows[-1])

    @staticmethod
    def tables(results: LengthResults) -> list[Table]:
        """Return memory and time by length; what was left out says why."""
        skipped = tuple(f"{row.way}, {row.tokens:,} tokens: {row.note}" for row in results.rows if row.note)
        made = [
            pivot(
                title,
                ("tokens",),
                [((f"{row.tokens:,}",), row.way, cell(_number(row, key), form, scale=scale)) for row in results.rows],
                notes=extra,
            )
            for title, key, form, scale, extra in (
                ("Growth of memory in a step, MB", "peak_bytes", ",.0f", 1e-6, Way.notes() + skipped),
                ("Time per token, microseconds", "seconds", ".1f", 1e6, ()),
                ("Processor time per token, microseconds", "cpu_seconds", ".1f", 1e6, ()),
            )
        ]
        return without_empty(made)

    @staticmethod
    def findings(results: LengthResults) -> list[str]:
        """Return the numbers beside their goals."""
        found = [
            f"gradients in pieces differ by {results.differences[name]:.1e} in {name}; the goal is {bound:g}"
            for dtype, bound in BOUNDS.items()
            if (name := str(dtype).removeprefix("torch.")) in results.differences
        ]
        measured = [row for row in results.rows if row.way is Way.PIECES and row.usage]
        if len(measured) > 1:
            before, last = measured[-2:]
            memory, clock, processor = (
                (_number(last, key) or 0) / (_number(before, key) or 1)
                for key in ("peak_bytes", "seconds", "cpu_seconds")
            )
            lengths = f"in pieces, {last.tokens:,} tokens against {before.tokens:,}"
            found.append(f"{lengths}: {memory:.2f} of the memory; the goal is {BARS['memory']}")
            found.append(
                f"{lengths}: {clock:.2f} of the time per token, {processor:.2f} of the processor time; "
                f"the goal is {BARS['time']}"
            )
        return found


def measure_point(point: Point) -> PointUsage:
    """Take a training step in this process, after a short one."""
    model, ids = point.build().train(), _ids(point.tokens, point.vocab_size)
    chunk = point.chunk if point.way is Way.PIECES else None

    def step(length: int) -> float:
        loss = model.loss(ids[:, :length], ids[:, 1 : length + 1], chunk=chunk)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    step(min(_WARM, point.tokens))
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    usage = measure_step(lambda: step(point.tokens))
    cpu_seconds = time.process_time() - start
    return PointUsage(seconds=usage.seconds, cpu_seconds=cpu_seconds, peak_bytes=usage.peak_bytes)


def refusal(point: Point, before: Point, usage: PointUsage, limit_seconds: float, limit_bytes: int) -> str:
    """Return why a longer sequence is left out, judged by a shorter one; an empty string if it is not.

    Args:
        point: What may be measured.
        before: The same way at another length.
        usage: What that took.
        limit_seconds: The longest that a whole sequence may take.
        limit_bytes: The most memory that it may need.
    """
    if point.way is Way.PIECES:
        return ""
    seconds = usage.seconds * point.flops / before.flops
    expected = usage.peak_bytes * point.tokens / before.tokens
    if seconds <= limit_seconds and expected <= limit_bytes:
        return ""
    return f"left out, predicted {seconds:,.0f} s and {expected / 1e9:,.1f} GB"


def difference(dtype: torch.dtype, tokens: int) -> float:
    """Return how far the gradients of a sequence in pieces are from those of the whole, relative to their size.

    The model has three layers, and its attention is not scaled down at the start, as that of the base models is.
    """
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 4, "depth": 3, "vocab_size": 256}
    model = cast(LanguageToST, create_model("tost_lm_base", **sizes, position="none", layer_scale=None)).to(dtype)
    ids = _ids(tokens, 256)

    def gradients(chunk: int | None) -> Tensor:
        loss = model.loss(ids[:, :-1], ids[:, 1:], chunk=chunk)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])

    whole = gradients(None)
    return relative_rms(gradients(max(1, tokens // _PIECES_OF_CHECK)), whole)


def _ids(tokens: int, vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(1))


def _number(row: LengthRow, key: str) -> float | None:
    """Return the memory of a point, or one of its times per token."""
    if row.usage is None:
        return None
    value: float = getattr(row.usage, key)
    return value if key == "peak_bytes" else value / row.tokens


def _told(row: LengthRow) -> str:
    assert row.usage is not None
    return f"{row.usage.peak_bytes / 1e6:,.0f} MB, {1e6 * row.usage.seconds / row.tokens:.1f} microseconds per token"
