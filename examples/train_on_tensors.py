"""Train token statistics attention on your own tensors, in a plain PyTorch loop.

The task: which of three frequencies is hidden in a noisy series? The series have different lengths and are padded.

python examples/train_on_tensors.py --steps 60
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tost


def series(count: int, length: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy series [B, N], a mask of real values [B, N] and labels [B]."""
    labels, lengths = torch.randint(3, (count,)), torch.randint(length // 2, length + 1, (count, 1))
    time = torch.arange(length)
    waves = torch.sin(time * (0.2 + 0.2 * labels[:, None]) + 6.28 * torch.rand(count, 1))
    return waves + 0.5 * torch.randn(count, length), time < lengths, labels


class Classifier(nn.Module):
    """Windows of nine values as tokens, two attention layers, a mean over real tokens."""

    def __init__(self, width: int = 48, heads: int = 6, depth: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(9, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.attention = nn.ModuleList(tost.TSSAttention(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        windows = nn.functional.pad(x * mask, (4, 4)).unfold(1, 9, 1)  # [B, N, 9]
        x = self.embed(windows).relu()
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x), mask)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60, help="steps of 64 series")
options = parser.parse_args()

torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in range(options.steps):
    values, mask, labels = series(64)
    loss = nn.functional.cross_entropy(model(values, mask), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
values, mask, labels = series(1000)
accuracy = (model(values, mask).argmax(-1) == labels).float().mean().item()
print(f"accuracy on new series: {accuracy:.2f} (chance: 0.33)")
