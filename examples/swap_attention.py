"""Swap token statistics attention into your own module, and measure what it saves.

python examples/swap_attention.py --tokens 1024 4096 8192
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import tost


class SoftmaxAttention(nn.Module):
    """PyTorch's attention as a function of one input and a mask of real tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0]


class Block(nn.Module):
    """A pre-norm transformer block; the attention is the only part that changes."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), attention
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192], help="lengths to time")
options = parser.parse_args()

torch.manual_seed(0)
blocks = {"softmax": Block(384, SoftmaxAttention(384, 8)), "token statistics": Block(384, tost.TSSAttention(384, 8))}
for name, block in blocks.items():
    print(f"{name}: {sum(p.numel() for p in block.parameters()):,} parameters")
for tokens in options.tokens:
    x, mask = torch.randn(1, tokens, 384), torch.arange(tokens)[None] < tokens * 3 // 4  # the last quarter is padding
    for name, block in blocks.items():
        block(x, mask).sum().backward()  # warm up
        start = time.perf_counter()
        block(x, mask).sum().backward()
        print(f"{tokens:>7} tokens, {name}: {time.perf_counter() - start:.3f} s")
