"""The authors' checkpoints: what is computed, what comes back, what is told by the shapes, what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.integrations.official.networks import language_logits, language_state, vision_logits, vision_state
from tost.errors import CheckpointError, ConfigError
from tost.integrations.official import to_official
from tost.models import LanguageToST, VisionToST
from tost.train.checkpoint.model import nearest_name

MIXERS = ("tssa", "xca", "softmax")
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts agree in every name, shape, type and bit."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and torch.equal(a[name], b[name])
        for name in a
    )


def cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    done = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    if state.get("lm_head.weight") is state.get("transformer.wte.weight", 0):
        done["lm_head.weight"] = done["transformer.wte.weight"]
    return done


@pytest.mark.parametrize("tokens_norm", [True, False])
@pytest.mark.parametrize("patch", [8, 16])
@pytest.mark.parametrize("mixer", MIXERS)
def test_vision_model_computes_what_the_description_says(mixer, patch, tokens_norm):
    state = vision_state(mixer=mixer, patch=patch, width=24, heads=8, depth=2)
    images = torch.randn(2, 3, 48, 40, dtype=torch.float64)
    expected = vision_logits(state, images, heads=8, mixer=mixer, tokens_norm=tokens_norm)
    model = tost.load_official(state, tokens_norm=tokens_norm).eval()
    assert isinstance(model, VisionToST)
    torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [*({"gammas": False}, {"qkv_bias": False}, {"classes": 0}, {"channels": 1, "hidden": 7}, {"patch": 4})],
    ids=str,
)
def test_unusual_vision_models_compute_what_the_description_says(options):
    state = vision_state(**options)
    images = torch.randn(2, options.get("channels", 3), 24, 24, dtype=torch.float64)
    expected = vision_logits(state, images, heads=2, mixer="tssa", tokens_norm=True)
    torch.testing.assert_close(tost.load_official(state).eval()(images), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"gammas": False}, {"tied": False}], ids=str)
def test_language_model_computes_what_the_description_says(options):
    state = language_state(**options)
    ids = torch.randint(11, (2, 7))
    model = tost.load_official(state).eval()
    assert isinstance(model, LanguageToST)
    torch.testing.assert_close(model(ids), language_logits(state, ids, heads=2), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"gammas": False}, {"tied": False}], ids=str)
def test_the_gpt_of_the_authors_computes_what_the_description_says(options, tmp_path):
    state = language_state(mixer="softmax", width=16, **options)
    ids = torch.randint(11, (2, 7))
    mask = torch.ones(9, 9, dtype=torch.float64).tril()[None, None]
    stored = state | {f"transformer.h.{i}.attn.bias": mask for i in range(2)}  # as without fused attention
    torch.save({"model": stored}, tmp_path / "ckpt.pt")
    model = tost.load_official(tmp_path / "ckpt.pt", num_heads=2).eval()
    assert (model.options.mixer, model.options.position) == ("softmax", "learned")
    assert (model.options.layer_scale is None) == (options == {"gammas": False})
    expected = language_logits(state, ids, heads=2, mixer="softmax")
    torch.testing.assert_close(model(ids), expected, rtol=1e-9, atol=1e-9)
    if options != {"tied": False}:
        assert same(to_official(model), state)


@settings(max_examples=30)
@given(
    st.sampled_from(MIXERS),
    st.sampled_from(TYPES),
    st.fixed_dictionaries(
        {
            "heads": st.integers(1, 3),
            "depth": st.integers(1, 3),
            "patch": st.sampled_from((8, 16)),
            "classes": st.integers(0, 12),
            "channels": st.integers(1, 4),
            "hidden": st.integers(1, 70),
            "class_depth": st.integers(1, 3),
            "gammas": st.booleans(),
        }
    ),
    st.integers(1, 3),
    st.booleans(),
)
def test_vision_checkpoints_come_back_bit_by_bit(mixer, dtype, sizes, share, tokens_norm):
    state = cast(vision_state(**sizes, mixer=mixer, width=8 * share * sizes["heads"]), dtype)
    asked = {"num_heads": sizes["heads"]} if mixer == "softmax" else {}
    model = tost.load_official(state, tokens_norm=tokens_norm, **asked)
    options = model.options
    found = {"heads": options.num_heads, "depth": options.depth, "patch": options.patch_size}
    found |= {"classes": options.num_classes, "channels": options.in_chans, "hidden": options.hidden_dim}
    found |= {"class_depth": options.class_depth, "gammas": options.layer_scale is not None}
    assert (found, options.mixer) == (sizes, mixer)
    assert same(to_official(model), state)


@settings(max_examples=30)
@given(
    st.sampled_from(TYPES),
    st.fixed_dictionaries(
        {
            "heads": st.integers(1, 4),
            "depth": st.integers(1, 3),
            "vocabulary": st.integers(1, 30),
            "length": st.integers(1, 30),
            "bias": st.booleans(),
            "gammas": st.booleans(),
        }
    ),
    st.integers(1, 5),
)
def test_language_checkpoints_come_back_bit_by_bit(dtype, sizes, share):
    state = cast(language_state(**sizes, width=share * sizes["heads"]), dtype)
    model = tost.load_official(state)
    options = model.options
    found = {"heads": options.num_heads, "depth": options.depth, "vocabulary": options.vocab_size}
    found |= {"length": options.max_length, "bias": options.bias, "gammas": options.layer_scale is not None}
    assert (found, options.tie_head) == (sizes, True)
    assert same(to_official(model), state)


@pytest.mark.parametrize(
    ("name", "sizes", "parameters"),
    [
        ("tost_tiny_patch16_224", {"width": 192, "depth": 12, "heads": 4}, 5_769_328),
        ("tost_small_patch16_224", {"width": 384, "depth": 12, "heads": 8}, 22_589_944),
        ("tost_medium_patch16_224", {"width": 512, "depth": 24, "heads": 8}, 71_481_064),
        ("tost_medium_patch8_224", {"width": 512, "depth": 24, "heads": 8, "patch": 8}, 71_408_936),
        ("tost_small_24_patch16_224", {"width": 384, "depth": 24, "heads": 8}, 40_344_664),
        ("xcit_small_nolpi_patch16_224", {"width": 384, "depth": 12, "heads": 8, "mixer": "xca"}, 26_138_104),
    ],
)
def test_sizes_of_the_paper_are_recognized(name, sizes, parameters):
    state = vision_state(
        **{"patch": 16, "classes": 1000, **sizes}, make=lambda *shape: torch.empty(shape, device="meta")
    )
    state = {key: tensor.to("meta") for key, tensor in state.items()}
    model = tost.load_official(state)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert nearest_name(model.options) == name
    assert model.options == tost.models.model_options(name, {})


def test_loading_copies_and_draws_no_random_numbers():
    state = vision_state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    random = torch.get_rng_state()
    model = tost.load_official(state)
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.requires_grad
            parameter.add_(1)
        for tensor in to_official(model).values():
            tensor.zero_()
    assert same(state, before)
    assert not any((parameter == 0).all() for parameter in model.parameters())


SMALL_STATES = [partial(vision_state, class_depth=1), partial(language_state, depth=1)]


@pytest.mark.parametrize("make", SMALL_STATES)
def test_every_missing_tensor_is_named(make):
    state = make()
    # Tied: each of the two can be told by the other.
    for name in state.keys() - {"lm_head.weight", "transformer.wte.weight"}:
        with pytest.raises(CheckpointError, match=f"missing: .*{name}"):
            tost.load_official({key: tensor for key, tensor in state.items() if key != name})


@pytest.mark.parametrize("make", SMALL_STATES)
@pytest.mark.parametrize("name", ["extra", "blocks.0.extra", "transformer.h.0.extra", "blocks.99999999.norm1.weight"])
def test_every_unused_tensor_is_named(make, name):
    with pytest.raises(CheckpointError, match=f"not used: .*{name}"):
        tost.load_official(make() | {name: torch.zeros(3)})


@pytest.mark.parametrize("make", SMALL_STATES)
def test_every_wrong_shape_or_type_is_an_error(make):
    state = make()
    for name, tensor in state.items():
        longer = torch.cat((tensor, tensor)) if tensor.dim() else tensor[None]
        for other in (longer, tensor.new_zeros(3, *tensor.shape), torch.tensor(1.0), tensor.bool()):
            with pytest.raises(CheckpointError):
                tost.load_official(state | {name: other})
    with pytest.raises(CheckpointError, match=rf"{name} \(torch.sparse_coo\)"):
        tost.load_official(state | {name: tensor.to_sparse()})


def test_a_wrong_shape_is_named_with_what_is_needed():
    state = vision_state() | {"blocks.1.mlp.fc2.weight": torch.zeros(3, 4)}
    with pytest.raises(CheckpointError, match=r"blocks.1.mlp.fc2.weight has shape \(3, 4\); \(16, 64\) is needed"):
        tost.load_official(state)


def test_free_options_are_taken_over():
    model = tost.load_official(
        vision_state(), drop_path=0.2, dropout=0.1, gradient_checkpointing=True, backend="torch", layer_scale=0.5
    )
    options = model.options
    assert (options.drop_path, options.dropout, options.gradient_checkpointing) == (0.2, 0.1, True)
    assert (options.backend, options.layer_scale) == ("torch", 0.5)
    assert tost.load_official(vision_state(depth=13)).options.layer_scale == 1e-5


@pytest.mark.parametrize(
    ("make", "asked", "message"),
    [
        (vision_state, {"depth": 3}, r"depth=3 \(the file: 2\)"),
        (vision_state, {"num_heads": 4, "mixer": "xca"}, r"mixer=xca \(the file: tssa\)"),
        (vision_state, {"num_classes": 10}, r"num_classes=10 \(the file: 5\)"),
        (vision_state, {"feed_forward": "ista"}, r"feed_forward=ista \(the file: mlp\)"),
        (vision_state, {"layer_scale": None}, r"layer_scale=None \(the file: with gammas\)"),
        (vision_state, {"mixer": "tssa_plus"}, r"mixer=tssa_plus \(the file: tssa\)"),
        (vision_state, {"conv_width": 3}, "blocks.0.conv"),
        (language_state, {"bias": True}, r"bias=True \(the file: False\)"),
        (language_state, {"position": "none"}, "position=none"),
        (lambda: language_state(gammas=False), {"layer_scale": 1.0}, r"layer_scale=1.0 \(the file: without gammas\)"),
    ],
)
def test_contradictions_are_refused(make, asked, message):
    with pytest.raises(CheckpointError, match=message):
        tost.load_official(make(), **asked)


def test_impossible_options_are_configuration_errors():
    with pytest.raises(ConfigError, match="did you mean drop_path"):
        tost.load_official(vision_state(), drop_paths=0.1)


def test_heads_of_softmax_attention_have_to_be_told_if_eight_do_not_fit():
    state = vision_state(mixer="softmax", width=12, patch=8, heads=3)
    with pytest.raises(CheckpointError, match="num_heads=8 is a guess"):
        tost.load_official(state)
    assert tost.load_official(state, num_heads=3).options.num_heads == 3
    assert tost.load_official(vision_state(mixer="softmax", width=16)).options.num_heads == 8


@pytest.mark.parametrize(
    "names",
    [
        {"gamma1": "gamma_1", "gamma2": "gamma_2"},
        {"gamma1": "ls_1.gamma", "gamma2": "ls_2.gamma"},
        {"gamma1": "ls1.gamma"},
        {"attn.temp": "attn.temperature"},
        {"attn.denom_bias": "attn.bias"},
    ],
    ids=lambda names: " ".join(names.values()),
)
def test_other_names_in_language_models_are_understood(names):
    state = language_state()
    renamed = dict(state)
    for i in range(2):
        for name, alias in names.items():
            renamed[f"transformer.h.{i}.{alias}"] = renamed.pop(f"transformer.h.{i}.{name}")
    assert same(to_official(tost.load_official(renamed)), state)
    with pytest.raises(CheckpointError, match="under two names"):
        tost.load_official(state | renamed)


def test_either_name_of_a_tied_head_is_enough():
    state = language_state()
    for name in ("lm_head.weight", "transformer.wte.weight"):
        assert same(to_official(tost.load_official({k: t for k, t in state.items() if k != name})), state)


def test_position_biases_are_cut_to_the_positions():
    state = language_state(length=9)
    cropped = state | {"transformer.wpe.weight": state["transformer.wpe.weight"][:4]}
    model = tost.load_official(cropped).eval()
    assert model.options.max_length == 4
    ids = torch.randint(11, (1, 4))
    torch.testing.assert_close(model(ids), language_logits(cropped, ids, heads=2), rtol=1e-9, atol=1e-9)
    short = state | {"transformer.h.1.attn.denom_bias": state["transformer.h.1.attn.denom_bias"][:, :4]}
    with pytest.raises(CheckpointError, match=r"transformer.h.1.attn.denom_bias has shape \(2, 4, 1\); \(2, 9, 1\)"):
        tost.load_official(short)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"transformer.h.0.attn.c_attn.weight": torch.zeros(48, 16)}, "not used: transformer.h.0.attn.temp"),
        ({"blocks.0.local_mp.conv1.weight": torch.zeros(1)}, "local patch interaction.*timm"),
        ({"patch_embed.proj.weight": torch.zeros(1)}, "ViT or DeiT"),
        ({"blocks.0.attn.qkv.weight": torch.zeros(32, 16)}, "32 rows for tokens of width 16"),
        ({"blocks.0.attention.proj_in.weight": torch.zeros(1)}, "state dict of this package.*tost.load_model"),
    ],
)
def test_relatives_are_refused_in_words_that_help(state, message):
    make = language_state if "transformer" in next(iter(state)) else vision_state
    with pytest.raises(CheckpointError, match=message):
        tost.load_official(make() | state)


def test_strangers_are_refused():
    with pytest.raises(CheckpointError, match=r"neither.*the names here are conv1.weight"):
        tost.load_official({"conv1.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="a Linear was given"):
        tost.load_official(torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="no model like Linear"):
        to_official(torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="no model like SequenceClassifier"):
        to_official(tost.create_model("lra_image", embed_dim=8, depth=1, num_heads=1))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("conv_width", 3), ("normalize", False), ("feed_forward", "ista")],
        *[("mixer", "mssa"), ("mixer", "tssa_plus"), ("patch_size", 4), ("patch_size", 2), ("global_pool", "avg")],
        *[("tie_head", False), ("position", "none")],
    ],
)
def test_options_that_the_authors_lack_are_refused(option, value):
    name = "tost_lm_base" if option in ("tie_head", "position") else "tost_tiny_patch16_224"
    model = tost.create_model(name, embed_dim=16, depth=1, num_heads=2, **{option: value})
    with pytest.raises(CheckpointError, match=f"the authors' code has no .*{option}={value}"):
        to_official(model)


def test_a_pruned_model_is_refused():
    model = tost.create_model("tost_tiny_patch16_224", embed_dim=16, depth=1, num_heads=2)
    del model.cls_attn_blocks[1]
    with pytest.raises(CheckpointError, match=r"lacks cls_attn_blocks\.1"):
        to_official(model)
