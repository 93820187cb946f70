"""Results show themselves in notebooks."""

from __future__ import annotations

import torch

import tost
import tost.analysis
from tost._text import html_card
from tost.report.runs import RunRecord
from tost.train.loop import RunResult


def test_names_and_values_are_escaped():
    shown = html_card("<b>", {"<script>": "<i>"})
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_an_analysis_shows_its_summary_and_its_picture():
    model = tost.create_model("tost_mini", depth=1)
    result = tost.analysis.gains_by_layer(model, [torch.randn(2, 3, 16, 16)])
    shown = result._repr_html_()
    assert all(name in shown for name in ("gains", "standard deviation of D"))
    assert "data:image/png;base64," in shown


def test_runs_and_checks_show_themselves(tmp_path):
    assert "0.5" in RunResult("finished", 10, {"loss": 0.5})._repr_html_()
    assert "unfinished" in RunRecord("mine", tmp_path)._repr_html_()
    assert "It is TSSA." in tost.check_tssa(tost.TSSAttention(24, num_heads=3))._repr_html_()
