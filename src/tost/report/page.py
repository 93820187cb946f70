"""The page: the order of its sections, and the frame around them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from tost._text import grouped, number
from tost.report.bench import BenchRecord
from tost.report.html import cut, definitions, details, image, note, preformatted, table, text
from tost.report.runs import RunRecord, processor
from tost.report.sections.bench import measurement, speed_sentences
from tost.report.sections.runs import curves, group_title, groups, judgement, results, trained

if TYPE_CHECKING:
    from tost.report.look import Finding, Insight
    from tost.report.texts import Passage

_MOST_ROWS = 40
_MOST_CELL = 60
_MOST_PASSAGE = 4000
_FRAME = 20_000  # bytes for what stands around the parts, and for the words about pictures


@dataclass(frozen=True)
class Content:
    """Everything that is on the page.

    Attributes:
        runs: At least one run.
        benchmarks: Measurements of speed.
        insights: What was seen in the models.
        passages: Generated text by run.
        command: How the page was asked for.
    """

    runs: Sequence[RunRecord]
    benchmarks: Sequence[BenchRecord] = ()
    insights: Sequence[Insight] = ()
    passages: Mapping[str, Sequence[Passage]] = field(default_factory=dict)
    command: Sequence[str] = ("tost", "report")


@dataclass
class _Room:
    """Bytes that are left for pictures."""

    left: int

    def take(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True


def render(content: Content, *, largest: int = 10_000_000) -> str:
    """Return the page as HTML.

    Args:
        content: What it shows.
        largest: Bytes that it may have; pictures that do not fit are left out, with a note.
    """
    compared = groups(content.runs)
    sections = {
        "In short": _short(content),
        "Results": "".join(map(results, compared.values())),
        "Curves": "".join(f"<h3>{text(group_title(key))}</h3>{curves(runs)}" for key, runs in compared.items()),
        "What was trained": "".join(trained(run) for run in content.runs),
        "Looking inside": _inside(content, _Room(0)),
        "Generated text": _texts(content),
        "Speed": "".join(measurement(record) for record in content.benchmarks),
        "How to repeat it": _repeat(content),
        "Where the numbers come from": _origin(content),
    }
    style = _file("style.css")
    bare = sum(len(part.encode()) for part in (*sections.values(), style))
    sections["Looking inside"] = _inside(content, _Room(largest - bare - _FRAME))  # now with the pictures that fit
    shown = [(f"part-{i}", title, body) for i, (title, body) in enumerate(sections.items()) if body]
    title = "Report on " + ", ".join(run.name for run in content.runs)
    links = "".join(f'<li><a href="#{anchor}">{text(name)}</a></li>' for anchor, name, _ in shown)
    main = "".join(f'<section id="{anchor}"><h2>{text(name)}</h2>{body}</section>' for anchor, name, body in shown)
    closing = f"Written on {datetime.now(UTC):%Y-%m-%d %H:%M UTC} by: {shlex.join(content.command)}"
    words = {"tab": text(cut(title, 120)), "title": text(cut(title, 200)), "closing": text(closing)}
    return Template(_file("page.html")).substitute(words, style=style, links=links, main=main)


def _file(name: str) -> str:
    """Return the text of a file that stands beside this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _short(content: Content) -> str:
    sentences = [judgement(runs) for runs in groups(content.runs).values()]
    for insight in content.insights:
        sentences += [f"{insight.run}: {finding.verdict}" for finding in insight.findings if finding.verdict]
    for record in content.benchmarks:
        sentences += speed_sentences(record)
    told = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences if sentence)
    open_runs = [run.name for run in content.runs if run.status != "finished"]
    warning = f"Not finished: {', '.join(open_runs)}. The numbers are those so far."
    said = f"<ul>{told}</ul>" if told else note("Nothing has been measured yet.")
    return note(warning, "warning") + said if open_runs else said


def _inside(content: Content, room: _Room) -> str:
    parts = []
    for insight in content.insights:
        parts.append(f"<h3>{text(insight.run)}</h3>")
        parts.append(f'<p class="lead">{text(insight.source)}</p>' if insight.source else "")
        parts += [_finding(insight.run, finding, room) for finding in insight.findings]
        parts += [note(remark) for remark in insight.notes]
    return "".join(parts)


def _finding(run: str, finding: Finding, room: _Room) -> str:
    title = finding.title or finding.name
    parts = [f"<h4>{text(title)}</h4>", f"<p>{text(finding.explanation)}</p>"]
    if finding.verdict:
        parts.append(f'<p class="verdict">{text(finding.verdict)}</p>')
    summary = "; ".join(f"{key}: {value}" for key, value in finding.numbers.items())
    if finding.picture and room.take(len(finding.picture) * 4 // 3):
        drawn = image(finding.picture, finding.picture_kind, f"{title} {run}. {cut(summary, 600)}")
        parts.append(f'<div class="picture">{drawn}</div>')
    elif finding.picture:
        remark = f"The picture is left out, because the page would be too large; tost analyze {finding.name} draws it."
        parts.append(note(remark))
    if finding.numbers:
        rows = [[key, value] for key, value in finding.numbers.items()]
        parts.append(table(["what", "value"], rows, caption=f"{run}: {finding.name} in numbers"))
    if finding.rows:
        parts.append(_rows(run, finding))
    return "".join(parts)


def _rows(run: str, finding: Finding) -> str:
    headers = [str(key) for key in finding.rows[0]]
    rows = [[_cell(row.get(key)) for key in finding.rows[0]] for row in finding.rows[:_MOST_ROWS]]
    more = len(finding.rows) - len(rows)
    caption = f"{run}: {finding.name}" + (f", the first {len(rows)} of {len(finding.rows)} rows" if more else "")
    heading = f"Numbers (first {len(rows)} rows)" if more else f"All numbers ({len(rows)} rows)"
    return details(heading, table(headers, rows, caption=caption))


def _cell(value: object) -> str:
    return value_text if (value_text := number(value)) != "–" else cut("–" if value is None else value, _MOST_CELL)  # noqa: RUF001


def _texts(content: Content) -> str:
    parts = []
    for run, passages in content.passages.items():
        parts.append(f"<h3>{text(run)}</h3>")
        for passage in passages:
            body = f"<b>{text(cut(passage.prompt, _MOST_PASSAGE))}</b>{text(cut(passage.text, _MOST_PASSAGE))}"
            speed = f"{passage.tokens / passage.seconds:,.0f} tokens per second" if passage.seconds > 0 else ""
            told = f"{passage.tokens} tokens at {speed}; {passage.settings}. The prompt is printed in bold."
            label = f"Text by {text(run)}"
            parts.append(f'<pre tabindex="0" role="region" aria-label="{label}">{body}</pre><p>{text(told)}</p>')
    return "".join(parts)


def _repeat(content: Content) -> str:
    known = [run.environment.get("command") for run in content.runs]
    commands = [shlex.join(map(str, command)) for command in known if isinstance(command, list)]
    commands += [record.command for record in content.benchmarks if record.command]
    commands.append(shlex.join(content.command))
    parts = ["<h3>Commands</h3>", preformatted("\n".join(dict.fromkeys(commands)), "Commands"), "<h3>Environment</h3>"]
    parts += _environments(content.runs)
    parts.append("<h3>Configuration</h3>")
    for run in content.runs:
        if run.config_text:
            shown = preformatted(run.config_text, f"Configuration of {run.name}")
            parts.append(details(f"{run.name}: config.yaml", shown))
    return "".join(parts)


def _environments(runs: Sequence[RunRecord]) -> list[str]:
    """Return each environment once, with the runs that had it."""
    parts = []
    for facts, same in grouped(runs, lambda run: tuple(_environment(run).items()) if run.environment else ()).items():
        parts.append(f"<h4>{text(', '.join(run.name for run in same))}</h4>" if len(runs) > 1 else "")
        parts.append(definitions(dict(facts)) if facts else note("The environment is not known."))
    return parts


def _environment(run: RunRecord) -> dict[str, str]:
    known = run.environment
    versions, native = (
        ", ".join(f"{name} {value}" for name, value in found.items()) if isinstance(found, dict) else ""
        for found in (known.get("versions"), known.get("native"))
    )
    return {
        "processor": f"{processor(known)}, {known.get('device', '?')}",
        "system": f"{known.get('platform', 'unknown')}, Python {known.get('python', '?')}",
        "packages": versions,
        "native kernel": native,
        "revision": str(known.get("revision") or "unknown"),
    }


def _origin(content: Content) -> str:
    rows = []
    for run in content.runs:
        rows += [
            [run.name, "config.yaml", "what was trained"],
            [run.name, "metrics.jsonl", f"curves: {len(run.steps):,} steps, {len(run.evaluations):,} evaluations"],
            [run.name, "summary.json", "results, time, memory, parameters"],
            [run.name, "env.json", "environment, command"],
        ]
    seen = [insight.run for insight in content.insights if insight.findings]
    rows += [[run, "checkpoints/", "analyses, computed when this page was written"] for run in seen]
    rows += [[run, "checkpoints/", "generated text, written when this page was written"] for run in content.passages]
    rows += [[record.theme, record.file.name, "speed"] for record in content.benchmarks]
    told = (
        "No number on this page is typed by hand. Each was read from these files, or computed from them by the command "
        "at the end of the page."
    )
    return f"<p>{text(told)}</p>" + table(["of", "file", "what is from there"], rows, caption="Sources", labels=3)
