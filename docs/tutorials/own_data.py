# %% [markdown]
# # Your own data
#
# Tensors and a loop of your own, a folder of pictures and a recipe, a text file and a recipe. The data are made up on
# the spot, so that the page runs offline.

# %%
import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image, ImageDraw
from torch import nn

import tost

# %% [markdown]
# ## Tensors, and a loop of your own
#
# Noisy series of different lengths; which of three frequencies is in them? Padding is left out exactly.


# %%
def series(count: int, length: int = 96):
    """Return noisy series [B, N], a mask of real values [B, N] and labels [B]."""
    labels, lengths = torch.randint(3, (count,)), torch.randint(length // 2, length + 1, (count, 1))
    steps = torch.arange(length)
    waves = torch.sin(steps * (0.2 + 0.2 * labels[:, None]) + 6.28 * torch.rand(count, 1))
    return waves + 0.5 * torch.randn(count, length), steps < lengths, labels


class Classifier(nn.Module):
    """Windows of nine values as tokens, two attention layers, a mean over real tokens."""

    def __init__(self, width: int = 48, heads: int = 6, depth: int = 2):
        super().__init__()
        self.embed, self.head = nn.Linear(9, width), nn.Linear(width, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.attention = nn.ModuleList(tost.TSSAttention(width, heads) for _ in range(depth))

    def forward(self, values, mask):
        x = self.embed(nn.functional.pad(values * mask, (4, 4)).unfold(1, 9, 1)).relu()
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x), mask)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
losses = []
for _ in range(60):
    values, mask, labels = series(64)
    loss = nn.functional.cross_entropy(model(values, mask), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

values, mask, labels = series(500)
print(f"accuracy on new series: {(model(values, mask).argmax(-1) == labels).float().mean().item():.2f} (chance: 0.33)")
garbage = torch.where(mask, values, 1e6)
print("padding changes the answer:", not torch.equal(model(values, mask), model(garbage, mask)))

# %% [markdown]
# ## A folder of pictures, and a recipe
#
# `<split>/<class>/<image>` is all that is needed. Here: circles, squares and triangles on a noisy ground.


# %%
def shape(kind: str, random: torch.Generator) -> Image.Image:
    picture = Image.effect_noise((32, 32), 30).convert("RGB")
    x, y = torch.randint(13, 19, (2,), generator=random).tolist()
    corners = {"circle": 24, "square": 4, "triangle": 3}[kind]
    angles = [2 * math.pi * i / corners for i in range(corners)]
    ImageDraw.Draw(picture).polygon([(x + 10 * math.cos(a), y + 10 * math.sin(a)) for a in angles], fill=(220, 80, 60))
    return picture


random = torch.Generator().manual_seed(0)
for split, count in {"train": 200, "val": 50}.items():
    for kind in ("circle", "square", "triangle"):
        folder = Path("shapes", split, kind)
        folder.mkdir(parents=True)
        for number in range(count):
            shape(kind, random).save(folder / f"{number}.png")

figure, axes = plt.subplots(1, 9, figsize=(9, 1.2))
for i, ax in enumerate(axes):
    kind = ("circle", "square", "triangle")[i % 3]
    ax.imshow(Image.open(f"shapes/val/{kind}/{i}.png"))
    ax.axis("off")

# %% [markdown]
# A recipe names task, model, data and schedule. On the command line this is `tost train shapes.yaml --out
# runs/shapes`; a typo in a key is an error that names the key you meant.

# %%
from tost.recipes import get_task, load_config  # noqa: E402
from tost.train import fit  # noqa: E402

Path("shapes.yaml").write_text("""
recipe: image_classification
model: {name: tost_mini, embed_dim: 48, depth: 2, num_heads: 4}
data: {name: image_folder, path: shapes, options: {image_size: 32, crop: none}}
train: {steps: 100, batch_size: 32}
optim: {lr: 3e-3}
""")
config = load_config("shapes.yaml")
result = fit(config, get_task(config.recipe), Path("runs/shapes"))
result

# %% [markdown]
# The run folder holds the configuration, every logged number and the checkpoints; `--resume auto` continues after an
# interruption, bit for bit. The trained model is an ordinary module:

# %%
trained = tost.load_model("runs/shapes")
print(type(trained).__name__, f"{sum(p.numel() for p in trained.parameters()):,} parameters")
sorted(path.name for path in Path("runs/shapes").iterdir())

# %% [markdown]
# ## A text file, and the command line
#
# Any text becomes a folder of tokens; the tokenizer travels with it and with the run. A minute is too short for a
# language model, the commands are the point.

# %%
import argparse  # noqa: E402

Path("notes.txt").write_text(Path(argparse.__file__).read_text())

# %% language="sh"
# tost data prepare text --out data/notes source=notes.txt tokenizer=bytes validation=0.1

# %% language="sh"
# tost train demo/stdlib_bytes data.name=tokens data.path=data/notes \
#   model.depth=2 train.steps=60 train.batch_size=8 log.every=20 --out runs/notes

# %% language="sh"
# tost generate runs/notes --prompt "def parse" --max-new-tokens 120 --top-k 8 --seed 1

# %% [markdown]
# Next: [Image data](../image-data.md), [Text data](../text-data.md), [Configuration](../configuration.md); a task, a
# model or a data set of your own: [Your own model, data, task](../extend.md).
