"""Every probe asks what it says: the answers are found again from the inputs alone."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tost.data import DataOptions, build_data
from tost.data.dataset import IGNORED
from tost.data.embedded import PROBES

SMALL = {
    "recall": {"length": 24, "pairs": 5, "num_keys": 9, "num_values": 4},
    "induction": {"length": 12, "symbols": 6},
    "selective_copy": {"length": 20, "count": 6, "symbols": 5},
    "most_frequent": {"length": 14, "symbols": 4},
    "brackets": {"length": 30, "max_depth": 3},
}
COUNTS = {"train_count": 50, "validation_count": 40}


def build(name, seed=0, **options):
    return build_data(DataOptions(name=name, options=SMALL[name] | COUNTS | options), seed)


def recall(inputs):
    values = dict(zip(inputs[0:10:2], inputs[1:10:2], strict=True))
    return [values[token] if place >= 10 and token else IGNORED for place, token in enumerate(inputs)]


def induction(inputs):
    return [IGNORED] * (len(inputs) - 1) + [inputs[inputs.index(0) + 1]]


def selective_copy(inputs):
    symbols = iter([token for token in inputs if token > 1])
    return [next(symbols) if token == 1 else IGNORED for token in inputs]


def most_frequent(inputs):
    return [IGNORED] * (len(inputs) - 1) + [max(set(inputs[:-1]), key=inputs[:-1].count)]


def brackets(inputs):
    return np.cumsum([1 if token == 0 else -1 for token in inputs]).tolist()


ANSWERS = {f.__name__: f for f in (recall, induction, selective_copy, most_frequent, brackets)}


def test_every_probe_is_tested_here():
    assert sorted(ANSWERS) == sorted(SMALL) == sorted(spec.name for spec in PROBES)


@pytest.mark.parametrize("name", SMALL)
@given(seed=st.integers(0, 2**63))
def test_answers_follow_from_the_inputs(name, seed):
    bundle, shape = build(name, seed, validation_count=5), DataOptions(name=name, options=SMALL[name]).shape()
    assert (shape.length, shape.task) == (SMALL[name]["length"], "token_prediction")
    for batch in (bundle.validation.gather(torch.arange(5)), bundle.train.gather(torch.tensor([0, 49, 50, 10**9]))):
        for inputs, targets in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
            assert targets == ANSWERS[name](inputs)
            asked = [target for target in targets if target != IGNORED]
            assert len(asked) > 0
            assert 0 <= min(inputs + asked) <= max(inputs + asked) < shape.vocab_size


def test_a_sample_of_recall_asks_for_every_key_once():
    batch = build("recall").validation.gather(torch.arange(40))
    for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
        assert sorted(inputs[targets != IGNORED].tolist()) == sorted(inputs[0:10:2].tolist())
    questions = (batch["targets"] != IGNORED)[:, 10:].float().mean(dim=0)
    assert questions.min() > 0  # anywhere after the pairs


def test_first_epochs_of_recall_may_have_shorter_samples():
    train = build("recall", first_lengths=[8, 16]).train
    plain = build("recall").train
    for epoch, (length, pairs) in enumerate([(8, 2), (16, 4), (24, 5), (24, 5)]):
        batch = train.gather(epoch * 50 + torch.arange(50))
        assert batch["inputs"].shape == batch["targets"].shape == (50, length)
        assert ((batch["targets"] != IGNORED).sum(dim=1) == pairs).all()
    late = torch.tensor([100, 151])
    assert torch.equal(train.gather(late)["inputs"], plain.gather(late)["inputs"])
    assert build("recall", first_lengths=[8, 16]).info == build("recall").info  # samples to measure on stay as they are


def test_a_batch_from_two_stages_is_padded_by_tokens_that_do_not_ask():
    train = build("recall", first_lengths=[8]).train
    short, both = train.gather(torch.tensor([49])), train.gather(torch.tensor([49, 50]))
    assert torch.equal(both["inputs"][:1, :8], short["inputs"])
    assert torch.equal(both["targets"][:1, :8], short["targets"])
    assert both["inputs"].shape == (2, 24)
    assert both["inputs"][0, 8:].unique().tolist() == [0]
    assert both["targets"][0, 8:].unique().tolist() == [IGNORED]


def test_most_frequent_has_one_winner_and_brackets_reach_every_depth():
    for row in build("most_frequent").validation.gather(torch.arange(40))["inputs"].tolist():
        counts = sorted((row[:-1].count(symbol) for symbol in range(1, 5)), reverse=True)
        assert counts[0] > counts[1]
    assert build("brackets").validation.gather(torch.arange(40))["targets"].unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", SMALL)
def test_draws_are_new_in_every_epoch_repeat_and_travel_to_workers(name):
    bundle = build(name, seed=3)
    first, again = (bundle.train.gather(torch.tensor([7]))["inputs"] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, bundle.train.gather(torch.tensor([57]))["inputs"])
    assert torch.equal(first, pickle.loads(pickle.dumps(bundle.train)).gather(torch.tensor([7]))["inputs"])
    assert not torch.equal(first, bundle.validation.gather(torch.tensor([7]))["inputs"])
    assert bundle.info.fingerprint != build(name, seed=4).info.fingerprint


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("recall", {"length": 14}, "length=14 is too short: these options need 15 tokens"),
        ("recall", {"pairs": 10, "length": 99}, "pairs=10 need as many different keys, but num_keys=9"),
        ("recall", {"first_lengths": [8, 25]}, r"first_lengths=\[8, 25\] has samples of more than length=24 tokens"),
        ("selective_copy", {"length": 11}, "these options need 12 tokens"),
    ],
)
def test_samples_that_do_not_fit_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)
