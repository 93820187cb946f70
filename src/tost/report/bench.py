"""Read the results of `tost bench` for the page. Without a passed gate there are no numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tost._io import read_json
from tost.errors import ConfigError

_ABOUT = ("theme", "command", "environment", "gate", "complete", "contenders", "plan")


@dataclass(frozen=True)
class BenchRecord:
    """A measurement.

    Attributes:
        file: Where it was read.
        theme: What was measured: ``ops``, ``model`` and so on.
        command: What measured it.
        environment: The machine.
        gate: Whether the implementations were right, if that was checked.
        rows: The numbers; empty if the gate is red.
        complete: Whether it ran to its end.
        contenders: What each competitor is.
    """

    file: Path
    theme: str
    command: str
    environment: Mapping[str, Any]
    gate: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    complete: bool
    contenders: Mapping[str, Any]

    @property
    def passed(self) -> bool | None:
        """Whether the gate is green; None if there was none."""
        return bool(self.gate["passed"]) if "passed" in self.gate else None


def read_bench(file: Path) -> BenchRecord:
    """Read a JSON file of `tost bench`.

    Raises:
        ConfigError: It is not there, or is something else.
    """
    remedy = "give the JSON file that `tost bench ... --out DIR` wrote"
    try:
        content = read_json(file, error=ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("theme"), str):
        raise ConfigError(f"{file} is not a measurement: it has no theme; {remedy}.")
    gate = _mapping(content.get("gate"))
    # What has no rows, such as the measurement of the training engine, is a row itself.
    rows = content.get("rows", [{key: value for key, value in content.items() if key not in _ABOUT}])
    if gate.get("passed", True) is not True or not isinstance(rows, list):
        rows = []
    return BenchRecord(
        file=file,
        theme=content["theme"],
        command=str(content.get("command", "")),
        environment=_mapping(content.get("environment")),
        gate=gate,
        rows=tuple(row for row in rows if isinstance(row, dict)),
        complete=content.get("complete", True) is True,
        contenders=_mapping(content.get("contenders")),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
