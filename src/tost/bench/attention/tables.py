"""Tables, sentences and files about attention layers side by side. All of it is computed from the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from tost.bench.attention.cases import PAPER_TOKENS, SUMMARIES, Figure
from tost.bench.attention.plot import draw_attention, figure_title
from tost.bench.attention.run import AttentionReport, AttentionRow, Pair
from tost.bench.harness.files import require_green, write_measurement
from tost.bench.ops.tables import Table, markdown_table

__all__ = [
    "attention_findings",
    "attention_markdown",
    "attention_tables",
    "detail_table",
    "growth_table",
    "relative_table",
    "write_attention",
]

_MISSING = "-"
# What we ask of one layer at the paper's length: softmax attention on the fused kernel takes this many times as long,
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
Key = tuple[Figure, bool]
Value = Callable[[AttentionRow], float | None]


def attention_tables(rows: Sequence[AttentionRow]) -> list[Table]:
    """Return what fits on a terminal: per figure the time and the memory by size, one row per contender."""
    tables = []
    for key, group in _groups(rows).items():
        title = figure_title(group)
        tables.append(_by_size(f"{title}, ms", group, _time_cell, notes=True))
        tables.append(_by_size(f"{title}, peak memory in MB", group, _memory_cell))
        if key[1]:
            tables.append(_by_size(f"{title}, MB kept for the backward pass", group, _kept_cell))
    return [table for table in tables if any(cell != _MISSING for row in table.rows for cell in row[1:])]


def detail_table(rows: Sequence[AttentionRow]) -> Table:
    """Return every number of one figure and pass: measured beside what it costs on paper."""
    axis = rows[0].point.figure.axis
    ours = {row.point.position: row for row in rows if row.point.contender == "tost"}
    measured = (axis, "contender", "depth", "ms", "passes", "/ tost", "peak MB", "/ tost", "weights MB")
    lines = []
    for row in rows:
        base = ours.get(row.point.position)
        lines.append(
            (
                f"{row.point.position:,}",
                row.point.contender,
                str(row.point.depth),
                row.note or _spread_cell(row),
                str(row.seconds.count) if row.seconds else _MISSING,
                _quotient(row, base, _seconds_of),
                _memory_cell(row),
                _quotient(row, base, _peak_of),
                _megabytes(row.weight_bytes),
                _short(row.cost.flops / 1e9),
                _short(row.cost.moved / 1e9),
                _milliseconds(row.bound_seconds),
                _MISSING if row.distance is None else f"{row.distance:.2f}",
            )
        )
    headers = (*measured, "GFLOP", "GB moved", "roofline ms", "ms / roofline")
    return Table(title=figure_title(rows), headers=headers, rows=tuple(lines), labels=2)


def growth_table(rows: Sequence[AttentionRow]) -> Table:
    """Return the paper's table of complexities beside the exponents that were measured.

    An exponent is the slope between the two largest sizes in logarithms. Projections are included, whose time grows
    with n and with the square of d; they hide the exponents of short sequences.
    """
    lines = []
    for name, (time, memory) in _PAPER_COMPLEXITY.items():
        slopes = []
        for figure in (Figure.TOKENS, Figure.WIDTH):
            line = [row for row in rows if row.point.figure is figure and row.point.contender == name]
            slopes += [_slope(line, _seconds_of), _slope(line, _peak_of)]
        if slopes != [_MISSING] * 4:
            lines.append((name, f"O({time})", f"O({memory})", *slopes))
    paper = ("contender", "time of a head", "memory of a head")
    headers = (*paper, "time ~ n^", "memory ~ n^", "time ~ d^", "memory ~ d^")
    return Table(title="Growth, between the two largest sizes measured", headers=headers, rows=tuple(lines), labels=3)


def relative_table(rows: Sequence[AttentionRow]) -> Table:
    """Return the paper's table of base models: time and memory relative to GPT-2, weights included in memory."""
    lines = []
    base = {(row.point.contender, row.point.tokens): row for row in rows if row.point.figure is Figure.BASE}
    for tokens in sorted({tokens for _, tokens in base}):
        for other in ("gpt2-sdpa", "gpt2-textbook"):
            ours, theirs = base["tost", tokens], base.get((other, tokens))
            time, memory = (_quotient(ours, theirs, value) for value in (_seconds_of, _total_of))
            reported = _PAPER_RELATIVE.get(tokens)
            paper = tuple(f"{number:.2f}" for number in reported) if reported else (_MISSING, _MISSING)
            lines.append((f"{tokens:,}", other, time, memory, *paper))
    headers = ("tokens", "ToST base over", "time", "memory", "paper: time", "paper: memory")
    return Table(title="Whole base models, relative to GPT-2", headers=headers, rows=tuple(lines), labels=2)


def attention_findings(rows: Sequence[AttentionRow], pairs: Sequence[Pair] = ()) -> list[str]:
    """Say by how much ToST is ahead, where something was asked for whether that was reached, and what the paper has."""
    said = []
    for pair in pairs:
        said.append(
            f"One layer, {pair.tokens:,} tokens, {_pass(pair.training)}: softmax attention on the fused kernel takes "
            f"{pair.ratio.median:.1f} ({pair.ratio.lower:.1f}-{pair.ratio.upper:.1f}) times as long as ToST, in turns"
            + _asked(pair.ratio.median, _TIMES_FASTER, pair.tokens)
        )
    said += [sentence for training in (False, True) for sentence in _memory_findings(rows, training)]
    at = [row for row in rows if row.point.figure is Figure.TOKENS and row.point.tokens == PAPER_TOKENS]
    if at:
        by_name = {row.point.contender: row for row in at}
        parts = [
            f"{name} takes {_quotient(by_name.get(name), by_name.get('tost'), _seconds_of)} times the time and "
            f"{_quotient(by_name.get(name), by_name.get('tost'), _peak_of)} times the memory of ToST"
            for name in ("vit-sdpa", "vit-textbook")
        ]
        said.append(f"{figure_title(at)}, {PAPER_TOKENS:,} tokens: {'; '.join(parts)}. The paper has {_PAPER_AHEAD}.")
    return said


def _memory_findings(rows: Sequence[AttentionRow], training: bool) -> list[str]:
    alone = [row for row in rows if row.point.figure is Figure.ALONE and row.point.training is training]
    lengths = sorted({row.point.tokens for row in alone})
    if not lengths:
        return []
    tokens = PAPER_TOKENS if PAPER_TOKENS in lengths else lengths[-1]
    found = {row.point.contender: row for row in alone if row.point.tokens == tokens}
    ours, theirs = found.get("tost"), found.get("vit-textbook")
    if ours is None or theirs is None:
        return []
    start = f"One layer, {tokens:,} tokens, {_pass(training)}: "
    if not ours.peak_bytes or not theirs.peak_bytes:
        return [f"{start}memory was not compared: {theirs.note or ours.note or 'too little to be seen'}."]
    ratio = theirs.peak_bytes / ours.peak_bytes
    text = f"{start}the textbook's attention takes {ratio:.0f} times the peak memory of ToST"
    kept = _quotient(theirs, ours, lambda row: row.kept_bytes)
    more = "" if kept == _MISSING else f" It keeps {kept} times the bytes for the backward pass, the input counted."
    return [text + _asked(ratio, _TIMES_SMALLER, tokens) + more]


def _asked(ratio: float, target: int, tokens: int) -> str:
    if tokens != PAPER_TOKENS:
        return "."
    return f"; at least {target} was asked for: {'reached' if ratio >= target else 'NOT reached'}."


def attention_markdown(report: AttentionReport, *, pictures: dict[Figure, str] | None = None) -> str:
    """Return a report as a Markdown page.

    Args:
        report: The measurement.
        pictures: File names of its pictures, by figure.

    Raises:
        ValueError: The gate is red.
    """
    require_green(report.gate)
    environment, roof = report.environment, report.roofline
    load = "" if environment.load is None else f" (load average {environment.load:g} at the start)"
    lines = [
        "# Attention layers side by side",
        "",
        f"{report.machine} | {report.gate.summary}",
        "",
        f"Made by `{report.command}` on {environment.measured[:10]}{load},",
        f"in {report.elapsed_seconds / 60:.1f} minutes.",
        "Batch 1, float32, one process per row. Peak memory is the growth of a fresh process during its first pass,",
        "without weights and input. Times are medians with quartiles in brackets; a pass that takes longer than",
        f"{report.scale.pass_seconds:g} s is timed once. Rows that were left out say what was predicted, from their",
        "operations and the rate of the point before.",
    ]
    if roof:
        lines += [
            f"The roofline is max(operations / {roof.flops_per_second / 1e9:.0f} GFLOP/s, bytes /",
            f"{roof.bytes_per_second / 1e9:.1f} GB/s), both measured in this run: a matrix product and a copy.",
        ]
    lines += ["", *(f"- {sentence}" for sentence in attention_findings(report.rows, report.pairs)), ""]
    present = dict.fromkeys(row.point.contender for row in report.rows)
    lines += [f"- **{name}**: {SUMMARIES[name]}" for name in present]
    shown: set[Figure] = set()
    for (figure, training), group in _groups(report.rows).items():
        table = detail_table(group)
        lines += ["", f"## {table.title}", ""]
        if pictures and figure in pictures and figure not in shown:
            lines += [f"![Time and memory, {table.title}]({pictures[figure]})", ""]
        shown.add(figure)
        lines += markdown_table(table)
        if training:
            kept = _by_size(f"{table.title}: MB kept for the backward pass, the input counted", group, _kept_cell)
            lines += ["", f"### {kept.title}", "", *markdown_table(kept)]
    for table in (growth_table(report.rows), relative_table(report.rows)):
        lines += ["", f"## {table.title}", "", *markdown_table(table)] if table.rows else []
    return "\n".join(lines) + "\n"


def write_attention(report: AttentionReport, folder: Path) -> list[Path]:
    """Write the files of a report: JSON, Markdown and a picture per figure; unfinished, ``<stem>.partial.json``.

    Args:
        report: A measurement behind a green gate.
        folder: Where to write; made if missing.

    Returns:
        The files written.

    Raises:
        ValueError: The gate is red.
    """

    def others() -> dict[str, str | bytes]:
        names = {figure: f"_{figure}.svg" for figure in report.scale.shapes}
        pictures = {figure: f"{report.stem}{name}" for figure, name in names.items()}
        contents: dict[str, str | bytes] = {".md": attention_markdown(report, pictures=pictures)}
        for figure, name in names.items():
            rows = [row for row in report.rows if row.point.figure is figure]
            contents[name] = draw_attention(rows, caption=report.machine)
        return contents

    return write_measurement(report, folder, others)


def _groups(rows: Sequence[AttentionRow]) -> dict[Key, list[AttentionRow]]:
    groups: dict[Key, list[AttentionRow]] = {}
    for row in rows:
        groups.setdefault((row.point.figure, row.point.training), []).append(row)
    return groups


def _by_size(
    title: str, rows: Sequence[AttentionRow], cell: Callable[[AttentionRow], str], *, notes: bool = False
) -> Table:
    sizes = sorted({row.point.position for row in rows})
    cells = {(row.point.contender, row.point.position): cell(row) for row in rows}
    names = dict.fromkeys(row.point.contender for row in rows)
    return Table(
        title=title,
        headers=("contender", *(f"{size:,}" for size in sizes)),
        rows=tuple((name, *(cells.get((name, size), _MISSING) for size in sizes)) for name in names),
        labels=1,
        notes=tuple(f"{row.point.label}: {row.note}" for row in rows if row.note) if notes else (),
    )


def _slope(rows: Sequence[AttentionRow], value: Value) -> str:
    points = sorted((row.point.position, number) for row in rows if (number := value(row)))
    if len(points) < 2:
        return _MISSING
    (start, low), (end, high) = points[-2:]
    return f"{math.log(high / low) / math.log(end / start):.2f}"


def _quotient(row: AttentionRow | None, base: AttentionRow | None, value: Value) -> str:
    above, below = (None if each is None else value(each) for each in (row, base))
    if not above or not below:
        return _MISSING
    ratio = above / below
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def _pass(training: bool) -> str:
    return "forward and backward" if training else "forward"


def _seconds_of(row: AttentionRow) -> float | None:
    return row.seconds.median if row.seconds else None


def _peak_of(row: AttentionRow) -> float | None:
    return row.peak_bytes


def _total_of(row: AttentionRow) -> float | None:
    return None if row.peak_bytes is None or row.weight_bytes is None else row.peak_bytes + row.weight_bytes


def _time_cell(row: AttentionRow) -> str:
    return row.note.partition(" (")[0] if row.note else _milliseconds(_seconds_of(row))


def _spread_cell(row: AttentionRow) -> str:
    if row.seconds is None or row.seconds.count == 1:
        return _milliseconds(_seconds_of(row))
    low, high = _milliseconds(row.seconds.lower), _milliseconds(row.seconds.upper)
    return f"{_milliseconds(row.seconds.median)} ({low}-{high})"


def _memory_cell(row: AttentionRow) -> str:
    return _megabytes(row.peak_bytes)


def _kept_cell(row: AttentionRow) -> str:
    return _megabytes(row.kept_bytes)


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return _MISSING
    return _short(1e3 * seconds)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _megabytes(count: int | None) -> str:
    return _MISSING if count is None else f"{count / 1e6:,.0f}" if count >= 1e8 else f"{count / 1e6:.1f}"
