"""Run the analyses for the page. Loads torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tost._text import number
from tost.analysis import Result, analyze, applicable, control_of, find_analysis, image_bytes, unsupported_reason
from tost.errors import TostError
from tost.report.samples import LoadedRun

_MOST_SVG = 400_000


@dataclass(frozen=True)
class Finding:
    """What an analysis found.

    Attributes:
        name: Its name on the command line.
        numbers: The few that sum it up.
        rows: All numbers, as a table.
        picture: Content of an image file; empty if it could not be drawn.
        picture_kind: ``png`` or ``svg+xml``.
        verdict: The conclusion in a sentence; empty if it is left to the reader.
        title: The question that the analysis answers; empty for its name.
        explanation: How to read the answer.
    """

    name: str
    numbers: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]] = ()
    picture: bytes = field(default=b"", repr=False)
    picture_kind: str = "png"
    verdict: str = ""
    title: str = ""
    explanation: str = ""


@dataclass(frozen=True)
class Insight:
    """The analyses of a run's model.

    Attributes:
        run: Name of the run.
        source: Which weights and samples were looked at, in a sentence.
        findings: One per analysis.
        notes: What was not done, and why.
    """

    run: str
    source: str = ""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def look_into(
    name: str, run: LoadedRun, wanted: Sequence[str] | None, log: Callable[[str], None] | None = None
) -> Insight:
    """Run the analyses that apply to the model of a run.

    Args:
        name: What to call the run.
        run: Its model and samples.
        wanted: Which analyses; None for all that apply.
        log: Receives a line when each of them ends.

    Returns:
        What was found; an analysis that fails costs a note, not the page.
    """
    say = log or (lambda line: None)
    findings: list[Finding] = []
    notes: list[str] = []
    try:
        control = control_of(run.model)
    except (TostError, TypeError):  # a model of another package has no options
        control = None
    for analysis in applicable(run.model) if wanted is None else wanted:
        if reason := unsupported_reason(run.model, analysis):
            notes.append(f"{analysis}: left out, because {reason}.")
            continue
        try:
            found = analyze(analysis, run.model, run.samples, control=control)
            finding = _finding(analysis, found)
            findings.append(finding)
            first = "; ".join(f"{key} {value}" for key, value in list(finding.numbers.items())[:2])
            say(f"{name}: {analysis}: {finding.verdict or first}")
        except (TostError, ValueError) as error:
            notes.append(f"{analysis}: could not be done: {error}")
            say(f"{name}: {notes[-1]}")
    source = (
        f"Looked at: the weights of {run.checkpoint.name}, with up to {run.count} samples of the validation set (and "
        "as many of the training set where both are compared), spread over the set."
    )
    return Insight(name, source, tuple(findings), tuple(notes))


def _finding(name: str, result: Result) -> Finding:
    kind, content = "png", b""
    if not result.is_photographic:
        kind, content = "svg+xml", image_bytes(result, "svg")
    if not content or len(content) > _MOST_SVG:
        kind, content = "png", image_bytes(result, "png")
    numbers = {key: value if isinstance(value, str) else number(value) for key, value in result.summary().items()}
    analysis = find_analysis(name)
    title = analysis.title or analysis.summary
    return Finding(name, numbers, result.rows(), content, kind, result.verdict(), title, analysis.explanation)
