"""The arithmetic of the operators. Loads no torch."""

from __future__ import annotations


def tssa_flops(
    num_heads: int, head_dim: int, *, causal: bool, bias: bool = False, count_scaled: bool = False, forget: bool = False
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
