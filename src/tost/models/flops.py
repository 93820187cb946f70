"""The arithmetic of a model per token or per image, from its options alone. Loads no torch.

Counted are the matrix products, with two operations per multiply-add, and every addition, multiplication, division,
comparison and exponential of TSSA itself, which is linear in the tokens. Norms, activations, layer scales, residual
sums and look-ups are left out, as is usual.
"""

from __future__ import annotations

from typing import NamedTuple

from tost.models.mixers import MixerSizes
from tost.models.options import (
    CrateOptions,
    ImageOptions,
    LanguageOptions,
    MixedOptions,
    ModelOptions,
    SequenceClassifierOptions,
    VisionOptions,
    VitOptions,
)


class TokenFlops(NamedTuple):
    """Floating point operations of a forward pass, per token or per image.

    Attributes:
        products: Spent in matrix products.
        statistics: Spent in the operator, element by element.
    """

    products: int
    statistics: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.products + self.statistics


def token_flops(options: ModelOptions) -> TokenFlops:
    """Count the operations of a forward pass per token.

    A classifier's head runs once per sequence and its class token is one more token; neither is counted here. Softmax
    attention is counted for sequences of `max_length` tokens, all pairs of them, as torch counts it too; the other
    mixers of long sequences are too.

    Args:
        options: Options of any model of this package.

    Returns:
        The count, by kind.

    Raises:
        TypeError: The options belong to no model of this package.
        NotImplementedError: The arithmetic of the mixer is not known.

    Example:
        >>> from tost.models import model_options, token_flops
        >>> token_flops(model_options("tost_lm_base", {})).products
        218824704
    """
    C = options.embed_dim
    if isinstance(options, LanguageOptions):
        mixing, statistics = _mixing(options, options.max_length, position_bias=options.position == "learned")
        near = options.conv_width * C * (2 if options.conv_at == "both" else 1)
        block = mixing + 2 * C * options.hidden_dim + near
        ends = C * options.vocab_size
    elif isinstance(options, SequenceClassifierOptions):
        mixing, statistics = _mixing(options, options.max_length)
        block = mixing + (2 * C * options.hidden_dim if options.block == "mlp" else 0)
        block += options.num_convolutions * options.conv_width * C
        ends = C * (options.in_features or 0)
    elif isinstance(options, ImageOptions):
        raise TypeError("the operations of an image model are counted per image; use image_flops.")
    else:
        raise TypeError(f"cannot count the operations of {type(options).__name__}: it is no model of this package.")
    return TokenFlops(2 * (ends + options.depth * block), options.depth * statistics)


def _mixing(options: MixedOptions, num_tokens: int, *, position_bias: bool = False) -> tuple[int, int]:
    """Return the multiply-adds of the mixer per token, and its operations besides."""
    spec, own = options.mixer_spec(), options.all_mixer_options()
    sizes = MixerSizes(options.embed_dim, options.num_heads, num_tokens, position_bias)
    if spec.products is None:
        raise NotImplementedError(
            f"cannot count the operations of mixer {spec.name!r}: it was registered without `products`."
        )
    return spec.products(sizes, own), spec.statistics(sizes, own)


def image_flops(options: ImageOptions, height: int, width: int) -> TokenFlops:
    """Count the operations of a forward pass for one image, class token and head included.

    The Fourier positions of `VisionToST` are left out: they are computed once for all images of a batch.

    Args:
        options: Options of an image model of this package.
        height: Height of the image in pixels.
        width: Width of the image in pixels.

    Returns:
        The count, by kind.

    Raises:
        TypeError: The options belong to no image model of this package.

    Example:
        >>> from tost.models import image_flops, model_options
        >>> image_flops(model_options("tost_small_patch16_224", {}), 224, 224).total
        7769213568
    """
    C, P, heads = options.embed_dim, options.patch_size, options.num_heads
    rows, columns = -(-height // P), -(-width // P)
    N = rows * columns
    head = C * options.num_classes
    if isinstance(options, VisionOptions):
        looked = 4 * C * C + 2 * C * options.hidden_dim + (2 * N + 1) * C * heads
        mixing, statistics = _mixing(options, N)
        feeding = 2 * C * C if options.feed_forward == "ista" else 2 * C * options.hidden_dim
        block = mixing + feeding + options.num_convolutions * options.conv_width**2 * C
        products = _stem(options, height, width) + N * options.depth * block + options.class_depth * looked
        return TokenFlops(2 * (products + head), N * options.depth * statistics)
    pixels, T = P * P * options.in_chans, N + 1
    if isinstance(options, VitOptions):
        block = 4 * C * C + 2 * T * C + 2 * C * options.hidden_dim
    elif isinstance(options, CrateOptions):
        block = 2 * C * C + 2 * T * C + 2 * C * C
    else:
        raise TypeError(
            f"cannot count the operations of {type(options).__name__}: it is no image model of this package."
        )
    return TokenFlops(2 * (N * pixels * C + T * options.depth * block + head), 0)


def _stem(options: VisionOptions, height: int, width: int) -> int:
    """Count the products of the convolutions: 3 x 3, each halving the image and doubling the width."""
    total, narrow, steps = 0, options.in_chans, options.patch_size.bit_length() - 1
    for i in reversed(range(steps)):
        height, width, wide = -(-height // 2), -(-width // 2), options.embed_dim >> i
        total += 9 * narrow * wide * height * width
        narrow = wide
    return total
