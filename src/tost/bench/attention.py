"""`tost bench attention`: attention layers side by side, one process per point, with memory and the cost on paper.

Four figures are the paper's: attention layers alone, forward, batch 1. Two are additional: whole base models, for the
paper's table of relative cost, and one layer alone in both passes. Points that would take too long or too much memory
are skipped with a prediction.

N tokens of width C in H heads of D = C / H features, batch 1. Operations of one layer, forward:

.. code-block:: text

                  matrix products            element by element
    tost          4 N C^2                    N (8 C + 7 H)
    tost, causal  4 N C^2                    N (10 C + 9 H)
    vit-sdpa      8 N C^2 + 4 N^2 C          5 N^2 H
    vit-textbook  8 N C^2 + 4 N^2 C          5 N^2 H
    crate         4 N C^2 + 4 N^2 C          5 N^2 H
    xcit          8 N C^2 + 4 N C D          6 N C + 6 H D^2
    gpt2-sdpa     8 N C^2 + 2 N (N+1) C      5/2 N (N+1) H
    gpt2-textbook 8 N C^2 + 4 N^2 C          6 N^2 H

A multiply-add is two operations, a softmax five per entry. A training step costs three times as much; fused kernels
compute the scores once more in the backward pass, which makes the part in N^2 3.5 times as much.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from tost._machine import choose_device
from tost._text import Table, count, grouped
from tost.bench.harness import (
    BOUNDS,
    MISSING,
    Benchmark,
    Check,
    Gate,
    Report,
    Row,
    Trial,
    cell,
    columns,
    free_bytes,
    keep_freed_memory,
    kept_bytes,
    layer_trial,
    pivot,
    plain,
    run_in_process,
    short,
    spread,
    watch_peak,
    with_quartiles,
)
from tost.bench.ops import check_operators
from tost.bench.plot import Line, Panel, Style, draw
from tost.errors import TostError
from tost.nn import (
    CausalSoftmaxAttention,
    CausalTSSAttention,
    CrossCovarianceAttention,
    SoftmaxAttention,
    SubspaceAttention,
    TSSAttention,
)
from tost.ops.flops import tssa_flops
from tost.testing import relative_rms

CONTENDERS = ("tost", "vit-sdpa", "vit-textbook", "crate", "xcit")
CAUSAL_CONTENDERS = ("tost", "gpt2-sdpa", "gpt2-textbook")
SUMMARIES = {
    "tost": "token statistics self-attention, causal in the causal figures",
    "vit-sdpa": "softmax attention of ViT on PyTorch's fused kernel",
    "vit-textbook": "the same in three steps, with all scores in memory",
    "crate": "subspace attention of CRATE, one projection as query, key and value, on PyTorch's fused kernel",
    "xcit": "cross-covariance attention of XCiT, among the features of a head",
    "gpt2-sdpa": "causal softmax attention of GPT-2 on PyTorch's fused kernel",
    "gpt2-textbook": "the same in four steps, with all scores and the mask in memory",
}
FIGURES = ("alone", "tokens", "width", "large", "causal", "base")
"""The paper's figures are tokens, width, large and causal."""

PAPER_TOKENS = 10_000
"""The paper states factors over ViT for this length."""

_PAPER_DEPTH = 12
_NUMBER = 4  # bytes
_HIDDEN = 4  # hidden width of the MLPs of both language models over their width
_FUSED = ("vit-sdpa", "crate", "gpt2-sdpa")
# Matrices of all scores, and of all tokens, that are in memory together at the peak; forward, then with backward. Only
# a forecast, to skip what cannot fit; memory itself is measured.
_HELD: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "tost": ((0, 3), (0, 7)),
    "vit-sdpa": ((0, 6), (0, 14)),
    "vit-textbook": ((2, 8), (3, 16)),
    "crate": ((0, 4), (0, 10)),
    "xcit": ((0, 10), (0, 20)),
    "gpt2-sdpa": ((0, 6), (0, 14)),
    "gpt2-textbook": ((2, 8), (3, 16)),
}
_START_SECONDS = 30.0  # a process may take this long to load and to build its layers
_SHORT = 16  # tokens of the pass that comes first, to load what is loaded on first use
_PAPER_RELATIVE = {4096: (0.60, 0.41), 8192: (0.46, 0.24)}  # time and memory of whole base models relative to GPT-2
# The paper's table of complexities: time and memory of a head, for n tokens of p features.
_PAPER_COMPLEXITY = {
    "tost": ("p n", "p"),
    "vit-sdpa": ("p n^2", "n^2"),
    "vit-textbook": ("p n^2", "n^2"),
    "crate": ("p n^2", "n^2"),
    "xcit": ("p^2 n", "p^2"),
}
_STYLES = {
    "tost": Style("ToST", "#D55E00", "o"),
    "vit-sdpa": Style("ViT, fused kernel", "#000000", "D"),
    "vit-textbook": Style("ViT, textbook", "#0072B2", "s", "--"),
    "crate": Style("CRATE", "#CC79A7", "^", "-."),
    "xcit": Style("XCiT", "#009E73", "P"),
    "gpt2-sdpa": Style("GPT-2, fused kernel", "#000000", "D"),
    "gpt2-textbook": Style("GPT-2, textbook", "#0072B2", "s", "--"),
}


@dataclass(frozen=True)
class Point:
    """One contender at one size: what a process measures.

    Attributes:
        figure: The figure that it belongs to.
        contender: One of the figure's contenders.
        tokens: Length of the one sequence, N.
        width: Model width, C.
        heads: Heads, H.
        depth: Layers.
        training: Forward and backward; else forward alone, without a graph.
        vocab_size: Ids of a whole model.
    """

    figure: str
    contender: str
    tokens: int
    width: int
    heads: int
    depth: int = _PAPER_DEPTH
    training: bool = False
    vocab_size: int = 50_304

    @property
    def causal(self) -> bool:
        """Whether a token sees only the tokens before it and itself."""
        return self.figure in ("causal", "base")

    @property
    def label(self) -> str:
        """One line for progress and error messages."""
        sizes = f"N={self.tokens} d={self.width} K={self.heads} {count(self.depth, 'layer')}"
        return f"{self.figure}: {self.contender} {sizes}{', training step' * self.training}"


class Cost(NamedTuple):
    """Operations in matrix products and elsewhere, and bytes held at the peak, about."""

    products: int
    elementwise: int
    held: int

    @property
    def flops(self) -> int:
        """All operations."""
        return self.products + self.elementwise


def layer_cost(point: Point) -> Cost:
    """Count one attention layer of a point, with its projections; see the table above."""
    N, C, H, causal = point.tokens, point.width, point.heads, point.causal
    D, pairs, name = C // H, N * N, point.contender
    # Operations in products, and all others, between the projections.
    mixing, elementwise = {
        "tost": (0, N * tssa_flops(H, D, causal=causal, bias=causal)),
        "vit-sdpa": (4 * pairs * C, 5 * pairs * H),
        "vit-textbook": (4 * pairs * C, 5 * pairs * H),
        "crate": (4 * pairs * C, 5 * pairs * H),
        "xcit": (4 * N * C * D, 6 * N * C + 6 * C * D),
        "gpt2-sdpa": (2 * N * (N + 1) * C, 5 * N * (N + 1) * H // 2),
        "gpt2-textbook": (4 * pairs * C, 6 * pairs * H),
    }[name]
    linear = 3 if point.training else 1
    quadratic = 3.5 if point.training and name in _FUSED else linear
    parts = 1 if name in ("tost", "crate") else 3
    scores, held_tokens = _HELD[name][point.training]
    weights = (parts + 1) * C * C * (2 if point.training else 1)
    return Cost(
        products=linear * 2 * (parts + 1) * N * C * C + round(quadratic * mixing),
        elementwise=linear * elementwise,
        held=_NUMBER * (scores * H * N * N + held_tokens * N * C + weights),
    )


def point_cost(point: Point) -> Cost:
    """Count all layers of a point; of a whole model also its MLPs, and the logits of the last token."""
    N, C, V, L, layer = point.tokens, point.width, point.vocab_size, point.depth, layer_cost(point)
    weights = _NUMBER * (L - 1) * (2 if point.contender in ("tost", "crate") else 4) * C * C
    held = layer.held + weights * (2 if point.training else 1)
    products = L * layer.products
    if point.figure == "base":
        products += L * 4 * N * C * _HIDDEN * C + 2 * C * V
        held += _NUMBER * (L * 2 * _HIDDEN * C * C + C * V + (2 * _HIDDEN + 1) * N * C)
    return Cost(products=products, elementwise=L * layer.elementwise, held=held)


class TextbookAttention(nn.Module):
    """Softmax attention with the scores of all pairs of tokens in memory, on the projections of a fused layer."""

    def __init__(self, layer: Any, *, causal: bool) -> None:
        super().__init__()
        self.proj_in, self.proj_out = layer.proj_in, layer.proj_out
        self.num_heads, self.head_dim, self.causal = layer.num_heads, layer.head_dim, causal

    def forward(self, x: Tensor, *unused: object, **also_unused: object) -> Tensor:
        """Map ``[B, N, C]`` to ``[B, N, C]``."""
        query, key, value = self.proj_in(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (query / math.sqrt(self.head_dim)) @ key.transpose(-2, -1)
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
            scores = scores.masked_fill_(hidden, -math.inf)
        weights = scores.softmax(dim=-1)
        del scores  # they would stay in memory next to the weights
        y: Tensor = self.proj_out((weights @ value).transpose(1, 2).flatten(2))
        return y


def build_layer(point: Point) -> nn.Module:
    """Return one attention layer, ``[B, N, C]`` to ``[B, N, C]``.

    All have a bias at their output, ToST's causal form too, though the language models have none: without residual
    sums between the layers the tokens would otherwise shrink to numbers that processors are slow with.
    """
    C, H = point.width, point.heads
    if point.contender == "tost":
        return CausalTSSAttention(C, H, point.tokens, out_bias=True) if point.causal else TSSAttention(C, H)
    fused = {"crate": SubspaceAttention, "xcit": CrossCovarianceAttention}.get(point.contender)
    if fused is None:
        fused = CausalSoftmaxAttention if point.causal else SoftmaxAttention
    layer = cast(Any, fused)(C, H)
    return TextbookAttention(layer, causal=point.causal) if point.contender.endswith("textbook") else layer


class LastLogits(nn.Module):
    """A language model from ids ``[B, N]`` to the logits of the next token, ``[B, V]``, without a state."""

    def __init__(self, point: Point) -> None:
        super().__init__()
        from tost.models import create_model

        name = "tost_lm_base" if point.contender == "tost" else "gpt2_base"
        sizes = {"embed_dim": point.width, "num_heads": point.heads, "depth": point.depth}
        sizes |= {"max_length": point.tokens, "vocab_size": point.vocab_size}
        model: Any = create_model(name, **sizes).eval()
        if point.contender == "gpt2-textbook":
            for block in model.blocks:
                block.attention = TextbookAttention(block.attention, causal=True)
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Read a text."""
        model: Any = self.model
        logits: Tensor = model.logits(model._features(ids, None, None)[:, -1])
        return logits


@torch.no_grad()
def check_layers() -> list[Check]:
    """Compare every baseline with its definition in float64, on the same weights and tokens."""
    checks = []
    for name in dict.fromkeys(CONTENDERS[1:] + CAUSAL_CONTENDERS[1:]):
        figure = "causal" if name.startswith("gpt2") else "tokens"
        torch.manual_seed(0)
        layer = build_layer(Point(figure, name, tokens=37, width=24, heads=3, depth=1)).eval()
        x = torch.randn(2, 37, 24)
        y = layer(x)
        error = relative_rms(y, _definition(name, layer.double(), x.double()))
        checks.append(Check(f"layer {name}", error, BOUNDS[torch.float32]))
    return checks


def _definition(name: str, layer: Any, x: Tensor) -> Tensor:
    """Return the definition's output of a layer, one head after the other."""
    projected = layer.proj_in(x).unflatten(-1, (-1, layer.num_heads, layer.head_dim))
    query, key, value = (projected[:, :, min(part, projected.shape[2] - 1)] for part in range(3))
    heads = []
    for h in range(layer.num_heads):
        q, k, v = query[:, :, h], key[:, :, h], value[:, :, h]
        if name == "xcit":
            q, k = q / q.norm(dim=1, keepdim=True), k / k.norm(dim=1, keepdim=True)
            weights = (layer.temperature[h] * q.transpose(1, 2) @ k).softmax(dim=-1)
            heads.append(v @ weights.transpose(1, 2))
            continue
        scores = q @ k.transpose(1, 2) / math.sqrt(layer.head_dim)
        if name.startswith("gpt2"):
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        heads.append(scores.softmax(dim=-1) @ v)
    y: Tensor = layer.proj_out(torch.cat(heads, dim=-1))
    return y


@dataclass(frozen=True)
class Job:
    """A point, and for how long and where to measure it."""

    point: Point
    device: str
    pass_seconds: float
    most_repeats: int


@dataclass(frozen=True)
class Usage:
    """Timed passes of a point, growth of memory in its first pass, bytes kept for backward, bytes of parameters."""

    seconds: list[float]
    peak_bytes: int
    kept_bytes: int | None
    weight_bytes: int


def build_trial(point: Point, device: str) -> tuple[nn.Module, Tensor, Trial]:
    """Return the layers of a point, their input, and one pass ready to be timed."""
    torch.manual_seed(0)
    if point.figure == "base":
        layers: nn.Module = LastLogits(point)
        x = torch.randint(point.vocab_size, (1, point.tokens), device=device)
    else:
        layers = nn.Sequential(*(build_layer(point) for _ in range(point.depth)))
        x = torch.randn(1, point.tokens, point.width, device=device).requires_grad_(point.training)
    layers = layers.to(device).train(point.training)
    cotangent = torch.randn_like(x) if point.training else None
    return layers, x, layer_trial(layers, x, cotangent, device)


def measure_point(job: Job) -> Usage:
    """Measure a point in this process.

    The first pass shows the memory, with a C library that returns freed blocks at once. If it is slow it is also the
    timed one. Otherwise the library keeps freed blocks from then on, and passes are repeated.
    """
    layers, x, trial = build_trial(job.point, job.device)
    with torch.set_grad_enabled(job.point.training):
        short_pass = layers(x[:, :_SHORT])
        if job.point.training:
            short_pass.sum().backward()
    trial.reset()
    kept = kept_bytes(lambda: layers(x), excluding=layers.parameters()) if job.point.training else None
    with watch_peak(job.device) as peak:
        seconds = [trial.seconds()]
    if seconds[0] <= job.pass_seconds:
        keep_freed_memory()
        trial.seconds()
        repeats = min(max(int(job.pass_seconds / max(seconds[0], 1e-9)), 3), job.most_repeats)
        seconds = [trial.seconds() for _ in range(repeats)]
    return Usage(seconds, peak[0], kept, sum(parameter.nbytes for parameter in layers.parameters()))


@dataclass
class Attention(Benchmark):
    """Time ToST, ViT, CRATE, XCiT and GPT-2 attention by size, with memory.

    Attributes:
        figure: Figures to measure.
        device: ``cpu``, ``cuda``, or ``auto``.
        limit_seconds: Skip passes that are expected to take longer.
        limit_bytes: Skip passes that are expected to need more; None for three quarters of the free memory.
        total_seconds: Start no point after this long.
        quick: Measure short sequences for a demonstration.
    """

    name: ClassVar[str] = "attention"
    heading: ClassVar[str] = "Attention layers side by side"
    checked: ClassVar[str] = "the operators and every layer with their definitions"
    introduction: ClassVar[str] = (
        "Batch 1, float32, one process per row. Peak memory is the growth of a fresh process during its first pass, "
        "without weights and input. Times are medians with quartiles in brackets; a slow pass is timed once. Skipped "
        "rows have a prediction, from their operations and the rate of the point before."
    )
    draws: ClassVar[bool] = True
    selects: ClassVar[tuple[str, ...]] = ("figure",)

    figure: tuple[str, ...] = FIGURES
    device: str = "auto"
    limit_seconds: float = 60.0
    limit_bytes: int | None = None
    total_seconds: float = 26 * 60.0
    quick: bool = False
    pass_seconds: float = field(init=False, default=2.0)
    most_repeats: int = field(init=False, default=50)

    def __post_init__(self) -> None:
        self.device = choose_device(self.device).type
        if self.quick:
            self.pass_seconds, self.most_repeats = 0.1, 5

    @property
    def points(self) -> list[Point]:
        """All points in order: within a figure short ones first, all contenders of a size together."""
        found: list[Point] = []
        for figure in self.figure:
            tokens, widths, heads = _QUICK[figure] if self.quick else _STANDARD[figure]
            small: dict[str, Any] = {"depth": 2, "vocab_size": 256} if self.quick else {}
            # Twelve layers of the wide figure take minutes on a CPU and show the same.
            if figure == "alone" or (figure == "large" and (self.quick or self.device == "cpu")):
                small["depth"] = 1
            names = CAUSAL_CONTENDERS if figure in ("causal", "base") else CONTENDERS
            for training, N, C, name in product(
                (False, True) if figure == "alone" else (False,), tokens, widths, names
            ):
                found.append(Point(figure, name, N, C, heads, training=training, **small))
        return found

    @property
    def steps(self) -> int:
        """One per point."""
        return len(self.points)

    def about(self) -> dict[str, Any]:
        """Return the options and the meaning of the contenders' names."""
        return {**super().about(), "contenders": SUMMARIES}

    def check(self) -> Gate:
        """Compare the operators with the reference and every baseline with its definition."""
        gate = check_operators()
        gate.checks += check_layers()
        return gate

    def measure(self, results: dict[str, Any], watch: Callable[[str], None]) -> Iterator[str]:
        """Measure one point after the other."""
        started = time.perf_counter()
        limit_bytes = self.limit_bytes or free_bytes(self.device) * 3 // 4
        rates: dict[tuple[str, str, bool], float] = {}
        for point in self.points:
            watch(point.label)
            cost, series = point_cost(point), (point.figure, point.contender, point.training)
            row: Row = {**plain(point), "flops": cost.flops, "seconds": None, "peak_bytes": None}
            # A contender continues at the rate of its last point.
            expected = cost.flops / rates[series] if series in rates else 0.0
            elapsed = time.perf_counter() - started
            row["note"] = self._skipped(cost, expected, limit_bytes, elapsed)
            if not row["note"]:
                job = Job(point, self.device, self.pass_seconds, self.most_repeats)
                timeout = _START_SECONDS + 3 * self.limit_seconds
                options: dict[str, Any] = {"timeout": timeout, "device": self.device, "limit_bytes": limit_bytes}
                try:
                    usage = run_in_process(measure_point, job, label=point.label, **options)
                    seconds = spread(usage.seconds)
                    row |= plain(usage) | {"seconds": plain(seconds)}
                    rates[series] = cost.flops / seconds.median
                except TostError as error:
                    reason = str(error).removeprefix(f"{point.label}: ")
                    row["note"] = f"{reason} (predicted {_seconds(expected)})"
            results["rows"].append(row)
            results["elapsed_seconds"] = time.perf_counter() - started
            yield row["note"] or f"{_milliseconds(row):.3g} ms, {row['peak_bytes'] / 1e6:.1f} MB"

    def _skipped(self, cost: Cost, expected: float, limit_bytes: int, elapsed: float) -> str:
        """Return why a point is skipped, or an empty string."""
        if expected > self.limit_seconds:
            return f"predicted {expected:.0f} s"
        if cost.held > limit_bytes:
            return f"predicted {cost.held / 1e9:.1f} GB"
        if elapsed + expected > self.total_seconds:
            return f"no time left, predicted {_seconds(expected)}"
        return ""

    def tables(self, results: Mapping[str, Any]) -> list[Table]:
        """Return one table per figure and pass, growth, and whole models relative to GPT-2."""
        rows = results["rows"]
        built = [_figure_table(line) for line in _figures(rows).values()]
        built += [_growth_table(rows), _relative_table([row for row in rows if row["figure"] == "base"])]
        return [table for table in built if table.rows]

    def pictures(self, report: Report) -> dict[str, bytes]:
        """Draw each figure: time on the left, peak memory on the right, a line of panels per pass."""
        figures = grouped(report.results["rows"], lambda row: str(row["figure"]))
        return {f"_{figure}.svg": _picture(rows, report.machine) for figure, rows in figures.items()}


Sizes = tuple[tuple[int, ...], tuple[int, ...], int]
# Tokens, widths and heads of the figures.
_STANDARD: dict[str, Sizes] = {
    "alone": ((1024, 4096, PAPER_TOKENS, 16_384), (384,), 8),
    "tokens": ((1024, 2048, 4096, PAPER_TOKENS, 16_384), (384,), 8),
    "width": ((4096,), (96, 192, 384, 768, 1536), 8),
    "large": ((512, 1024, 2048, 4096, 8192), (4096,), 32),
    "causal": ((1024, 2048, 4096, 8192, 16_384), (768,), 12),
    "base": ((2048, 4096, 8192), (768,), 12),
}
_QUICK: dict[str, Sizes] = {
    "alone": ((512,), (64,), 4),
    "tokens": ((256, 512), (64,), 4),
    "width": ((256,), (64, 128), 4),
    "large": ((512,), (256,), 8),
    "causal": ((256, 512), (64,), 4),
    "base": ((512,), (64,), 4),
}


def _milliseconds(row: Row) -> float | None:
    return 1e3 * row["seconds"]["median"] if row["seconds"] else None


def _peak(row: Row) -> float | None:
    peak: float | None = row["peak_bytes"]
    return peak


def _peak_and_weights(row: Row) -> float | None:
    return None if row["peak_bytes"] is None else row["peak_bytes"] + row["weight_bytes"]


def _position(row: Row) -> int:
    return int(row["width" if row["figure"] == "width" else "tokens"])


def _pass(training: bool) -> str:
    return "forward and backward" if training else "forward"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def _figures(rows: Sequence[Row]) -> dict[tuple[str, bool], list[Row]]:
    return grouped(rows, lambda row: (row["figure"], row["training"]))


def figure_title(row: Row) -> str:
    """Return the common properties of the rows of one figure and pass."""
    layers = count(row["depth"], "causal attention layer" if row["figure"] == "causal" else "attention layer")
    if row["figure"] == "base":
        layers = f"Whole models of {row['depth']} layers"
    elif row["figure"] != "alone" and row["depth"] != _PAPER_DEPTH:
        layers += f" ({_PAPER_DEPTH} in the paper)"
    size = f"n={row['tokens']:,}" if row["figure"] == "width" else f"d={row['width']:,}"
    return f"{layers}, {size}, K={row['heads']}, {_pass(row['training'])}"


def _figure_table(rows: Sequence[Row]) -> Table:
    """Return the measurements of one figure and pass beside the cost on paper."""
    ours = {_position(row): row for row in rows if row["contender"] == "tost"}
    cells: list[tuple[str, Callable[[Row], str]]] = [
        ("width" if rows[0]["figure"] == "width" else "tokens", lambda row: f"{_position(row):,}"),
        ("contender", lambda row: row["contender"]),
        ("ms", lambda row: row["note"] or with_quartiles(row["seconds"], lambda seconds: short(1e3 * seconds))),
        ("/ tost", lambda row: _quotient(row, ours.get(_position(row)), _milliseconds)),
        ("peak MB", lambda row: cell(row["peak_bytes"], ",.1f", 1e-6)),
        ("/ tost", lambda row: _quotient(row, ours.get(_position(row)), _peak)),
        ("GFLOP", lambda row: short(row["flops"] / 1e9)),
    ]
    if rows[0]["training"]:
        cells.append(("MB kept for backward", lambda row: cell(row.get("kept_bytes"), ",.1f", 1e-6)))
    return columns(figure_title(rows[0]), rows, cells, labels=2)


def _growth_table(rows: Sequence[Row]) -> Table:
    """Return the paper's complexities beside measured exponents: slopes in logarithms between the two largest sizes.

    Projections are included, which hide the exponents of short sequences.
    """
    lines = []
    for name, (time_of_head, memory_of_head) in _PAPER_COMPLEXITY.items():
        slopes = []
        for figure, value in product(("tokens", "width"), (_milliseconds, _peak)):
            line = [row for row in rows if row["figure"] == figure and row["contender"] == name]
            points = sorted((_position(row), number) for row in line if (number := value(row)))[-2:]
            if len(points) < 2:
                slopes.append(MISSING)
            else:
                (start, low), (end, high) = points
                slopes.append(f"{math.log(high / low) / math.log(end / start):.2f}")
        if slopes != [MISSING] * 4:
            lines.append((name, f"O({time_of_head})", f"O({memory_of_head})", *slopes))
    headers = (
        "contender",
        "time of a head",
        "memory of a head",
        "time ~ n^",
        "memory ~ n^",
        "time ~ d^",
        "memory ~ d^",
    )
    return Table(title="Growth, between the two largest sizes measured", headers=headers, rows=lines, labels=3)


def _relative_table(rows: Sequence[Row]) -> Table:
    """Return the paper's table of base models: time and memory relative to GPT-2, weights included in memory."""
    base = {(row["contender"], row["tokens"]): row for row in rows}
    cells = []
    for tokens, other in product(sorted({row["tokens"] for row in rows}), CAUSAL_CONTENDERS[1:]):
        ours, theirs = base.get(("tost", tokens)), base.get((other, tokens))
        measured = [_quotient(ours, theirs, _milliseconds), _quotient(ours, theirs, _peak_and_weights)]
        paper = [cell(number, ".2f") for number in _PAPER_RELATIVE.get(tokens, (None, None))]
        names = ("time", "memory", "paper: time", "paper: memory")
        cells += [((f"{tokens:,}", other), name, text) for name, text in zip(names, [*measured, *paper], strict=True)]
    return pivot("Whole base models, relative to GPT-2", ["tokens", "ToST base over"], cells)


def _quotient(row: Row | None, base: Row | None, value: Callable[[Row], float | None]) -> str:
    above, below = (None if each is None else value(each) for each in (row, base))
    if not above or not below:
        return MISSING
    ratio = above / below
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def _picture(rows: Sequence[Row], machine: str) -> bytes:
    panels = []
    for chosen in _figures(rows).values():
        for what, value, scale in (("time in ms", _milliseconds, 1.0), ("peak memory in MB", _peak, 1e-6)):
            lines = []
            for name, line in grouped(chosen, lambda row: str(row["contender"])).items():
                points = sorted((_position(row), scale * number) for row in line if (number := value(row)))
                if points:
                    lines.append(Line(style=_STYLES[name], points=points, bold=name == "tost"))
            sizes = sorted({_position(row) for row in chosen})
            panels.append(Panel(title=f"{figure_title(chosen[0])}\n{what}", lines=lines, sizes=sizes))
    absent = [f"{_STYLES[row['contender']].label} at {_position(row):,}, {row['note']}" for row in rows if row["note"]]
    remarks = textwrap.wrap(f"not measured: {'; '.join(absent)}", 150) if absent else []
    axis = "model width d" if rows[0]["figure"] == "width" else "tokens n"
    return draw(panels, below=[axis, *remarks, machine])
