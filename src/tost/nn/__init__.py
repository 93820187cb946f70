"""Modules around the operators."""

from __future__ import annotations

from tost.nn.attention import CausalTSSAttention, PaperForm, TSSAttention
from tost.nn.block import Block, CausalBlock, run_blocks
from tost.nn.mlp import MLP
from tost.nn.position import LearnedPositions, SinusoidalPositions, token_positions
from tost.nn.state import ModelState

__all__ = [
    "MLP",
    "Block",
    "CausalBlock",
    "CausalTSSAttention",
    "LearnedPositions",
    "ModelState",
    "PaperForm",
    "SinusoidalPositions",
    "TSSAttention",
    "run_blocks",
    "token_positions",
]
