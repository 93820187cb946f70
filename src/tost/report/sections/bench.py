"""The section about speed and memory, from the results of `tost bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tost._text import UNKNOWN, byte_size, duration, number, real
from tost._yaml import flatten
from tost.report.bench import BenchRecord
from tost.report.charts import Axis, Series, line_chart
from tost.report.html import cut, definitions, details, note, table, text
from tost.report.runs import processor
from tost.report.sections.attention import attention_figures, attention_sentences

_LABELS = {
    "tost": "ToST layer",
    "sdpa": "softmax attention",
    "xca": "cross-covariance attention",
    "tost-torch": "ToST on plain PyTorch",
    "paper eager": "the paper's listing",
    "paper compiled": "the paper's listing, compiled",
    "limit": "its two projections alone",
}
_OPS = {"tssa": "Attention that sees all tokens", "causal_tssa": "Attention that sees only what came before"}
_MODES = {"fwd": "forward", "fwd+bwd": "forward and backward, as in training"}
_MOST_ROWS, _MOST_COLUMNS = 80, 12
# How far single measurements lie from their median is in the file.
_SPREAD = (" lower", " upper", " count", "_lower_quartile", "_upper_quartile")

Shape = tuple[str, str, int, int, int, str]


def measurement(record: BenchRecord) -> str:
    """Return one measurement: the machine, whether the results were right, and then the numbers."""
    parts = [f"<h3>tost bench: {text(record.theme)}</h3>", definitions(_facts(record)), _gate(record)]
    if not record.complete:
        remark = "This measurement was interrupted before its end; what is missing was not measured."
        parts.append(note(remark, "warning"))
    if record.passed is not False:
        if record.theme.startswith("ops"):
            parts.append(_layers(record))
        elif record.theme.startswith("attention"):
            parts.append(attention_figures(record) + _explain(record))
        else:
            parts.append(_any_rows(record))
    return "".join(parts)


def speed_sentences(record: BenchRecord) -> list[str]:
    """Say how much longer softmax attention takes at the longest length that both were measured at."""
    if record.passed is not True:
        return []
    if record.theme.startswith("attention"):
        return attention_sentences(record)
    if not record.theme.startswith("ops"):
        return []
    longest: dict[str, tuple[int, str]] = {}
    for shape, rows in _by_shape(record).items():
        times = _times(rows)
        shared = sorted(set(times.get("tost", {})) & set(times.get("sdpa", {})))
        if shape[1] != "fwd" or not shared:
            continue
        ours, theirs = times["tost"][shared[-1]], times["sdpa"][shared[-1]]
        sentence = (
            f"{_OPS.get(shape[0], shape[0])}, width {shape[3]}, {shared[-1]:,} tokens: a ToST layer takes "
            f"{duration(ours)}, a layer of softmax attention {duration(theirs)}, {theirs / ours:.1f} times as long."
        )
        longest[shape[0]] = max(longest.get(shape[0], (0, "")), (shared[-1], sentence))
    return [sentence for _, sentence in longest.values()]


def _facts(record: BenchRecord) -> dict[str, str]:
    environment = record.environment
    load = environment.get("load")
    return {
        "machine": processor(environment) + (f", load {load} at the start" if load is not None else ""),
        "software": f"torch {environment.get('torch', '?')}, tost {environment.get('tost', '?')} "
        f"({environment.get('revision') or 'no revision'})",
        "measured": str(environment.get("measured", "unknown")),
        "command": record.command or "unknown",
        "file": record.file.name,
    }


def _gate(record: BenchRecord) -> str:
    if record.passed is None:
        return note("This measurement has no gate: the results were not checked in the same run.")
    checks = record.gate.get("checks")
    if record.passed:
        told = f"{number(checks)} comparisons with the reference came out right before anything was timed."
        return note(f"Gate: green. {told}")
    failures = record.gate.get("failures")
    failed = len(failures) if isinstance(failures, list) else "some"
    return note(f"Gate: red. {failed} of {number(checks)} comparisons failed, so no speed is shown.", "warning")


def _by_shape(record: BenchRecord) -> dict[Shape, list[Mapping[str, Any]]]:
    """Return the rows of single layers by everything but their length."""
    found: dict[Shape, list[Mapping[str, Any]]] = {}
    for row in record.rows:
        try:
            int(row["tokens"])
            sizes = (int(row["batch"]), int(row["width"]), int(row["heads"]))
            key = (str(row["op"]), str(row["mode"]), *sizes, str(row["dtype"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue  # a row of some other kind
        found.setdefault(key, []).append(row)
    return found


def _times(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return median seconds by contender and number of tokens."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        seconds = real(row.get("seconds_median"))
        if seconds is not None and seconds > 0:
            found.setdefault(str(row.get("contender")), {})[int(row["tokens"])] = seconds
    return found


def _layers(record: BenchRecord) -> str:
    charts, tables = [], []
    for shape, rows in _by_shape(record).items():
        times = _times(rows)
        op, mode, batch, width, heads, dtype = shape
        title = f"{_OPS.get(op, op)}: {_MODES.get(mode, mode)} (width {width}, {heads} heads, batch {batch}, {dtype})"
        order = [name for name in _LABELS if name in times] + [name for name in times if name not in _LABELS]
        shown = [name for name in order if name in ("tost", "sdpa", "xca", "paper eager", "limit")] or order
        lines = [Series(_label(name), sorted(times[name].items()), look) for look, name in enumerate(shown)]
        if any(len(line.points) > 1 for line in lines):
            across, up = Axis("tokens", log=True), Axis("time per layer", log=True, write=duration)
            charts.append(line_chart(lines, title=title, x=across, y=up))
        tables.append(_table(title, order, times))
    head = f'<div class="charts">{"".join(charts)}</div>' if charts else ""
    return head + "".join(tables) + _explain(record)


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _table(title: str, order: Sequence[str], times: Mapping[str, Mapping[int, float]]) -> str:
    lengths = sorted({tokens for found in times.values() for tokens in found})
    first = [name for name in ("tost", "sdpa") if name in order]
    others = [name for name in order if name not in first]
    headers = ["tokens", *map(_label, first), "softmax / ToST", *map(_label, others)]
    rows = []
    for tokens in lengths:
        ours, theirs = (times.get(name, {}).get(tokens) for name in ("tost", "sdpa"))
        ratio = f"{theirs / ours:.1f}x" if ours and theirs else UNKNOWN
        cells = {name: duration(times[name].get(tokens)) for name in order}
        rows.append([f"{tokens:,}", *(cells[name] for name in first), ratio, *(cells[name] for name in others)])
    return table(headers, rows, caption=f"{title}. Median time of one layer.")


def _explain(record: BenchRecord) -> str:
    known = {_label(name): str(summary) for name, summary in record.contenders.items()}
    return details("What was compared", definitions(known)) if known else ""


def _any_rows(record: BenchRecord) -> str:
    """Return rows of a kind that this page has no chart for, as they are."""
    flat = [flatten(row, " ") for row in record.rows[:_MOST_ROWS]]
    found = dict.fromkeys(key for row in flat for key in row if not key.endswith(_SPREAD))
    keys = list(found)[:_MOST_COLUMNS]
    if not keys:
        return note("The file holds no rows.")
    rows = [[_cell(key, row.get(key)) for key in keys] for row in flat]
    left_out = len(record.rows) - len(rows)
    more = f" {left_out} more rows are in the file." if left_out > 0 else ""
    return table([key.replace("_", " ") for key in keys], rows, caption=f"As measured.{more}")


def _cell(key: str, value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "seconds" in key and "count" not in key:
            return duration(value)
        return byte_size(value) if "bytes" in key else number(value)
    return UNKNOWN if value is None else cut(value, 60)
