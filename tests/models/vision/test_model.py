"""The vision model: any image, any dtype, any choice of parts; and the interface that timm expects."""

import copy

import pytest
import torch
from torch import nn

import tost._torchvision  # before timm, which imports torchvision

# isort: split
from timm.layers import DropPath
from timm.models.xcit import ClassAttentionBlock, ConvPatchEmbed

import tost
from tests.models.tiny import PLUS, make_tiny, perturb
from tost.errors import BackendError
from tost.models.mixers import list_mixers
from tost.models.vision.tost import ClassBlock, ConvStem

NAME = "tost_tiny_patch16_224"


def make(**overrides):
    torch.manual_seed(0)
    return perturb(make_tiny("tost_mini", **overrides)).eval()


@pytest.mark.parametrize(("patch", "size"), [(16, (33, 33)), (16, (16, 100)), (8, (9, 31)), (4, (28, 28)), (2, (7, 2))])
def test_any_size_and_aspect_will_do(patch, size):
    model = make(patch_size=patch)
    images = torch.randn(2, 3, *size)
    (rows, columns) = (-(-side // patch) for side in size)
    assert model(images).shape == (2, 3)
    assert model.forward_features(images).shape == (2, 1 + rows * columns, 16)


@pytest.mark.parametrize("pool", ["token", "avg", ""])
def test_head_sees_what_was_chosen(pool):
    model = make(global_pool=pool)
    images = torch.randn(2, 3, 16, 24)
    tokens = model.forward_features(images)
    pooled = {"token": tokens[:, 0], "avg": tokens[:, 1:].mean(dim=1), "": tokens}[pool]
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), pooled)
    torch.testing.assert_close(model(images), model.head(pooled), rtol=1e-5, atol=1e-6)
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), pooled, rtol=1e-5, atol=1e-6)


def test_reset_classifier_keeps_the_rest_and_tells_the_options():
    model = make().double()
    before = copy.deepcopy(model.state_dict())
    model.reset_classifier(7, "avg")
    assert (model.num_classes, model.global_pool, model.options.num_classes) == (7, "avg", 7)
    assert model(torch.randn(2, 3, 16, 16).double()).shape == (2, 7)
    assert model.get_classifier().weight.dtype == torch.float64
    assert model.get_classifier().weight.std() < 0.1
    assert not model.get_classifier().bias.any()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items() if "head" not in key)
    assert type(model)(model.options).state_dict().keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="global_pool"):
        model.reset_classifier(7, "max")
    with pytest.raises(ValueError, match="num_classes"):
        model.reset_classifier(-1)
    assert model.num_classes == 7, "a refused change must change nothing"


def test_intermediates_are_the_outputs_of_the_blocks():
    model = make(depth=3)
    images = torch.randn(2, 3, 16, 24)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, out: seen.append(out))
    last, maps = model.forward_intermediates(images, norm=False)
    assert torch.equal(last, model.forward_features(images))
    for tokens, image in zip(seen[:3], maps, strict=True):
        assert image.shape == (2, 16, 4, 6)
        assert torch.equal(image[1, :, 2, 5], tokens[1, 2 * 6 + 5])
    (normed,) = model.forward_intermediates(images, [1], norm=True, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(normed, model.norm(seen[1]))
    seen.clear()
    assert len(model.forward_intermediates(images, [0, 1], stop_early=True, intermediates_only=True)) == 2
    assert len(seen) == 2, "the last block was computed for nothing"
    with pytest.raises(ValueError, match="output_fmt='NHWC' is not known; it takes 'NCHW' or 'NLC'"):
        model.forward_intermediates(images, output_fmt="NHWC")


def test_pruning_leaves_the_intermediates():
    model = make(depth=3)
    images = torch.randn(1, 3, 16, 16)
    expected = model.forward_intermediates(images, [0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1], prune_norm=True) == [0, 1]
    assert (len(model.blocks), len(model.cls_attn_blocks), model.num_classes) == (2, 0, 0)
    assert isinstance(model.norm, nn.Identity)
    found = model.forward_intermediates(images, [0, 1], intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 15, 40), r"images of 15 x 40 pixels are smaller than a patch of 16 x 16\. Enlarge them, or build"),
        (
            (1, 1, 32, 32),
            r"images have shape \(1, 1, 32, 32\) and dtype torch.float32; .* images \[B, 3, height, width",
        ),
        ((3, 32, 32), r"Use images\[None\] for a single one"),
    ],
)
def test_wrong_images_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        make_tiny(NAME)(torch.zeros(shape))


def test_pieces_of_images_are_refused(monkeypatch):
    monkeypatch.setattr("tost.models.vision.base.active", object)
    with pytest.raises(BackendError, match="image models need whole images, but a ContextParallel context is active"):
        make_tiny(NAME)(torch.zeros(1, 3, 32, 32))


PARTS = {
    "softmax": {"mixer": "softmax"},
    "xca": {"mixer": "xca"},
    "mssa": {"mixer": "mssa"},
    "ista": {"feed_forward": "ista"},
    "mssa and ista": {"mixer": "mssa", "feed_forward": "ista"},
    "no norm": {"normalize": False},
    "no norm, ista": {"normalize": False, "feed_forward": "ista"},
    "conv_width": {"conv_width": 3},
    "convolutions before the branches": {"conv_width": 3, "conv_at": "both"},
    "convolution before the block": {"conv_width": 3, "conv_at": "block"},
    "convolution of the values": {"conv_width": 3, "conv_at": "values", **PLUS},
    "convolution of softmax's values": {"conv_width": 3, "conv_at": "values", "mixer": "softmax"},
    "no mixer": {"conv_width": 3, "conv_at": "block", "mixer": "none"},
    "plus": PLUS,
    "plus, no norm": {"mixer": "tssa_plus", "mixer_options": {"block_size": 2, "normalize": False}},
    "no scale": {"layer_scale": None},
    "one class block": {"class_depth": 1},
}


@pytest.mark.parametrize("overrides", PARTS.values(), ids=PARTS.keys())
def test_every_choice_of_parts_trains(overrides):
    model = make(**overrides).train()
    images = torch.randn(4, 3, 16, 24)
    logits = model(images)
    assert torch.isfinite(logits).all()
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    plain = make()
    shared = {key: value for key, value in model.state_dict().items() if plain.state_dict().get(key) is not None}
    if not any(shared[key].shape != plain.state_dict()[key].shape for key in shared):
        plain.load_state_dict(shared, strict=False)
        assert not torch.allclose(plain(images), model.eval()(images)), "the choice changes nothing"


def test_drop_path_is_constant_or_grows():
    def rates(**overrides):
        return [block.drop_path for block in make(depth=5, drop_path=0.2, **overrides).blocks]

    assert rates() == [0.2] * 5
    assert rates(drop_path_rule="linear") == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert make(depth=1, drop_path=0.2, drop_path_rule="linear").options.drop_paths() == [0.2]
    assert not any(isinstance(module, DropPath) for module in make(drop_path=0.2).cls_attn_blocks.modules())


def test_first_weights_are_the_authors():
    torch.manual_seed(0)
    model = tost.create_model(NAME, depth=2)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
            assert not module.bias.any(), name
        elif isinstance(module, nn.Conv2d):  # PyTorch's own: uniform with this bound
            bound = (module.weight[0].numel()) ** -0.5
            assert 0.95 * bound < module.weight.abs().max() <= bound, name
        elif isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            assert module.eps == (1e-6 if isinstance(module, nn.LayerNorm) else 1e-5)
    assert 0.015 < model.cls_token.std() < 0.025
    scales = {name: value for name, value in model.state_dict().items() if "gamma" in name}
    assert len(scales) == 2 * (2 + 2)
    assert all((value == 1).all() for value in scales.values())
    deep = tost.create_model("tost_tiny_24_patch16_224", depth=1)
    assert all((value == 1e-5).all() for name, value in deep.state_dict().items() if "gamma" in name)


@pytest.mark.parametrize("patch", [8, 16])
def test_stem_is_the_one_of_timm(patch):
    theirs = ConvPatchEmbed(img_size=64, patch_size=patch, embed_dim=32)
    ours = ConvStem(patch, 3, 32)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 33)
    tokens, grid = ours(images)
    expected, size = theirs(images)
    assert grid == tuple(size)
    assert tokens.is_contiguous(), "the tokens were to come without a copy"
    torch.testing.assert_close(tokens, expected, rtol=1e-5, atol=1e-5)


def pass_through(stem, images):
    """Gradients and state after a step, and the bytes that were kept for the backward pass."""
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens = stem(images)[0]
    tokens.square().sum().backward()
    results = [tokens.detach(), *(p.grad for p in stem.parameters()), *stem.buffers()]
    return results, sum(tensor.numel() * tensor.element_size() for tensor in kept.values())


@pytest.mark.parametrize("patch", [2, 4, 16])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_stem_recomputes_instead_of_keeping(patch, momentum, monkeypatch):
    torch.manual_seed(0)
    lean = ConvStem(patch, 3, 32).train()
    for norm in lean.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = momentum
    plain = copy.deepcopy(lean)
    monkeypatch.setattr(plain, "_may_recompute", lambda: False)
    images = torch.randn(2, 3, 64, 64)
    for _ in range(2):  # running statistics of two steps
        (found, kept), (expected, all_kept) = pass_through(lean, images), pass_through(plain, images)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert kept == all_kept if patch == 2 else kept < 0.6 * all_kept
    assert all(norm.momentum == momentum for norm in lean.modules() if isinstance(norm, nn.BatchNorm2d))


@pytest.mark.parametrize("mixer", list_mixers(place="vision"))
def test_every_mixer_that_fits_trains_in_the_same_network(mixer):
    torch.manual_seed(0)
    model = tost.create_model("tost_mini", mixer=mixer, depth=1, embed_dim=16, num_heads=2, layer_scale=1.0)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.blocks.parameters())
    assert model.flops_per_image(32, 32) > 0


class Known(nn.Module):
    """A dropout whose decision is known."""

    def forward(self, x):
        kept = torch.arange(x.numel()).reshape(x.shape) % 3 > 0
        return x * kept * 1.5


@pytest.mark.parametrize("tokens_norm", [True, False])
@pytest.mark.parametrize("eta", [1.0, None])
@pytest.mark.parametrize("form", ["plain", "dropout", "exchanged", "hooked"])
def test_class_block_is_the_one_of_timm(tokens_norm, eta, form):
    torch.manual_seed(1)
    blocks = [
        kind(32, 4, qkv_bias=True, eta=eta, tokens_norm=tokens_norm) for kind in (ClassAttentionBlock, ClassBlock)
    ]
    theirs, ours = (block.double() for block in blocks)
    perturb(theirs)
    ours.load_state_dict(theirs.state_dict())
    for block in (theirs, ours):
        block.attn.fused_attn = False
        if form == "dropout":
            block.attn.attn_drop = Known()
        elif form == "exchanged":
            block.attn.v = nn.Sequential(block.attn.v, nn.Tanh())
    calls = []
    if form == "hooked":
        ours.attn.k.register_forward_hook(lambda *_: calls.append(1))
    token, patches = torch.randn(3, 1, 32).double(), torch.randn(3, 7, 32).double()
    expected = theirs(torch.cat((token, patches), dim=1))
    found_token, found_patches = ours(token, patches)
    torch.testing.assert_close(found_token, expected[:, :1], rtol=0, atol=1e-10)
    torch.testing.assert_close(found_patches, expected[:, 1:], rtol=0, atol=1e-10)
    without = ours(token, patches, keep_patches=False)
    assert without[1] is None
    assert torch.equal(without[0], found_token)
    assert bool(calls) == (form == "hooked")


def test_class_weights_are_those_that_the_token_takes():
    model = make()
    token, patches = torch.randn(2, 1, 16), torch.randn(2, 5, 16)
    block = model.cls_attn_blocks[0]
    weights = block.weights(token, patches)
    assert weights.shape == (2, 4, 6)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4))
    values = block.attn.v(block.norm1(torch.cat((token, patches), dim=1))).view(2, 6, 4, 4)
    seen = torch.einsum("bhn,bnhd->bhd", weights, values).reshape(2, 1, 16)
    torch.testing.assert_close(block.attn.proj(seen), block._attend(block.norm1(token), block.norm1(patches)))


def test_only_the_class_token_is_exempt_from_decay():
    model = make()
    assert model.no_weight_decay() <= {name for name, _ in model.named_parameters()}
    assert model.no_weight_decay() == {"cls_token"}
