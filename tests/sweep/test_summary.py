"""The table and the sentences that are computed."""

from __future__ import annotations

from tost.sweep import statements, table


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
