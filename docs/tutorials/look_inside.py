# %% [markdown]
# # Look inside
#
# A ToST layer sorts tokens into groups, one per head, and takes a step on an objective that can be measured. Both can
# be
# looked at. This page uses two small models that come with the package; `tost.load_model("runs/mine")` takes yours.

# %%
import argparse
from importlib.resources import files
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image

import tost
from tost import analysis

language = tost.load_pretrained("bytes-tiny")
digits = tost.load_pretrained("digits-tiny")

# %% [markdown]
# ## Which group does each token join?
#
# Every byte in the colour of the head that has most of it. Point at `indent`, names and brackets: layers differ in what
# they
# sort by.

# %%
text = 'def mean(values):\n    """Return the arithmetic mean."""\n    return sum(values) / len(values)\n'
ids = torch.tensor(list(text.encode()))
along = analysis.text_memberships(language, ids, text)
along

# %% [markdown]
# The numbers are tensors: layers, tokens, heads. How sharp are the groups?

# %%
pi = along.pi
print(tuple(pi.shape), "layers, tokens, heads")
for layer, shares in enumerate(pi):
    largest = shares.max(-1).values.mean()
    print(f"layer {layer}: the largest head has {largest:.2f} of a token (uniform: {1 / pi.shape[-1]:.2f})")

# %% [markdown]
# ## Which bytes surprise the model?

# %%
found = analysis.surprise(language, ids, text)
found.summary()

# %%
figure, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
ax.bar(range(1, len(text)), found.bits[1:], width=1)
ax.set(xlabel="byte", ylabel="bits", xticks=range(len(text)), title="Surprise")
ax.set_xticklabels([letter if letter.strip() else "·" for letter in text], fontsize=6, family="monospace")
plt.show()
# %% [markdown]
# ## Groups of patches
#
# The classifier sees 32 x 32 pixels as 8 x 8 patches. Its samples are in the package.

# %%
folder = files("tost") / "pretrained" / "weights" / "digits-tiny" / "samples"
pixels = torch.stack(
    [
        torch.from_numpy(np.array(Image.open(str(folder / f"{i}.png")).convert("RGB").resize((32, 32))))
        for i in range(10)
    ]
)
pixels = pixels.permute(0, 3, 1, 2) / 255
mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
images = (pixels - mean[:, None, None]) / std[:, None, None]
with torch.inference_mode():
    print("taken for:", digits(images).argmax(-1).tolist())

# %%
analysis.membership_maps(digits, [{"inputs": images, "pixels": pixels}], layers=[0, 3, 5], shown=4)

# %% [markdown]
# ## Does each layer compress?
#
# The theory says that attention lowers $R_c^{var}$, an upper bound of the coding rate of the groups. Nothing forces a
# trained
# network to do that, because its output projection is free. So measure, beside an untrained network of the same form.

# %%
windows = torch.tensor(list(Path(argparse.__file__).read_bytes()[: 16 * 256])).view(16, 256)
rates = analysis.coding_rate_by_layer(language, [windows])
rates += analysis.coding_rate_by_layer(analysis.control_of(language), [windows], source="control")
rates

# %%
print(rates.verdict())

# %% [markdown]
# ## What does the state remember?
#
# A causal layer keeps three sums per head. Each new token takes a share of them; with forgetting, old ones fade.

# %%
memory = analysis.state_memory(language, [windows])
memory

# %% [markdown]
# All of this for one of your runs, on one page: `tost analyze RUN all`, `tost report RUN`. In the browser, for any text
# you type:
# `tost explore`. Next: [Look inside](../look-inside.md) explains every number; [the page of `tost
# explore`](../explore.md).
