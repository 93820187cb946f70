"""The token mixers that the paper compares with on long sequences, behind one interface.

Each is called as ``mixer(x, mask)``, from tokens ``[B, N, C]`` and an optional bool mask ``[B, N]`` of the real ones to
``[B, N, C]``. Padding never counts; where a mask is exactly a deletion, and where it cannot be, stands with each class.
"""

from __future__ import annotations

from tost.nn.mixers.bigbird import BigBird, bigbird_pattern
from tost.nn.mixers.block import MixerBlock, TokenBatchNorm
from tost.nn.mixers.linear import LinearAttention, feature_attention
from tost.nn.mixers.linformer import Linformer
from tost.nn.mixers.nystrom import NystromAttention, iterative_pinv
from tost.nn.mixers.performer import Performer, orthogonal_directions, positive_features
from tost.nn.mixers.reformer import Reformer, hash_buckets
from tost.nn.mixers.s4 import S4, long_convolution
from tost.nn.mixers.s4_kernels import DenseSystem, DiagonalKernel, LowRankKernel, hippo_legs

__all__ = [
    "S4",
    "BigBird",
    "DenseSystem",
    "DiagonalKernel",
    "LinearAttention",
    "Linformer",
    "LowRankKernel",
    "MixerBlock",
    "NystromAttention",
    "Performer",
    "Reformer",
    "TokenBatchNorm",
    "bigbird_pattern",
    "feature_attention",
    "hash_buckets",
    "hippo_legs",
    "iterative_pinv",
    "long_convolution",
    "orthogonal_directions",
    "positive_features",
]
