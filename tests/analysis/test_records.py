"""Capturing: the model computes the same, what is captured is right, and nothing stays behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tost
import tost.analysis as analysis
from tests.models.tiny import PLUS, example, make_tiny, perturb
from tost.analysis.records import choose, run_batch
from tost.errors import ConfigError
from tost.nn import Block, PaperForm
from tost.nn.block import with_neighbours
from tost.ops._blocks import shrink

KINDS = {
    "vision": ("tost_mini", {}),
    "ablation": ("tost_mini", {"normalize": False}),
    "vision plus": ("tost_mini_plus", {}),
    "language": ("tost_lm_base", {}),
    "language plus": ("tost_lm_base_plus", {}),
    "no positions": ("tost_lm_base", {"position": "none"}),
    "gated features": ("tost_lm_base_plus", {"mixer_options": {"block_size": 1}}),
    "classifier": ("lra_listops", {}),
    "classifier plus": ("tost_sequence", PLUS),
    "post norm": ("lra_listops", {"norm": "post"}),
}
PLACES = ("tokens", "input", "attention", "output")


@pytest.fixture(params=KINDS, ids=list(KINDS))
def model(request):
    name, options = KINDS[request.param]
    return perturb(make_tiny(name, **options)).eval()


def hooks(model):
    stores = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks")
    return sum(len(getattr(module, store)) for module in model.modules() for store in stores)


@torch.no_grad()
def test_results_do_not_change_and_hooks_are_gone(model):
    x = example(model)
    before = model(x)
    with analysis.capture(model, what=PLACES) as records:
        assert torch.equal(model(x), before)
        assert hooks(model) > 0
    assert hooks(model) == 0
    assert [record.layer.index for record in records] == [0, 1]
    assert all(getattr(record, place) is not None for record in records for place in PLACES)


@torch.no_grad()
def test_hooks_are_gone_after_an_exception(model):
    def fail(record):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), analysis.capture(model, visit=fail):
        model(example(model))
    assert hooks(model) == 0
    with pytest.raises(ZeroDivisionError):
        analysis.observe(model.train(), [example(model)], fail)
    assert hooks(model) == 0
    assert model.training


def operate(attention, w, x, mask=None):
    """The operator of a layer, and its memberships if it has any."""
    if isinstance(attention, tost.GatedTSSAttention):
        return tost.gated_tssa(w, attention.write(x), mask=mask), None
    if isinstance(attention, tost.CausalTSSAttention):
        arguments = (w, attention.temperature, attention.bias())
        return tost.causal_tssa(*arguments, mask=mask), tost.causal_membership(*arguments, mask=mask)
    options = {"normalize": attention.normalize, "mask": mask}
    y = tost.tssa(w, attention.temperature, block_size=attention.block_size, **options)
    return y, tost.membership(w, attention.temperature, **options)


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@torch.no_grad()
def test_statistics_are_those_of_the_operator(model, padding):
    x = example(model)
    mask = None
    if padding and not hasattr(model.options, "in_chans"):
        mask = torch.tensor([[True] * 9, [False] * 2 + [True] * 5 + [False] * 2])
    with analysis.capture(model) as records:
        run_batch(model, {"inputs": x, "mask": mask})
    for record in records:
        found = record.statistics()
        y, pi = operate(record.layer.attention, record.tokens, record.x, mask)
        assert (pi is None) == (found.pi is None) == record.layer.is_gated
        weight = 1 if pi is None else found.pi.unsqueeze(-1)
        torch.testing.assert_close(-weight * shrink(found.deviation(), found.moments, found.block_size), y)
        assert pi is None or torch.equal(record.share(), pi)
        real = torch.ones(found.w.shape[:2]) if mask is None else mask.float()
        torch.testing.assert_close(found.share().sum(-1), real)
        assert (found.share() >= 0).all()
        assert not found.gain()[real == 0].any()
        torch.testing.assert_close(found.weights().sum(1), torch.ones(found.weights()[:, 0].shape))


@torch.no_grad()
def test_gain_is_what_one_more_token_adds_to_the_coding_rate(model):
    with analysis.capture(model) as records:
        model(example(model))
    for record in records:
        found = record.statistics()
        u = found.deviation().unflatten(-1, (-1, found.block_size))
        eye = torch.eye(found.block_size)
        with_token = torch.logdet(eye + found.blocks() + u.unsqueeze(-1) * u.unsqueeze(-2))
        expected = 0.5 * (with_token - torch.logdet(eye + found.blocks())).sum(-1)
        torch.testing.assert_close(found.gain(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
@torch.no_grad()
def test_windows_are_weighted_means_and_covariances(size):
    model = perturb(make_tiny("tost_lm_base_plus", mixer_options={"block_size": size})).double().eval()
    with analysis.capture(model) as records:
        model(example(model))
    for record in records:
        found = record.statistics()
        weight = found.weights()  # [B, N, H, P]
        w = found.w.unflatten(-1, (-1, size))
        mean = (weight.unsqueeze(-1) * w).sum(1)
        torch.testing.assert_close(found.mean[:, -1], mean.flatten(-2))
        away = w - mean.unsqueeze(1)
        torch.testing.assert_close(found.blocks()[:, -1], torch.einsum("bnhp,bnhpi,bnhpj->bhpij", weight, away, away))
        before = found.w - found.error()
        torch.testing.assert_close(before[:, 1:], found.mean[:, :-1])
        assert not before[:, 0].any()


@torch.no_grad()
def test_stream_is_that_of_the_blocks(model):
    with analysis.capture(model, what=PLACES) as records:
        model(example(model))
    first, second = records
    torch.testing.assert_close(first.output, second.input)
    for record in records:
        seen, w = record.project(record.input)
        torch.testing.assert_close(w, record.tokens)
        mixed = record.layer.attention(seen, record.mask)
        block = record.layer.block
        expected = with_neighbours(record.input, block.conv_block, record.mask, record.grid)
        expected = block._add(expected, mixed, block.gamma1, None)
        torch.testing.assert_close(expected if block.norm == "pre" else block.norm1(expected), record.attention)


@pytest.mark.parametrize("model", [kind for kind in KINDS if "mini" not in KINDS[kind][0]], indirect=True)
@torch.no_grad()
def test_padding_is_known(model):
    x = example(model, length=6)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    with analysis.capture(model) as records:
        run_batch(model, {"inputs": x, "mask": mask, "targets": x})
    for record in records:
        assert torch.equal(record.mask, mask)
        assert not record.share()[~mask].any()


@torch.no_grad()
def test_visited_records_are_not_kept(model):
    seen = []
    with analysis.capture(model, layers=[-1], visit=lambda record: seen.append(record.layer.index)) as records:
        model(example(model))
    assert seen == [1]
    assert records == []


@torch.no_grad()
def test_records_are_visited_before_a_sharded_block_gives_up_its_weights(model):
    events = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, output: events.append("sharded"))
    with analysis.capture(model, visit=lambda record: events.append("visited")):
        model(example(model))
    assert events == ["visited", "sharded"] * 2


class Foreign(nn.Module):
    """Someone's model that has our attention and nothing else of tost."""

    def __init__(self, form):
        super().__init__()
        self.mixer = perturb(tost.TSSAttention(8, 2, paper=form))

    def forward(self, x):
        return x + self.mixer(x)


@pytest.mark.parametrize("form", [None, PaperForm(eps=0.5)], ids=["free", "paper"])
@torch.no_grad()
def test_attention_in_a_foreign_model(form):
    model, x = Foreign(form).eval(), torch.randn(2, 5, 8)
    with analysis.capture(model) as records:
        y = model(x) - x
    (record,) = records
    torch.testing.assert_close(record.tokens, model.mixer._tokens(x))
    assert record.layer.block is None
    attention = model.mixer
    mixed = tost.tssa(record.tokens, record.layer.temperatures())
    torch.testing.assert_close(attention._project_out(mixed, 5), y)
    u = record.layer.subspaces()
    projected = torch.einsum("bnc,hcd->bnhd", x, u) + record.layer.scale * attention.proj_in.bias.view(2, 4)
    torch.testing.assert_close(projected, record.tokens)
    with pytest.raises(ConfigError, match="residual"), analysis.capture(model, what=["input"]):
        pass
    assert "coding-rate" not in analysis.applicable(model)


@torch.no_grad()
def test_state_is_refused():
    model = make_tiny("tost_lm_base").eval()
    with analysis.capture(model), pytest.raises(ValueError, match="use_cache=False"):
        model.forward_with_state(example(model))
    assert hooks(model) == 0


def test_timm_and_transformers_models():
    import tost._torchvision

    # isort: split
    import timm

    import tost.integrations.timm  # noqa: F401
    from tests.integrations.transformers.models import left_padded, make, tokens

    model = timm.create_model("tost_mini", num_classes=3)
    rates = analysis.coding_rate_by_layer(model, [torch.randn(2, 3, 32, 32)])
    assert len(rates.curves) == 3
    theirs = make("plus")
    ids, mask = left_padded([tokens(9), tokens(6, seed=1)])
    found = analysis.head_usage(theirs, [{"input_ids": ids, "attention_mask": mask}])
    ours = analysis.head_usage(theirs.to_tost(), [{"inputs": ids, "mask": mask.bool()}])
    torch.testing.assert_close(found.usage, ours.usage)
    assert analysis.applicable(theirs) == analysis.applicable(theirs.to_tost())


def test_mistakes_are_named():
    model = make_tiny("tost_mini")
    with pytest.raises(ConfigError, match="0 to 1"), analysis.capture(model, layers=[2]):
        pass
    with pytest.raises(ConfigError, match="what takes tokens"), analysis.capture(model, what=["everything"]):
        pass
    with pytest.raises(ConfigError, match="no TSSA layers"), analysis.capture(nn.Linear(2, 2)):
        pass
    with pytest.raises(ConfigError, match="no samples"):
        analysis.head_usage(model, [])
    with pytest.raises(ValueError, match="'inputs'"):
        run_batch(model, {"targets": torch.zeros(1)})
    assert choose([-1, 0, 0], 4) == [0, 3]
    assert any(isinstance(module, Block) for module in model.modules())
