"""Options of ours for the TSSA modules. The authors have none of them, and all are off by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Extensions"]


@dataclass(frozen=True)
class Extensions:
    """What we add to the authors' attention.

    Attributes:
        gate: Multiply the operator's output by ``silu(proj_gate(x))`` before the output projection. The operator only
            shrinks a token's features, by factors that all tokens of a group share; the gate lets each token choose.
        count_scaled: Multiply the energies by the number of real tokens behind them. They are shares that sum to D over
            the tokens, so without it memberships flatten as sequences get longer, unless the temperature grows.
        forget: Causal attention only: let the statistics of each head fade with every token, at a learned rate. Heads
            start with different half-lives; see `CausalTSSAttention.decay`.
        beyond: Causal attention only: what becomes of the position bias behind its last position. ``"error"`` refuses
            such sequences, ``"hold"`` goes on with the last position's bias.
    """

    gate: bool = False
    count_scaled: bool = False
    forget: bool = False
    beyond: Literal["error", "hold"] = "error"
