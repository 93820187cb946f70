"""Every combination of the language models' options keeps what the plain model promises."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.tiny import PLUS, count_products, example, make_tiny, perturb
from tost.errors import ConfigError
from tost.models import LanguageOptions, model_options, token_flops
from tost.nn import BlockState
from tost.ops.flops import gated_flops
from tost.testing import assert_close
from tost.train.config import OptimConfig
from tost.train.optim import parameter_groups

LENGTH = 12
GATED = {**PLUS, "conv_width": 4, "layer_scale": None}
RECURRENT = ("linear", "mingru", "gated_delta", "s4d")


def make(options, **more):
    torch.manual_seed(0)
    return perturb(make_tiny("tost_lm_base", **{**options, **more}).double())


@st.composite
def option_sets(draw):
    """A valid choice of everything that decides how tokens meet."""
    mixer = draw(st.sampled_from((*["tssa"] * 3, *["tssa_plus"] * 3, "softmax", *RECURRENT)))
    options = {"conv_width": draw(st.sampled_from((0, 2, 4))), "bias": draw(st.booleans())}
    if options["conv_width"]:
        options["conv_at"] = draw(st.sampled_from(("attention", "mlp", "both")))
    options["position"] = draw(st.sampled_from(("learned", "sinusoidal", "none")))
    if mixer == "softmax":
        return {**options, "mixer": mixer, "layer_scale": None, "activation": "gelu_tanh"}
    if mixer == "tssa_plus":
        options["mixer_options"] = {"block_size": draw(st.sampled_from((1, 2, 4)))}
    return {**options, "mixer": mixer}


cuts = st.lists(st.integers(0, LENGTH), max_size=4).map(lambda found: [0, *sorted(found), LENGTH])
masks = st.none() | st.lists(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2).map(
    torch.tensor
)


def in_pieces(model, ids, mask, edges):
    state, pieces, sizes = None, [], set()
    for begin, end in itertools.pairwise(edges):
        part = None if mask is None else mask[:, begin:end]
        logits, state = model.forward_with_state(ids[:, begin:end], state, part)
        pieces.append(logits)
        sizes.add(state.bytes())
    return torch.cat(pieces, dim=1), state, sizes


@given(option_sets(), masks, cuts)
@settings(max_examples=40)
def test_pieces_and_single_tokens_are_the_whole(options, mask, edges):
    model = make(options)
    ids = example(model, length=LENGTH)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    expected = model(ids, mask)
    for way in (edges, range(LENGTH + 1)):
        logits, state, sizes = in_pieces(model, ids, mask, way)
        assert_close("logits", logits[real], expected[real], 1e-10)
        assert state.position.tolist() == real.sum(dim=1).tolist()
        assert len(sizes) == 1 or options.get("mixer") == "softmax", "the state has grown"


@given(option_sets(), masks.filter(lambda mask: mask is not None))
@settings(max_examples=30)
def test_mask_equals_deletion(options, mask):
    model = make(options)
    ids = example(model, length=LENGTH)
    junk = ids.where(mask, -100)
    logits, state = model.forward_with_state(junk, mask=mask)
    following, _ = model.forward_with_state(ids[:, :1], state)
    for row in range(2):
        kept = ids[row, mask[row]][None]
        alone = model(torch.cat((kept, ids[row : row + 1, :1]), dim=1))[0]
        assert_close("tokens", logits[row, mask[row]], alone[:-1], 1e-10)
        assert_close("next", following[row, 0], alone[-1], 1e-10)


@given(option_sets(), st.integers(1, LENGTH - 1))
@settings(max_examples=25)
def test_later_tokens_change_nothing_before_them(options, cut):
    model = make(options)
    ids = example(model, length=LENGTH)
    other = ids.clone()
    other[:, cut:] = (other[:, cut:] + 1) % model.options.vocab_size
    assert_close("before", model(other)[:, :cut], model(ids)[:, :cut], 1e-13)
    assert not torch.allclose(model(other)[:, cut], model(ids)[:, cut])


@given(option_sets(), masks)
@settings(max_examples=25)
def test_gradients_reach_everything_and_are_the_same_in_pieces_and_recomputed(options, mask):
    found = []
    for recompute, edges in ((False, None), (True, None), (False, (0, 3, 4, LENGTH))):
        model = make(options, gradient_checkpointing=recompute)
        ids = example(model, length=LENGTH)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        logits = model(ids, mask) if edges is None else in_pieces(model, ids, mask, edges)[0]
        logits[real].square().sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient is not None, name
        assert mask is not None or gradient.any(), f"{name} has no effect"
        assert torch.equal(gradient, found[1][name]), name
        assert_close(name, found[2][name], gradient, 1e-9)


@given(option_sets(), masks)
@settings(max_examples=15)
def test_loss_is_that_of_the_logits(options, mask):
    model = make(options)
    ids, targets = example(model, length=LENGTH), example(model, length=LENGTH)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    logits = model(ids, mask)[real]
    expected = torch.nn.functional.cross_entropy(logits, targets[real], reduction="sum")
    junk = targets.where(real, -5)
    assert_close("sum", model(ids, mask, targets=junk), expected, 1e-11)
    assert_close("mean", model.loss(ids, junk, mask), expected / max(1, int(real.sum())), 1e-11)


def test_rows_of_a_state_are_selected_moved_and_measured():
    model = make(GATED)
    ids = example(model, batch=3, length=7)
    _, state = model.forward_with_state(ids)
    assert isinstance(state.layers[0], BlockState)
    beams = state.select([2, 0, 2])
    token = torch.tensor([[1], [2], [3]])
    logits, _ = model.forward_with_state(token, beams)
    for row, source in enumerate((2, 0, 2)):
        alone = model(torch.cat((ids[source], token[row]))[None])
        assert_close("beam", logits[row], alone[0, -1:], 1e-10)
    # Per layer and sequence: means, covariances of pairs, masses, three tokens of the window, and a position.
    assert state.bytes() == 2 * 3 * 8 * (16 + 24 + 8 + 3 * 16 + 1)
    assert state.to(dtype=torch.float32).bytes() == 2 * 3 * (4 * (16 + 24 + 8 + 3 * 16) + 8)
    assert state.layers[0].windows[0].requires_grad
    assert not state.detach().layers[0].windows[0].requires_grad
    assert state.to("meta").position.is_meta


def test_state_of_a_model_with_other_options_is_refused():
    ids = torch.zeros(1, 3, dtype=torch.int64)
    _, state = make({}).forward_with_state(ids)
    with pytest.raises(ValueError, match=r"with 0 windows of convolutions, but this block has .* and 1 of them"):
        make({"conv_width": 4}).forward_with_state(ids, state)
    _, state = make({"conv_width": 3}).forward_with_state(ids)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 16\), but x with shape \(1, 3, 16\) needs \(1, 3, 16\)"):
        make({"conv_width": 4}).forward_with_state(ids, state)


def test_matrices_decay_and_what_belongs_to_the_operator_does_not():
    model = make({**GATED, "conv_at": "both", "bias": True, "layer_scale": 1e-5})
    groups = parameter_groups(model, OptimConfig(lr=1e-3, weight_decay=0.1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = ({names[id(parameter)] for parameter in group["params"]} for group in groups)
    kinds = {"weight", "bias", "gamma1", "gamma2", "norm_weight"}
    assert {name.rpartition(".")[2] for name in names.values()} == kinds
    attention = (f"attention.proj_{part}" for part in ("in", "gate", "write", "out"))
    block = (*attention, "mlp.proj_in", "mlp.proj_out", "conv", "conv_mlp")
    expected = {f"blocks.{i}.{name}.weight" for name in block for i in range(2)}
    assert decayed == expected | {"tokens.weight", "positions.weight"}
    assert spared == set(names.values()) - decayed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv_width": 1}, "conv_width=1 reaches no token but the last one itself; use 2 or more, or 0"),
        ({"conv_width": -1}, "conv_width: -1 given; needs a whole number >= 0"),
        ({"conv_at": "mlp"}, "conv_at=mlp places a convolution, but conv_width=0 has none; set conv_width"),
        (
            {"mixer": "tssa_plus", "embed_dim": 16, "num_heads": 4},
            "block_size=8 does not divide the width of a head, 4",
        ),
        ({"mixer_options": {"block_size": 2}}, "mixer_options takes no keys"),
        ({"mixer": "softmax", "backend": "torch"}, "backend=torch is about TSSA, but mixer=softmax"),
        ({"position": "sinusoidal", "embed_dim": 3, "num_heads": 3}, "embed_dim=3 cannot hold the sines and cosines"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        model_options("tost_lm_base", options)


def test_plus_is_the_same_at_every_size_and_stays_what_it_was():
    added = {}
    for size in ("base", "medium", "large"):
        plain, plus = (model_options(f"tost_lm_{size}{kind}", {}) for kind in ("", "_plus"))
        added[size] = {k: v for k, v in dict(plus).items() if v != getattr(plain, k)}
        assert isinstance(plus, LanguageOptions)
        assert plus.all_mixer_options().block_size == 8
    convolutions = {"conv_width": 4, "conv_at": "both", "conv_start": "previous"}
    assert added["base"] == {**convolutions, "mixer": "tssa_plus", "layer_scale": None, "position": "none"}
    assert added["base"] == added["medium"] == added["large"]


def test_waves_are_of_the_size_of_fresh_embeddings_and_have_no_end():
    model = make_tiny("tost_lm_base", position="sinusoidal", embed_dim=64, vocab_size=500)
    zeros = torch.zeros(1, 300, dtype=torch.int64)
    vectors = (model.embed(zeros, None, None) - model.tokens(zeros)).detach()
    assert 0.9 < vectors.std() / model.tokens.weight.std() < 1.1
    far = model.embed(zeros[:, :1], torch.tensor([123_456_789]), None)
    assert torch.isfinite(far).all()
    assert model.num_parameters() == model.num_parameters(positions=True)


@pytest.mark.parametrize(
    "options",
    [GATED, {"conv_width": 3, "conv_at": "both"}, {"mixer": "softmax", "conv_width": 2, "max_length": 16}],
    ids=str,
)
def test_products_are_those_that_torch_counts(options):
    model = make_tiny("tost_lm_base", **options)
    found = count_products(model, example(model, batch=3, length=16))
    assert found == 3 * 16 * token_flops(model.options).products


def test_statistics_are_counted_with_what_is_added():
    def per_head(**options):
        return token_flops(model_options("tost_lm_base", options)).statistics / (12 * 12)

    plain = per_head()
    assert per_head(position="sinusoidal") == plain - 2
    assert per_head(mixer="softmax") == 0
    for g in (1, 8):
        assert per_head(mixer="tssa_plus", mixer_options={"block_size": g}) == gated_flops(64, g)
