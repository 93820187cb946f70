"""The paper's efficiency figures: time and memory by size, from the results of `tost bench attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tost._text import UNKNOWN, byte_size, duration, real
from tost.report.bench import BenchRecord
from tost.report.charts import Axis, Series, line_chart
from tost.report.html import cut, table

_LABELS = {
    "tost": "ToST",
    "vit-sdpa": "ViT, fused kernel",
    "vit-textbook": "ViT, textbook",
    "crate": "CRATE",
    "xcit": "XCiT",
    "gpt2-sdpa": "GPT-2, fused kernel",
    "gpt2-textbook": "GPT-2, textbook",
}
_AXES = {"tokens": "tokens", "width": "model width"}


class _Point(NamedTuple):
    """One contender at one size; what was not measured is None."""

    contender: str
    sizes: Mapping[str, int]
    seconds: float | None
    peak_bytes: float | None
    note: str


class _Figure(NamedTuple):
    """The points of one figure in one kind of pass, and which size varies among them."""

    name: str
    training: bool
    axis: str
    points: Sequence[_Point]


def attention_figures(record: BenchRecord) -> str:
    """Return charts of time and peak memory for every figure that was measured, each with its numbers."""
    parts = []
    for figure in _figures(record):
        title = _title(figure)
        time, memory = Axis("time", log=True, write=duration), Axis("peak memory (MB)", log=True)
        charts = [
            _chart(figure, f"{title}: time", time, lambda point: point.seconds),
            _chart(figure, f"{title}: memory", memory, lambda point: point.peak_bytes and point.peak_bytes / 1e6),
        ]
        parts.append(f'<div class="charts">{"".join(charts)}</div>{_table(figure, title)}')
    return "".join(parts)


def attention_sentences(record: BenchRecord) -> list[str]:
    """Return how much slower softmax attention on the fused kernel is, at the most tokens of the twelve layers."""
    for figure in _figures(record):
        if figure.name != "tokens":
            continue
        found = {(point.contender, point.sizes["tokens"]): point for point in figure.points}
        for tokens in sorted({point.sizes["tokens"] for point in figure.points}, reverse=True):
            ours, theirs = found.get(("tost", tokens)), found.get(("vit-sdpa", tokens))
            if ours and theirs and ours.seconds and theirs.seconds:
                return [
                    f"{_title(figure)}, {tokens:,} tokens: ToST takes {duration(ours.seconds)}, softmax attention on "
                    f"the fused kernel {duration(theirs.seconds)}, {theirs.seconds / ours.seconds:.1f} times as long."
                ]
    return []


def _figures(record: BenchRecord) -> list[_Figure]:
    groups: dict[tuple[str, bool], list[_Point]] = {}
    for row in record.rows:
        point = _point(row)
        if point is not None:
            groups.setdefault((str(row.get("figure")), row.get("training") is True), []).append(point)
    found = []
    for (name, training), points in groups.items():
        axis = "width" if len({point.sizes["width"] for point in points}) > 1 else "tokens"
        found.append(_Figure(name, training, axis, sorted(points, key=lambda point: point.sizes[axis])))
    return found


def _point(row: Mapping[str, Any]) -> _Point | None:
    """Return the point of a row; None for a row of another kind."""
    try:
        sizes = {key: int(row[key]) for key in ("tokens", "width", "heads", "depth")}
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    seconds = row.get("seconds")
    median = real(seconds.get("median")) if isinstance(seconds, Mapping) else None
    return _Point(str(row.get("contender")), sizes, median, real(row.get("peak_bytes")), str(row.get("note") or ""))


def _title(figure: _Figure) -> str:
    sizes = figure.points[0].sizes
    causal = "causal " if figure.name == "causal" else ""
    what = f"{sizes['depth']} {causal}attention {'layer' if sizes['depth'] == 1 else 'layers'}"
    if figure.name == "base":
        what = f"whole language models of {sizes['depth']} layers"
    fixed = f"{sizes['tokens']:,} tokens" if figure.axis == "width" else f"width {sizes['width']:,}"
    step = "forward and backward" if figure.training else "forward"
    return f"{what[0].upper()}{what[1:]}, {fixed}, {sizes['heads']} heads, {step}"


def _names(figure: _Figure) -> list[str]:
    present = dict.fromkeys(point.contender for point in figure.points)
    return [name for name in _LABELS if name in present] + [name for name in present if name not in _LABELS]


def _chart(figure: _Figure, title: str, y: Axis, value: Callable[[_Point], float | None]) -> str:
    lines = []
    for look, name in enumerate(_names(figure)):
        places = [
            (float(point.sizes[figure.axis]), found)
            for point in figure.points
            if point.contender == name and (found := value(point)) is not None
        ]
        lines.append(Series(_LABELS.get(name, name), places, look))
    return line_chart(lines, title=title, x=Axis(_AXES[figure.axis], log=True), y=y)


def _table(figure: _Figure, title: str) -> str:
    names = _names(figure)
    cells: dict[int, dict[str, str]] = {}
    for point in figure.points:
        written = cut(point.note, 60) or UNKNOWN
        if point.seconds is not None:
            written = f"{duration(point.seconds)}, {byte_size(point.peak_bytes)}"
        cells.setdefault(point.sizes[figure.axis], {})[point.contender] = written
    rows = [[f"{place:,}", *(found.get(name, UNKNOWN) for name in names)] for place, found in cells.items()]
    headers = [_AXES[figure.axis], *(_LABELS.get(name, name) for name in names)]
    return table(headers, rows, caption=f"{title}. Median time, and peak memory without weights and input.")
