"""The table, the sentences that are computed, and numbers filled into text."""

from __future__ import annotations

import pytest

from tests.sweep.samples import leave, make_plan, make_runs
from tost.errors import ConfigError
from tost.sweep import collect, fill, page, section, statements, table


@pytest.fixture
def gathered(tmp_path, monkeypatch):
    """Gather results whose runs have given accuracies and parameters."""
    monkeypatch.setattr("sys.argv", ["tost", "sweep", "mine", "--out", "some where"])

    def make(accuracies=(0.5, 0.75, 0.6, 0.75), parameters=(1000, 1020), **changes):
        plan = make_plan(**changes)
        runs = make_runs(plan, tmp_path)
        for run, accuracy in zip(runs, accuracies, strict=False):
            leave(run, accuracy=accuracy, loss=2 * accuracy, parameters=parameters[list(plan.arms).index(run.arm)])
        return collect("mine", plan, [], runs)

    return make


def test_table_has_one_row_per_arm(gathered):
    made = table(gathered())
    assert made.headers == ["arm", "parameters", "steps", "seeds", "accuracy %", "best"]
    assert made.rows == [
        ["thin", "1,000", "7", "2", "55.00 ± 7.07", "61.00"],
        ["wide", "1,020", "7", "2", "75.00 ± 0.00", "76.00"],
    ]
    assert made.markdown().splitlines()[:3] == [
        "| arm | parameters | steps | seeds | accuracy % | best |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| thin | 1,000 | 7 | 2 | 55.00 ± 7.07 | 61.00 |",
    ]


def test_a_single_seed_has_no_spread_and_a_missing_arm_no_numbers(gathered):
    made = table(gathered(accuracies=(0.5,)))
    assert made.rows == [["thin", "1,000", "7", "1", "50.00", "51.00"], ["wide", "-", "-", "0", "-", "-"]]


def test_lowest_can_be_best_and_another_metric_has_only_its_last_value(gathered):
    made = table(gathered(metric="loss", mode="min", percent=False))
    assert made.headers[4] == "loss"
    assert made.rows[0][4:] == ["1.100 ± 0.141", "1.000"]


def test_reported_values_stand_beside_ours(gathered):
    results = gathered(arms={"thin": {"reference": 91.2}, "wide": {}}, source="their Table 4.")
    made = table(results)
    assert made.headers[-1] == "reported"
    assert [row[-1] for row in made.rows] == ["91.2", "-"]
    assert "Reported: their Table 4." in statements(results)


def test_statements_are_computed(gathered):
    said = statements(gathered())
    assert "Parameters of all arms: 1,000 (thin) to 1,020 (wide), 2.0% apart." in said
    assert "Every run takes 7 steps of 64 samples." in said
    assert "The accuracy is that of the last step; best is that of the best evaluation of any seed" in said[-1]
    assert statements(gathered(metric="loss"))[-1].endswith("best is that of the best seed.")
    assert "All arms have 5 parameters." in statements(gathered(parameters=(5, 5)))
    longer = gathered(arms={"thin": {"set": ["train.steps=14"]}, "wide": {}})
    assert "The arms differ in length: thin 14 steps of 64 samples; wide 7 steps of 64 samples." in statements(longer)
    said = statements(gathered(arms={"a": {}, "b": {}, "c": {}}, accuracies=(0.1, 0.1), parameters=(5, 5, 5)))
    assert said[0].startswith("Not finished: c/seed0 (new), a/seed1 (new)")
    assert "All finished arms have 5 parameters." in said


def test_section_tells_command_table_notes_text_and_machine(gathered):
    text = section(gathered(), "Wide wins by {wide.accuracy.mean - thin.accuracy.mean:.1f} points.\n")
    parts = text.split("\n\n")
    assert parts[0] == "## Two sizes"
    assert parts[1] == "```shell\ntost sweep mine --out 'some where'\n```"
    assert parts[2].startswith("| arm |")
    assert parts[4] == "- `thin`: narrow"
    assert parts[5] == "Wide wins by 20.0 points."
    assert parts[6] == "*A CPU, 1 thread, torch 9.9, tost 0.0, revision abc1234, 2001-02-03.*"
    assert page([text]).endswith(f"{text}\n")
    assert "No results are stored yet." in page([])


VALUES = {
    "{thin.accuracy.mean:.1f}": "55.0",
    "{thin.accuracy.std:.2f}": "7.07",
    "{wide.parameters:,}": "1,020",
    "{thin.loss.min:.3f}": "1.000",
    "{thin.best.max:.0f}": "61",
    "{wide.parameters / thin.parameters:.2f}": "1.02",
    "{thin.accuracy.mean - wide.accuracy.mean:+.1f}": "-20.0",
    "{thin.steps}": "7",
    "{{thin.steps}}": "{thin.steps}",
    "`code 1.5` and {thin.samples}": "`code 1.5` and 448",
}


@pytest.mark.parametrize(("text", "filled"), VALUES.items())
def test_fill_replaces_placeholders(gathered, text, filled):
    assert fill(text, gathered()) == filled


REFUSED = {
    "{thiin.accuracy.mean}": "no such number in the results; did you mean thin.accuracy.mean",
    "{zzz}": "the names look like thin.parameters",
    "{}": "no such number",
    "{thin.reference}": "the results do not have it",
    "{thin.steps:q}": "write for example {thin.steps:.1f}",
    "{thin.steps + thin.steps + thin.steps}": "at most two names",
    "{thin.steps / thin.zero}": "no such number",
    "It has 91.2 points.": "91.2 was typed by hand",
    "It is 5 % better.": "5 % was typed by hand",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_fill_refuses_what_it_cannot_compute(gathered, text, message):
    with pytest.raises(ConfigError) as caught:
        fill(text, gathered())
    assert message in str(caught.value)


def test_fill_does_not_divide_by_zero(gathered):
    with pytest.raises(ConfigError, match=r"wide\.accuracy\.std is 0"):
        fill("{thin.steps / wide.accuracy.std}", gathered())
