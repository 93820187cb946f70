"""Results show themselves in notebooks."""

from __future__ import annotations

import torch

import tost
import tost.analysis
from tost._text import html_card


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
    assert result.figure()._repr_png_().startswith(b"\x89PNG")


def test_states_say_what_they_hold():
    _, state = tost.causal_tssa_with_state(torch.randn(2, 5, 3, 4), torch.ones(3))
    shown = state._repr_html_()
    assert all(
        text in shown for text in ("[5, 5]", "3, 4 squares each", f'<td style="text-align:left">{3 * (2 * 4 + 1)}<')
    )
    model = tost.load_pretrained("bytes-tiny")
    _, whole = model.forward_with_state(torch.zeros(1, 7, dtype=torch.int64), None)
    assert all(text in whole._repr_html_() for text in ("[7]", "4 (GatedState)", f"{whole.bytes():,}"))
