"""The numbers: those of the objective on hand-made tokens, the same for any batch size, right where they are known."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
import tost.analysis as analysis
from tests.models.tiny import make_tiny, perturb
from tost import objective
from tost.analysis.heads import coherence_of, effective_rank, moments
from tost.analysis.rates import MEASURES, rates_of_tokens
from tost.analysis.records import attention_layers
from tost.errors import ConfigError


@settings(max_examples=30)
@given(n=st.integers(1, 7), d=st.integers(1, 6), K=st.integers(1, 3), seed=st.integers(0, 99), padded=st.booleans())
def test_rates_are_those_of_the_objective(n, d, K, seed, padded):
    generator = torch.Generator().manual_seed(seed)
    p = int(torch.randint(1, d + 1, (), generator=generator))
    z = torch.randn(2, n, d, dtype=torch.float64, generator=generator)
    u = torch.randn(K, d, p, dtype=torch.float64, generator=generator)
    pi = torch.randn(2, n, K, dtype=torch.float64, generator=generator).softmax(-1)
    mask = torch.rand(2, n, generator=generator) < 0.7 if padded else None
    w = torch.einsum("bnd,kdp->bnkp", z, u)
    found = rates_of_tokens(z, w, pi, eps=0.7, mask=mask)
    own = math.sqrt(d)
    torch.testing.assert_close(found["variational"], objective.variational_compression(z, pi, u, own, mask=mask))
    torch.testing.assert_close(found["rate"], objective.coding_rate(z, 0.7, mask=mask))
    torch.testing.assert_close(found["compression"], objective.compression_rate(z, pi, 0.7, mask=mask))
    torch.testing.assert_close(found["reduction"], objective.rate_reduction(z, pi, 0.7, mask=mask))
    assert (found["subspaces"] <= found["variational"] + 1e-9).all()
    groups = [objective.compression_rate(w[:, :, k], pi[:, :, k : k + 1], math.sqrt(p), mask=mask) for k in range(K)]
    torch.testing.assert_close(found["subspaces"], torch.stack(groups).sum(0))
    for g in [size for size in range(1, p + 1) if p % size == 0]:
        blocks = rates_of_tokens(z, w, pi, eps=0.7, mask=mask, block_size=g)
        expected = objective.variational_compression(z, pi, u, own, mask=mask, block_size=g)
        torch.testing.assert_close(blocks["variational"], expected)


def test_rates_by_layer_are_those_of_the_stream():
    model = perturb(make_tiny("tost_mini")).eval()
    x = torch.randn(3, 3, 32, 32)
    result = analysis.coding_rate_by_layer(model, [x])
    with torch.no_grad(), analysis.capture(model, what=["tokens", "input", "attention", "output"]) as records:
        model(x)
    for i, record in enumerate(records):
        for place in ("input", "attention", "output"):
            block = record.layer.block
            seen = block.norm1(getattr(record, place)).double()
            attention = record.layer.attention
            w = torch.nn.functional.linear(seen, attention.proj_in.weight.double(), attention.proj_in.bias.double())
            w = w.view(3, 64, 4, 4)
            pi = tost.membership(w, attention.temperature)
            # The bias is a direction of its own: one more feature that is always 1.
            ones = torch.cat((seen, torch.ones_like(seen[..., :1])), dim=-1)
            u = torch.cat((record.layer.subspaces(), attention.proj_in.bias.view(4, 1, 4)), dim=1).double()
            expected = objective.variational_compression(ones, pi, u, math.sqrt(17))
            found = result.curve("trained", "validation", place).values["variational"][:, i]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def two_places():
    """Hand-made rates of two samples in four layers, in front of the attention and behind it."""
    values = {measure: torch.zeros(2, 4, dtype=torch.float64) for measure in MEASURES}
    curves = []
    for place, numbers in {"input": [4.0, 3.0, 2.0, 2.0], "attention": [3.5, 3.2, 1.0, 1.5]}.items():
        curve = {**values, "variational": torch.tensor([numbers, numbers], dtype=torch.float64)}
        curves.append(analysis.RateCurve("trained", "validation", place, (0, 1, 2, 3), curve))
    curves[1].values["variational"][1, 0] = 5.5  # the second sample rises where the first falls
    return analysis.CodingRates(tuple(curves))


def test_change_within_a_block_is_taken_sample_by_sample(two_places):
    assert two_places.steps() == [("input", "attention")]
    change = two_places.change("trained", "validation", "input", "attention")
    expected = torch.tensor([[-0.5, 0.2, -1.0, -0.5], [1.5, 0.2, -1.0, -0.5]], dtype=torch.float64)
    torch.testing.assert_close(change.values["variational"], expected)
    rows = [row for row in two_places.rows() if row["place"] == "attention - input" and row["measure"] == "variational"]
    assert [row["mean"] for row in rows] == pytest.approx([0.5, 0.2, -1.0, -0.5])
    stored = [curve for curve in two_places.to_json()["curves"] if curve["place"] == "attention - input"]
    assert [curve["measures"]["variational"]["mean"] for curve in stored] == [pytest.approx([0.5, 0.2, -1.0, -0.5])]
    with pytest.raises(ConfigError, match="trained/validation/output"):
        two_places.change("trained", "validation", "attention", "output")


@pytest.mark.parametrize("places", [("attention",), ("input", "attention"), ("input", "attention", "output")])
def test_compression_figure_draws_what_there_is(places):
    model = make_tiny("tost_mini").eval()
    result = analysis.coding_rate_by_layer(model, [torch.randn(2, 3, 32, 32)], places=places)
    titles = [axes.get_title() for axes in result.figure().axes if axes.get_visible()]
    assert ("what the attention does to it (below 0: compresses)" in titles) == ("input" in places)
    assert ("what the MLP does to it" in titles) == (len(places) == 3)


def test_falls_are_counted(two_places):
    two_places.curves[1].values["variational"][1, 0] = 3.5
    result = two_places
    assert result.falls("trained", "validation") == (2, 3, 3, 4)
    summary = result.summary()
    assert summary["trained, validation: R_c^var falls from layer to layer"] == "2 of 3"
    assert summary["trained, validation: R_c^var falls within the attention"] == "3 of 4"
    with pytest.raises(ConfigError, match="trained/validation/input"):
        result.curve("trained", "train", "input")


def close(a, b, where=""):
    """Compare plain data; the pictures' maps come as nested lists."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            close(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        torch.testing.assert_close(
            torch.tensor([x for x in flat(a) if isinstance(x, float)], dtype=torch.float64),
            torch.tensor([x for x in flat(b) if isinstance(x, float)], dtype=torch.float64),
            rtol=1e-6,
            atol=1e-6,
            msg=lambda text: f"{where}: {text}",
        )


def flat(values):
    for value in values:
        if isinstance(value, list):
            yield from flat(value)
        elif isinstance(value, dict):
            yield from flat(list(value.values()))
        else:
            yield value


IMAGES = ("coding-rate", "membership-maps", "class-attention", "gains", "heads")
TEXTS = ("coding-rate", "gains", "heads", "state-memory")


@pytest.mark.parametrize(
    ("model", "names"),
    [("tost_mini", IMAGES), ("tost_lm_base_plus", TEXTS)],
    ids=["images", "texts"],
)
def test_batches_of_1_and_64_agree(model, names):
    model = perturb(make_tiny(model)).double()
    x = torch.randn(64, 3, 8, 12).double() if names is IMAGES else torch.randint(11, (64, 12))
    for name in names:
        together = analysis.analyze(name, model, analysis.Samples(validation=[x]))
        apart = analysis.analyze(name, model, analysis.Samples(validation=list(x.split(1))))
        found, expected = (json.loads(json.dumps(result.to_json())) for result in (apart, together))
        for content in (found, expected):
            content.pop("summary")
        close(found, expected, name)


def test_gains_of_hand_made_tokens():
    layer = attention_layers(perturb(make_tiny("tost_mini")))[0]
    w = torch.tensor([[[[1.0, 2.0]], [[3.0, 0.0]]]])  # two tokens, one head
    pi = torch.tensor([[[0.25], [0.75]]])
    expected = torch.tensor([(0.25 * 1 + 0.75 * 9), 0.25 * 4])
    torch.testing.assert_close(moments(layer, w, pi).flatten(), expected)
    padded = torch.cat((w, torch.full((1, 1, 1, 2), math.nan)), dim=1)
    mask = torch.tensor([[True, True, False]])
    pi = torch.cat((pi, torch.zeros(1, 1, 1)), dim=1)
    torch.testing.assert_close(moments(layer, padded, pi, mask).flatten(), expected)


@pytest.mark.parametrize("name", ["tost_mini", "tost_lm_base"])
def test_gains_of_blocks_are_what_they_multiply_their_principal_directions_by(name):
    layer = attention_layers(perturb(make_tiny(name, block_size=2)))[0]
    w = torch.randn(1, 6, 4, 4, dtype=torch.float64)
    pi = layer.membership(w).detach()
    gains = 1 / (1 + moments(layer, w, pi))[0, -1].unflatten(-1, (2, 2))  # after the last token
    blocks = w[0].unflatten(-1, (2, 2))
    exact = torch.einsum("nh,nhki,nhkj->hkij", pi[0], blocks, blocks) / (pi[0].sum(0) + 1e-8)[:, None, None, None]
    inverse = torch.linalg.inv(torch.eye(2) + exact)
    torch.testing.assert_close(gains.prod(-1), torch.linalg.det(inverse))
    torch.testing.assert_close(gains.sum(-1), inverse.diagonal(dim1=-2, dim2=-1).sum(-1))
    assert (gains[..., 0] <= gains[..., 1]).all()


def test_gains_keep_the_moments_behind_them():
    model = perturb(make_tiny("tost_mini", block_size=2))
    found = analysis.gains_by_layer(model, [torch.randn(1, 3, 16, 16)])
    eigenvalues = torch.linalg.eigvalsh(found.moments).flip(-1).flatten(-2)
    torch.testing.assert_close(1 / (1 + eigenvalues), found.mean)
    assert found.correlations().diagonal(dim1=-2, dim2=-1).allclose(torch.ones(()).double())


def test_effective_rank():
    assert effective_rank(torch.eye(5)).item() == pytest.approx(5)
    assert effective_rank(torch.diag(torch.tensor([3.0, 0.0, 0.0]))).item() == pytest.approx(1)
    assert effective_rank(torch.zeros(3, 3)).item() == 0


def test_coherence():
    u = torch.zeros(2, 4, 2)
    u[0, 0, 0] = u[0, 1, 1] = 2
    u[1, 0, 0] = u[1, 3, 1] = u[1, 0, 1] = 1  # the first direction is shared, the second half so
    gram = coherence_of(u)
    expected = torch.tensor([[1.0, math.sqrt(0.5)], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gram[0, :, 1], expected)
    model = make_tiny("tost_mini")
    with torch.no_grad():
        model.blocks[0].attention.proj_in.weight.copy_(torch.linalg.qr(torch.randn(16, 16))[0])
    found = analysis.subspace_coherence(model)
    assert found.between[0].item() == pytest.approx(0, abs=1e-6)
    assert found.mutual[0].item() == pytest.approx(0, abs=1e-6)
    assert found.within[0].item() == pytest.approx(0, abs=1e-6)
    assert found.blocks[0].abs().max().item() == pytest.approx(0, abs=1e-6)
    assert found.mutual[1].item() > found.between[1].item() > 0
    assert found.random == pytest.approx(math.sqrt(2 / (math.pi * 16)))
    torch.testing.assert_close(found.sample.diagonal(dim1=1, dim2=2), torch.ones(2, 16, dtype=torch.float64))


def test_heads_add_up():
    model = perturb(make_tiny("lra_listops"))
    ids, mask = torch.randint(11, (3, 8)), torch.arange(8) < torch.tensor([8, 5, 2])[:, None]
    found = analysis.head_usage(model, [{"inputs": ids, "mask": mask}])
    ones = torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(found.usage.sum(1), ones, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.hard.sum(1), ones)
    assert (found.rank <= found.head_dim + 1e-9).all()
    assert (found.entropy <= 1 + 1e-6).all()


def test_state_forgets_as_its_decay_says():
    model = make_tiny("tost_lm_base", forget=True, position="none")
    with torch.no_grad():
        for block in model.blocks:
            block.attention.proj_in.weight.zero_()  # memberships are then uniform
            block.attention.decay_logit.fill_(math.log(0.8 / 0.2))
    found = analysis.state_memory(model, [torch.randint(11, (3, 20))])
    expected = torch.tensor([(1 - 0.8**k) / (1 - 0.8**20) for k in found.recent], dtype=torch.float64)
    torch.testing.assert_close(found.mass, expected.expand(2, 4, -1), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.decay_half_life, torch.full((2, 4), math.log(0.5) / math.log(0.8)).double())
    assert found.half_life.unique().tolist() == [4]  # three hold 0.494


def test_state_without_forgetting_holds_all_alike():
    model = make_tiny("tost_lm_base", position="none")
    with torch.no_grad():
        for block in model.blocks:
            block.attention.proj_in.weight.zero_()
    found = analysis.state_memory(model, [torch.randint(11, (2, 16))])
    assert not found.forgets
    assert found.half_life.unique().tolist() == [8]
    assert found.to_json()["decay_half_life"] == [[None] * 4] * 2
