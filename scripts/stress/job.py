"""What a scenario works with, and what it counts."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from victims import Victim

__all__ = ["Job", "Scenario"]


@dataclass
class Job:
    """One scenario at work.

    Attributes:
        folder: Its files, which are removed unless something differs.
        kills: How many processes to kill, or how often to do what else the scenario does.
        deadline: When to stop, by the monotonic clock.
        chance: Source of randomness.
        counts: How often what happened; "kills" and "compared" are shown in the table.
        differences: What was not as it should be.
    """

    folder: Path
    kills: int
    deadline: float
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """File for the output of the victims."""
        return self.folder / "log.txt"

    @property
    def done(self) -> bool:
        """Whether enough was killed, or the time is up, or something differs."""
        enough = self.counts["kills"] >= self.kills
        return enough or time.monotonic() > self.deadline or bool(self.differences)

    def start(
        self, arguments: Sequence[str], *, prepare: Callable[[], None] | None = None, processes: int = 1
    ) -> Victim:
        """Start a command."""
        return Victim(arguments, self.log, prepare=prepare, processes=processes)

    def run(self, arguments: Sequence[str], *, prepare: Callable[[], None] | None = None, processes: int = 1) -> Victim:
        """Run a command undisturbed, which has to succeed."""
        victim = self.start(arguments, prepare=prepare, processes=processes)
        code = victim.wait()
        self.expect(code == 0, f"exit code {code} without a disturbance: {victim.output[-1500:]}")
        return victim

    def expect(self, right: bool, otherwise: str) -> bool:
        """Note a difference unless all is right."""
        if not right:
            self.differences.append(otherwise)
        return right

    def expect_message(self, victim: Victim, codes: Sequence[int], *words: str) -> None:
        """Note a difference unless a command failed with one of the codes and a message with all words."""
        code, output = victim.poll(), victim.output
        self.expect(code in codes, f"exit code {code} instead of {codes}: {output[-1500:]}")
        self.expect("Traceback" not in output, f"a traceback instead of a message: {output[-3000:]}")
        for word in words:
            self.expect(word in output, f"the message lacks {word!r}: {output[-1500:]}")


@dataclass(frozen=True)
class Scenario:
    """Something bad that happens again and again.

    Attributes:
        about: What happens, for the table.
        run: Does it, until `Job.done`.
        share: Its part of the kills, relative to the others.
        counted: What is counted, in the plural.
    """

    about: str
    run: Callable[[Job], None]
    share: float = 1.0
    counted: str = "kills"
