"""The long-range classifier with every mixer, in pairs, and in the layouts of the other code bases."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F

from tests.models.tiny import PLUS, count_products, example, make_tiny, padded, perturb
from tost.errors import ConfigError
from tost.models import model_options, token_flops
from tost.models.mixers import list_mixers
from tost.nn.mixers import MixerBlock, TokenBatchNorm
from tost.testing import assert_close

# Small enough that a sequence of 9 needs more than one block, chunk or landmark.
MIXERS = list_mixers(place="sequence")
SMALL = {
    "reformer": {"chunk_size": 4, "num_buckets": 4},
    "bigbird": {"block_size": 2, "num_random": 1},
    "linformer": {"rank": 4},
    "tssa_plus": {"block_size": 2},
    "s4": {"state_size": 4},
    "s4d": {"state_size": 4},
}


S4_LAYOUT = {
    "mixer": "s4",
    "block": "mixer",
    "norm_kind": "batch",
    "mixer_options": {"state_size": 4},
    "position": "none",
}


def make(name="lra_listops", mixer="tssa", **overrides):
    torch.manual_seed(0)
    options = {"mixer": mixer, "mixer_options": SMALL.get(mixer, {}), "dropout": 0.0, **overrides}
    return perturb(make_tiny(name, **options).double())


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("pooling", ["mean", "cls", "first"])
def test_mask_equals_deletion_with_every_mixer(mixer, pooling):
    model = make(mixer=mixer, pooling=pooling).eval()
    x = example(model)
    expected = model(x)
    for before, after in ((0, 5), (2, 4)):
        junk, mask = padded(x, before, after)
        assert_close("logits", model(junk, mask), expected, 1e-9)


NEAR = {
    "attention": {"conv_width": 3},
    "both": {"conv_width": 3, "conv_at": "both", "norm": "post"},
    "block": {"conv_width": 5, "conv_at": "block", "mixer": "none"},
    "values": {"conv_width": 3, "conv_at": "values", **PLUS},
    "softmax": {"conv_width": 3, "conv_at": "values", "mixer": "softmax"},
}


@pytest.mark.parametrize("options", NEAR.values(), ids=NEAR.keys())
def test_neighbours_stop_at_the_ends_of_a_sequence(options):
    model = make(**options).eval()
    x = example(model)
    expected = model(x)
    assert not torch.allclose(expected, model(x.flip(1)))
    for before, after in ((0, 5), (2, 4)):
        junk, mask = padded(x, before, after)
        assert_close("logits", model(junk, mask), expected, 1e-9)
    packed = model(x.reshape(1, -1), cu_seqlens=torch.tensor([0, 9, 18]))
    assert_close("packed", packed, expected, 1e-9)


@pytest.mark.parametrize("options", NEAR.values(), ids=NEAR.keys())
def test_neighbours_are_learned_and_counted(options):
    model = make_tiny("lra_listops", **options)
    F.cross_entropy(model(example(model, length=24)), torch.tensor([0, 2])).backward()
    near = {name: p for name, p in model.named_parameters() if "conv" in name}
    assert near
    assert all(bool(p.grad.any()) for p in near.values())
    o, taps = model.options, sum(p.numel() for name, p in near.items() if p.dim() == 2)
    plain = model_options("lra_listops", {**o.model_dump(), "conv_width": 0, "conv_at": "attention"})
    assert token_flops(o).products - token_flops(plain).products == 2 * taps


def test_plus_takes_the_options_of_tssa():
    model = make(mixer="tssa_plus", mixer_options={"block_size": 4, "normalize": False})
    assert model.blocks[0].attention.operator_options() == {"block_size": 4, "normalize": False}
    assert model_options("lra_text", {"mixer": "tssa_plus"}).all_mixer_options().block_size == 8
    assert model_options("lra_text", {"mixer": "tssa_plus", "backend": "torch"}).backend == "torch"


def test_a_mixer_without_values_is_refused_by_name():
    with pytest.raises(ConfigError, match="but mixer=s4d takes none; use another place, such as conv_at=block"):
        make_tiny("lra_listops", mixer="s4d", conv_width=3, conv_at="values")


def test_without_pooling_every_element_has_logits():
    model = make(pooling="none", head_kind="linear").eval()
    x = example(model)
    expected = model(x)
    assert expected.shape == (2, 9, 3)
    junk, mask = padded(x, 2, 4)
    assert_close("masked", model(junk, mask)[mask], expected.flatten(0, 1), 1e-9)
    assert_close(
        "packed", model(x.reshape(1, -1), cu_seqlens=torch.tensor([0, 9, 18]))[0], expected.flatten(0, 1), 1e-9
    )
    pairs = make("lra_retrieval", pooling="none", head_kind="linear").eval()
    assert pairs(example(pairs)).shape[:2] == (4, 9)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("block", ["mlp", "mixer"])
def test_every_parameter_gets_a_gradient_with_every_mixer(mixer, block):
    norm_kind = "batch" if block == "mixer" else "layer"
    model = make_tiny("lra_listops", mixer=mixer, mixer_options=SMALL.get(mixer, {}), block=block, norm_kind=norm_kind)
    F.cross_entropy(model(example(model, length=24)), torch.tensor([0, 2])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # The norm in front of no mixer is there, but nothing comes of it.
        idle = mixer == "none" and (block == "mixer" or "norm1" in name) and name.startswith("blocks.")
        assert bool(parameter.grad.any()) != idle, name


@pytest.mark.parametrize("mixer", ["linformer", "s4"])
def test_class_token_fits_in_front_of_the_longest_sequence(mixer):
    model = make(mixer=mixer, pooling="cls")
    assert model(example(model, length=24)).shape == (2, 3)
    with pytest.raises(ValueError, match="reaches position 25"):
        model(example(model, length=25))


def test_options_of_another_mixer_are_refused_until_they_are_cleared():
    with pytest.raises(
        ConfigError,
        match=r"state_size: unknown key; .* than linear, clear them all with mixer_options=",
    ):
        model_options("lra_text", {**S4_LAYOUT, "mixer": "linear"})
    cleared = model_options("lra_text", {"mixer": "linear", "mixer_options": None})
    assert cleared == model_options("lra_text", {"mixer": "linear", "mixer_options": {}})
    assert hash(cleared) == hash(model_options("lra_text", {"mixer": "linear", "mixer_options": {}}))


@pytest.mark.parametrize("pair", ["nli", "concat"])
@pytest.mark.parametrize("head", ["mlp", "mlp_relu", "linear"])
def test_two_towers_are_one_network_and_a_comparison(pair, head):
    model = make("lra_retrieval", pair=pair, head_kind=head).eval()
    x = example(model)
    u, v = (model.features(x[:, i]) for i in (0, 1))
    seen = torch.cat((u, v, u * v, u - v), dim=1) if pair == "nli" else torch.cat((u, v), dim=1)
    assert_close("logits", model(x), model.head(seen), 1e-12)
    assert not torch.allclose(model(x), model(x.flip(1)))
    layers = [layer for layer in model.head.modules() if isinstance(layer, torch.nn.Linear)]
    expected = {"mlp": 2, "linear": 1, "mlp_relu": 3 if pair == "concat" else 2}[head]
    assert len(layers) == expected
    assert layers[0].in_features == seen.shape[1]


def test_towers_are_padded_each_for_itself():
    model = make("lra_retrieval")
    first, second = (torch.randint(1, 258, (2, n)) for n in (5, 9))
    x = torch.stack((F.pad(first, (0, 4), value=7), second), dim=1)
    mask = torch.stack((torch.arange(9) < 5, torch.ones(9, dtype=torch.bool))).expand(2, 2, 9)
    u, v = model.features(first), model.features(second)
    assert_close("logits", model(x, mask), model.head(torch.cat((u, v), dim=1)), 1e-10)


@pytest.mark.parametrize("shape", [(2, 9), (2, 3, 9), (9,)])
def test_what_is_no_pair_is_refused(shape):
    with pytest.raises(ValueError, match=r"this model compares two sequences: it needs ids \[B, 2, N\]"):
        make("lra_retrieval")(torch.zeros(shape, dtype=torch.int64))


def test_poolings_are_what_they_are_called():
    x = torch.randint(1, 16, (2, 9))
    mask = torch.tensor([[True] * 6 + [False] * 3, [False] * 2 + [True] * 7])
    first, tokens = make(pooling="first"), []
    first.norm_out.register_forward_hook(lambda *inputs: tokens.append(inputs[-1]))
    assert torch.equal(first.features(x, mask), torch.stack((tokens[0][0, 0], tokens[0][1, 2])))
    assert torch.equal(first.features(x), tokens[1][:, 0])


def test_tied_blocks_are_one_block_many_times():
    model, plain = make(tied=True, depth=3), make(depth=3)
    assert len(model.blocks) == 1
    state = model.state_dict()
    for key, value in list(state.items()):
        if key.startswith("blocks.0"):
            state |= {key.replace("blocks.0", f"blocks.{i}"): value for i in (1, 2)}
    plain.load_state_dict(state)
    x = example(model)
    assert_close("logits", model(x), plain(x), 1e-13)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layout_of_s4_is_its_equation(norm):
    model = make("lra_image", **S4_LAYOUT, norm=norm, num_heads=1)
    x = example(model, dtype=torch.float64)
    tokens = model.embedding(x)
    for block in model.blocks:
        assert isinstance(block, MixerBlock)
        assert isinstance(block.norm1, TokenBatchNorm)
        if norm == "pre":
            tokens = tokens + block.attention(block.norm1(tokens))
        else:
            tokens = block.norm1(tokens + block.attention(tokens))
    assert model.norm_in is None
    assert model.norm_out is None
    assert_close("logits", model(x), model.head(tokens.mean(dim=1)), 1e-12)


def test_batch_norm_is_that_of_torch_and_leaves_padding_out():
    ours, theirs = (perturb(norm(5).double()) for norm in (TokenBatchNorm, torch.nn.BatchNorm1d))
    theirs.load_state_dict({**ours.state_dict(), "num_batches_tracked": torch.tensor(0)})
    x, mask = torch.randn(3, 7, 5, dtype=torch.float64), torch.rand(3, 7) < 0.6
    junk = torch.where(mask.unsqueeze(-1), x, float("nan"))
    for _ in range(2):
        assert_close("padded", ours(junk, mask)[mask], theirs(x[mask]), 1e-12)
        assert_close("plain", ours(x), theirs(x.mT).mT, 1e-12)
    for key, value in ours.state_dict().items():
        assert_close(key, value, theirs.state_dict()[key], 1e-12)
    ours.eval(), theirs.eval()
    assert_close("evaluation", ours(x), theirs(x.mT).mT, 1e-12)
    alone = TokenBatchNorm(5)
    assert alone(torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.bool)).isfinite().all()
    assert alone(torch.randn(1, 1, 5)).isfinite().all()
    assert alone.running_var.isfinite().all()


def test_batch_norm_counts_a_batch_once_under_checkpointing():
    layout = {"block": "mixer", "norm_kind": "batch", "dropout": 0.0}
    models = [make_tiny("lra_listops", **layout, gradient_checkpointing=recompute) for recompute in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    ids = example(models[0])
    for model in models:
        loss = model(ids).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for name, value in models[0].named_buffers():
        assert torch.equal(value, models[1].get_buffer(name)), name
    for (name, value), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_close(name, other.grad, value.grad, 1e-6)


def test_batch_norm_of_parts_that_share_their_sums_is_that_of_the_whole():
    """What processes exchange, played by two threads of one."""
    x = torch.randn(4, 7, 5, dtype=torch.float64)
    mask = torch.rand(4, 7) < 0.6
    whole, *parts = (perturb(TokenBatchNorm(5).double(), by=0.0) for _ in range(3))
    meeting, mail = Barrier(2), {}

    def exchange(rank, part):
        meeting.wait()
        mail[rank] = part
        meeting.wait()
        total = mail[0] + mail[1]
        meeting.wait()
        return total

    def run(rank):
        parts[rank].share(partial(exchange, rank))
        return parts[rank](x[2 * rank : 2 * rank + 2], mask[2 * rank : 2 * rank + 2])

    with ThreadPoolExecutor(2) as pool:
        found = torch.cat(list(pool.map(run, range(2))))
    assert_close("outputs", found, whole(x, mask), 1e-12)
    for name, value in whole.named_buffers():
        assert_close(name, parts[0].get_buffer(name), value, 1e-12)


def test_steps_and_state_matrices_do_not_decay():
    model = make_tiny("lra_text", **S4_LAYOUT, num_heads=2)
    names = model.no_weight_decay()
    assert len(names) == 2 * 5
    assert names < {name for name, _ in model.named_parameters()}
    assert {name.rpartition(".")[2] for name in names} == {"log_step", "log_decay", "frequency", "b", "p"}
    assert make_tiny("lra_text").no_weight_decay() == set()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mixer": "linformr"}, "mixer: there is no mixer 'linformr'; did you mean 'linformer'"),
        (
            {"mixer": "linformer", "mixer_options": {"rnk": 4}},
            "mixer_options.rnk: unknown key; did you mean mixer_options.rank.*another mixer than linformer",
        ),
        ({"mixer": "linear", "mixer_options": {"rank": 4}}, "mixer_options takes no keys"),
        (
            {"mixer": "linformer", "mixer_options": {"rank": 0}},
            "mixer_options.rank: 0 given; needs a whole number >= 1",
        ),
        ({"mixer": "s4", "mixer_options": {"step_min": 0.2}}, "step_min=0.2 is above step_max=0.1"),
        ({"mixer": "linear", "backend": "torch"}, "backend=torch is about TSSA, but mixer=linear"),
        ({"norm_kind": "batch"}, "norm_kind=batch goes with block=mixer"),
        ({"mixer_options": 3}, "mixer_options: 3 given; needs keys and their values"),
        ({"towers": 3}, "towers: 3 given; needs one of 1, 2"),
        ({"mixer": "tssa_plus", "num_heads": 64}, "block_size=8 does not divide the width of a head, 4"),
        ({"conv_width": 4}, "conv_width=4 has no middle"),
        ({"conv_at": "mlp"}, "conv_at=mlp places a convolution, but conv_width=0 has none"),
        ({"block": "mixer", "conv_width": 3}, "belongs to blocks with an MLP; use block=mlp"),
    ],
)
def test_impossible_options_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        model_options("lra_text", overrides)


@pytest.mark.parametrize("mixer", ["softmax", "linear", "performer", "linformer"])
def test_products_of_mixers_are_those_that_torch_counts(mixer):
    model = make_tiny("lra_listops", mixer=mixer, mixer_options=SMALL.get(mixer, {}), head_kind="linear").eval()
    o = model.options
    found = count_products(model, example(model, batch=3, length=o.max_length))
    head = 3 * 2 * o.embed_dim * o.num_classes
    assert found == 3 * o.max_length * token_flops(o).products + head
