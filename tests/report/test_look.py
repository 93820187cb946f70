"""Looking into the model of a run: the right weights, the right samples, the right words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.report.reading import Reading, complaints
from tests.train.runs import run
from tost.analysis import CodingRates, RateCurve, find_analysis, list_analyses
from tost.analysis.rates import MEASURES
from tost.errors import CheckpointError
from tost.report import Request, continue_prompts, look_into, write_report
from tost.report.samples import _leap, load_run

BYTES = ("data.options.length=48", "train.steps=2", "evaluate.batches=1", "checkpoint.every=1", "evaluate.every=2")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "run"
    run(folder, "train.steps=2", "model.depth=2", "evaluate.every=2", "checkpoint.every=1")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "run"
    run(folder, *BYTES, "model.depth=2", "model.position=learned", config="demo/stdlib_bytes")
    return folder


def test_load_run_takes_the_newest_weights_and_samples_of_both_splits(digits):
    opened = load_run(digits, count=20)
    assert opened.checkpoint.name == "step-00000002"
    assert not opened.model.training
    train, validation = (list(batches) for batches in (opened.samples.train, opened.samples.validation))
    assert [len(batch["inputs"]) for batch in validation] == [16, 4]
    assert len({row.tobytes() for batch in validation for row in batch["inputs"].numpy()}) == 20
    assert not torch.equal(train[0]["inputs"], validation[0]["inputs"])
    assert opened.samples.text is None


@given(st.integers(1, 300))
def test_every_place_is_visited_once_in_leaps(count):
    places = [i * _leap(count) % count for i in range(count)]
    assert sorted(places) == list(range(count))
    if count >= 20:
        assert len({10 * place // count for place in places[:6]}) >= 4, "the first six are of several classes"


def test_load_run_writes_text_token_by_token(text):
    opened = load_run(text, count=4)
    ids, tokens = opened.samples.text
    assert ids.shape == (1, 48)
    assert len(tokens) == 48
    assert "".join(tokens) == bytes(ids[0].tolist()).decode(errors="replace")


def test_a_damaged_newest_checkpoint_is_passed_over(digits, tmp_path):
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(digits, copy, symlinks=True)
    (copy / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"broken")
    said: list[str] = []
    assert load_run(copy, count=4, log=said.append).checkpoint.name == "step-00000001"
    assert said
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError):
        load_run(copy)


def test_look_into_explains_what_it_finds(digits):
    said: list[str] = []
    insight = look_into("mine", load_run(digits, count=8), ["coding-rate", "class-attention", "heads"], said.append)
    assert [finding.name for finding in insight.findings] == ["coding-rate", "heads"]
    assert insight.notes == ("class-attention: left out, because it looks at images, and the model does not.",)
    assert all(find_analysis(finding.name).explanation and finding.picture for finding in insight.findings)
    assert "In an untrained model" in insight.findings[0].verdict
    assert len(said) == 2


def test_every_analysis_has_an_explanation():
    specs = [find_analysis(name) for name in list_analyses()]
    assert all(spec.title.endswith("?") and spec.explanation for spec in specs)


def rates(source: str, before: list[float], after: list[float], split: str = "validation") -> CodingRates:
    places = {"input": before, "attention": after}
    return CodingRates(
        tuple(
            RateCurve(
                source,
                split,
                place,
                tuple(range(len(values))),
                {measure: torch.tensor([values], dtype=torch.float64) for measure in MEASURES},
            )
            for place, values in places.items()
        )
    )


def test_verdict_counts_falls_and_names_rises():
    trained = rates("trained", [9, 9, 9, 0], [4.0, 3.0, 3.5, 1.0])
    said = (trained + rates("control", [0, 0, 0, 0], [1.0, 2.0, 3.0, 4.0])).verdict()
    assert "falls in 2 of 3 steps" in said
    assert "within the attention of 3 of 4 layers" in said
    assert "It rises from layer 1 to 2." in said
    assert "In an untrained model of the same form: 0 of 3 steps and 0 of 4 layers." in said
    assert "not fall" not in said


def test_verdict_says_so_when_the_rate_does_not_fall():
    said = rates("trained", [1, 1, 1], [1.0, 2.0, 3.0]).verdict()
    assert "does not fall over most layers: it falls in 0 of 2 steps" in said
    assert "It rises from layer 0 to 1, 1 to 2." in said


def test_text_is_generated_the_same_every_time(text):
    opened = load_run(text, count=2)
    first, again = (continue_prompts(opened, ["def "], length=20)[0] for _ in range(2))
    assert first.text == again.text
    assert first.tokens == 20
    assert continue_prompts(opened, [], length=1)[0].prompt == bytes(opened.samples.text[0][0].tolist()).decode()


def test_generation_ends_where_the_positions_do(text):
    (passage,) = continue_prompts(load_run(text, count=2), ["x" * 40], length=300)
    assert passage.tokens == 8, "48 positions, 40 of them taken by the prompt"


def test_page_of_real_runs(digits, text, tmp_path):
    out = tmp_path / "page.html"
    said: list[str] = []
    request = Request(runs=(digits, text), analyses=("coding-rate", "text-memberships"), prompts=("import ",))
    write_report(request, out, said.append)
    page = out.read_text(encoding="utf-8")
    assert complaints(page) == []
    told = Reading(page).text
    assert "R_c^var" in told
    assert "import" in told
    assert "tokens per second" in told
    assert page.count("<img ") == 3
    assert len(page) < 10_000_000
