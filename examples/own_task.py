"""Train your own model on your own data for your own task: how many different symbols are in a sequence?

python examples/own_task.py --out runs/own train.steps=100
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import tost
from tost.data import TensorDataset
from tost.recipes import get_task, load_config
from tost.train import BatchResult, Task, fit


@tost.register_data("bags", task="counting")
def bags(count: int = 500, length: int = 16, symbols: int = 12, seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Sequences of symbols, and how many different ones each has."""
    ids = torch.randint(symbols, (count, length), generator=torch.Generator().manual_seed(seed))
    different = nn.functional.one_hot(ids, symbols).amax(dim=1).sum(dim=1).float()
    train = {"inputs": ids[100:], "targets": different[100:]}
    return TensorDataset(train), TensorDataset({"inputs": ids[:100], "targets": different[:100]})


@tost.register_model("counter", tasks=("counting",))
class Counter(nn.Module):
    """One attention layer over symbols, and a sum over tokens."""

    def __init__(self, symbols: int = 12, embed_dim: int = 48, num_heads: int = 12) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(symbols, embed_dim), nn.LayerNorm(embed_dim)
        self.attention = tost.TSSAttention(embed_dim, num_heads)
        self.head = nn.Linear(embed_dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attention(self.norm(self.embed(ids))).sum(dim=1)).squeeze(-1)


@tost.register_task("counting")
class Counting(Task):
    """Squared error of a number per sequence."""

    def compute(self, model: nn.Module, batch: dict[str, Tensor]) -> BatchResult:
        return BatchResult((model(batch["inputs"]) - batch["targets"]).square().sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/own_task"), help="the run folder")
    parser.add_argument("overrides", nargs="*", help="such as train.steps=100")
    options = parser.parse_args()
    changes = ["recipe=counting", "model.name=counter", "data.name=bags", "optim.lr=1e-2", "train.steps=200"]
    changes += ["checkpoint.best_metric=loss", "checkpoint.best_mode=min", *options.overrides]
    result = fit(load_config("demo/digits", changes), get_task("counting"), options.out)
    print("mean squared error:", result.metrics["loss"])
