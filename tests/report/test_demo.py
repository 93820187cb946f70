"""`make demo`: its stages are commands that exist, and the whole of it runs, goes on and ends with a page."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.report.reading import Reading, complaints
from tost.recipes import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("length", [{}, {"long": True}, {"tiny": True}])
def test_stages_train_what_they_say(demo, tmp_path, length):
    stages = demo.stages(tmp_path, **length)
    trainings = [stage for stage in stages if stage.command[0] == "train"]
    configs = [load_config(s.command[1], [word for word in s.command[2:] if "=" in word]) for s in trainings]
    assert [config.model.name for config in configs] == ["tost_mini", "softmax_mini", "vit_mini", "tost_lm_base_plus"]
    # The runs on images differ in nothing but the model.
    assert all(c.model_dump(exclude={"model"}) == configs[0].model_dump(exclude={"model"}) for c in configs[1:3])
    assert all(stage.command[-2:] == ("--resume", "auto") and stage.run is not None for stage in trainings)
    assert stages[-1].command[0] == "report"
    assert [Path(run) for run in stages[-1].command[1:5]] == [stage.run for stage in trainings]


def test_the_makefile_runs_it():
    assert "scripts/demo.py --out demo$(if $(LONG),-long --long)" in (ROOT / "Makefile").read_text()


def test_only_finished_runs_are_kept(demo, tmp_path):
    (tmp_path / "summary.json").write_text('{"status": "interrupted"}')
    assert not demo.is_finished(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    assert not demo.is_finished(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    assert demo.is_finished(tmp_path)
    assert not demo.is_finished(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_is_interrupted_goes_on_and_works_twice(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--tiny", "--out", "demo"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    lines = iter(process.stdout.readline, "")
    next(line for line in lines if "a plain vision transformer" in line)
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: everybody gets it
    rest = process.communicate(timeout=300)[0]
    assert process.returncode == 130, rest
    assert "the same command goes on" in rest

    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == "demo/report.html"
        assert len(re.findall(r"^=== \[\d/9\]", done.stdout, flags=re.MULTILINE)) == 9
    assert done.stdout.count("already finished") == 4
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert complaints(page) == []
    told = Reading(page).text
    for part in ("R_c^var", "In an untrained model", "Gate: green", "vit_mini", "tokens per second", "import"):
        assert part in told, part
