"""Reports and their files: stored ones load, writing is all or nothing, and a red gate shows nothing."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.bench.reports import RED, report
from tost._lazy import load
from tost._machine import source_revision
from tost.bench.harness.benchmark import benchmarks
from tost.bench.harness.environment import describe_environment
from tost.bench.harness.gate import GateResult
from tost.bench.harness.plot import Line, Panel, Style, draw, require_matplotlib
from tost.bench.harness.report import Report
from tost.errors import ConfigError

STORED = Path(__file__).parents[3] / "benchmarks" / "results"


@dataclass
class Numbers:
    rows: list[int] = field(default_factory=list)


def known(value, stored):
    """Leave out what a measurement has now and the stored one had not: options that came later, at their defaults."""
    if isinstance(stored, dict):
        return {key: known(value.get(key), stored[key]) for key in stored}
    if isinstance(stored, list):
        return [known(one, other) for one, other in zip(value, stored, strict=True)]
    return value


@pytest.mark.parametrize("benchmark", benchmarks(), ids=lambda benchmark: benchmark.name)
def test_stored_measurements_load_and_give_the_same_tables(benchmark):
    measurement = load(benchmark.measurement)
    files = sorted(STORED.glob(f"{benchmark.name}_*.json"))
    assert files
    for file in files:
        content = json.loads(file.read_text())
        stored = Report.from_json(content, measurement.results)
        again = json.loads(json.dumps(stored.to_json(), allow_nan=False))
        assert known(again, content) == content
        assert set(again) - set(content) <= {"complete", "gate"}, "the first files of some benchmarks lack these"
        assert stored.stem == file.stem
        tables = measurement.tables(stored.results)
        assert tables
        if file.with_suffix(".md").exists():
            page = file.with_suffix(".md").read_text().splitlines()
            lines = [line for line in measurement.page(stored).splitlines() if line.startswith("| ")]
            assert [line for line in lines if line not in page] == []
        assert all(image.startswith(b"<?xml") for image in measurement.pictures(stored).values())


def test_a_file_of_another_kind_is_refused():
    content = report("toy", Numbers([1, 2])).to_json()
    assert Report.from_json(content, Numbers).results == Numbers([1, 2])
    crowded = {**content, "gate": {"checks": 10**12, "failures": [], "declined": {}}}
    for wrong in ({}, {**content, "rows": ["many"]}, {**content, "environment": None}, {**content, "gate": 3}, crowded):
        with pytest.raises(ConfigError, match="not a report of Numbers"):
            Report.from_json(wrong, Numbers)


def test_gates_survive_the_file():
    for gate in (report("toy", Numbers()).gate, RED):
        again = GateResult.from_json(gate.to_json())
        assert (again.passed, again.summary) == (gate.passed, gate.summary)
        assert len(again.failures) == len(gate.failures)


def test_a_red_gate_hides_the_numbers(tmp_path):
    red = report("toy", Numbers([1]), gate=RED)
    assert red.to_json()["rows"] == []
    assert not red.to_json()["complete"]
    with pytest.raises(ValueError, match="only behind a green gate"):
        red.write(tmp_path, dict)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_is_part_of_the_name():
    gpu = report("toy", Numbers(), accelerator="NVIDIA H800")
    assert gpu.stem == "toy_nvidia-h800_202605"
    assert gpu.machine.endswith("| NVIDIA H800")
    assert Report.from_json(gpu.to_json(), Numbers).accelerator == "NVIDIA H800"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    (path,) = report("toy", Numbers([1])).write(tmp_path, dict)
    before = path.read_bytes()

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report("toy", Numbers([2])).write(tmp_path, dict)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_missing_matplotlib_is_reported_before_measuring(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tost-transformer\[analysis\]'"):
        require_matplotlib()


def test_pictures_in_other_formats():
    line = Line(
        style=Style("a", "#000000", "o"), points=[(1, 1.0), (2, 3.0)], quartiles=[(0.9, 1.1), (2.0, 4.0)], end="3 s"
    )
    panel = Panel(title="a panel", lines=[line], sizes=[1, 2], level="one")
    assert draw([panel], below=["sizes"], image_format="png").startswith(b"\x89PNG")
    assert draw([panel], below=["a"]) == draw([panel], below=["a"]) != draw([panel], below=["b"])


def test_environment_describes_this_process():
    here = describe_environment()
    assert here.cpu
    assert here.slug.endswith(f"-{here.threads}t")
    assert here.slug.replace("-", "").isalnum()
    assert len(here.month) == 6
    assert source_revision() is None or source_revision().strip()
