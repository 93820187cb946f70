"""How much arithmetic a model does per token or per image, from its options alone. Loads no torch.

Counted are the matrix products, with two operations per multiply-add, and every addition, multiplication, division,
comparison and exponential of TSSA itself, which is linear in the tokens. Norms, activations, layer scales, residual
sums and look-ups are left out, as is usual.
"""

from __future__ import annotations

from typing import NamedTuple

from tost.models.options import LanguageOptions, ModelOptions, SequenceClassifierOptions
from tost.models.sequence.flops import mixer_products
from tost.models.sequence.options import TSSAOptions
from tost.models.vision.options import CrateOptions, ImageOptions, VisionOptions, VitOptions

__all__ = ["TokenFlops", "image_flops", "token_flops", "tssa_flops"]


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


def tssa_flops(
    num_heads: int,
    head_dim: int,
    *,
    causal: bool,
    bias: bool = False,
    count_scaled: bool = False,
    forget: bool = False,
) -> int:
    """Count the operations of TSSA on one token.

    Each of the H * D features takes 8: square it and add it to the sum, divide it by the sum and add it to the energy,
    weigh it by the membership and add it to the second sum, scale the token by membership and gain. Each head takes 7:
    temperature, the five of a softmax, the sum of memberships. The causal form has a moment per token, not per
    sequence, which is 2 more per feature: divide by the mass, add 1. A position bias takes 2 more per head, energies
    scaled by a count take 1, and forgetting one for each number in the three sums, 2 per feature and 1 per head.

    Args:
        num_heads: H.
        head_dim: D.
        causal: The causal form.
        bias: With a position bias.
        count_scaled: With energies that are multiplied by a count.
        forget: With sums that fade.

    Returns:
        Operations per token, whatever the length of the sequence.
    """
    per_feature = (10 if causal else 8) + 2 * forget
    return num_heads * (head_dim * per_feature + 7 + 2 * bias + count_scaled + forget)


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

    Example:
        >>> from tost.models import model_options, token_flops
        >>> token_flops(model_options("tost_lm_base", {})).products
        218824704
    """
    C = options.embed_dim
    if isinstance(options, LanguageOptions):
        return _language_flops(options)
    if isinstance(options, SequenceClassifierOptions):
        block = mixer_products(options) + (2 * C * options.hidden_dim if options.block == "mlp" else 0)
        products = 2 * (C * (options.in_features or 0) + options.depth * block)
        own = options.all_mixer_options()
        if not isinstance(own, TSSAOptions):
            return TokenFlops(products, 0)
        heads = options.num_heads
        per_layer = tssa_flops(heads, C // heads, causal=False, count_scaled=own.count_scaled)
        return TokenFlops(products, options.depth * per_layer)
    if isinstance(options, ImageOptions):
        raise TypeError("the operations of an image model are counted per image; use image_flops.")
    raise TypeError(f"cannot count the operations of {type(options).__name__}: it is no model of this package.")


def _language_flops(options: LanguageOptions) -> TokenFlops:
    C, H, tssa = options.embed_dim, options.num_heads, options.mixer == "tssa"
    mixing = (3 if options.gate else 2) * C * C if tssa else 4 * C * C + 2 * C * options.max_length
    near = options.local * C * (2 if options.local_at == "both" else 1)
    block = mixing + 2 * C * options.hidden_dim + near
    statistics = tssa_flops(
        H,
        C // H,
        causal=True,
        bias=options.position == "learned",
        count_scaled=options.count_scaled,
        forget=options.forget,
    )
    return TokenFlops(2 * (C * options.vocab_size + options.depth * block), options.depth * statistics if tssa else 0)


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
        products = _stem(options, height, width) + N * options.depth * _block(options, N) + options.class_depth * looked
        statistics = N * options.depth * tssa_flops(heads, C // heads, causal=False)
        return TokenFlops(2 * (products + head), statistics if options.mixer == "tssa" else 0)
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


def _block(options: VisionOptions, tokens: int) -> int:
    """Count the products of a block per token."""
    C = options.embed_dim
    mixing = {
        "tssa": 2 * C * C + (C * C if options.gate else 0),
        "softmax": 4 * C * C + 2 * tokens * C,
        "xca": 4 * C * C + 2 * C * C // options.num_heads,
        "mssa": 2 * C * C + 2 * tokens * C,
    }
    feeding = 2 * C * C if options.feed_forward == "ista" else 2 * C * options.hidden_dim
    return mixing[options.mixer] + feeding + options.local**2 * C
