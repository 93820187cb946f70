"""Options of image models: what goes together, and how much arithmetic it takes."""

import pytest
import torch

from tests.models.tiny import PLUS, count_products, make_tiny
from tost.errors import ConfigError
from tost.models import image_flops, model_options, token_flops
from tost.models.options import FixedSizeOptions, ImageOptions, VisionOptions


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("tost_mini", {"patch_size": 6}, "patch_size: 6 given; needs one of 2, 4, 8, 16"),
        ("tost_mini", {"patch_size": "8"}, "patch_size: '8' given; needs one of 2, 4, 8, 16"),
        ("tost_mini", {"mixer": "conv"}, "mixer: there is no mixer 'conv'; mixers: bigbird, .*linear, "),
        ("tost_mini", {"num_classes": -1}, "num_classes: -1 given; needs a whole number >= 0"),
        ("tost_mini", {"drop_path": 1.0}, "drop_path: 1.0 given; needs a number >= 0 and < 1"),
        ("tost_mini", {"global_pool": "max"}, "global_pool: max given; needs one of token, avg, ''"),
        ("tost_mini", {"layer_scale": 0.0}, "layer_scale: 0.0 given; needs a number > 0 or null"),
        ("tost_mini", {"class_depth": 0}, "class_depth: 0 given; needs a whole number >= 1"),
        ("tost_mini", {"image_size": 32}, "image_size: unknown key"),
        ("tost_mini", {"conv_width": 4}, "conv_width=4 has no middle: the convolution needs an odd width; use 5, or 0"),
        ("tost_mini", {"conv_width": -1}, "conv_width: -1 given; needs a whole number >= 0"),
        ("tost_mini", {"conv_at": "block"}, "conv_at=block places a convolution, but conv_width=0 has none"),
        ("tost_mini", {"mixer_options": {"block_size": 2}}, "with mixer=tssa, set options of the model: normalize"),
        ("tost_mini_plus", {"num_heads": 16}, "block_size=8 does not divide the width of a head, 4"),
        ("tost_mini", {"mixer": "mssa", "normalize": False}, "normalize=False is about TSSA, but mixer=mssa"),
        ("softmax_mini", {"backend": "torch"}, "backend=torch is about TSSA, but mixer=softmax"),
        (
            "tost_tiny_patch16_224",
            {"embed_dim": 36},
            "embed_dim=36 is not divisible by 8: with patch_size=16 the stem starts with 1/8 of the width",
        ),
        ("crate_mini", {"image_size": 30}, "image_size=30 is not made of whole patches of patch_size=4: resize"),
        ("vit_mini", {"image_size": (32, 30)}, r"image_size=\(32, 30\) is not made of whole patches of patch_size=4"),
        ("crate_mini", {"mlp_ratio": 2.0}, "mlp_ratio=2.0 has no meaning for CRATE, which has no MLP"),
        ("vit_mini", {"backend": "native"}, "backend=native chooses an implementation of TSSA, which this model has n"),
        ("vit_mini", {"drop_path_rule": "constant"}, "drop_path_rule: constant given; needs linear"),
        ("vit_mini", {"mixer": "tssa"}, "mixer: unknown key"),
    ],
)
def test_unusable_options_are_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        model_options(name, overrides)


def test_image_size_is_one_number_or_two():
    assert model_options("vit_mini", {"image_size": 64}).image_shape == (64, 64)
    assert model_options("crate_mini", {"image_size": [28, 32]}).image_shape == (28, 32)
    assert model_options("vit_mini", {"image_size": [64, 64]}) == model_options("vit_mini", {"image_size": 64})


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("tost_tiny_patch16_224", {}),
        ("tost_mini", {"mlp_ratio": 2.5, "class_depth": 3, "in_chans": 1}),
        ("tost_mini", {**PLUS, "conv_width": 3}),
        ("tost_mini", {"conv_width": 3, "conv_at": "both"}),
        ("tost_mini", {"conv_width": 5, "conv_at": "block"}),
        ("xcit_mini", {"conv_width": 3, "conv_at": "values"}),
        ("tost_mini", {"feed_forward": "ista", "num_classes": 0}),
        ("softmax_mini", {}),
        ("xcit_mini", {}),
        ("tost_mini", {"mixer": "mssa"}),
        ("crate_mini", {}),
        ("vit_mini", {}),
    ],
)
def test_products_are_those_that_torch_counts(name, overrides):
    model = make_tiny(name, **overrides)
    o = model.options
    height, width = o.image_shape if isinstance(o, FixedSizeOptions) else (35, 20)
    tokens = -(-height // o.patch_size) * -(-width // o.patch_size)
    positions = 2 * 64 * o.embed_dim * tokens if isinstance(o, VisionOptions) else 0  # once for all images
    images = torch.randn(3, o.in_chans, height, width)
    assert count_products(model.eval(), images) == 3 * image_flops(o, height, width).products + positions
    assert model.flops_per_image(height, width) == sum(image_flops(o, height, width))


def test_counts_of_other_models_are_refused():
    with pytest.raises(TypeError, match="counted per image; use image_flops"):
        token_flops(model_options("tost_mini", {}))
    with pytest.raises(TypeError, match="cannot count the operations of ImageOptions: it is no image model"):
        image_flops(ImageOptions(embed_dim=4, depth=1, num_heads=1), 32, 32)
