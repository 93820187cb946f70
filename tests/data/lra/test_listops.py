"""ListOps in memory and as files: values by an evaluator that reads the text, and that only seed and options count."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tost.data import DataOptions, build_data
from tost.data.embedded import ListOpsOptions
from tost.data.lra import listops
from tost.data.lra.listops import SYMBOLS, ListOpsGenerator, build_listops, listops_text
from tost.data.prepare import prepare
from tost.errors import ConfigError

SMALL = {"max_depth": 4, "max_args": 4, "min_length": 8, "max_length": 60}
# Percent in theory: the joint distribution of length and value follows level by level from convolutions.
EXACT = (16.958, 9.040, 7.728, 8.287, 8.961, 8.638, 7.662, 7.173, 8.734, 16.819)
VALUES = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def evaluate(text):
    """Value, length and depth of an expression as it is written in the files; fails unless it is a binary tree."""
    words = iter(text.split(" "))

    def node():
        """A value, or what a pair of an operator and arguments has collected so far, with length and depth."""
        word = next(words)
        if word != "(":
            return ([word], 1, 1) if word in VALUES or word == "]" else (int(word), 1, 1)
        (left, left_length, left_depth), (right, right_length, right_depth) = node(), node()
        assert next(words) == ")"
        length = left_length + right_length
        if right == ["]"]:
            operator, *arguments = left
            return VALUES[operator](arguments), length, left_depth
        assert isinstance(left, list)
        assert isinstance(right, int)
        return [*left, right], length, max(left_depth, right_depth + 1)

    value, length, depth = node()
    assert next(words, None) is None
    assert isinstance(value, int)
    return value, length, depth


def read(folder, split):
    lines = (folder / "listops-1000" / f"basic_{split}.tsv").read_text().split("\n")
    assert lines[0] == "Source\tTarget"
    assert lines[-1] == ""
    return [(source, int(target)) for source, target in (line.split("\t") for line in lines[1:-1])]


def everything(folder):
    return {file.relative_to(folder): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(2, 6), args=st.integers(2, 6))
def test_text_says_what_the_tokens_say(seed, depth, args):
    limits = ListOpsOptions(max_depth=depth, max_args=args, min_length=1, max_length=400)
    tokens, value = ListOpsGenerator(limits, seed).example(0, 0, lambda found: False)
    text = listops_text(tokens)
    assert evaluate(text)[:2] == (value, len(tokens))
    assert len(text.split(" ")) == 3 * len(tokens) - 2
    kept = [word for word in text.split(" ") if word not in "()"]
    assert kept == [SYMBOLS[token] for token in tokens]


def test_files_are_right(tmp_path):
    facts = prepare("lra/listops", {"count": 200, "seed": 3, **SMALL}, tmp_path)
    assert (facts["train"], facts["val"], facts["test"]) == (192, 4, 4)
    rows = [row for split in ("train", "val", "test") for row in read(tmp_path, split)]
    assert len({source for source, _ in rows}) == 200
    for source, target in rows:
        value, length, depth = evaluate(source)
        assert value == target
        assert 8 < length < 60
        assert depth <= 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["listops-1000", "prepare.json"]


def test_the_reader_and_the_demo_see_the_same_expressions(tmp_path):
    prepare("lra/listops", {"count": 500, "seed": 5, **SMALL}, tmp_path)
    options = {"length": 60, "eos": False}
    bundle = build_data(DataOptions(name="lra_listops", path=str(tmp_path), options=options), seed=0)
    demo = build_listops(ListOpsOptions(**SMALL, train_count=480, validation_count=10), seed=5)
    for files, memory in ((bundle.train, demo.train), (bundle.validation, demo.validation)):
        assert len(files) == len(memory)
        for row in range(len(files)):
            assert all((files[row][key] == memory[row][key]).all() for key in ("inputs", "mask", "targets"))


def test_repetitions_are_drawn_again(tmp_path):
    # 4 operators x 10 x 10 digits are all there are.
    few = {"count": 300, "max_depth": 2, "max_args": 2, "min_length": 3, "max_length": 5}
    prepare("lra/listops", few, tmp_path)
    rows = [row for split in ("train", "val", "test") for row in read(tmp_path, split)]
    assert len(set(rows)) == 300
    assert all(evaluate(source)[0] == target for source, target in rows)
    demo = build_listops(
        ListOpsOptions(max_depth=2, max_args=2, min_length=3, max_length=5, train_count=288, validation_count=6), 0
    )
    tokens = [bytes(row["inputs"][row["mask"]].tolist()) for row in demo.train]
    assert [source for source, _ in read(tmp_path, "train")] == [listops_text(row) for row in tokens]


def test_files_do_not_depend_on_the_number_of_processes(tmp_path):
    given_options = {"count": 2600, **SMALL}
    for workers in (1, 2):
        prepare("lra/listops", given_options, tmp_path / str(workers), workers=workers)
    assert everything(tmp_path / "1") == everything(tmp_path / "2")
    prepare("lra/listops", given_options | {"seed": 1}, tmp_path / "other")
    before, after = (read(tmp_path / name, "train") for name in ("1", "other"))
    assert not set(before) & set(after)


def test_it_goes_on_where_it_was_stopped(tmp_path):
    given_options = {"count": 2600, **SMALL}
    prepare("lra/listops", given_options, tmp_path / "whole")

    def stop(done, total, what):
        if done >= 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("lra/listops", given_options, tmp_path / "stopped", report=stop)
    seen = []
    facts = prepare("lra/listops", given_options, tmp_path / "stopped", report=lambda *now: seen.append(now))
    assert seen[0] == (1000, 2600, "examples"), "what was done is not done again"
    assert seen[-1] == (2600, 2600, "examples")
    assert "already there" not in facts
    assert everything(tmp_path / "whole") == everything(tmp_path / "stopped")
    assert prepare("lra/listops", given_options, tmp_path / "stopped")["already there"]


def test_impossible_limits_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="leave no length in between"):
        prepare("lra/listops", {"min_length": 100, "max_length": 101}, tmp_path)
    with pytest.raises(ConfigError, match="min_length=500 asks for more; raise max_depth"):
        prepare("lra/listops", {"max_depth": 3, "max_args": 5}, tmp_path)


def test_full_expressions_have_the_statistics_of_the_original(tmp_path):
    prepare("lra/listops", {"count": 400}, tmp_path)
    rows = [row for split in ("train", "val", "test") for row in read(tmp_path, split)]
    found = [evaluate(source) for source, _ in rows]
    assert all(value == target for (value, *_), (_, target) in zip(found, rows, strict=True))
    assert {depth for *_, depth in found} == {10}
    lengths = [length for _, length, _ in found]
    assert all(500 < length < 2000 for length in lengths)
    assert abs(statistics.mean(lengths) / 1037 - 1) < 4 * 0.37 / 20
    assert abs(statistics.median(lengths) / 956 - 1) < 4 * 0.37 / 20
    counts = Counter(target for _, target in rows)
    for label, percent in enumerate(EXACT):
        assert abs(counts[label] / 4 - percent) < 400 * (0.17 * 0.83 / 400) ** 0.5


def test_more_samples_than_expressions_are_refused(monkeypatch):
    monkeypatch.setattr(listops, "_MAX_DRAWS", 5000)
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
    sets = [build_listops(ListOpsOptions(train_count=count, validation_count=50), 3) for count in (10, 400)]
    small, large = (bundle.validation.gather(torch.arange(50))["inputs"] for bundle in sets)
    assert torch.equal(small, large), "the validation set does not depend on the size of the training set"
