"""Look inside a model: what each layer does to the coding rate, and which head each patch belongs to.

Trains a small image model on synthetic images for a moment, then writes pictures, JSON and tables.

python examples/look_inside.py --out pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import tost
from tost import analysis


def stripes(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy images [B, 1, 28, 28] of horizontal or vertical stripes, and which of the two."""
    labels = torch.randint(2, (count,))
    wave = torch.sin(torch.arange(28) * 0.9 + 6.28 * torch.rand(count, 1))
    images = torch.where(labels[:, None, None] == 1, wave[:, None, :], wave[:, :, None])
    return (images + 0.3 * torch.randn_like(images))[:, None], labels


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder for the pictures")
parser.add_argument("--steps", type=int, default=30, help="steps of 32 images")
options = parser.parse_args()

torch.manual_seed(0)
model = tost.create_model("tost_mini", num_classes=2, in_chans=1, depth=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(options.steps):
    images, labels = stripes(32)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f} after {options.steps} steps")

batches = [stripes(16)[0] for _ in range(2)]
rates = analysis.coding_rate_by_layer(model, batches)
step = rates.change("trained", "validation", "input", "attention").mean()
print("change of R_c^var by each attention layer, below 0 if it compresses:", *(f"{x:+.4f}" for x in step.tolist()))
for result in (rates, analysis.head_usage(model, batches), analysis.membership_maps(model, batches)):
    picture = analysis.save(result, options.out)[0]
    print(picture)
