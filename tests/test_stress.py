"""The stress program: it notices what it is there to notice, adds up its results, and finds nothing in a short run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import run

ROOT = Path(__file__).parents[1]


@pytest.fixture
def modules(monkeypatch):
    """Its modules, imported as the program imports them."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "stress"))
    import compare
    import record

    yield compare, record
    for name in ("compare", "record"):
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("stress") / "run"
    run(out, "train.ema_decay=0.9", "train.steps=4", "schedule.warmup_steps=1")
    (out / "batches.txt").write_text("0.0 0 abc\n1.0 0 def\n")
    return out


def append(path, text):
    path.write_text(path.read_text() + text)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda out: None, None),
        (lambda out: append(out / "batches.txt", "1.0 0 def\n"), None),  # taken again after a kill
        (lambda out: append(out / "batches.txt", "1.0 0 other\n"), "data of step 1.0 0"),
        (lambda out: (out / "batches.txt").write_text("0.0 0 abc\n"), "data of step 1.0 0"),
        (lambda out: append(out / "metrics.jsonl", (out / "metrics.jsonl").read_text()), "metrics.jsonl"),
        (lambda out: append(out / "config.yaml", "\n"), "config.yaml"),
        (lambda out: flip(out / "checkpoints/last/optimizer.safetensors"), "last checkpoint: optimizer.safetensors"),
        (lambda out: flip(out / "checkpoints/last/ema.safetensors"), "last checkpoint: ema.safetensors"),
        (lambda out: (out / "checkpoints/last/random-00000.json").unlink(), "last checkpoint: random-00000.json"),
        (lambda out: (out / "checkpoints/last").unlink(), "there is no last checkpoint"),
    ],
)
def test_differences_are_noticed(modules, finished, tmp_path, change, difference):
    shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    change(tmp_path / "copy")
    found = modules[0].compare_runs(finished, tmp_path / "copy")
    assert difference in found if difference else not found


def test_results_are_added_up(modules, tmp_path):
    record = modules[1]
    file = tmp_path / "stress.json"
    for differences in ([], ["weights"]):
        result = {"counts": {"kills": 3, "compared": 2, "inside a checkpoint": 1}, "differences": differences}
        record.add(file, "train", "runs killed", "kills", {**result, "seconds": 1.5})
    record.add(file, "clock", "clocks", "times", {"counts": {"kills": 5}, "differences": [], "seconds": 1.0})
    content = record.load(file)
    assert record.summed(content) == {
        "kills": 6,
        "disturbances": 5,
        "compared": 4,
        "differences": 1,
        "seconds": pytest.approx(4.0),
    }
    shown = "\n".join(record.table(content).plain())
    assert "runs killed (2 inside a checkpoint)" in shown
    assert "6 kills" in shown.splitlines()[-1]


@pytest.mark.slow
def test_a_few_kills_of_everything_leave_no_trace(tmp_path):
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "stress.json")]
    command = [sys.executable, str(ROOT / "scripts" / "stress"), "--kills", "60", *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    scenarios = json.loads((tmp_path / "stress.json").read_text())["scenarios"]
    assert all(scenario["counts"]["kills"] >= 1 for scenario in scenarios.values())
    assert not any(scenario["differences"] for scenario in scenarios.values())
