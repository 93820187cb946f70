"""Every parser of files from outside: what the program writes is read, and damage is refused in words.

`make fuzz` looks for inputs that do anything else, guided by coverage; what it finds is stored here and replayed.
"""

from __future__ import annotations

from random import Random

import pytest

from fuzz.harness import CRASHES, memory_limit, problem_of
from fuzz.mutate import mutate
from fuzz.targets import TARGETS
from tost.errors import TostError

MUTATIONS = 80
# Those that build a model, or a configuration of a run, for each input.
FEWER = {"resume": 12, "hf_folder": 24, "explorer": 24, "model_folder": 16, "official": 16, "overrides": 32}

pytestmark = pytest.mark.filterwarnings("ignore")  # what libraries say about damaged files


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory):
    return request.param, TARGETS[request.param](tmp_path_factory.mktemp(request.param))


def is_accepted(harness, data):
    try:
        harness.parse(data)
    except TostError:
        return False
    return True


def test_seeds_are_read(target):
    _, harness = target
    assert [problem_of(harness, seed) for seed in harness.seeds] == [""] * len(harness.seeds)
    assert any(is_accepted(harness, seed) for seed in harness.seeds)


def test_what_once_went_wrong_does_not_any_more(target):
    name, harness = target
    with memory_limit():
        found = {path.name: problem_of(harness, path.read_bytes()) for path in sorted((CRASHES / name).glob("*"))}
    assert {name: problem for name, problem in found.items() if problem} == {}


def test_changed_files_are_read_or_refused_in_words(target):
    name, harness = target
    found = {}
    with memory_limit():
        for number in range(FEWER.get(name, MUTATIONS)):
            chance = Random(number)
            seed = chance.choice(harness.seeds)
            data = seed[: harness.prefix] + mutate(seed[harness.prefix :], chance, harness.words)
            if problem := problem_of(harness, data):
                found.setdefault(problem, (number, data[:500]))
    assert found == {}, "the problem, and the first input that showed it"


def test_every_stored_crash_has_its_target():
    assert {path.name for path in CRASHES.glob("*")} <= set(TARGETS)
