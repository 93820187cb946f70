"""Modules around the operators."""

from __future__ import annotations

from tost.nn.attention import CausalTSSAttention, PaperForm, TSSAttention
from tost.nn.block import Block, CausalBlock, run_blocks
from tost.nn.extensions import Extensions
from tost.nn.ista import ISTA
from tost.nn.local import GridMixer
from tost.nn.mlp import MLP
from tost.nn.mssa import SubspaceAttention
from tost.nn.position import LearnedPositions, SinusoidalPositions, token_positions
from tost.nn.softmax import SoftmaxAttention
from tost.nn.state import ModelState
from tost.nn.xca import CrossCovarianceAttention

__all__ = [
    "ISTA",
    "MLP",
    "Block",
    "CausalBlock",
    "CausalTSSAttention",
    "CrossCovarianceAttention",
    "Extensions",
    "GridMixer",
    "LearnedPositions",
    "ModelState",
    "PaperForm",
    "SinusoidalPositions",
    "SoftmaxAttention",
    "SubspaceAttention",
    "TSSAttention",
    "run_blocks",
    "token_positions",
]
