# %% [markdown]
# # Swap it into your ViT
#
# Replace the attention of a Vision Transformer of timm by token statistics, train both, and compare accuracy,
# parameters and time, on handwritten digits of scikit-learn.

# %%
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import tost
import tost.integrations.timm  # before timm: see "TSSA in a model that you have"

import timm  # isort: skip

torch.manual_seed(0)
torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # [1797, 1, 8, 8]
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels))
train, test = order[:1400], order[1400:]
images.shape

# %% [markdown]
# ## One line
#
# A small ViT with 16 tokens. It averages its tokens at the end: token statistics rescale tokens and do not copy from
# one to another, so a class token would learn little (ToST ends with two class-attention layers for that reason).


# %%
def vit() -> torch.nn.Module:
    torch.manual_seed(1)
    sizes = {
        "img_size": 8,
        "patch_size": 2,
        "in_chans": 1,
        "num_classes": 10,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 4,
    }
    return timm.create_model("vit_tiny_patch16_224", **sizes, global_pool="avg", class_token=False)


softmax = vit()
swapped = tost.replace_attention(vit())

for name, model in {"softmax": softmax, "token statistics": swapped}.items():
    print(
        f"{name:17} {sum(p.numel() for p in model.parameters()):>8,} parameters, {type(model.blocks[0].attn).__name__}"
    )

# %% [markdown]
# One projection takes the place of queries, keys and values. The training loop is the same:


# %%
def fit(model: torch.nn.Module, epochs: int = 12, rate: float = 3e-3) -> list[float]:
    """Train, and return the accuracy on the test images after each epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * (len(train) // 50))
    found = []
    for _ in range(epochs):
        model.train()
        for rows in train[torch.randperm(len(train))].split(50):
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.inference_mode():
            found.append((model(images[test]).argmax(-1) == labels[test]).float().mean().item())
    return found


curves = {}
for name, model in {"softmax": softmax, "token statistics": swapped}.items():
    start = time.perf_counter()
    curves[name] = fit(model)
    print(f"{name:17} accuracy {curves[name][-1]:.3f} in {time.perf_counter() - start:.1f} s")

# %% [markdown]
# ## From a model that is already trained
#
# A replaced layer starts from the value projection of the old one, and has to be trained on. Here the swap costs some
# accuracy, and less if only one layer is replaced:

# %%
for layers in ([1], [0, 1]):
    student = vit()
    student.load_state_dict(softmax.state_dict())
    student = tost.replace_attention(student, layers=layers).eval()
    with torch.inference_mode():
        before = (student(images[test]).argmax(-1) == labels[test]).float().mean().item()
    after = fit(student, epochs=3, rate=1e-3)
    print(f"layers {layers!s:10} accuracy {before:.3f} at once, {after[-1]:.3f} after three epochs")

# %% [markdown]
# ## What it costs
#
# Scores of pairs are quadratic in the tokens, sums are linear. One layer, width 192, forward, one thread:

# %%
lengths = [256, 512, 1024, 2048, 4096]
block = timm.create_model("vit_tiny_patch16_224").blocks[0].attn.eval()
layers = {"softmax": block, "token statistics": tost.TSSAttention(192, 3).eval()}
times = {name: [] for name in layers}
for tokens in lengths:
    x = torch.randn(1, tokens, 192)
    for name, layer in layers.items():
        with torch.inference_mode():
            layer(x)
            runs = []
            for _ in range(3):
                start = time.perf_counter()
                layer(x)
                runs.append(time.perf_counter() - start)
        times[name].append(1000 * min(runs))

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for name, values in curves.items():
    axes[0].plot(range(1, len(values) + 1), values, marker="o", label=name)
axes[0].set(xlabel="epoch", ylabel="test accuracy", title="Digits", xticks=range(2, 13, 2))
for name, values in times.items():
    axes[1].loglog(lengths, values, marker="o", label=name)
axes[1].set(xlabel="tokens", ylabel="milliseconds", title="One attention layer")
axes[1].set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
axes[1].minorticks_off()
for ax in axes:
    ax.legend()

# %% [markdown]
# `tost.TSSAttention(embed_dim, num_heads)` takes `[B, N, C]` and a mask of real tokens in your own module. Next:
# [TSSA in a model that you have](../replace.md), [which models are ahead at equal steps](../tried.md#images).
