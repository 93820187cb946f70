"""Processes: arguments and results survive the way, and failures are told in a few words."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

import pytest
import torch

from tost.bench.harness.memory import RETURN_AT_ONCE
from tost.bench.harness.worker import reason, run_in_process
from tost.errors import TostError


class Kind(StrEnum):
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True)
class Job:
    kind: Kind
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    job: Job
    threads: int
    setting: str | None
    pid: int


def answer(job: Job) -> Answer:
    if job.kind is Kind.BAD:
        raise KeyError("no such thing")
    setting = os.environ.get(next(iter(RETURN_AT_ONCE)))
    return Answer(job=job, threads=torch.get_num_threads(), setting=setting, pid=os.getpid())


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(request.config.rootpath), os.environ.get("PYTHONPATH", "")]))


def test_a_job_is_done_in_another_process():
    job = Job(kind=Kind.GOOD, sizes=(1, 2))
    done = run_in_process(answer, job, label="a test")
    assert done.job == job
    assert isinstance(done.job.kind, Kind)
    assert done.threads == torch.get_num_threads()
    assert done.setting == next(iter(RETURN_AT_ONCE.values())), "freed memory goes back at once"
    assert done.pid != os.getpid()


def test_failures_end_with_the_last_words():
    with pytest.raises(TostError, match=r"^a test: failed with code 1: KeyError: 'no such thing'$"):
        run_in_process(answer, Job(kind=Kind.BAD, sizes=()), label="a test")


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        (-9, "", "ended by the system, as when memory runs out"),
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried", "out of memory"),
        (1, "Traceback\nMemoryError", "out of memory"),
        (3, "", "failed with code 3: no message"),
        (1, "Traceback\nKeyError: 'x'\n", "failed with code 1: KeyError: 'x'"),
    ],
)
def test_reasons(code, words, expected):
    assert reason(code, words) == expected
