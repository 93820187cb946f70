"""How much arithmetic a model does per token, from its options alone. Loads no torch.

Counted are the matrix products, with two operations per multiply-add, and every addition, multiplication, division,
comparison and exponential of TSSA itself, which is linear in the tokens. Norms, activations, layer scales, residual
sums and look-ups are left out, as is usual.
"""

from __future__ import annotations

from typing import NamedTuple

from tost.models.options import LanguageOptions, ModelOptions, SequenceClassifierOptions

__all__ = ["TokenFlops", "token_flops", "tssa_flops"]


class TokenFlops(NamedTuple):
    """Floating point operations of a forward pass, per token.

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


def tssa_flops(num_heads: int, head_dim: int, *, causal: bool, bias: bool = False) -> int:
    """Count the operations of TSSA on one token.

    Each of the H * D features takes 8: square it and add it to the sum, divide it by the sum and add it to the energy,
    weigh it by the membership and add it to the second sum, scale the token by membership and gain. Each head takes 7:
    temperature, the five of a softmax, the sum of memberships. The causal form has a moment per token, not per
    sequence, which is 2 more per feature: divide by the mass, add 1. A position bias takes 2 more per head.

    Args:
        num_heads: H.
        head_dim: D.
        causal: The causal form.
        bias: With a position bias.

    Returns:
        Operations per token, whatever the length of the sequence.
    """
    return num_heads * (head_dim * (10 if causal else 8) + 7 + (2 if bias else 0))


def token_flops(options: ModelOptions) -> TokenFlops:
    """Count the operations of a forward pass per token.

    A classifier's head runs once per sequence and its class token is one more token; neither is counted here.

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
        outside, causal, bias = C * options.vocab_size, True, options.position == "learned"
    elif isinstance(options, SequenceClassifierOptions):
        outside, causal, bias = C * (options.in_features or 0), False, False
    else:
        raise TypeError(f"cannot count the operations of {type(options).__name__}: it is no model of this package.")
    block = 2 * C * C + 2 * C * options.hidden_dim
    per_layer = tssa_flops(options.num_heads, C // options.num_heads, causal=causal, bias=bias)
    return TokenFlops(2 * (outside + options.depth * block), options.depth * per_layer)
