"""Carrying out runs with stand-ins for processes: order, limits, failures, interrupts. One real process at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sweep.samples import bare_run, mark
from tost.errors import ConfigError
from tost.sweep import Run, RunOutcome, State, claim, execute, progress_of, start_process, tail
from tost.sweep.runner import POLL_SECONDS


class Stub:
    """A process that lives for some looks at it, and then leaves what a run would."""

    def __init__(self, run: Run, code: int, looks: int = 2) -> None:
        self.run, self.code, self.looks = run, code, looks
        self.signals: list[int] = []
        self.killed = self.waited = False
        mark(run, "interrupted")

    def poll(self):
        self.looks -= 1
        if self.looks > 0 and not self.signals:
            return None
        status = "interrupted" if self.signals or self.code == 130 else "finished" if self.code == 0 else "failed"
        mark(self.run, status)
        return 130 if self.signals else self.code

    def send_signal(self, sig):
        self.signals.append(sig)

    def kill(self):
        self.killed = True

    def wait(self):
        self.waited = True
        return 0


class World:
    """Starts stand-ins and watches; keeps what happened, in order."""

    def __init__(self, codes: dict[str, int] | None = None, looks: dict[str, int] | None = None) -> None:
        self.codes, self.looks = codes or {}, looks or {}
        self.stubs: dict[str, Stub] = {}
        self.events: list[tuple[str, str]] = []
        self.most = 0
        self.ticks = 0

    def start(self, run):
        assert run.name not in self.stubs, "started twice"
        self.stubs[run.name] = Stub(run, self.codes.get(run.arm, 0), self.looks.get(run.arm, 2))
        return self.stubs[run.name]

    def started(self, run):
        self.events.append(("started", run.name))

    def ended(self, outcome):
        self.events.append(("ended", outcome.run.name))

    def tick(self, running):
        self.ticks += 1
        self.most = max(self.most, len(running))

    def execute(self, runs: list[Run], **options) -> dict[str, RunOutcome]:
        outcomes = execute(runs, self.start, self, poll_seconds=0.0, **options)
        assert len(outcomes) == len(runs)
        return {outcome.run.name: outcome for outcome in outcomes}


@st.composite
def sweeps(draw):
    """Arms in any order, each after at most one other, without circles; their exit codes and lives."""
    count = draw(st.integers(1, 7))
    afters = {arm: draw(st.none() | st.integers(0, arm - 1)) if arm else None for arm in range(count)}
    codes = {f"a{arm}": draw(st.sampled_from([0, 0, 0, 1, 130, -9])) for arm in range(count)}
    looks = {f"a{arm}": draw(st.integers(1, 4)) for arm in range(count)}
    order = draw(st.permutations(range(count)))
    return [(f"a{arm}", None if afters[arm] is None else f"a{afters[arm]}") for arm in order], codes, looks


@settings(max_examples=60)
@given(sweeps(), st.integers(1, 4))
def test_everything_that_can_finish_does(sweep, jobs):
    arms, codes, looks = sweep
    sources = dict(arms)
    with tempfile.TemporaryDirectory() as folder:
        runs = [bare_run(Path(folder), arm, after and f"{after}/seed0") for arm, after in arms]
        world = World(codes, looks)
        outcomes = world.execute(runs, jobs=jobs)

    def succeeds(arm: str) -> bool:
        return codes[arm] == 0 and (sources[arm] is None or succeeds(sources[arm]))

    assert world.most <= jobs
    for arm, after in arms:
        name, outcome = f"{arm}/seed0", outcomes[f"{arm}/seed0"]
        assert (outcome.reason == "") == succeeds(arm) == (outcome.state is State.finished)
        assert (name in world.stubs) == (after is None or succeeds(after)), "started if and only if its source finished"
        if after and name in world.stubs:
            assert world.events.index(("ended", f"{after}/seed0")) < world.events.index(("started", name))
        if after and not succeeds(after):
            assert outcome.reason == f"{after}/seed0, which it starts from, did not finish"
    assert not any(stub.signals or stub.killed for stub in world.stubs.values())


def test_runs_start_in_their_order_and_fill_the_jobs(tmp_path):
    world = World(looks={"a": 9})
    world.execute([bare_run(tmp_path, arm) for arm in "abcd"], jobs=2)
    assert [name for event, name in world.events if event == "started"] == [f"{arm}/seed0" for arm in "abcd"]
    assert world.most == 2
    assert world.events[-1] == ("ended", "a/seed0"), "the others did not wait for the slow one"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (1, "exit code 1"),
        (2, "exit code 2"),
        (-9, "ended by SIGKILL"),
        (-123, "ended by signal 123"),
        (130, "interrupted"),
    ],
)
def test_the_reason_is_told(tmp_path, code, reason):
    world = World({"a": code})
    assert world.execute([bare_run(tmp_path, "a")])["a/seed0"].reason == reason


def test_a_process_that_ends_well_without_finishing_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(Stub, "poll", lambda self: 0)
    outcome = World().execute([bare_run(tmp_path, "a")])["a/seed0"]
    assert (outcome.state, outcome.reason) == (State.interrupted, "ended before its last step")


def test_stopping_asks_once_waits_and_starts_nothing(tmp_path, monkeypatch):
    world = World(looks={"a": 99, "b": 99})
    asked = []
    monkeypatch.setattr(Stub, "send_signal", lambda self, sig: asked.append((self.run.arm, sig)))
    slow = {"a": 8, "b": 12}

    def poll(self):  # saving takes a while
        if not asked or world.ticks < slow[self.run.arm]:
            return None
        mark(self.run, "interrupted")
        return 130

    monkeypatch.setattr(Stub, "poll", poll)
    outcomes = world.execute([bare_run(tmp_path, arm) for arm in "abc"], jobs=2, stopping=lambda: world.ticks >= 3)
    assert asked == [("a", signal.SIGINT), ("b", signal.SIGINT)]
    assert list(world.stubs) == ["a/seed0", "b/seed0"]
    reasons = {name: outcome.reason for name, outcome in outcomes.items()}
    assert reasons == {"a/seed0": "interrupted", "b/seed0": "interrupted", "c/seed0": "stopped before its turn"}
    assert outcomes["c/seed0"].state is State.new
    assert not any(stub.killed for stub in world.stubs.values())


def test_a_run_that_still_finishes_while_stopping_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(Stub, "send_signal", lambda self, sig: None)
    world = World(looks={"a": 4})
    outcomes = world.execute([bare_run(tmp_path, "a")], stopping=lambda: world.ticks >= 1)
    assert outcomes["a/seed0"].reason == ""


def test_an_exception_ends_the_processes_at_once(tmp_path, monkeypatch):
    world = World(looks={"a": 99, "b": 99})

    def tick(running):
        raise KeyboardInterrupt

    monkeypatch.setattr(world, "tick", tick)
    with pytest.raises(KeyboardInterrupt):
        world.execute([bare_run(tmp_path, arm) for arm in "ab"], jobs=2)
    assert len(world.stubs) == 2
    assert all(stub.killed and stub.waited for stub in world.stubs.values())


def test_progress_is_the_newest_logged_step(tmp_path):
    run = bare_run(tmp_path, "a")
    assert progress_of(run) == {}
    run.folder.mkdir(parents=True)
    steps = [{"kind": "step", "step": step, "loss": 2.0 / step, "eta_seconds": 60.0} for step in range(1, 200)]
    lines = [json.dumps(record) for record in (*steps, {"kind": "evaluation", "step": 199})]
    (run.folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "step", "st')
    assert progress_of(run)["step"] == 199


def test_tail_is_the_end_of_what_was_said(tmp_path):
    run = bare_run(tmp_path, "a")
    assert tail(run) == []
    run.folder.mkdir(parents=True)
    (run.folder / "output.txt").write_bytes(b"\xff" + b"".join(b"line %d\n" % number for number in range(5000)))
    assert tail(run, lines=2) == ["line 4998", "line 4999"]


def test_a_folder_is_claimed_by_one_sweep_and_by_what_it_started(tmp_path):
    with claim(tmp_path / "sweep") as lock:
        with pytest.raises(ConfigError, match="is at work in"), claim(tmp_path / "sweep"):
            pass
        orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    with pytest.raises(ConfigError, match="a run that outlived one"), claim(tmp_path / "sweep"):
        pass
    orphan.communicate(b"\n")
    with claim(tmp_path / "sweep"):
        pass


def test_a_process_has_its_own_output_session_and_threads(tmp_path, monkeypatch):
    probe = (
        "import os; print(os.getsid(0) == os.getpid(), os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])"
    )
    real = subprocess.Popen
    commands = []

    def popen(command, **options):
        commands.append(command)
        return real([sys.executable, "-c", probe], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    run = bare_run(tmp_path, "a")
    for _ in range(2):
        assert start_process(run, threads=3).wait() == 0
    assert tail(run) == ["True 3 passive"] * 2
    assert commands[0] == [sys.executable, "-m", "tost.cli", *run.arguments]
    assert os.environ.get("OMP_NUM_THREADS") != "3"
    assert POLL_SECONDS < 1
