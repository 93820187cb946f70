"""`tost bench gpu-check`, on a CPU: Triton's interpreter stands for the GPU, and a constant for its clock."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from tost.bench.gpu_check import run
from tost.bench.gpu_check.cases import BENCHMARK, GpuCheckScale
from tost.errors import ConfigError
from tost.ops.triton import approval

SMALL = GpuCheckScale(device="cpu", compile=False, checked=((2, 3, 2, 3),), shapes=((1, 3, 2, 3),))


@pytest.fixture
def interpreted(monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="triton has no packages for this platform")
    from tests.ops.triton.interpreter import speed_up

    speed_up()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(run, "DTYPES", (torch.float32,))
    return tmp_path / "tost" / "gpu-check.json"


def test_a_machine_without_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="nothing to check here: torch finds no GPU"):
        BENCHMARK.start(GpuCheckScale())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(run, "unavailable", lambda: ["triton is not installed"])
    with pytest.raises(ConfigError, match=r"nothing to check here: triton is not installed\."):
        BENCHMARK.start(SMALL)


def test_the_interpreter_is_not_taken_for_a_gpu(interpreted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1 is set"):
        BENCHMARK.start(GpuCheckScale())


@pytest.fixture
def clocked(interpreted, monkeypatch):
    def clock(call):
        call()
        return 2e-6

    monkeypatch.setattr(run, "events", clock)
    return interpreted


def test_kernels_that_are_right_are_timed_and_recorded(clocked):
    measurement = run.GpuCheck(SMALL)
    report = measurement.open_report("gpu-check")
    assert report.gate.passed
    names = {check.name for check in report.gate.checks}
    assert "causal_tssa 2x3x2x3 float32, all options: ddecay" in names
    assert {f"{op} 2x3x2x3 float32, packed: dw" for op in ("tssa", "causal_tssa")} <= names
    assert "causal_tssa 2x3x2x3 float32, one token: mass" in names
    assert "tssa 2x3x2x3 float32, not normalized: bits of a second run" in names
    lines = list(measurement.measure(report.results, lambda line: None))
    assert len(lines) == measurement.steps == 4
    assert clocked.exists()
    assert report.results.recorded
    (finding,) = measurement.findings(report.results)
    assert finding.startswith("To paste into an issue: the Triton kernels passed")
    assert "1/1 to 1/1 of the time" in finding
    assert "| tssa fwd 1x3 H=2 D=3 | 2 | 2 | 2 | 2 |" in measurement.page(report)


def test_nothing_is_recorded_where_it_is_not_asked_for(clocked):
    results = run.GpuCheckResults()
    list(run.GpuCheck(replace(SMALL, record=False)).measure(results, lambda line: None))
    assert len(results.rows) == 16
    assert not clocked.exists()
    assert not results.recorded
    assert "nothing was recorded" in run.GpuCheck.findings(results)[0]


def test_a_wrong_kernel_turns_the_gate_red(interpreted, monkeypatch):
    right = run._run

    def wrong(leaves, options, backend, *, causal):
        found = right(leaves, options, backend, causal=causal)
        return found | {"dw": 1.01 * found["dw"]} if backend == "triton" and "dw" in found else found

    monkeypatch.setattr(run, "_run", wrong)
    measurement = run.GpuCheck(SMALL)
    report = measurement.open_report("gpu-check")
    assert not report.gate.passed
    assert all(check.name.endswith(": dw") for check in report.gate.failures)
    assert not interpreted.exists()
    (sentence,) = measurement.regrets(report.gate)
    assert sentence.startswith("To paste into an issue, with the lines above: the Triton kernels failed 7 of ")


def test_a_kernel_that_does_not_run_turns_the_gate_red(interpreted, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of resource: shared memory\nand a trace")

    monkeypatch.setattr("tost.ops.triton.launch.causal_step", broken)
    report = run.GpuCheck(SMALL).open_report("gpu-check")
    (failure,) = report.gate.failures
    assert failure.name == "causal_tssa 2x3x2x3 float32, one token: RuntimeError: out of resource: shared memory"


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["tssa", "causal"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, id=f"{shape} {dtype}")
        for shape in GpuCheckScale().checked
        for dtype in run.DTYPES
        if shape[1] < 1000 or dtype == torch.float32
    ],
)
def test_the_kernels_pass_what_a_gpu_is_asked(interpreted, shape, dtype, causal):
    """So that what fails on a device is the device's doing, not that of a bound.

    Long sequences, which take minutes here, are in float32 only.
    """
    forms = run.FORMS[causal]
    checks = [check for form in forms for check in run.compare(shape, dtype, "cpu", causal=causal, form=form)]
    assert len(checks) > len(forms)
    assert not [check.message for check in checks if not check.passed]


def test_a_contender_that_fails_leaves_its_reason():
    def clock(call):
        raise RuntimeError("out of memory\nand more")

    rows = run.measure_case(SMALL.cases[0], "cpu", compiled=False, clock=clock)
    assert {(row.seconds, row.note) for row in rows} == {(None, "out of memory")}
    assert run._tables(run.GpuCheckResults(rows=rows))[0].notes


@pytest.mark.parametrize("case", SMALL.cases, ids=lambda case: case.label)
def test_linear_attention_is_timed_where_it_is_installed(monkeypatch, case):
    """A stand-in for the package: what it is called with and what is taken from it, not what it computes."""
    seen = []

    def chunk_linear_attn(q, k, v, normalize):
        seen.append((q.shape, q is k is v, normalize))
        return 2 * q, None

    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    sys.modules["fla"].__spec__ = ModuleSpec("fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    package = ModuleType("fla.ops.linear_attn")
    package.chunk_linear_attn = chunk_linear_attn
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", package)

    def clock(call):
        call()
        return 1.0

    rows = run.measure_case(case, "cpu", compiled=False, clock=clock)
    assert ("fla linear attention" in {row.contender for row in rows}) == case.causal
    assert seen == [((1, 3, 2, 3), True, False)] * case.causal
    assert not any(row.note for row in rows)


def test_the_state_is_shown(interpreted):
    assert approval.state() == "no GPU here"
