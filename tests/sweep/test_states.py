"""What the arms of a sweep remember: measured on their models, shown in the table and in a picture."""

from __future__ import annotations

import pytest

import tost
from tests.models.tiny import Running
from tests.sweep.samples import leave, make_plan, make_runs
from tests.test_docs import load_script
from tost.models.mixers.registry import MIXERS
from tost.recipes import load_config
from tost.sweep import collect, read_results, state_picture, statements, table, write_results
from tost.sweep.memory import state_bytes

C, H, D, N, L, FLOAT = 128, 4, 32, 256, 2, 4  # those of the recipe
ARMS = {mixer: {"set": [f"model.mixer={mixer}"]} for mixer in ("none", "tssa", "running")}


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        (["model.mixer=none"], 0),
        (["model.mixer=tssa"], H * (2 * D + 1)),
        (["model.mixer=tssa", "model.block_size=8"], H * (D + D * 9 // 2 + 1)),
        (["model.mixer=mingru"], C),
        (["model.mixer=linear"], H * D * (D + 1)),
        (["model.mixer=gated_delta"], H * D * D),
        (["model.mixer=window", "model.mixer_options.window=16"], 2 * C * 15),
        (["model.mixer=softmax"], 2 * C * N),
        (["model.mixer=s4d"], 64 * C),
    ],
    ids=str,
)
def test_states_are_those_of_the_mixers(changes, numbers):
    found = state_bytes(load_config("probes/recall", changes))
    assert found == L * FLOAT * numbers


@pytest.fixture
def gathered(tmp_path, monkeypatch):
    monkeypatch.setattr(MIXERS, "_specs", dict(MIXERS._specs))
    tost.register_mixer("running", places=("language",))(Running)  # has no state
    plan = make_plan(config="probes/recall", arms=ARMS, states=True, set=["train.steps=7", "schedule.warmup_steps=1"])
    runs = make_runs(plan, tmp_path / "runs")
    for run in runs:
        leave(run, accuracy=0.5 + 0.1 * run.seed)
    return collect("mine", plan, [], runs)


def test_states_are_in_the_table_and_in_the_stored_results(gathered, tmp_path):
    shown = table(gathered)
    assert [row[list(shown.headers).index("state, bytes")] for row in shown.rows] == ["0", "2,080", "-"]
    assert any("The state is" in text for text in statements(gathered))
    write_results(tmp_path / "mine.json", gathered)
    assert read_results(tmp_path / "mine.json") == gathered
    assert load_script("results_page").fill("{tssa.state_bytes:,}", gathered) == "2,080"
    plain = make_plan()
    assert "state, bytes" not in table(collect("mine", plain, [], make_runs(plain, tmp_path / "other"))).headers


def test_the_picture_shows_arms_with_a_state_and_is_reproducible(gathered, tmp_path):
    picture = state_picture(gathered)
    assert picture == state_picture(gathered)
    text = picture.decode()
    assert all(f"<!-- {label} -->" in text for label in ("none", "tssa", "2,048", "accuracy %"))
    assert "<!-- running -->" not in text
    plain = make_plan()
    assert state_picture(collect("mine", plain, [], make_runs(plain, tmp_path / "other"))) is None


def test_the_page_of_results_draws_it(gathered, tmp_path):
    script = load_script("update_results")
    write_results(tmp_path / "results" / "mine.json", gathered)
    assert "(img/mine.svg)" in script.generate(tmp_path / "results")
    script.draw(tmp_path / "results", tmp_path / "img")
    assert (tmp_path / "img" / "mine.svg").read_bytes() == state_picture(gathered)
