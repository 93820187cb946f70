"""Tables, sentences and pictures of attention layers side by side. All of it is computed from the rows."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tost._text import Table, count, grouped
from tost.bench.attention import run
from tost.bench.attention.cases import PAPER_DEPTH, PAPER_TOKENS, SUMMARIES, AttentionScale, Figure
from tost.bench.attention.layers import check_layers
from tost.bench.attention.run import AttentionResults, AttentionRow, measure_attention, measure_pairs
from tost.bench.harness.device import choose_device
from tost.bench.harness.gate import GateResult
from tost.bench.harness.measurement import Measurement, page
from tost.bench.harness.plot import Line, Panel, Style, draw, lines_of
from tost.bench.harness.report import Report
from tost.bench.harness.table import MISSING, cell, columns, pivot, short, with_quartiles, without_empty
from tost.bench.ops import gate
from tost.bench.ops.cases import Op

# The goals for one layer at the paper's length: softmax attention on the fused kernel takes this many times as long,
# and the textbook's form this many times the memory.
_TIMES_FASTER, _TIMES_SMALLER = 30, 100
# What the paper reports from its GPU: at its length over ViT, and of whole base models relative to GPT-2.
_PAPER_AHEAD = "about 10 times faster than ViT and almost 100 times less memory, on an H800"
_PAPER_RELATIVE = {4096: (0.60, 0.41), 8192: (0.46, 0.24)}
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
_AXES = {"tokens": "tokens n", "width": "model width d"}
_INTRODUCTION = """\
Measured in {minutes:.1f} minutes. Batch 1, float32, one process per row. Peak memory is the growth of a fresh process
during its first pass, without weights and input. Times are medians with quartiles in brackets; a pass that takes longer
than {pass_seconds:g} s is timed once. Rows that were left out have what was predicted, from their operations and the
rate of the point before."""
_ROOFLINE = """\
The roofline is max(operations / {flops:.0f} GFLOP/s, bytes / {bytes:.1f} GB/s), both measured in this run: a matrix
product and a copy."""
Value = Callable[[AttentionRow], float | None]


def _milliseconds(row: AttentionRow) -> float | None:
    return 1e3 * row.seconds.median if row.seconds else None


def _peak(row: AttentionRow) -> float | None:
    return row.peak_bytes


def _peak_and_weights(row: AttentionRow) -> float | None:
    return None if row.peak_bytes is None or row.weight_bytes is None else row.peak_bytes + row.weight_bytes


def _pass(training: bool) -> str:
    return "forward and backward" if training else "forward"


def figure_title(rows: Sequence[AttentionRow]) -> str:
    """Return what the rows of one figure and pass have in common, in a few words."""
    row = rows[0]
    layers = count(row.depth, "causal attention layer" if row.figure is Figure.CAUSAL else "attention layer")
    if row.whole:
        layers = f"Whole models of {row.depth} layers"
    elif row.figure.published and row.depth != PAPER_DEPTH:
        layers += f" ({PAPER_DEPTH} in the paper)"
    size = f"n={row.tokens:,}" if row.figure.axis == "width" else f"d={row.width:,}"
    return f"{layers}, {size}, K={row.heads}, {_pass(row.training)}"


def attention_tables(results: AttentionResults) -> list[Table]:
    """Return what fits on a terminal: per figure the time and the memory by size, one row per contender."""
    tables = []
    for (_, training), rows in _figures(results.rows).items():
        title, notes = figure_title(rows), [f"{row.label}: {row.note}" for row in rows if row.note]
        tables.append(
            _by_size(f"{title}, ms", rows, lambda row: row.note.partition(" (")[0] or short(_milliseconds(row)), notes)
        )
        tables.append(_by_size(f"{title}, peak memory in MB", rows, lambda row: _megabytes(row.peak_bytes)))
        if training:
            tables.append(_kept_table(f"{title}, MB kept for the backward pass", rows))
    return without_empty(tables)


def _figures(rows: Sequence[AttentionRow]) -> dict[tuple[Figure, bool], list[AttentionRow]]:
    return grouped(rows, lambda row: (row.figure, row.training))


def _by_size(
    title: str, rows: Sequence[AttentionRow], text: Callable[[AttentionRow], str], notes: Sequence[str] = ()
) -> Table:
    cells = [((row.contender,), f"{row.position:,}", text(row)) for row in rows]
    return pivot(title, ["contender"], cells, notes=notes)


def _kept_table(title: str, rows: Sequence[AttentionRow]) -> Table:
    return _by_size(title, rows, lambda row: _megabytes(row.kept_bytes))


def _megabytes(number: int | None) -> str:
    return cell(number, ",.0f" if number is not None and number >= 1e8 else ".1f", scale=1e-6)


def detail_table(rows: Sequence[AttentionRow]) -> Table:
    """Return every number of one figure and pass: measured beside what it costs on paper."""
    ours = {row.position: row for row in rows if row.contender == "tost"}
    cells: list[tuple[str, Callable[[AttentionRow], str]]] = [
        (rows[0].figure.axis, lambda row: f"{row.position:,}"),
        ("contender", lambda row: row.contender),
        ("depth", lambda row: str(row.depth)),
        ("ms", lambda row: row.note or with_quartiles(row.seconds, lambda seconds: short(1e3 * seconds))),
        ("passes", lambda row: str(row.seconds.count) if row.seconds else MISSING),
        ("/ tost", lambda row: _quotient(row, ours.get(row.position), _milliseconds)),
        ("peak MB", lambda row: _megabytes(row.peak_bytes)),
        ("/ tost", lambda row: _quotient(row, ours.get(row.position), _peak)),
        ("weights MB", lambda row: _megabytes(row.weight_bytes)),
        ("GFLOP", lambda row: short(row.flops / 1e9)),
        ("GB moved", lambda row: short(row.bytes_moved / 1e9)),
        ("roofline ms", lambda row: short(1e3 * row.roofline_seconds)),
        ("ms / roofline", lambda row: cell(row.times_roofline, ".2f")),
    ]
    return columns(figure_title(rows), rows, cells, labels=2)


def growth_table(rows: Sequence[AttentionRow]) -> Table:
    """Return the paper's table of complexities beside the exponents that were measured.

    An exponent is the slope between the two largest sizes in logarithms. Projections are included, whose time grows
    with n and with the square of d; they hide the exponents of short sequences.
    """
    lines = []
    for name, (time_of_head, memory_of_head) in _PAPER_COMPLEXITY.items():
        slopes = []
        for figure in (Figure.TOKENS, Figure.WIDTH):
            line = [row for row in rows if row.figure is figure and row.contender == name]
            slopes += [_slope(line, _milliseconds), _slope(line, _peak)]
        if slopes != [MISSING] * 4:
            lines.append((name, f"O({time_of_head})", f"O({memory_of_head})", *slopes))
    paper = ("contender", "time of a head", "memory of a head")
    headers = (*paper, "time ~ n^", "memory ~ n^", "time ~ d^", "memory ~ d^")
    return Table(title="Growth, between the two largest sizes measured", headers=headers, rows=tuple(lines), labels=3)


def _slope(rows: Sequence[AttentionRow], value: Value) -> str:
    points = sorted((row.position, number) for row in rows if (number := value(row)))
    if len(points) < 2:
        return MISSING
    (start, low), (end, high) = points[-2:]
    return f"{math.log(high / low) / math.log(end / start):.2f}"


def relative_table(rows: Sequence[AttentionRow]) -> Table:
    """Return the paper's table of base models: time and memory relative to GPT-2, weights included in memory."""
    lines = []
    base = {(row.contender, row.tokens): row for row in rows if row.figure is Figure.BASE}
    for tokens in sorted({tokens for _, tokens in base}):
        for other in ("gpt2-sdpa", "gpt2-textbook"):
            ours, theirs = base["tost", tokens], base.get((other, tokens))
            measured = [_quotient(ours, theirs, value) for value in (_milliseconds, _peak_and_weights)]
            paper = [cell(number, ".2f") for number in _PAPER_RELATIVE.get(tokens, (None, None))]
            lines.append((f"{tokens:,}", other, *measured, *paper))
    headers = ("tokens", "ToST base over", "time", "memory", "paper: time", "paper: memory")
    return Table(title="Whole base models, relative to GPT-2", headers=headers, rows=tuple(lines), labels=2)


def _quotient(row: AttentionRow | None, base: AttentionRow | None, value: Value) -> str:
    above, below = (None if each is None else value(each) for each in (row, base))
    if not above or not below:
        return MISSING
    ratio = above / below
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def attention_findings(results: AttentionResults) -> list[str]:
    """Return by how much ToST is ahead, whether the goals are reached, and what the paper reports."""
    sentences = [
        f"One layer, {pair.tokens:,} tokens, {_pass(pair.training)}: softmax attention on the fused kernel takes "
        f"{pair.ratio.median:.1f} ({pair.ratio.lower:.1f}-{pair.ratio.upper:.1f}) times as long as ToST, in turns"
        + _goal(pair.ratio.median, _TIMES_FASTER, pair.tokens)
        for pair in results.pairs
    ]
    for (figure, _), rows in _figures(results.rows).items():
        if figure is Figure.ALONE:
            sentences += _memory_findings(rows)
    at = [row for row in results.rows if row.figure is Figure.TOKENS and row.tokens == PAPER_TOKENS]
    if at:
        by_name = {row.contender: row for row in at}
        parts = [
            f"{name} takes {_quotient(by_name.get(name), by_name.get('tost'), _milliseconds)} times the time and "
            f"{_quotient(by_name.get(name), by_name.get('tost'), _peak)} times the memory of ToST"
            for name in ("vit-sdpa", "vit-textbook")
        ]
        sentences.append(
            f"{figure_title(at)}, {PAPER_TOKENS:,} tokens: {'; '.join(parts)}. The paper has {_PAPER_AHEAD}."
        )
    return sentences


def _memory_findings(rows: Sequence[AttentionRow]) -> list[str]:
    lengths = {row.tokens for row in rows}
    tokens = PAPER_TOKENS if PAPER_TOKENS in lengths else max(lengths)
    found = {row.contender: row for row in rows if row.tokens == tokens}
    ours, theirs = found.get("tost"), found.get("vit-textbook")
    if ours is None or theirs is None:
        return []
    start = f"One layer, {tokens:,} tokens, {_pass(ours.training)}: "
    if not ours.peak_bytes or not theirs.peak_bytes:
        return [f"{start}memory was not compared: {theirs.note or ours.note or 'too little to be seen'}."]
    ratio = theirs.peak_bytes / ours.peak_bytes
    text = f"{start}the textbook's attention takes {ratio:.0f} times the peak memory of ToST"
    kept = _quotient(theirs, ours, lambda row: row.kept_bytes)
    more = "" if kept == MISSING else f" It keeps {kept} times the bytes for the backward pass, the input counted."
    return [text + _goal(ratio, _TIMES_SMALLER, tokens) + more]


def _goal(ratio: float, goal: int, tokens: int) -> str:
    if tokens != PAPER_TOKENS:
        return "."
    return f"; the goal of at least {goal} is {'reached' if ratio >= goal else 'NOT reached'}."


def attention_page(report: Report[AttentionResults]) -> str:
    """Return a report as a Markdown page.

    Raises:
        ValueError: The gate is red.
    """
    results, pass_seconds = report.results, report.about["scale"]["pass_seconds"]
    parts: list[Any] = [_INTRODUCTION.format(minutes=results.elapsed_seconds / 60, pass_seconds=pass_seconds)]
    if roof := results.roofline:
        parts.append(_ROOFLINE.format(flops=roof.flops_per_second / 1e9, bytes=roof.bytes_per_second / 1e9))
    parts.append(attention_findings(results))
    parts.append([f"**{name}**: {SUMMARIES[name]}" for name in dict.fromkeys(row.contender for row in results.rows)])
    shown: set[Figure] = set()
    for (figure, training), rows in _figures(results.rows).items():
        table = detail_table(rows)
        if figure not in shown:
            parts.append(f"![Time and memory, {table.title}]({report.stem}_{figure}.svg)")
        shown.add(figure)
        parts.append(table)
        if training:
            parts.append(_kept_table(f"{table.title}: MB kept for the backward pass, the input counted", rows))
    parts += [growth_table(results.rows), relative_table(results.rows)]
    return page("Attention layers side by side", report, *parts)


def attention_pictures(report: Report[AttentionResults]) -> dict[str, bytes]:
    """Draw each figure: a line of panels per pass, time with its roofline on the left and peak memory on the right."""
    figures = grouped(report.results.rows, lambda row: row.figure)
    return {f"_{figure}.svg": _picture(rows, report.machine) for figure, rows in figures.items()}


def _picture(rows: Sequence[AttentionRow], machine: str) -> bytes:
    panels = []
    for chosen in _figures(rows).values():
        title, sizes = figure_title(chosen), sorted({row.position for row in chosen})
        lines = _lines(chosen, _milliseconds) + _bounds(chosen)
        panels.append(Panel(title=f"{title}\ntime in ms", lines=lines, sizes=sizes))
        lines = _lines(chosen, lambda row: row.peak_bytes / 1e6 if row.peak_bytes else None)
        panels.append(Panel(title=f"{title}\npeak memory in MB", lines=lines, sizes=sizes))
    absent = [
        f"{_STYLES[row.contender].label} at {row.position:,}{' with backward' * row.training}, {row.note}"
        for row in rows
        if row.note
    ]
    remarks = textwrap.wrap(f"not measured: {'; '.join(absent)}", 150) if absent else []
    return draw(panels, below=[_AXES[rows[0].figure.axis], *remarks, machine])


def _lines(rows: Sequence[AttentionRow], value: Value) -> list[Line]:
    return lines_of(_STYLES, [(row.contender, row.position, value(row)) for row in rows], bold="tost")


def _bounds(rows: Sequence[AttentionRow]) -> list[Line]:
    """Return the least time that the machine allows, below each line: the gap is the distance to the roofline."""
    measured = grouped((row for row in rows if row.seconds), lambda row: row.contender)
    return [
        Line(
            style=Style("roofline of each", _STYLES[name].color, dashes=":"),
            points=sorted((row.position, 1e3 * row.roofline_seconds) for row in line),
            thin=True,
        )
        for name, line in measured.items()
    ]


class AttentionMeasurement(Measurement[AttentionScale, AttentionResults]):
    """The benchmark `tost bench attention`."""

    results = AttentionResults
    checked = "operators and layers with the reference"
    draws = True

    tables, findings = staticmethod(attention_tables), staticmethod(attention_findings)
    page, pictures = staticmethod(attention_page), staticmethod(attention_pictures)

    def __init__(self, scale: AttentionScale) -> None:
        device, self.accelerator = choose_device(scale.device)
        super().__init__(scale.on(device))

    def check(self) -> GateResult:
        """Compare the operators with their reference, and the baselines with their definitions."""
        return gate.run_gate(list(Op)).plus(check_layers())

    def about(self) -> dict[str, Any]:
        """Return the scale and what each contender is."""
        return {**super().about(), "contenders": SUMMARIES}

    @property
    def steps(self) -> int:
        """The roofline, the pairs in turns, and one step per point."""
        return 2 + len(self.scale.points)

    def measure(self, results: AttentionResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Measure the machine, then ToST and softmax attention in turns, then all points."""
        started = time.monotonic()
        watch("this machine")
        roof = results.roofline = run.roofline_in_process(self.scale.device)
        speeds = f"{roof.flops_per_second / 1e9:.0f} GFLOP/s in a matrix product"
        yield f"{speeds}, {roof.bytes_per_second / 1e9:.1f} GB/s in a copy"
        watch("tost and vit-sdpa in turns")
        for pair in measure_pairs(self.scale, watch=watch):
            results.pairs.append(pair)
        yield ", ".join(f"{_pass(pair.training)} {pair.ratio.median:.1f}" for pair in results.pairs) or "left out"
        for row in measure_attention(self.scale, roof, watch=watch):
            results.rows.append(row)
            results.elapsed_seconds = round(time.monotonic() - started, 1)
            yield _summary(row)


def _summary(row: AttentionRow) -> str:
    if row.seconds is None or row.peak_bytes is None:
        return f"left out: {row.note}"
    return f"{1e3 * row.seconds.median:.4g} ms, {row.peak_bytes / 1e6:.0f} MB, {row.times_roofline:.2f} x roofline"
