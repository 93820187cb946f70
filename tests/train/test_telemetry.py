import pytest
import torch
from torch import nn

import tost
from tests.models.tiny import example, make_tiny, perturb
from tests.train.runs import run
from tost import objective
from tost.analysis.rates import coding_rate_by_layer, compression_by_layer
from tost.nn import PaperForm
from tost.testing import assert_close


def objective_of(w, pi, **options):
    """The variational objective of projected tokens."""
    heads, width = w.shape[2:]
    bases = torch.eye(heads * width, dtype=w.dtype).unflatten(1, (heads, width)).transpose(0, 1)
    return objective.variational_compression(w.flatten(-2), pi, bases, (heads * width) ** 0.5, **options).mean()


FORMS = {
    "plain": (tost.TSSAttention, {}),
    "causal": (tost.CausalTSSAttention, {"max_length": 16}),
    "bias by head": (tost.CausalTSSAttention, {"max_length": 16, "position_bias": "head"}),
    "blocks": (tost.BlockTSSAttention, {"block_size": 2}),
    "paper": (tost.TSSAttention, {"paper": PaperForm(eps=0.5)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_measure_is_the_variational_objective_of_the_projected_tokens(form):
    torch.manual_seed(0)
    module, options = FORMS[form]
    attention = perturb(module(8, 2, **options))
    x = torch.randn(3, 5, 8)
    found = compression_by_layer(nn.Sequential(attention), lambda: attention(x))
    w, temperature = attention.proj_in(x).unflatten(-1, (2, 4)), attention.temperature.expand(2)
    w = w * (8**0.5 / 0.5) if form == "paper" else w
    pi = (
        tost.causal_membership(w, temperature, attention.bias())
        if attention.causal
        else tost.membership(w, temperature)
    )
    expected = objective_of(w, pi, block_size=getattr(attention, "block_size", 1))
    assert_close("R_c_var", torch.tensor(found["compression/layer_00"]), expected.detach(), 1e-5)


def test_layers_are_found_in_order_and_hooks_are_gone():
    model = nn.Sequential(
        tost.TSSAttention(8, 2), tost.CausalTSSAttention(8, 2, 16), tost.GatedTSSAttention(8, 2, block_size=2)
    )
    x = torch.randn(3, 5, 8)
    found = compression_by_layer(model, lambda: model(x))
    assert list(found) == [f"compression/layer_0{i}" for i in range(3)]
    assert compression_by_layer(model[0], lambda: model[0](x))["compression/layer_00"] == found["compression/layer_00"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["tost_mini", "tost_mini_plus", "tost_lm_base", "tost_lm_base_plus"])
def test_blocks_log_the_change_within_their_attention(name):
    model = perturb(make_tiny(name)).eval()
    x = example(model)
    found = compression_by_layer(model, lambda: model(x))
    rates = coding_rate_by_layer(model, [x])
    for i, change in enumerate(rates.change("trained", "validation", "input", "attention").mean().tolist()):
        assert found[f"compression/change_{i:02d}"] == pytest.approx(change, rel=1e-3, abs=1e-4)
        before = rates.curve("trained", "validation", "input").mean()[i].item()
        assert found[f"compression/layer_{i:02d}"] == pytest.approx(before, rel=1e-4)


def test_a_run_logs_every_layer(tmp_path):
    result, recorder = run(tmp_path / "run", "evaluate.telemetry=true", "model.depth=2")
    assert {"compression/layer_00", "compression/change_01"} <= result.metrics.keys()
    assert set(recorder.evaluations) == {6, 12}
