"""`check_tssa` knows TSSA however it is written, and tells the known mistakes apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tost
from tost.errors import ConfigError


class Copy(nn.Module):
    """TSSA as people copy it from the paper, with one thing changed."""

    def __init__(self, dim=24, heads=3, change="", out=True, causal=False):
        super().__init__()
        self.heads, self.change, self.causal = heads, change, causal
        self.qkv = nn.Linear(dim, dim, bias=False)
        self.temp = nn.Parameter(torch.ones(heads, 1))
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.5)) if out else nn.Identity()

    def forward(self, x):
        B, N, _ = x.shape
        heads = 1 if self.change == "one head" else self.heads
        w = self.qkv(x).view(B, N, heads, -1).transpose(1, 2)  # [B, H, N, D]
        axis = {"energy normalized over features": -1, "energy normalized over heads": 1}.get(self.change, -2)
        if self.change == "energy not normalized":
            normed = w
        elif self.causal and axis == -2 and self.change != "energy looks ahead":
            normed = w / (w**2).cumsum(axis).sqrt()
        else:
            normed = F.normalize(w, dim=axis)
        temp = 1.0 if self.change in ("temperature ignored", "one head") else self.temp
        pi = ((normed**2).sum(-1) * temp).softmax(dim=2 if self.change == "softmax over tokens" else 1)
        if self.causal:
            mass = 1.0 if self.change == "moment not divided" else pi.cumsum(-1).unsqueeze(-1)
            moment = (pi.unsqueeze(-1) * w**2).cumsum(-2) / mass
        else:
            weight = pi if self.change == "moment not divided" else pi / (pi.sum(-1, keepdim=True) + 1e-8)
            moment = weight.unsqueeze(-2) @ w**2
        if self.change == "moment over features":
            moment = moment.sum(-1, keepdim=True)
        y = (1 if self.change == "sign" else -1) * w * pi.unsqueeze(-1) / (1 + moment)
        if self.change == "something else":
            y = y.tanh()
        return self.to_out(y.transpose(1, 2).reshape(B, N, -1))


MISTAKES = [
    "softmax over tokens",
    "one head",
    "moment over features",
    "energy normalized over features",
    "energy normalized over heads",
    "energy not normalized",
    "moment not divided",
    "sign",
    "temperature ignored",
]
CAUSAL = [*MISTAKES, "energy looks ahead"]


@pytest.mark.parametrize("out", [True, False])
def test_a_faithful_copy_is_right(out):
    found = tost.check_tssa(Copy(out=out))
    assert found
    assert found.finding == "tssa"
    assert found.errors["tssa"] < 1e-7


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_known_mistakes_are_named(mistake, seed):
    found = tost.check_tssa(Copy(change=mistake), seed=seed)
    assert not found
    assert found.finding == mistake
    assert found.errors["tssa"] > 1e-3


def test_a_faithful_causal_copy_is_right():
    assert tost.check_tssa(Copy(causal=True)).finding == "causal"


@pytest.mark.parametrize("mistake", CAUSAL)
def test_known_mistakes_are_named_in_causal_copies_too(mistake):
    found = tost.check_tssa(Copy(change=mistake, causal=True))
    assert not found
    assert found.finding == f"causal, {mistake}"
    assert found.errors["causal"] > 1e-3


@pytest.mark.parametrize("causal", [False, True])
def test_an_unknown_mistake_is_told_as_such(causal):
    found = tost.check_tssa(Copy(change="something else", causal=causal))
    assert (found.is_tssa, found.finding) == (False, "unknown")
    assert "no known mistake explains it" in found.message


@pytest.mark.parametrize("in_bias", [True, False])
def test_ours_is_right(in_bias):
    assert tost.check_tssa(tost.TSSAttention(24, num_heads=3, in_bias=in_bias)).finding == "tssa"


def test_the_causal_form_is_right():
    module = tost.CausalTSSAttention(24, num_heads=3, max_length=16, position_bias=None)
    assert tost.check_tssa(module).finding == "causal"


def test_the_module_stays_as_it_is():
    module = Copy().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tost.check_tssa(module)
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert next(module.parameters()).dtype == torch.float32


def test_what_cannot_be_checked():
    with pytest.raises(ConfigError, match="no linear layer"):
        tost.check_tssa(nn.Identity())
    with pytest.raises(ConfigError, match="give num_heads"):
        tost.check_tssa(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="Name the heads with num_heads"):
        tost.check_tssa(Copy(), num_heads=7)
