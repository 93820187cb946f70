"""Modules around the operators."""

from __future__ import annotations

from tost.nn.attention import CausalTSSAttention, TSSAttention
from tost.nn.block import Block, CausalBlock, run_blocks
from tost.nn.causal_local import CausalConvolution
from tost.nn.causal_softmax import CausalSoftmaxAttention
from tost.nn.extensions import Extensions
from tost.nn.ista import ISTA
from tost.nn.local import GridMixer
from tost.nn.loss import linear_cross_entropy
from tost.nn.mixers import S4, BigBird, LinearAttention, Linformer, NystromAttention, Performer, Reformer
from tost.nn.mlp import MLP
from tost.nn.mssa import SubspaceAttention
from tost.nn.paper import PaperForm
from tost.nn.position import LearnedPositions, SinusoidalPositions, token_positions
from tost.nn.softmax import SoftmaxAttention
from tost.nn.state import BlockState, KVState, ModelState
from tost.nn.xca import CrossCovarianceAttention

__all__ = [
    "ISTA",
    "MLP",
    "S4",
    "BigBird",
    "Block",
    "BlockState",
    "CausalBlock",
    "CausalConvolution",
    "CausalSoftmaxAttention",
    "CausalTSSAttention",
    "CrossCovarianceAttention",
    "Extensions",
    "GridMixer",
    "KVState",
    "LearnedPositions",
    "LinearAttention",
    "Linformer",
    "ModelState",
    "NystromAttention",
    "PaperForm",
    "Performer",
    "Reformer",
    "SinusoidalPositions",
    "SoftmaxAttention",
    "SubspaceAttention",
    "TSSAttention",
    "linear_cross_entropy",
    "run_blocks",
    "token_positions",
]
