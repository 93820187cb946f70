"""ListOps: values against an evaluator that reads the tokens, the grammar against what is known about the original."""

from __future__ import annotations

import statistics

import pytest
import torch

from tost.data import DataOptions, build_data
from tost.data.lra import grammar as lra_grammar
from tost.data.lra.grammar import PAD, SYMBOLS, ListOpsGenerator
from tost.data.toy.listops import build_listops
from tost.data.toy.options import ListOpsOptions
from tost.errors import ConfigError

VALUE = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def words(ids):
    return [SYMBOLS[token] for token in ids if token != PAD]


def evaluate(tokens):
    """Value, depth and numbers of arguments of an expression; fails unless it is exactly one expression."""
    stack, depth, arguments = [[]], 1, []
    for token in tokens:
        if token in VALUE:
            stack.append([token])
            depth = max(depth, len(stack))
        elif token == "]":
            operator, *values = stack.pop()
            arguments.append(len(values))
            stack[-1].append(VALUE[operator](values))
        else:
            stack[-1].append(int(token))
    ((value,),) = stack
    return value, depth, arguments


def rows(dataset):
    return dataset.gather(torch.arange(len(dataset)))


@pytest.fixture(scope="module")
def bundle():
    return build_data(DataOptions(name="listops", options={"train_count": 3000, "validation_count": 500}), seed=0)


def test_the_evaluator_knows_the_examples_of_the_original():
    assert evaluate(["[MAX", "2", "9", "[MIN", "4", "7", "]", "0", "]"]) == (9, 3, [2, 4])
    assert evaluate(["[MED", "1", "4", "]"])[0] == 2  # 2.5, cut
    assert evaluate(["[MED", "9", "1", "4", "]"])[0] == 4
    assert evaluate(["[SM", "9", "9", "4", "]"])[0] == 2


def test_symbols_are_fixed():
    assert SYMBOLS == ("<pad>", "[MIN", "[MAX", "[MED", "[SM", "]", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9")


def test_targets_are_the_values(bundle):
    for dataset in (bundle.train, bundle.validation):
        samples = rows(dataset)
        for ids, target in zip(samples["inputs"].tolist(), samples["targets"].tolist(), strict=True):
            assert evaluate(words(ids))[0] == target


def test_expressions_keep_their_limits(bundle):
    samples = rows(bundle.train)
    seen = [evaluate(words(ids)) for ids in samples["inputs"].tolist()]
    assert {depth for _, depth, _ in seen} == {3, 4}  # one operator alone makes at most 7 tokens
    assert {count for *_, arguments in seen for count in arguments} == {2, 3, 4, 5}
    assert min(lengths(samples)) == 11
    assert max(lengths(samples)) < 100


def lengths(samples):
    return samples["mask"].sum(dim=1).tolist()


def test_lengths_are_strictly_between_the_limits():
    tight = build_listops(ListOpsOptions(min_length=10, max_length=13, train_count=400, validation_count=1), 0)
    assert set(lengths(rows(tight.train))) == {11, 12}
    assert tight.train[0]["inputs"].shape == (13,)


def test_the_mask_covers_the_expression(bundle):
    samples = rows(bundle.train)
    assert torch.equal(samples["mask"], samples["inputs"] != PAD)
    first_padding = samples["mask"].int().sum(dim=1, keepdim=True)
    assert torch.equal(samples["mask"], torch.arange(100) < first_padding)


def test_no_expression_occurs_twice(bundle):
    ids = torch.cat([rows(bundle.train)["inputs"], rows(bundle.validation)["inputs"]])
    assert len(torch.unique(ids, dim=0)) == len(ids)


def test_no_expression_occurs_twice_where_few_exist():
    few = ListOpsOptions(max_depth=2, max_args=2, min_length=3, max_length=5, train_count=300, validation_count=100)
    made = build_listops(few, 0)
    ids = torch.cat([rows(made.train)["inputs"], rows(made.validation)["inputs"]])
    assert len(torch.unique(ids, dim=0)) == 400  # 4 operators x 10 x 10 digits: all there are


def test_more_samples_than_expressions_are_refused(monkeypatch):
    monkeypatch.setattr(lra_grammar, "_MAX_DRAWS", 5000)
    few = ListOpsOptions(max_depth=2, max_args=2, min_length=3, max_length=5, train_count=400, validation_count=100)
    with pytest.raises(
        ConfigError, match=r"found only 400 different ListOps expressions .*'max_depth': 2.* ask for few"
    ):
        build_listops(few, 0)


def test_an_example_depends_on_seed_and_number():
    options = ListOpsOptions()
    first, second = (ListOpsGenerator(options, seed=5).split(1, count)[0] for count in (40, 90))
    assert (first == second[:40]).all()
    assert (first != ListOpsGenerator(options, seed=6).split(1, 40)[0]).any(axis=1).all()
    assert (first != ListOpsGenerator(options, seed=5).split(0, 40)[0]).any(axis=1).all()


def test_the_validation_set_does_not_depend_on_the_size_of_the_training_set():
    small, large = (
        build_listops(ListOpsOptions(train_count=count, validation_count=50), 3).validation for count in (10, 400)
    )
    assert torch.equal(rows(small)["inputs"], rows(large)["inputs"])


def test_the_grammar_has_the_statistics_of_the_original():
    # Measured on the original generator: mean length 1037, labels 0 and 9 at 17 % each, full depth always reached.
    original = ListOpsOptions(max_depth=10, max_args=10, min_length=500, max_length=2000)
    ids, values = ListOpsGenerator(original, seed=0).split(0, 300)
    assert abs((ids != PAD).sum(axis=1).mean() - 1037) < 4 * 380 / 300**0.5
    ends = ((values == 0) | (values == 9)).mean()
    assert abs(ends - 0.338) < 4 * (0.338 * 0.662 / 300) ** 0.5
    for row, value in zip(ids[:50].tolist(), values[:50].tolist(), strict=True):
        assert evaluate(words(row))[:2] == (value, 10)


def test_operators_and_digits_are_equally_likely(bundle):
    samples = rows(bundle.train)
    operators = [SYMBOLS.index(name) for name in VALUE]
    counts = torch.stack([(samples["inputs"] == operator).sum() for operator in operators]).double()
    assert (counts / counts.sum() - 0.25).abs().max() < 0.02
    digits = torch.stack([(samples["inputs"] == SYMBOLS.index(str(digit))).sum() for digit in range(10)]).double()
    assert (digits / digits.sum() - 0.1).abs().max() < 0.01


def test_the_default_size():
    made = build_data(DataOptions(name="listops"), seed=1)
    assert (len(made.train), len(made.validation)) == (20_000, 2_000)
