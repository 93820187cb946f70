"""The global order: every sample once per epoch, the same for any number of processes and workers."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tost.data import make_evaluation_loader, make_loader
from tost.data._random import mix, mix_array
from tost.data.loader import GlobalOrder

from .samples import Draws, Numbers, PlainNumbers, joined, loaders, numbers_of, step_by_step

WORLDS = st.sampled_from([1, 2, 3, 4, 6])


@st.composite
def runs(draw):
    """Sizes, a seed, and two ways of sharing the same global batch."""
    first, second, factor = draw(WORLDS), draw(WORLDS), draw(st.integers(1, 3))
    return {
        "samples": draw(st.integers(1, 60)),
        "global_batch": first * second * factor,
        "worlds": (first, second),
        "seed": draw(st.integers(-(2**70), 2**70)),
        "shuffle": draw(st.booleans()),
    }


@settings(max_examples=60)
@given(runs(), st.integers(1, 12))
def test_a_step_takes_the_same_samples_whatever_the_number_of_processes(run, steps):
    first, second = (
        step_by_step(
            loaders(
                Numbers(run["samples"]),
                global_batch=run["global_batch"],
                world_size=world,
                seed=run["seed"],
                shuffle=run["shuffle"],
            ),
            steps,
        )
        for world in run["worlds"]
    )
    assert first == second
    stream = joined(first)
    assert len(stream) == steps * run["global_batch"]
    for at in range(0, len(stream), run["samples"]):
        epoch = stream[at : at + run["samples"]]
        assert len(set(epoch)) == len(epoch), "a sample came twice within an epoch, so another one is missing"


@settings(max_examples=60)
@given(st.integers(1, 80), st.integers(1, 9), WORLDS)
def test_an_evaluation_takes_every_sample_once_and_in_order(samples, batch_size, world):
    made = [
        make_evaluation_loader(PlainNumbers(samples), batch_size=batch_size, rank=rank, world_size=world)
        for rank in range(world)
    ]
    assert len({len(loader) for loader in made}) == 1, "processes that meet in collectives need the same steps"
    steps = step_by_step(made)
    assert len(steps) == len(made[0])
    assert joined(steps) == list(range(samples))
    assert all(len(step) == batch_size * world for step in steps[:-1])


def test_the_last_step_of_an_evaluation_is_shared_evenly():
    made = [make_evaluation_loader(Numbers(11), batch_size=4, rank=rank, world_size=2) for rank in range(2)]
    assert [[numbers_of(batch) for batch in loader] for loader in made] == [
        [[0, 1, 2, 3], [8]],
        [[4, 5, 6, 7], [9, 10]],
    ]


@pytest.mark.parametrize("dataset", [Numbers(1), PlainNumbers(1)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_no_samples_keeps_its_shapes_and_types(dataset, workers):
    (batch,) = make_evaluation_loader(dataset, batch_size=4, rank=0, world_size=2, workers=workers)
    assert (batch["inputs"].shape, batch["inputs"].dtype) == ((0, 1), torch.float32)
    assert (batch["targets"].shape, batch["targets"].dtype) == ((0,), torch.int64)


def test_a_finite_pass_can_be_shuffled_and_starts_again():
    loader = make_loader(Numbers(10), batch_size=4, seed=5, infinite=False)
    first = [numbers_of(batch) for batch in loader]
    assert sorted(joined(first)) == list(range(10))
    assert joined(first) != list(range(10))
    next(iter(loader))  # a pass that is broken off does not shorten the next one
    assert [numbers_of(batch) for batch in loader] == first


def test_the_order_is_what_it_was():
    # A run that is resumed with another version of this package must find its samples again.
    assert mix(0) == 0xE220A8397B1DCDAF  # the first number of SplitMix64 from seed 0
    assert mix(1, 2) == 0xBCD9DBB49673066B != mix(2, 1)
    assert mix(-1) == mix(2**64 - 1)
    first, second = (torch.randperm(8, generator=torch.Generator().manual_seed(mix(1, epoch))) for epoch in (0, 1))
    assert GlobalOrder(8, seed=1, shuffle=True).indices(6, 11) == [*first[6:].tolist(), *second[:3].tolist()]


@given(st.integers(-(2**65), 2**65), st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_numbers_mixed_at_once_are_those_mixed_one_by_one(seed, last):
    assert mix_array(mix(7, seed), np.array(last, dtype=np.uint64)).tolist() == [mix(7, seed, word) for word in last]


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_random_numbers_alone(workers):
    before = torch.get_rng_state()
    loader = make_loader(Numbers(9), batch_size=4, seed=0, workers=workers)
    for _, _batch in zip(range(5), loader, strict=False):
        pass
    assert torch.equal(torch.get_rng_state(), before)


BAD = {
    "empty": ({"dataset": Numbers(0)}, r"the data set has no samples; a loader needs at least one"),
    "no batch": ({"batch_size": 0}, r"batch_size=0, workers=0, .* need at least one sample per step"),
    "rank": ({"rank": 2, "world_size": 2}, r"rank=2 of world_size=2: .* a rank from 0 to world_size - 1"),
    "negative rank": ({"rank": -1}, r"rank=-1 of world_size=1"),
    "workers": ({"workers": -1}, r"workers=-1, .* no negative number of workers"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change, message):
    options = {"dataset": Numbers(5), "batch_size": 2, "seed": 0} | change
    dataset = options.pop("dataset")
    with pytest.raises(ValueError, match=message):
        make_loader(dataset, **options)


@settings(max_examples=40)
@given(runs(), st.integers(1, 12))
def test_draw_numbers_name_the_epoch_and_the_sample(run, steps):
    settings = {key: run[key] for key in ("global_batch", "seed", "shuffle")}
    plain, drawn = (
        joined(step_by_step(loaders(kind(run["samples"]), world_size=run["worlds"][0], **settings), steps))
        for kind in (Numbers, Draws)
    )
    assert [draw % run["samples"] for draw in drawn] == plain
    assert [draw // run["samples"] for draw in drawn] == [at // run["samples"] for at in range(len(drawn))]
    assert len(set(drawn)) == len(drawn)


@settings(max_examples=40)
@given(runs(), st.integers(2, 4), st.integers(1, 12))
def test_repetitions_come_in_a_row_and_are_dealt_in_turn(run, repeats, steps):
    dataset = Draws(run["samples"], repeats)
    settings = {key: run[key] for key in ("global_batch", "seed", "shuffle")}
    whole = step_by_step(loaders(dataset, world_size=1, **settings), steps)
    order = joined(whole)
    assert len(set(order)) == len(order), "every repetition is a draw of its own"
    for at, draw in enumerate(order):
        epoch, place = divmod(at, run["samples"])
        round_number, sample = divmod(draw, run["samples"])
        assert round_number == epoch * repeats + place % repeats
        if place % repeats:
            assert sample == order[at - 1] % run["samples"]
    world = run["worlds"][1]
    for rank, loader in enumerate(loaders(dataset, world_size=world, **settings)):
        shares = [numbers_of(batch) for batch in islice(loader, steps)]
        assert shares == [step[rank::world] for step in whole]


@pytest.mark.parametrize(
    ("samples", "repeats", "expected"),
    [(1_281_167, 3, 1_281_024), (1_281_167, 1, 1_281_167), (511, 3, 256), (256, 2, 256), (255, 3, 255), (1, 3, 1)],
)
def test_an_epoch_with_repetitions_is_about_as_long_as_one_without(samples, repeats, expected):
    assert GlobalOrder(samples, seed=0, shuffle=True, repeats=repeats).epoch == expected


def test_an_epoch_with_repetitions_has_a_third_of_the_samples():
    order = GlobalOrder(1000, seed=0, shuffle=True, repeats=3)
    first, second = order.indices(0, 768), order.indices(768, 1536)
    assert len(set(first)) == len(set(second)) == 256
    assert first[:6] == [first[0]] * 3 + [first[3]] * 3
    assert set(first) != set(second)
