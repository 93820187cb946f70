"""The report of a measurement: what was measured, where, and behind which gate. Its files are written whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from tost._io import write_atomic
from tost.bench.harness.environment import Environment
from tost.bench.harness.gate import GateResult
from tost.errors import ConfigError

Results = TypeVar("Results")

_HEAD = ("theme", "complete", "command", "environment", "accelerator", "gate")


_adapters: dict[type[Any], TypeAdapter[Any]] = {}  # each takes milliseconds to build


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def plain(value: object) -> Any:
    """Return a dataclass as JSON holds it."""
    return _adapter(type(value)).dump_python(value, mode="json")


@dataclass(kw_only=True)
class Report(Generic[Results]):
    """A measurement together with everything needed to judge it.

    Attributes:
        theme: The benchmark; a demonstration or a selection has a name of its own.
        command: What was run.
        environment: Where.
        gate: The checks of what was measured.
        results: The numbers, a dataclass of the benchmark. Times are in seconds.
        about: What was measured and how long, in plain types.
        accelerator: The GPU, if that was measured.
        complete: Whether it came to its end.
    """

    theme: str
    command: str
    environment: Environment
    gate: GateResult
    results: Results
    about: dict[str, Any] = field(default_factory=dict)
    accelerator: str | None = None
    complete: bool = False

    @property
    def stem(self) -> str:
        """File name without its ending: theme, hardware and month."""
        hardware = self.accelerator.lower().replace(" ", "-") if self.accelerator else self.environment.slug
        return f"{self.theme}_{hardware}_{self.environment.month}"

    @property
    def machine(self) -> str:
        """One line: hardware and versions."""
        return self.environment.summary + (f" | {self.accelerator}" if self.accelerator else "")

    @property
    def headline(self) -> str:
        """One line: hardware, versions and the state of the gate."""
        return f"{self.machine} | {self.gate.summary}"

    def require_green(self) -> None:
        """Refuse to show speeds of something that is wrong.

        Raises:
            ValueError: A check failed.
        """
        if not self.gate.passed:
            raise ValueError(f"{self.gate.summary}; speeds are shown only behind a green gate.")

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain types. A red gate must not leak a speed, not even into a file."""
        shown = self.results if self.gate.passed else type(self.results)()
        return {
            "theme": self.theme,
            "complete": self.complete and self.gate.passed,
            "command": self.command,
            "environment": asdict(self.environment),
            **({"accelerator": self.accelerator} if self.accelerator else {}),
            "gate": self.gate.to_json(),
            **self.about,
            **plain(shown),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], results: type[Results]) -> Report[Results]:
        """Return the report that `to_json` wrote.

        Args:
            content: The object.
            results: Dataclass of the benchmark's numbers.

        Raises:
            ConfigError: It is not a report of this benchmark.
        """
        names = {name for name in content if name in getattr(results, "__dataclass_fields__", ())}
        try:
            return cls(
                theme=content["theme"],
                command=content["command"],
                environment=_adapter(Environment).validate_python(content["environment"]),
                gate=GateResult.from_json(content.get("gate")),
                results=_adapter(results).validate_python({name: content[name] for name in names}),
                about={key: value for key, value in content.items() if key not in names and key not in _HEAD},
                accelerator=content.get("accelerator"),
                complete=content.get("complete", True),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"not a report of {results.__name__}: {error}") from error

    def write(self, folder: Path, others: Callable[[], Mapping[str, str | bytes]]) -> list[Path]:
        """Write the files of a measurement.

        One that is not complete goes to ``<stem>.partial.json`` and leaves the files of an earlier, complete one alone.
        A complete one is written as JSON and whatever else there is, and its partial file is removed.

        Args:
            folder: Where to write; created if missing.
            others: Makes the files beside the JSON, by the rest of their names after the stem.

        Returns:
            The files written.

        Raises:
            ValueError: The gate is red.
        """
        self.require_green()
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        partial = folder / f"{self.stem}.partial.json"
        if not self.complete:
            write_atomic(partial, text)
            return [partial]
        contents = {".json": text, **others()}
        for ending, content in contents.items():
            write_atomic(folder / f"{self.stem}{ending}", content)
        partial.unlink(missing_ok=True)
        return [folder / f"{self.stem}{ending}" for ending in contents]
