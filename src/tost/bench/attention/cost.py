"""What attention costs on paper: operations, bytes moved and memory needed, by contender. Loads no torch.

N tokens of width C in H heads of D = C / H features, batch 1, numbers of 4 bytes. One layer, forward:

.. code-block:: text

                  matrix products            element by element            numbers moved between the projections
    tost          4 N C^2                    N (8 C + 7 H)                 4 N C + 2 N H
    tost, causal  4 N C^2                    N (10 C + 9 H)                2 N C
    vit-sdpa      8 N C^2 + 4 N^2 C          5 N^2 H                       4 N C
    vit-textbook  8 N C^2 + 4 N^2 C          5 N^2 H                       6 N C + 4 N^2 H
    crate         4 N C^2 + 4 N^2 C          5 N^2 H                       2 N C
    xcit          8 N C^2 + 4 N C D          6 N C + 6 H D^2               10 N C + 4 H D^2
    gpt2-sdpa     8 N C^2 + 2 N (N+1) C      5/2 N (N+1) H                 4 N C
    gpt2-textbook 8 N C^2 + 4 N^2 C          6 N^2 H                       6 N C + 6 N^2 H + N^2 / 4

A multiply-add is two operations, a softmax five per entry. A projection from C to P C moves N C + P N C + P C^2 more
numbers: it reads the tokens and its weights and writes the result. Of every other stage each operand is read once and
each result written once, where a fused kernel is one stage: this is the least that main memory has to see, not what a
cache misses. TSSA reads its tokens three times, because the sums of all tokens come before the memberships and the
moments before the output; the causal form needs what came before only, and reads them once. Causal softmax attention
needs half of the scores; in the textbook's form it computes them all and masks half.

A training step costs three times as much, for a backward pass has two products where the forward pass has one; the
fused kernels compute the scores once more on the way back, which makes the part in N^2 3.5 times as much.
"""

from __future__ import annotations

from dataclasses import dataclass

from tost.bench.attention.cases import Point
from tost.ops.flops import tssa_flops

_NUMBER = 4  # bytes
_HIDDEN = 4  # hidden width of the MLPs of both language models over their width
_FUSED = ("vit-sdpa", "crate", "gpt2-sdpa")

# Matrices of all scores, and of all tokens, that are in memory together when most is; forward, then forward and
# backward. Only a forecast, to leave out what cannot fit; memory itself is measured.
_HELD: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "tost": ((0, 3), (0, 7)),
    "vit-sdpa": ((0, 6), (0, 14)),
    "vit-textbook": ((2, 8), (3, 16)),
    "crate": ((0, 4), (0, 10)),
    "xcit": ((0, 10), (0, 20)),
    "gpt2-sdpa": ((0, 6), (0, 14)),
    "gpt2-textbook": ((2, 8), (3, 16)),
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Operations and bytes of one pass.

    Attributes:
        products: Operations in matrix products.
        elementwise: All other operations.
        moved: Bytes that go to and from main memory, at least.
        held: Bytes in memory at the fullest moment, about; weights included.
    """

    products: int
    elementwise: int
    moved: int
    held: int

    @property
    def flops(self) -> int:
        """All operations."""
        return self.products + self.elementwise


def layer_cost(point: Point) -> Cost:
    """Count one attention layer of a point, with its projections."""
    N, C, H = point.tokens, point.width, point.heads
    name, linear = point.contender, 3 if point.training else 1
    quadratic = 3.5 if point.training and name in _FUSED else linear
    parts = 1 if name in ("tost", "crate") else 3
    projections = 2 * (parts + 1) * N * C * C
    mixing, elementwise, mixing_moves = _mixing(point)
    moved = 2 * N * C + (parts + 1) * (N * C + C * C) + mixing_moves
    scores, tokens = _HELD[name][point.training]
    weights = (parts + 1) * C * C * (2 if point.training else 1)
    return Cost(
        products=linear * projections + round(quadratic * mixing),
        elementwise=linear * elementwise,
        moved=_NUMBER * linear * moved,
        held=_NUMBER * (scores * H * N * N + tokens * N * C + weights),
    )


def point_cost(point: Point) -> Cost:
    """Count all layers of a point; of a whole model also its MLPs, and the logits of the last token."""
    N, C, V, layer = point.tokens, point.width, point.vocab_size, layer_cost(point)
    weights = _NUMBER * (point.depth - 1) * (2 if point.contender in ("tost", "crate") else 4) * C * C
    held = layer.held + weights * (2 if point.training else 1)
    products, moved = point.depth * layer.products, point.depth * layer.moved
    if point.whole:
        mlp_moves = 2 * (N * C + _HIDDEN * N * C + _HIDDEN * C * C)
        products += point.depth * 4 * N * C * _HIDDEN * C + 2 * C * V
        moved += _NUMBER * (point.depth * mlp_moves + C * V)
        held += _NUMBER * (point.depth * 2 * _HIDDEN * C * C + C * V + (2 * _HIDDEN + 1) * N * C)
    return Cost(products=products, elementwise=point.depth * layer.elementwise, moved=moved, held=held)


def _mixing(point: Point) -> tuple[int, int, int]:
    """Count what stands between the projections of a layer: operations in products, all others, numbers moved."""
    N, C, H, causal = point.tokens, point.width, point.heads, point.causal
    D, tokens, pairs = C // H, N * C, N * N
    counts = {
        "tost": (0, N * tssa_flops(H, D, causal=causal, bias=causal), 2 * tokens if causal else 4 * tokens + 2 * N * H),
        "vit-sdpa": (4 * pairs * C, 5 * pairs * H, 4 * tokens),
        "vit-textbook": (4 * pairs * C, 5 * pairs * H, 6 * tokens + 4 * pairs * H),
        "crate": (4 * pairs * C, 5 * pairs * H, 2 * tokens),
        "xcit": (4 * tokens * D, 6 * tokens + 6 * C * D, 10 * tokens + 4 * C * D),
        "gpt2-sdpa": (2 * N * (N + 1) * C, 5 * N * (N + 1) * H // 2, 4 * tokens),
        "gpt2-textbook": (4 * pairs * C, 6 * pairs * H, 6 * tokens + 6 * pairs * H + pairs // 4),
    }
    return counts[point.contender]
