"""A new benchmark is two files: description and code. The command, its help, gate and files follow."""

from __future__ import annotations

import json
import sys

import pytest
import typer

import tost.bench
from tost.bench.harness.benchmark import Option, benchmarks, numbers, options_of
from tost.cli import _bench
from tost.errors import ConfigError

CASES = '''
from dataclasses import dataclass
from typing import Annotated

from tost.bench.harness.benchmark import Benchmark, Option


@dataclass(frozen=True, kw_only=True)
class ToyScale:
    cases: Annotated[tuple[int, ...], Option("Sizes.", flag="sizes", metavar="N,N,...")] = (10, 1000)
    repeats: Annotated[int, Option("Timed runs.", least=3, selects=False)] = 5
    wrong: Annotated[bool, Option("Be wrong.", stored=False)] = False

    @classmethod
    def quick(cls):
        """One size."""
        return cls(cases=(10,), repeats=3)


BENCHMARK = Benchmark(name="toy", help="Time a sum.", scale=ToyScale, measurement="tost.bench.toy.run:ToyMeasurement")
'''
RUN = """
from dataclasses import dataclass, field

import torch

from tost.bench.harness.gate import Check, GateResult
from tost.bench.harness.measurement import Measurement, page
from tost.bench.harness.table import columns
from tost.bench.harness.timing import Spread, Trial, interleave, spread_of


@dataclass(frozen=True, kw_only=True)
class Row:
    size: int
    seconds: Spread


@dataclass(kw_only=True)
class Results:
    rows: list[Row] = field(default_factory=list)


class ToyMeasurement(Measurement):
    results = Results
    checked = "a sum with arithmetic"

    def check(self):
        return GateResult(checks=(Check(name="sum", error=float(self.scale.wrong), bound=1e-6),))

    def measure(self, results, watch):
        for size in self.scale.cases:
            watch(f"{size} numbers")
            numbers = torch.ones(size)
            rounds = interleave({"sum": Trial(numbers.sum)}, repeats={"sum": self.scale.repeats})
            results.rows.append(Row(size=size, seconds=spread_of(rounds, "sum")))
            yield "done"

    @staticmethod
    def tables(results):
        cells = [("size", lambda row: str(row.size)), ("runs", lambda row: str(row.seconds.count))]
        return [columns("Sums", results.rows, cells)]

    @staticmethod
    def page(report):
        return page("Sums", report, *ToyMeasurement.tables(report.results))
"""


@pytest.fixture
def toy(tmp_path, monkeypatch, capsys):
    """Run `tost bench toy`; the result is the exit code and what was printed."""
    folder = tmp_path / "packages" / "toy"
    folder.mkdir(parents=True)
    for name, text in (("__init__", ""), ("cases", CASES), ("run", RUN)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(tost.bench, "__path__", [*tost.bench.__path__, str(folder.parent)])

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tost", "bench", "toy", *arguments])
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
        app.add_typer(_bench.build(), name="bench")
        with pytest.raises(SystemExit) as exit_info:
            app()
        captured = capsys.readouterr()
        return exit_info.value.code, captured.out, captured.err

    yield run
    for name in [name for name in sys.modules if name.startswith("tost.bench.toy")]:
        del sys.modules[name]


def test_two_files_are_a_benchmark(toy, tmp_path):
    code, out, _ = toy("--help")
    assert code == 0
    for part in (
        "Time a sum.",
        "--sizes N,N,...",
        "Sizes.  [default: (10,1000)]",
        "5, with --quick 3",
        "x>=3",
        "One size.",
    ):
        assert part in out
    code, out, err = toy("--sizes", "10,20,30", "--repeats", "4", "--out", str(tmp_path / "out"), "--json")
    assert code == 0, err
    content = json.loads(out.splitlines()[-1])
    assert (content["theme"], content["complete"]) == ("toy-selection", True)
    assert content["scale"] == {"cases": [10, 20, 30], "repeats": 4}
    assert [(row["size"], row["seconds"]["count"]) for row in content["rows"]] == [(10, 4), (20, 4), (30, 4)]
    assert "gate: comparing a sum with arithmetic" in err
    assert "[3/3] 30 numbers: done" in err
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".md"]


def test_a_wrong_benchmark_is_not_shown(toy, tmp_path):
    code, out, err = toy("--wrong", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "sum: relative rms 1 exceeds 1e-06" in out
    assert "Sums" not in out
    assert "no speed was measured" in err
    assert not (tmp_path / "out").exists()


def test_a_demonstration_has_its_own_scale(toy):
    code, out, _ = toy("--quick", "--json")
    content = json.loads(out.splitlines()[-1])
    assert (code, content["theme"], content["scale"]) == (0, "toy-quick", {"cases": [10], "repeats": 3})


def test_every_benchmark_is_described():
    found = benchmarks()
    names = ["attention", "generate", "model", "ops"]
    assert [benchmark.name for benchmark in found] == names
    for benchmark in found:
        assert benchmark.theme(benchmark.scale()) == benchmark.name
        assert all(isinstance(option, Option) for _, option in options_of(benchmark.scale).values())


def test_lists_of_numbers():
    assert numbers("1,2", "tokens") == (1, 2)
    with pytest.raises(ConfigError, match="'1k' is not a list of numbers; write for example --tokens 1024,4096"):
        numbers("1k", "tokens")
