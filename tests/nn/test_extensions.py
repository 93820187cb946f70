"""Extensions of the modules: gate, output norm, scale at the start, count-scaled energies."""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F

import tost
from tests.models.tiny import perturb
from tost.nn import Extensions
from tost.ops._inputs import causal_form
from tost.ops.form import Form, OperatorOptions
from tost.testing import assert_close

B, N, C, H = 2, 15, 12, 3
GATE = Extensions(gate=True)
COUNT = Extensions(count_scaled=True)
NORM = Extensions(gate=True, head_norm=True)


def make(form, extensions, dtype=torch.float64, **options):
    if form == "plain":
        return perturb(tost.TSSAttention(C, H, extensions=extensions, dtype=dtype, **options))
    return perturb(tost.CausalTSSAttention(C, H, 64, extensions=extensions, dtype=dtype, **options))


def tokens(dtype=torch.float64):
    return torch.randn(B, N, C, dtype=dtype)


FORMS = pytest.mark.parametrize("form", ["plain", "causal"])


@FORMS
def test_gate_multiplies_the_operators_output(form):
    gated, x = make(form, GATE), tokens()
    plain = make(form, Extensions())
    assert plain.load_state_dict(gated.state_dict(), strict=False).unexpected_keys[0].startswith("proj_gate")
    plain.proj_out = torch.nn.Identity()
    gate = F.linear(x, gated.proj_gate.weight, gated.proj_gate.bias)
    assert_close("y", gated(x), gated.proj_out(plain(x) * gate * gate.sigmoid()), 1e-13)


@FORMS
def test_head_norm_divides_by_the_root_mean_square_of_each_head(form):
    normed, x = make(form, NORM), tokens()
    plain = make(form, Extensions())
    assert plain.load_state_dict(normed.state_dict(), strict=False).unexpected_keys[0].startswith("norm_weight")
    plain.proj_out = torch.nn.Identity()
    y = plain(x).unflatten(-1, (H, C // H))
    y = y / (y.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    gate = F.silu(F.linear(x, normed.proj_gate.weight, normed.proj_gate.bias))
    assert_close("y", normed(x), normed.proj_out(y.flatten(2) * normed.norm_weight * gate), 1e-12)
    normed(x).square().sum().backward()
    assert all(parameter.grad.any() for parameter in normed.parameters())


@FORMS
def test_unit_variance_is_that_of_the_projected_tokens(form):
    extensions, options = Extensions(unit_variance=True), {"max_length": 8} if form == "causal" else {}
    kind = tost.CausalTSSAttention if form == "causal" else tost.TSSAttention
    attention = kind(256, 4, extensions=extensions, **options)
    assert attention.proj_in(torch.randn(1000, 256)).var().item() == pytest.approx(1, rel=0.05)
    assert attention.proj_out.weight.var().item() == pytest.approx(1 / 3 / 256, rel=0.05), "torch's own start"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tost_lm_base", {"vocab_size": 7}),
        ("tost_mini", {}),
        ("lra_listops", {"mixer_options": {"unit_variance": True}}),
    ],
)
def test_models_start_with_unit_variance(name, sizes):
    own = {} if "mixer_options" in sizes else {"unit_variance": True}
    model = tost.create_model(name, embed_dim=256, depth=1, num_heads=4, **sizes, **own)
    assert model.blocks[0].attention.proj_in.weight.var().item() == pytest.approx(1 / 256, rel=0.05)


@FORMS
def test_blocks_are_those_of_the_operator(form):
    attention, x = make(form, Extensions(block_size=2)), tokens()
    w, operator = attention.proj_in(x).unflatten(-1, (H, C // H)), tost.tssa if form == "plain" else tost.causal_tssa
    bias = () if form == "plain" else (attention.position_bias,)
    y = operator(w, attention.temperature, *bias, block_size=2)
    assert_close("y", attention(x), attention.proj_out(y.flatten(2)), 1e-12)
    with pytest.raises(ValueError, match=r"block_size \(3\) must divide the width of a head \(4\)"):
        make(form, Extensions(block_size=3))


@pytest.mark.parametrize("name", ["normalize", "token_decay", "centred"])
def test_causal_call_takes_options_of_the_operator_only(name):
    with pytest.raises(TypeError, match=name):
        causal_form(None, **{name: True})


def test_options_of_the_operator_are_extensions():
    names = {field.name for field in fields(OperatorOptions)}
    assert set(COUNT.operator_options()) == names
    assert names < {field.name for field in fields(Extensions)}
    assert names < {field.name for field in fields(Form)}
    assert COUNT.operator_options() == {**Extensions().operator_options(), "count_scaled": True}


@pytest.mark.parametrize("normalize", [True, False])
def test_count_scaled_energies_are_temperatures_times_the_count(normalize):
    scaled, x = make("plain", COUNT, normalize=normalize), tokens()
    plain = tost.TSSAttention(C, H, normalize=normalize, dtype=torch.float64)
    mask = torch.arange(N).expand(B, -1) < torch.tensor([[N], [4]])
    for row, count in enumerate((N, 4)):
        plain.load_state_dict(scaled.state_dict() | {"temperature": count * scaled.temperature.detach()})
        assert_close("y", scaled(x, mask)[row, :count], plain(x[row : row + 1, :count])[0], 1e-12)
    assert_close("whole", scaled(x, mask)[:1], scaled(x[:1]), 1e-12)


def test_count_scaled_causal_energy_is_the_temperature_times_the_position():
    scaled, x = make("causal", COUNT, position_bias=None), tokens()
    plain = tost.CausalTSSAttention(C, H, 64, position_bias=None, dtype=torch.float64)
    w = scaled.proj_in(x).unflatten(-1, (H, -1))
    energy = (w.square() / w.square().cumsum(1).clamp_min(1e-12)).sum(-1) * torch.arange(1, N + 1)[:, None]
    pi = (scaled.temperature * energy).softmax(-1).unsqueeze(-1)
    moment = (pi * w.square()).cumsum(1) / (pi.cumsum(1) + 1e-8)
    assert_close("y", scaled(x), scaled.proj_out((-pi * w / (1 + moment)).flatten(2)), 1e-11)
    plain.load_state_dict(scaled.state_dict())
    assert_close("first token", scaled(x[:, :1]), plain(x[:, :1]), 1e-12)
