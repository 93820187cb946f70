"""The code of a benchmark: its checks, numbers, tables, page and pictures."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from tost._machine import command_arguments
from tost._text import Table
from tost.bench.harness.benchmark import options_of
from tost.bench.harness.environment import describe_environment
from tost.bench.harness.gate import GateResult
from tost.bench.harness.report import Report, plain

Scale = TypeVar("Scale")
Results = TypeVar("Results")


class Measurement(ABC, Generic[Scale, Results]):
    """The code of a benchmark.

    Args:
        scale: What to measure, and how long.

    Attributes:
        results: Dataclass of the numbers; all its fields have defaults.
        checked: What the gate compares, for the progress line.
        heading: Title of the Markdown page.
        draws: Whether there are pictures, which need matplotlib.
        accelerator: The GPU that is measured, if any.
    """

    results: ClassVar[type]
    checked: ClassVar[str]
    heading: ClassVar[str] = ""
    draws: ClassVar[bool] = False
    accelerator: str | None = None

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    @abstractmethod
    def check(self) -> GateResult:
        """Compare what is measured with its reference."""

    def regrets(self, gate: GateResult) -> list[str]:
        """Return what is said about a red gate beside its failures, in sentences."""
        return []

    def about(self) -> dict[str, Any]:
        """Return what the result files hold about the conditions; by default the scale."""
        hidden = {name for name, (_, option) in options_of(type(self.scale)).items() if not option.stored}
        return {"scale": {name: value for name, value in plain(self.scale).items() if name not in hidden}}

    @property
    def steps(self) -> int:
        """How often `measure` yields; by default once for each of the scale's cases."""
        cases: list[Any] = self.scale.cases  # type: ignore[attr-defined]
        return len(cases)

    @abstractmethod
    def measure(self, results: Results, watch: Callable[[str], None]) -> Iterator[str]:
        """Measure one case after the other.

        Args:
            results: Receives the numbers.
            watch: Called with a line when something starts.

        Yields:
            One line about each case, as soon as its numbers are in `results`.
        """

    @staticmethod
    @abstractmethod
    def tables(results: Any) -> list[Table]:
        """Return what is shown on a terminal."""

    @staticmethod
    def findings(results: Any) -> list[str]:
        """Return what the numbers mean, in sentences."""
        return []

    @classmethod
    def page(cls, report: Any) -> str:
        """Return the Markdown page of a report: by default the findings, then the tables.

        Raises:
            ValueError: The gate is red.
        """
        return page(cls.heading, report, cls.findings(report.results), *cls.tables(report.results))

    @staticmethod
    def pictures(report: Any) -> dict[str, bytes]:
        """Return the image files of a report, by the rest of their names after the stem."""
        return {}

    def open_report(self, theme: str) -> Report[Results]:
        """Pass the gate; returns a report that has no numbers yet."""
        return Report(
            theme=theme,
            command=shlex.join(["tost", *command_arguments()]),
            environment=describe_environment(),
            gate=self.check(),
            results=self.results(),
            about=self.about(),
            accelerator=self.accelerator,
        )

    @classmethod
    def write(cls, report: Report[Results], folder: Path) -> list[Path]:
        """Write the files of a report; see `Report.write`."""
        return report.write(folder, lambda: {".md": cls.page(report), **cls.pictures(report)})


def page(title: str, report: Report[Any], *parts: str | Table | Sequence[str]) -> str:
    """Return a Markdown page.

    Args:
        title: Its heading.
        report: Where the numbers come from.
        *parts: What follows the line about the machine: paragraphs, lists of sentences, and tables, each below its
            title. What is empty is left out.

    Raises:
        ValueError: The gate is red.
    """
    report.require_green()
    environment = report.environment
    load = "" if environment.load is None else f" (load average {environment.load:g} at the start)"
    ending = "" if report.complete else ", interrupted before the end"
    made = f"Made by `{report.command}` on {environment.measured[:10]}{load}{ending}."
    blocks = [f"# {title}", report.headline, made]
    for part in parts:
        if isinstance(part, Table):
            blocks += [f"## {part.title}", part.markdown()] if part.rows else []
            part = part.notes
        if part:
            blocks.append(part if isinstance(part, str) else "\n".join(f"- {sentence}" for sentence in part))
    return "\n\n".join(blocks) + "\n"
