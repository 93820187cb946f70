"""What timm's own tests ask of a model, asked of tost's; and the arguments that timm passes."""

import copy

import pytest
import torch
from torch import nn

import tost.integrations.timm

# isort: split
import timm
from timm.layers import create_feature_extractor
from timm.models import FeatureInfo, group_parameters
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay

import tost
from tost.errors import ConfigError
from tost.models import CrateOptions, VisionOptions, model_spec

TINY = {"embed_dim": 32, "depth": 3, "num_heads": 4}
NAMES = sorted(name for name in tost.list_models() if model_spec(name).options in (VisionOptions, CrateOptions))
KINDS = [
    *["tost_tiny_patch16_224", "tost_medium_patch8_224", "tost_mini", "tost_mini_plus"],
    *["xcit_mini", "softmax_mini", "crate_mini"],
]
every_kind = pytest.mark.parametrize("name", KINDS)


def make(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**TINY, **kwargs})


def images_for(model, batch=1):
    """Images of the smallest size that a model is made for, but of more than one token."""
    channels, height, width = model.default_cfg["input_size"]
    return torch.randn(batch, channels, min(height, 32), min(width, 32))


def test_every_image_model_is_listed_and_none_of_timm_is_replaced():
    assert set(NAMES) <= set(timm.list_models())
    assert set(timm.list_models("tost_*")) == {name for name in NAMES if name.startswith("tost_")}
    # timm shows its own builders in its package; ours are only in its registry.
    assert not [name for name in NAMES if hasattr(timm.models, name)]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_timm_is_the_model_of_this_package(name):
    with torch.device("meta"):
        theirs, ours = timm.create_model(name), tost.create_model(name)
    assert theirs.options == ours.options
    cfg = theirs.default_cfg
    assert cfg["architecture"] == name
    assert cfg["num_classes"] == theirs.num_classes
    state = ours.state_dict()
    assert f"{cfg['classifier']}.weight" in state
    assert f"{cfg['first_conv']}.weight" in state
    assert theirs.pretrained_cfg is cfg
    assert not cfg["url"]


@every_kind
def test_backward_reaches_every_parameter(name):
    model = make(name, num_classes=42).train()
    logits = model(images_for(model, 2))
    assert logits.shape[-1] == 42
    logits.mean().backward()
    for parameter, value in model.named_parameters():
        assert value.grad is not None, f"no gradient for {parameter}"


@every_kind
def test_features_head_and_classifier(name):
    model = make(name).eval()
    images = images_for(model)
    assert model.num_features == model.head_hidden_size == 32
    tokens = model.forward_features(images)
    assert tokens.shape[-1] == model.num_features
    assert model.forward_head(tokens, pre_logits=True).shape == (1, model.head_hidden_size)
    torch.testing.assert_close(model.forward_head(tokens), model(images), rtol=1e-4, atol=1e-5)
    assert isinstance(model.get_classifier(), nn.Linear)
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    pooled = model(images)
    assert pooled.shape == (1, model.num_features)
    torch.testing.assert_close(pooled, model.forward_head(tokens, pre_logits=True), rtol=1e-4, atol=1e-5)
    model.reset_classifier(0, "")
    assert model(images).shape == tokens.shape
    model.reset_classifier(11, "token")
    assert model(images).shape == (1, 11)
    assert model.get_classifier().out_features == model.num_classes == 11
    assert make(name, num_classes=0)(images).shape == (1, 32)
    assert make(name, num_classes=0, global_pool="").eval()(images).shape == tokens.shape


@every_kind
def test_features_only(name):
    model = make(name, features_only=True).eval()
    images = images_for(model)
    patch = tost.create_model(name, depth=1).options.patch_size
    channels, reduction = model.feature_info.channels(), model.feature_info.reduction()
    assert (channels, reduction) == ([32] * 3, [patch] * 3)
    maps = model(images)
    assert [tuple(image.shape) for image in maps] == [(1, 32, 32 // patch, 32 // patch)] * 3
    (first,) = make(name, features_only=True, out_indices=[0]).eval()(images)
    assert torch.equal(first, maps[0])
    parameters = [parameter for parameter, _ in model.named_parameters()]
    assert not any("head" in parameter or "cls_attn" in parameter for parameter in parameters)


@every_kind
def test_forward_intermediates(name):
    model = make(name).eval()
    images = images_for(model)
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    last, maps = model.forward_intermediates(images)
    assert [image.shape[1] for image in maps] == info.channels()
    assert [images.shape[-1] // image.shape[-1] for image in maps] == info.reduction()
    assert all(torch.isfinite(image).all() for image in maps)
    torch.testing.assert_close(last, model.forward_features(images))
    for index, image in enumerate(maps):
        (alone,) = model.forward_intermediates(images, [index], intermediates_only=True, stop_early=True)
        assert torch.equal(alone, image)
    (final,) = model.forward_intermediates(images, 1, intermediates_only=True)
    assert torch.equal(final, maps[-1])
    pruned = copy.deepcopy(model)
    assert list(pruned.prune_intermediate_layers([1], prune_norm=True)) == [1]
    (alone,) = pruned.forward_intermediates(images, [1], intermediates_only=True)
    assert torch.equal(alone, maps[1])


@every_kind
def test_layers_are_found_from_stem_to_head(name):
    model = make(name)
    parameters = dict(model.named_parameters())
    groups = group_parameters(model, model.group_matcher())
    assert sorted(parameter for group in groups.values() for parameter in group) == sorted(parameters)
    layer_of = {parameter: layer for layer, group in groups.items() for parameter in group}
    classes = len(getattr(model, "cls_attn_blocks", ()))
    assert layer_of["cls_token"] == 0
    assert [layer_of[f"blocks.{i}.norm1.weight"] for i in range(3)] == [1, 2, 3]
    assert [layer_of[f"cls_attn_blocks.{i}.norm1.weight"] for i in range(classes)] == list(range(4, 4 + classes))
    assert layer_of["norm.weight"] == layer_of["head.weight"] - 1 == max(groups) - 1 == 3 + classes
    assert all(layer_of[key] == 0 for key in parameters if key.startswith(("patch_embed", "pos_embed")))
    scales = {
        id(parameter): group["lr_scale"]
        for group in param_groups_layer_decay(model, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay())
        for parameter in group["params"]
    }
    assert set(scales) == set(map(id, parameters.values()))
    assert scales[id(model.head.weight)] == 1
    assert scales[id(model.cls_token)] == min(scales.values()) < 0.5**3


@every_kind
def test_weight_decay_spares_vectors_and_class_token(name):
    model = make(name)
    spared, decayed = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    assert decayed["weight_decay"] == 0.1
    exempt = set(map(id, spared["params"]))
    assert id(model.cls_token) in exempt
    assert {id(p) for key, p in model.named_parameters() if key.endswith("temperature")} <= exempt
    assert id(model.blocks[0].attention.proj_in.weight) not in exempt
    optimizer = create_optimizer_v2(model, opt="adamw", weight_decay=0.1)
    counted = sum(len(group["params"]) for group in optimizer.param_groups if group["weight_decay"] == 0)
    assert counted == len(exempt)


def test_arguments_of_timm_reach_the_options():
    model = make("tost_mini", in_chans=1, img_size=64, drop_rate=0.1, drop_path_rate=0.2, proj_drop_rate=0.3)
    options = model.options
    assert (options.in_chans, options.head_dropout, options.drop_path, options.dropout) == (1, 0.1, 0.2, 0.3)
    assert [block.drop_path for block in model.blocks] == [0.2] * 3
    assert model.default_cfg["input_size"] == (3, 32, 32)
    assert make("crate_mini", img_size=(28, 32)).options.image_shape == (28, 32)
    assert make("tost_mini", global_pool="avg").global_pool == "avg"
    assert make("tost_mini", mixer="xca", layer_scale=1e-5).options.layer_scale == 1e-5
    other = make("tost_mini", device="meta", dtype=torch.bfloat16)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in other.parameters())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"img_size": 2}, "img_size=2 is smaller than a patch of 4 x 4 pixels; use larger images, or"),
        ({"drop_pathrate": 0.1}, "drop_pathrate: unknown key; did you mean drop_path?"),
        ({"attn_drop_rate": 0.1}, "attn_drop_rate: unknown key"),
        ({"num_heads": 5}, "embed_dim=32 is not divisible by num_heads=5"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        make("tost_mini", **kwargs)


def test_there_is_nothing_to_download():
    with pytest.raises(RuntimeError, match="No pretrained weights exist for tost_tiny_patch16_224"):
        make("tost_tiny_patch16_224", pretrained=True)
    assert not timm.is_model_pretrained("tost_tiny_patch16_224")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_checkpoint_is_loaded(tmp_path, suffix):
    from safetensors.torch import save_file

    model = make("tost_mini").eval()
    path = tmp_path / f"model{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": model.state_dict()}, path)
    else:
        save_file(model.state_dict(), path)
    torch.manual_seed(9)
    other = timm.create_model("tost_mini", checkpoint_path=str(path), **TINY).eval()
    images = images_for(model)
    assert torch.equal(other(images), model(images))


@every_kind
@pytest.mark.parametrize("train", [False, True])
def test_features_by_torch_fx(name, train):
    model = make(name).train(train)
    images = images_for(model, 2)
    traced = create_feature_extractor(model, return_nodes={"blocks.1": "middle", "head": "logits"})
    found = traced(images)
    (middle,) = model.forward_intermediates(images, [1], intermediates_only=True, output_fmt="NLC")
    assert torch.equal(found["middle"][:, -middle.shape[1] :], middle)
    torch.testing.assert_close(found["logits"], model(images))
    # One trace fits every size that the model takes.
    larger = torch.nn.functional.interpolate(images, scale_factor=2)
    torch.testing.assert_close(traced(larger)["logits"], model(larger))
    found["logits"].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@every_kind
def test_input_size_can_be_set(name):
    model = make(name).eval()
    patch, size = model.options.patch_size, model.default_cfg["input_size"][1]
    images = images_for(model)
    before = model(images)
    model.set_input_size(patch_size=patch)
    model.set_input_size(img_size=(size, 2 * size))
    assert model(torch.randn(1, 3, size, 2 * size)).shape == before.shape
    with pytest.raises(ValueError, match=rf"patch_size={2 * patch} differs from that of this model, {patch}"):
        model.set_input_size(patch_size=2 * patch)
    with pytest.raises(ValueError, match="patch"):
        model.set_input_size(img_size=1)
    if "crate" in name:
        assert model.options.image_shape == (size, 2 * size)
        assert model.pos_embed.shape[1] == 1 + model.grid[0] * model.grid[1]
        assert tost.create_model(name, **model.options.model_dump()).load_state_dict(model.state_dict())
