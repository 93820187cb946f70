"""The page of the paper's tables: the paper's numbers as printed, ours from files, what is missing is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.test_docs import load_script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    return load_script("update_paper_tables")


def entry(script, name):
    (found,) = [entry for entry in script.entries() if entry["name"] == name]
    return found


def attention_row(figure, contender, tokens, seconds, peak_bytes):
    sizes = {"tokens": tokens, "width": 768, "heads": 12, "depth": 12, "training": False}
    measured = {"seconds": None if seconds is None else {"median": seconds}, "peak_bytes": peak_bytes}
    measured |= {"weight_bytes": None if seconds is None else 2 * 10**6}
    return {"figure": figure, "contender": contender, **sizes, **measured, "note": "" if seconds else "predicted 212 s"}


@pytest.fixture
def measured(tmp_path):
    """A folder with a measurement of attention in the form in which `tost bench attention` stores it."""
    rows = [
        attention_row(figure, name, tokens, *values)
        for figure in ("causal", "base")
        for tokens in (4096, 8192)
        for name, values in {"tost": (0.5, 10**6), "gpt2-sdpa": (2.0, 4 * 10**6), "gpt2-textbook": (None, None)}.items()
    ]
    place = {"cpu": "A CPU", "threads": 2, "measured": "2001-02-03T04:05:06Z"}
    pairs = [{"tokens": 10_000, "training": True, "ratio": {"median": 8.0, "lower": 7.5, "upper": 8.25}}]
    content = {"complete": True, "gate": {"passed": True}, "environment": place, "rows": rows, "pairs": pairs}
    (tmp_path / "attention_a-cpu_200102.json").write_text(json.dumps(content))
    return tmp_path


def test_every_table_and_figure_with_a_result_is_there(script):
    names = " ".join(entry["name"] for entry in script.entries())
    assert all(f"Table {number}" in names for number in range(1, 9))
    assert all(str(number) in names.split("Table 8")[1] for number in (1, 4, 5, 6, 7, 8, 9, 10, 11))
    assert all(entry["commands"] for entry in script.entries())


def test_the_papers_digits_are_kept(script):
    shown = script.section(entry(script, "Table 3"))
    assert "| ToST | 37.25 | 66.75 | 79.46 | 46.62 | 69.41 | 59.90 |" in shown


def test_sizes_that_differ_are_shown_and_others_are_not_repeated(script):
    shown = script.section(entry(script, "Table 2"))
    assert "| parameters, here | 5.8M | 22.6M | 71.5M | 26.1M | 84.1M | 22.1M | 86.6M |" in shown
    assert "and the same: parameters." in script.section(entry(script, "Table 4, left"))
    assert ", here" not in script.section(entry(script, "Table 5"))


def test_stored_sweeps_are_shown_and_missing_ones_named(script, tmp_path):
    ablation = entry(script, "Table 8")
    assert "`tost sweep vision_ablation`" in script.section(ablation, tmp_path)
    shutil.copy(ROOT / "results" / "vision_ablation.json", tmp_path)
    shown = script.section(ablation, tmp_path)
    assert "| mlp_norm |" in shown
    assert "Ready to run" not in shown


def test_measured_attention_is_set_against_the_papers_ratios(script, measured):
    shown = script.section(entry(script, "Table 4, right"), measurements=measured)
    assert "| `base`: tost / gpt2-sdpa | 0.25 | 0.50 | 0.25 | 0.50 |" in shown
    assert "| `base`: tost / gpt2-textbook | not measured |" in shown
    assert "A CPU, 2 threads, 2001-02-03" in shown


def test_a_figure_shows_times_memory_and_why_something_is_missing(script, measured):
    shown = script.section(entry(script, "Figure 8"), measurements=measured)
    assert "| 4,096 | 500.0 ms, 1.0 MB | 2,000.0 ms, 4.0 MB | predicted 212 s |" in shown


def test_ratios_of_runs_in_turns_are_shown(script, measured):
    shown = script.section(entry(script, "Figures 1, 6 and 7"), measurements=measured)
    assert "10,000 tokens, forward and backward: softmax attention on the fused kernel takes 8.0 times as long" in shown


def test_a_red_gate_is_not_shown(script, measured):
    path = measured / "attention_a-cpu_200102.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "gate": {"passed": False}}))
    assert script.measurement("attention", measured) is None
    assert "500.0 ms" not in script.section(entry(script, "Figure 8"), measurements=measured)


def test_training_steps_are_set_against_both_gpt2(script, tmp_path):
    names = ("transformers GPT-2", "transformers GPT-2, our loss")
    rows = [
        {"part": "train", "contender": name, "tokens": tokens, "peak_bytes": peak, "ratios": ratios}
        for tokens in (4096, 8192)
        for name, peak, ratios in (
            ("tost_lm_base", 3 * 10**9, {names[0]: {"median": 0.25}, names[1]: {"median": 0.75}}),
            (names[0], 10 * 10**9, {}),
            (names[1], 5 * 10**9, {}),
        )
    ]
    place = {"cpu": "A CPU", "threads": 2, "measured": "2001-02-03T04:05:06Z"}
    content = {"gate": {"passed": True}, "environment": place, "rows": rows}
    (tmp_path / "generate_a-cpu_200102.json").write_text(json.dumps(content))
    shown = script.section(entry(script, "Table 4, right"), measurements=tmp_path)
    assert "| tost_lm_base / transformers GPT-2 | 0.25 | 0.30 | 0.25 | 0.30 |" in shown
    assert "| tost_lm_base / transformers GPT-2, our loss | 0.75 | 0.60 | 0.75 | 0.60 |" in shown
