"""The modules against an independent re-statement of the authors' formulation and against the objective's gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tost
from tests.models.tiny import perturb
from tost import objective
from tost.nn import PaperForm
from tost.testing import assert_close

B, N, C, H = 2, 21, 24, 4
D = C // H


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(B, N, C, dtype=dtype)


def heads_first(module, x):
    return module.proj_in(x).unflatten(-1, (H, D)).transpose(1, 2)  # [B, H, N, D]


def authors_vision(module, x):
    w = heads_first(module, x)
    normed = F.normalize(w, dim=-2)
    pi = ((normed**2).sum(-1) * module.temperature[:, None]).softmax(dim=1)
    moment = torch.einsum("bhn,bhnd->bhd", pi / (pi.sum(-1, keepdim=True) + 1e-8), w**2)
    out = -(w * pi[..., None]) / (1 + moment[:, :, None])
    return module.proj_out(out.transpose(1, 2).flatten(2))


def authors_language(module, x, effect_of_bias=1.0):
    w = heads_first(module, x)
    share = w**2 / (w**2).cumsum(-2).clamp_min(1e-12) + effect_of_bias * module.position_bias[:, : x.shape[1], None]
    pi = (share.sum(-1) * module.temperature[:, None]).softmax(dim=1)
    moment = (w**2 * pi[..., None]).cumsum(-2) / (pi.cumsum(-1) + 1e-8)[..., None]
    out = -(w * pi[..., None]) / (1 + moment)
    return module.proj_out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("in_bias", "out_bias"), list(itertools.product((False, True), repeat=2)))
def test_vision_form_is_the_authors(in_bias, out_bias):
    module = perturb(tost.TSSAttention(C, H, in_bias=in_bias, out_bias=out_bias, dtype=torch.float64))
    x = inputs()
    assert (module.proj_in.bias is not None, module.proj_out.bias is not None) == (in_bias, out_bias)
    assert_close("y", module(x), authors_vision(module, x), 1e-13)


@pytest.mark.parametrize("in_bias", [False, True])
def test_language_form_is_the_authors(in_bias):
    module = perturb(tost.CausalTSSAttention(C, H, 32, in_bias=in_bias, dtype=torch.float64))
    assert_close("y", module(inputs()), authors_language(module, inputs()), 1e-13)


def test_bias_of_the_equation_has_one_part_in_head_dim_of_the_listings_effect():
    module = perturb(tost.CausalTSSAttention(C, H, 32, position_bias="head", dtype=torch.float64))
    assert_close("y", module(inputs()), authors_language(module, inputs(), effect_of_bias=1 / D), 1e-13)


def test_paper_form_is_a_gradient_step_on_the_variational_objective():
    eps, tau = 0.7, 1.3
    paper = PaperForm(step_size=tau, eps=eps)
    module = tost.TSSAttention(C, H, in_bias=False, out_bias=False, normalize=False, paper=paper, dtype=torch.float64)
    with torch.no_grad():
        module.proj_in.weight.copy_(torch.linalg.qr(torch.randn(C, C, dtype=torch.float64)).Q)
    z = inputs()
    u = module.proj_in.weight.unflatten(0, (H, D)).mT  # [H, C, D]
    w = torch.einsum("bnc,hcd->bnhd", z, u)
    pi = tost.membership(w, module.temperature.expand(H), normalize=False)
    expected = objective.tssa_step(z, pi, u, eps, tau)
    assert_close("y", module(z), expected, 1e-7)  # the operator adds 1e-8 to a group's mass
    assert sum(p.numel() for p in module.parameters()) == C * C + 1


def test_paper_form_counts_real_tokens_only():
    paper = PaperForm(step_size=2.0)
    for module in (
        tost.TSSAttention(C, H, in_bias=False, out_bias=False, paper=paper, dtype=torch.float64),
        tost.CausalTSSAttention(C, H, 64, paper=paper, dtype=torch.float64),
    ):
        x = inputs()
        padded = torch.cat((torch.full((B, 5, C), 7.0, dtype=x.dtype), x), dim=1)
        mask = torch.arange(N + 5).expand(B, -1) >= 5
        assert_close("y", module(padded, mask=mask)[:, 5:], module(x), 1e-12)


def test_causal_paper_form_divides_by_the_position():
    free = tost.CausalTSSAttention(C, H, 64, paper=PaperForm(step_size=None), dtype=torch.float64)
    stepped = tost.CausalTSSAttention(C, H, 64, paper=PaperForm(step_size=3.0), dtype=torch.float64)
    stepped.load_state_dict(free.state_dict())
    x = inputs()
    position = torch.arange(1, N + 1, dtype=x.dtype)[:, None]
    assert_close("y", stepped(x), 3.0 * free(x) / position, 1e-12)
    first, state = stepped.forward_with_state(x[:, :8])
    second, _ = stepped.forward_with_state(x[:, 8:], state)
    assert_close("continued", torch.cat((first, second), dim=1), stepped(x), 1e-12)


@pytest.mark.parametrize("make", [lambda: tost.TSSAttention(C, H), lambda: tost.CausalTSSAttention(C, H, 64)])
def test_inference_overwrites_its_own_tokens_and_nobody_elses(make):
    module, x = perturb(make()), inputs(torch.float32)
    expected, kept = module(x), x.clone()
    with torch.no_grad():
        assert_close("y", module(x), expected, 1e-6)
        seen = []
        handle = module.proj_in.register_forward_hook(lambda _module, _input, output: seen.append(output))
        module(x)
        handle.remove()
        assert_close("w", seen[0], F.linear(x, module.proj_in.weight, module.proj_in.bias), 1e-6)
        module.proj_in = nn.Identity()
        module(x)
    assert torch.equal(x, kept)


def test_gain_dropout_drops_features_of_a_head_for_all_tokens():
    module = tost.TSSAttention(C, H, gain_drop=0.5)
    module.proj_out = nn.Identity()
    x = inputs(torch.float32)
    dropped = module(x)
    kept = module.eval()(x)
    ratio = (dropped / kept).round(decimals=3)
    assert set(ratio.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(ratio, ratio[:, :1].expand_as(ratio))


def test_causal_gain_dropout_and_output_dropout_act_in_training_only():
    for options in ({"gain_drop": 0.5}, {"out_drop": 0.5}):
        module = tost.CausalTSSAttention(C, H, 64, **options)
        x = inputs(torch.float32)
        assert not torch.equal(module(x), module(x))
        module.eval()
        assert torch.equal(module(x), module(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tost.TSSAttention(10, 3), r"embed_dim \(10\) must be divisible by num_heads \(3\)"),
        (lambda: tost.TSSAttention(10, 0), r"num_heads \(0\)"),
        (lambda: tost.CausalTSSAttention(8, 2, 4, position_bias="both"), r"position_bias='both' is not known"),
        (lambda: tost.TSSAttention(8, 2)(torch.randn(3, 8)), r"x has shape \(3, 8\); this module needs \[B, N, 8\]"),
        (lambda: tost.CausalTSSAttention(8, 2, 4)(torch.randn(1, 5, 8)), r"bias covers 4 positions.*position 5"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
