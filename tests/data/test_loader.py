"""Positions: what was consumed is never repeated, what was only prepared ahead is never lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tost.data import loader as loader_module
from tost.data import make_evaluation_loader, make_loader

from .samples import Numbers, PlainNumbers, loaders, numbers_of, step_by_step


def take(loader, steps):
    return [numbers_of(batch) for batch in islice(loader, steps)]


def saved(loader):
    """The state after a trip through a file."""
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (1, 1), (1, 3), (2, 0), (2, 1), (2, 2), (3, 3)])
def test_a_new_loader_goes_on_with_the_next_batch(before, after):
    whole = take(make_loader(PlainNumbers(17), batch_size=3, seed=1), 20)
    loader = make_loader(PlainNumbers(17), batch_size=3, seed=1, workers=before)
    stream = iter(loader)
    first = take(stream, 7)  # the iterator stays alive, with batches prepared ahead
    state = saved(loader)
    assert state["global_position"] == 21
    other = make_loader(PlainNumbers(17), batch_size=3, seed=1, workers=after)
    other.load_state_dict(state)
    assert saved(other) == state
    assert first + take(other, 13) == whole
    assert first + take(stream, 13) == whole


@st.composite
def interruptions(draw):
    first, second = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    return {
        "samples": draw(st.integers(1, 40)),
        "global_batch": first * second * draw(st.integers(1, 3)),
        "worlds": (first, second),
        "seed": draw(st.integers(0, 2**63)),
        "cut": draw(st.integers(0, 9)),
    }


def check_interruption(run, workers):
    """Some steps with one number of processes, the rest with another: as if nothing had happened."""
    steps, dataset = 10, Numbers(run["samples"])
    options = {"global_batch": run["global_batch"], "seed": run["seed"]}
    whole = step_by_step(loaders(dataset, world_size=1, **options), steps)
    before = loaders(dataset, world_size=run["worlds"][0], workers=workers[0], **options)
    first = step_by_step(before, run["cut"])
    states = [saved(loader) for loader in before]
    assert all(state == states[0] for state in states), "the position belongs to the run, not to a process"
    after = loaders(dataset, world_size=run["worlds"][1], workers=workers[1], **options)
    for loader in after:
        loader.load_state_dict(states[0])
    assert first + step_by_step(after, steps - run["cut"]) == whole


@settings(max_examples=60)
@given(interruptions())
def test_a_run_goes_on_with_another_number_of_processes(run):
    check_interruption(run, workers=(0, 0))


@settings(max_examples=4)
@given(interruptions())
def test_a_run_goes_on_with_other_processes_and_workers(run):
    check_interruption(run, workers=(2, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_again_goes_on_with_the_stream(workers):
    whole = take(make_loader(Numbers(10), batch_size=3, seed=0), 9)
    loader = make_loader(Numbers(10), batch_size=3, seed=0, workers=workers)
    assert take(loader, 4) + take(loader, 5) == whole


def test_a_far_position_is_reached_at_once():
    loader = make_loader(Numbers(1000), batch_size=2, seed=0)
    loader.load_state_dict({**loader.state_dict(), "global_position": 10**15})  # step by step this would not end
    assert len(take(loader, 1)) == 1
    assert loader.state_dict()["global_position"] == 10**15 + 2


OTHER_STATES = {
    "other data": (
        {"samples": 9},
        "saved with samples=9 instead of 8: the order of samples is another one. Resume with the same data and seed",
    ),
    "other seed": ({"seed": 4}, "saved with seed=4 instead of 3"),
    "other order": ({"shuffle": False}, "saved with shuffle=False instead of True"),
    "repeated": ({"repeats": 3}, "saved with repeats=3 instead of 1"),
}


def test_other_states():
    loader = make_loader(Numbers(8), batch_size=2, seed=3)
    state = loader.state_dict()
    del state["repeats"]  # as before there were repetitions
    loader.load_state_dict({**state, "global_position": 4})
    assert loader.state_dict()["global_position"] == 4
    with pytest.raises(
        ValueError, match=r"not the state of a loader: it lacks global_position, samples, seed, shuffle;"
    ):
        loader.load_state_dict({"step": 3})


@pytest.mark.parametrize(("change", "message"), OTHER_STATES.values(), ids=OTHER_STATES.keys())
def test_a_state_of_something_else_is_refused(change, message):
    loader = make_loader(Numbers(8), batch_size=2, seed=3)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(loader.state_dict() | change)


def test_leaving_a_loop_ends_its_workers():
    loader = make_loader(Numbers(6), batch_size=3, seed=0, workers=2)
    stream = iter(loader)
    next(stream)
    workers = loader._iterator._workers
    assert all(worker.is_alive() for worker in workers)
    stream.close()
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.slow
def test_workers_can_be_started_by_a_server(monkeypatch):
    monkeypatch.setattr(loader_module, "_start_method", lambda: "forkserver")
    assert take(make_evaluation_loader(Numbers(6), batch_size=3, workers=2), None) == [[0, 1, 2], [3, 4, 5]]


# A training process that notes signals and goes on, as ours does until its step is saved.
TRAINING = """
import signal, sys
from itertools import islice
from tests.data.samples import Numbers
from tost.data import make_loader

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
loader = make_loader(Numbers(100), batch_size=2, seed=0, workers=2)
stream = iter(loader)
next(stream), next(stream)  # a batch of each worker: both have left the group
print(*(worker.pid for worker in loader._iterator._workers), flush=True)
sys.stdin.readline()
for _ in islice(stream, 49):
    pass
print("took", loader.state_dict()['global_position'], flush=True)
"""


@pytest.fixture
def training():
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    with process:
        yield process
        process.kill()


def test_a_signal_to_the_whole_group_leaves_the_workers_at_work(training):
    assert training.stdout.readline()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(training.pid, number)
    out, _ = training.communicate("go on\n", timeout=60)
    assert out == "took 102\n"
    assert training.returncode == 0


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(training):
    workers = [int(pid) for pid in training.stdout.readline().split()]
    training.kill()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive the training process"
        time.sleep(0.2)


def is_running(pid):
    status = Path(f"/proc/{pid}/stat")
    # An ended process that has not been collected yet has the state Z.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
