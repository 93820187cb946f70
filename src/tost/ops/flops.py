"""The arithmetic of the operators. Loads no torch."""

from __future__ import annotations


def tssa_flops(num_heads: int, head_dim: int, *, causal: bool, bias: bool = False, block_size: int = 1) -> int:
    """Count the operations of TSSA on one token.

    Each of the H * D features takes 8: square it and add it to the sum, divide it by the sum and add it to the energy,
    weigh it by the membership and add it to the second sum, scale the token by membership and gain. Each head takes 7:
    temperature, the five of a softmax, the sum of memberships. The causal form has a moment per token, not per
    sequence, which is 2 more per feature: divide by the mass, add 1. A position bias takes 2 more per head.

    In blocks of g features a block has g(g+1)/2 products in place of g squares to weigh and add. Solving for a token
    takes 2 operations for each of the g(g-1) entries off the diagonal in place of its gain.

    Args:
        num_heads: H.
        head_dim: D.
        causal: The causal form.
        bias: With a position bias.
        block_size: Features in a block, g.

    Returns:
        Operations per token, whatever the length of the sequence.
    """
    g = block_size
    per_block = 3 * (g * (g - 1) // 2) + 2 * g * (g - 1)  # beyond the diagonal
    heads = head_dim * (10 if causal else 8) + head_dim // g * per_block + 7 + 2 * bias
    return num_heads * heads


def gated_flops(embed_dim: int, block_size: int) -> int:
    """Count the operations of gated statistics on one token.

    Per block of g features: 6 for the gate and its mass; per feature 4 for mean and distance, 2 for its share; per
    product, of which there are g(g+1)/2, 3 to add and fade it; about g^3 / 3 for the factors, 2 g^2 for the solution.
    """
    g = block_size
    return embed_dim // g * (6 + 6 * g + 3 * g * (g + 1) // 2 + g**3 // 3 + 2 * g * g)
