"""The baselines must be what they claim to be, or the comparison is worth nothing."""

from __future__ import annotations

import pytest
import torch

from tost.bench.ops.cases import Case, Op
from tost.bench.ops.contenders import CONTENDERS, PaperAttention, our_layer
from tost.testing import assert_close

CASES = [Case(op=op, batch=2, tokens=9, width=12, heads=3) for op in Op]


# Compiling takes too long here; a slow test does it.
EAGER = [(case, contender) for case in CASES for contender in CONTENDERS if case.op in contender.ops]
EAGER = [(case, contender) for case, contender in EAGER if not contender.compiled]


@pytest.mark.parametrize(("case", "contender"), EAGER, ids=[f"{case.op}-{who.name}" for case, who in EAGER])
def test_every_contender_is_a_layer(case, contender):
    x = torch.randn(2, 9, 12, requires_grad=True)
    layer = contender.build(case, our_layer(case, backend="auto"))
    layer(x).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_paper_layer_computes_what_ours_does(case):
    ours = our_layer(case, backend="reference").double()
    paper = PaperAttention(case, ours.proj_in, ours.proj_out).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    assert_close("y", paper(x), ours(x), 1e-10)


def build(name, case):
    (contender,) = [contender for contender in CONTENDERS if contender.name == name]
    return contender.build(case, our_layer(case, backend="auto")).double()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_softmax_attention_weights_the_values(case):
    layer = build("sdpa", case)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (3, 4)) for part in layer.proj_in(x).chunk(3, dim=-1))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / 2.0
    if case.causal:
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    y = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v)
    assert_close("y", layer(x), layer.proj_out(y.flatten(-2)), 1e-10)


def test_cross_covariance_attention_mixes_features():
    layer = build("xca", CASES[0])
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (3, 4)) for part in layer.proj_in(x).chunk(3, dim=-1))
    q, k = q / q.norm(dim=1, keepdim=True), k / k.norm(dim=1, keepdim=True)
    weights = torch.einsum("bnhd,bnhe->bhde", q, k).softmax(-1)
    y = torch.einsum("bhde,bnhe->bnhd", weights, v)
    assert_close("y", layer(x), layer.proj_out(y.flatten(-2)), 1e-10)
