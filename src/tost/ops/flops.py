"""The arithmetic of the operators. Loads no torch."""

from __future__ import annotations


def tssa_flops(
    num_heads: int,
    head_dim: int,
    *,
    causal: bool,
    bias: bool = False,
    count_scaled: bool = False,
    forget: bool = False,
    block_size: int = 1,
    centered: bool = False,
) -> int:
    """Count the operations of TSSA on one token.

    Each of the H * D features takes 8: square it and add it to the sum, divide it by the sum and add it to the energy,
    weigh it by the membership and add it to the second sum, scale the token by membership and gain. Each head takes 7:
    temperature, the five of a softmax, the sum of memberships. The causal form has a moment per token, not per
    sequence, which is 2 more per feature: divide by the mass, add 1. A position bias takes 2 more per head, energies
    scaled by a count take 1, and forgetting one for each number in the three sums, 2 per feature and 1 per head. Means
    take 4 per feature: weigh it and add it to the sum, remove the mean from the square and from the token; the causal
    form also divides each by the mass, and lets the sum fade.

    In blocks of g features a block has g(g+1)/2 products in place of g squares to weigh, add, and let fade. Solving for
    a token takes 2 operations for each of the g(g-1) entries off the diagonal in place of its gain, and the causal form
    also factors a matrix per token, about g^3/3 operations in place of the g divisions.

    Args:
        num_heads: H.
        head_dim: D.
        causal: The causal form.
        bias: With a position bias.
        count_scaled: With energies that are multiplied by a count.
        forget: With sums that fade.
        block_size: Features in a block, g.
        centered: With moments about means.

    Returns:
        Operations per token, whatever the length of the sequence.
    """
    g = block_size
    per_feature = (10 if causal else 8) + 2 * forget + centered * (4 + causal + forget)
    # Beyond the diagonal: products and their fading, two triangular solves, and the factors.
    per_block = (3 + forget) * (g * (g - 1) // 2) + 2 * g * (g - 1) + causal * (g**3 - g) // 3
    heads = head_dim * per_feature + head_dim // g * per_block + 7 + 2 * bias + count_scaled + forget
    return num_heads * heads


def gated_flops(embed_dim: int, block_size: int) -> int:
    """Count the operations of gated statistics on one token.

    Per block of g features: 6 for the gate and its mass; per feature 4 for mean and distance, 2 for its share; per
    product, of which there are g(g+1)/2, 3 to add and fade it; about g^3 / 3 for the factors, 2 g^2 for the solution.
    """
    g = block_size
    return embed_dim // g * (6 + 6 * g + 3 * g * (g + 1) // 2 + g**3 // 3 + 2 * g * g)
