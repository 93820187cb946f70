"""HTML elements. All outside text goes through `text`, which escapes whatever a browser would obey."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence

# Characters that HTML forbids, or that turn the direction of the text around them.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def text(value: object) -> str:
    """Return anything as text that is safe inside elements and quoted attributes."""
    return html.escape(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def cut(value: object, most: int) -> str:
    """Return anything as plain text of at most so many characters."""
    shown = str(value)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


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
    """Return HTML that is folded away below a summary."""
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
