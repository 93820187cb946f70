"""Models and samples of runs, and what the page shows of them."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.report.reading import Reading, complaints
from tests.train.runs import run
from tost.errors import CheckpointError
from tost.report import continue_prompts, load_run, write_report

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


def test_load_run_writes_text_token_by_token(text):
    ids, tokens = load_run(text, count=4).samples.text
    assert ids.shape == (1, 48)
    assert len(tokens) == 48
    assert "".join(tokens) == bytes(ids[0].tolist()).decode(errors="replace")


def test_a_damaged_newest_checkpoint_is_skipped(digits, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(digits, copy, symlinks=True)
    (copy / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"broken")
    lines: list[str] = []
    assert load_run(copy, count=4, log=lines.append).checkpoint.name == "step-00000001"
    assert lines
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError):
        load_run(copy)


def test_text_is_generated_the_same_every_time_and_ends_with_the_positions(text):
    opened = load_run(text, count=2)
    first, again = (continue_prompts(opened, ["def "], length=20)[0] for _ in range(2))
    assert first.text == again.text
    assert first.tokens == 20
    assert continue_prompts(opened, [], length=1)[0].prompt == bytes(opened.samples.text[0][0].tolist()).decode()
    (passage,) = continue_prompts(opened, ["x" * 40], length=300)
    assert passage.tokens == 8, "48 positions, 40 of them taken by the prompt"


def test_page_of_real_runs(digits, text, tmp_path):
    lines: list[str] = []
    analyses = ("coding-rate", "text-memberships", "class-attention")
    out = write_report([digits, text], tmp_path / "page.html", analyses=analyses, prompts=["import "], log=lines.append)
    page = out.read_text(encoding="utf-8")
    assert complaints(page) == []
    shown = Reading(page).text
    for part in ("In an untrained model", "import", "tokens per second", "Which group does each token belong to?"):
        assert part in shown, part
    assert "class-attention: left out, because it looks at images, and the model does not." in shown
    alternatives = [image["alt"] for image in Reading(page).named("img")]
    assert sum(alt.startswith("Does each layer compress?") for alt in alternatives) == 2
    assert len(page) < 10_000_000
    assert any("coding-rate: The compression measure" in line for line in lines)
