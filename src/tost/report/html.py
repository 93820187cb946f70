"""Small pieces of HTML. Whatever comes from outside goes through `text`, which leaves nothing that a browser obeys."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence

__all__ = [
    "bytes_of",
    "count",
    "cut",
    "definitions",
    "details",
    "duration",
    "image",
    "note",
    "number",
    "preformatted",
    "real",
    "share",
    "table",
    "text",
]

UNKNOWN = "–"  # noqa: RUF001 - a dash in a cell, not a minus
# Characters that HTML forbids, or that turn the direction of the text around them.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def text(value: object) -> str:
    """Return anything as text that is safe inside elements and quoted attributes."""
    return html.escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def cut(value: object, most: int) -> str:
    """Return anything as plain text of at most so many characters."""
    shown = str(value)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def number(value: object, digits: int = 4) -> str:
    """Write a number with so many significant digits; a dash for anything else."""
    found = real(value)
    if found is None:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) and abs(found) < 1e15 else f"{found:.{digits}g}"


def share(value: object) -> str:
    """Write a share of 1 in per cent."""
    found = real(value)
    return UNKNOWN if found is None else f"{100 * found:.1f} %"


def count(value: object) -> str:
    """Write a large whole number: 12,345, or 1.23 million."""
    found = real(value)
    if found is None:
        return UNKNOWN
    return f"{found / 1e6:.2f} million" if found >= 1e6 else f"{found:,.0f}"


def bytes_of(value: object) -> str:
    """Write an amount of memory."""
    found = real(value)
    if found is None:
        return UNKNOWN
    return f"{found / 1e9:.2f} GB" if found >= 1e9 else f"{found / 1e6:.1f} MB"


def duration(value: object) -> str:
    """Write seconds: 950 µs, 8.1 ms, 41 s, 12 min 4 s."""
    found = real(value)
    if found is None or found < 0:
        return UNKNOWN
    if found < 1:
        return f"{1e6 * found:.3g} µs" if found < 1e-3 else f"{1e3 * found:.3g} ms"
    whole = round(found)
    if whole < 60:
        return f"{found:.3g} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def real(value: object) -> float | None:
    """Return a number that somebody may have measured; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Beyond that even writing it in another unit overflows.
    return float(value) if -1e300 < value < 1e300 else None


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, labels: int = 1, best: Sequence[int] = ()
) -> str:
    """Return a table of plain text.

    Args:
        headers: Titles of the columns.
        rows: Cells.
        caption: What it shows.
        labels: Columns on the left that hold words; the first of them heads its row.
        best: Rows that are marked as the best.
    """
    head = "".join(f'<th scope="col"{_aligned(i, labels)}>{text(cell)}</th>' for i, cell in enumerate(headers))
    body = []
    for place, row in enumerate(rows):
        cells = "".join(
            f'<th scope="row">{text(cell)}</th>' if i == 0 else f"<td{_aligned(i, labels)}>{text(cell)}</td>"
            for i, cell in enumerate(row)
        )
        body.append(f"<tr{' class=best' if place in best else ''}>{cells}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table>'
        f"<caption><span>{text(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _aligned(column: int, labels: int) -> str:
    return "" if column < labels else " class=n"


def definitions(entries: Mapping[str, str]) -> str:
    """Return names and values, one below the other."""
    return "<dl>" + "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in entries.items()) + "</dl>"


def details(summary: str, content: str) -> str:
    """Return something that is folded away until it is asked for; `content` is HTML."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def preformatted(value: str, label: str) -> str:
    """Return text in which spaces and lines count."""
    return f'<pre tabindex="0" role="region" aria-label="{text(label)}">{text(value)}</pre>'


def note(value: str, kind: str = "note") -> str:
    """Return a remark that stands out; `kind` is ``note`` or ``warning``."""
    return f'<p class="{text(kind)}">{text(value)}</p>'


def image(content: bytes, kind: str, alternative: str) -> str:
    """Return a picture that is part of the page; ``kind`` is ``png`` or ``svg+xml``."""
    data = base64.b64encode(content).decode("ascii")
    return f'<img src="data:image/{text(kind)};base64,{data}" alt="{text(alternative)}">'
