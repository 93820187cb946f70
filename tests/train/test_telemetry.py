import pytest
import torch
from torch import nn

import tost
from tests.train.runs import run
from tost import objective
from tost.analysis.rates import compression_by_layer, variational_rate
from tost.nn import Extensions, PaperForm
from tost.testing import assert_close


def test_measure_is_the_variational_objective_of_the_projected_tokens():
    torch.manual_seed(0)
    d, heads = 12, 3
    z = torch.randn(2, 7, d, dtype=torch.float64)
    u = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q.reshape(d, heads, 4).transpose(0, 1)
    w = torch.einsum("bnd,kdp->bnkp", z, u)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    pi = tost.membership(w, torch.ones(heads), mask=mask)
    expected = objective.variational_compression(z, pi, u, eps=d**0.5, mask=mask)
    assert_close("R_c_var", variational_rate(w, pi), expected, 1e-7)


def test_layers_are_found_in_order_and_hooks_are_gone():
    torch.manual_seed(0)
    model = nn.Sequential(tost.TSSAttention(8, 2), tost.CausalTSSAttention(8, 2, 16))
    x = torch.randn(3, 5, 8)
    found = compression_by_layer(model, lambda: model(x))
    assert list(found) == ["compression/layer_00", "compression/layer_01"]
    first = model[0].proj_in(x).unflatten(-1, (2, 4))
    expected = variational_rate(first, tost.membership(first, torch.ones(2))).mean().item()
    assert found["compression/layer_00"] == expected
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_run_logs_every_layer(tmp_path):
    result, recorder = run(tmp_path / "run", "evaluate.telemetry=true", "model.depth=2")
    assert {"compression/layer_00", "compression/layer_01"} <= result.metrics.keys()
    assert set(recorder.evaluations) == {6, 12}


def test_options_of_causal_attention_are_part_of_the_measure():
    torch.manual_seed(0)
    options = Extensions(count_scaled=True, forget=True, after_last_position="repeat")
    attention = tost.CausalTSSAttention(8, 2, 3, position_bias="head", extensions=options)
    nn.init.normal_(attention.position_bias)
    x = torch.randn(3, 5, 8)
    found = compression_by_layer(nn.Sequential(attention), lambda: attention(x))
    w = attention.proj_in(x).unflatten(-1, (2, 4))
    bias = attention.position_bias.t()[[0, 1, 2, 2, 2]] / 4
    form = {"count_scaled": True, "decay": attention.decay()}
    pi = tost.causal_membership(w, attention.temperature, bias.unsqueeze(0), **form)
    assert found["compression/layer_00"] == variational_rate(w, pi).mean().item()


def test_blocks_are_part_of_the_measure():
    torch.manual_seed(0)
    attention = tost.TSSAttention(8, 2, extensions=Extensions(block_size=2))
    x = torch.randn(3, 5, 8)
    found = compression_by_layer(nn.Sequential(attention), lambda: attention(x))["compression/layer_00"]
    w = attention.proj_in(x).unflatten(-1, (2, 4))
    pi = tost.membership(w, attention.temperature)
    bases = torch.eye(8).unflatten(1, (2, 4)).transpose(0, 1)
    arguments = (w.flatten(-2), pi, bases, 8**0.5)
    expected = objective.variational_compression(*arguments, block_size=2).mean().item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert found < objective.variational_compression(*arguments).mean().item()


def test_coding_precision_is_part_of_the_measure():
    torch.manual_seed(0)
    attention = tost.TSSAttention(8, 2, paper=PaperForm(eps=0.5))
    x = torch.randn(3, 5, 8)
    found = compression_by_layer(nn.Sequential(attention), lambda: attention(x))
    w = attention.proj_in(x).unflatten(-1, (2, 4)) * (8**0.5 / 0.5)
    pi = tost.membership(w, attention.temperature.expand(2))
    assert found["compression/layer_00"] == variational_rate(w, pi).mean().item()
