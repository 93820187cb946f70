# %% [markdown]
# # Long sequences
#
# Attention from token statistics needs three sums per head, whatever the length. This page measures one layer, reads
# a long text piece by piece, and shows the limits of a state of constant size.

# %%
import argparse
import inspect
import itertools
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import tost
from tost.generation import Sampling, generate_with_state, load_state, prefill, save_state, state_bytes

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## Linear time
#
# Forward and backward of one causal layer, on one thread, beside PyTorch's fused softmax attention.

# %%
width, heads = 256, 4
layer = tost.CausalTSSAttention(width, heads, max_length=16384)
qkv, out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)


def softmax(x):
    q, k, v = qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def seconds(function, tokens):
    x = torch.randn(1, tokens, width)
    function(x[:, :64]).sum().backward()
    start = time.perf_counter()
    function(x).sum().backward()
    return time.perf_counter() - start


lengths = {"token statistics": [1024, 2048, 4096, 8192, 16384], "softmax": [1024, 2048, 4096]}
figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, function in {"token statistics": layer, "softmax": softmax}.items():
    ax.loglog(lengths[name], [seconds(function, n) for n in lengths[name]], marker="o", label=name)
ax.set(xlabel="tokens", ylabel="seconds", title="Forward and backward of one causal layer")
ax.legend()
plt.show()
# %% [markdown]
# ## A state that does not grow
#
# `bytes-tiny` comes with the package. It was trained on 512 bytes at a time and has no positions, so there is no
# limit on the length. Here it reads modules of the standard library.

# %%
model = tost.load_pretrained("bytes-tiny")
text = b"".join(Path(module.__file__).read_bytes() for module in (argparse, inspect))[: 16 * 8192]
ids = torch.tensor([list(text)])
options = model.options

read, kept, cache, state = [], [], [], None
for piece in ids.split(8192, dim=1):
    state = prefill(model, piece, state)
    read.append(int(state.position[0]))
    kept.append(state_bytes(state))
    cache.append(2 * 4 * options.depth * options.embed_dim * read[-1])  # keys and values in float32
print(f"state: {kept[-1]:,} bytes; keys and values of softmax attention: {cache[-1]:,} bytes")

figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.semilogy(read, cache, marker="o", label="keys and values of softmax attention")
ax.semilogy(read, kept, marker="o", label="state")
ax.set(xlabel="bytes read", ylabel="bytes kept")
ax.legend()
plt.show()
# %% [markdown]
# ## Pieces of any size
#
# Pieces give the same state up to rounding, so their size is a question of memory only.

# %%
short = ids[:, :4096]
whole = prefill(model, short, chunk_size=4096)
pieces = None
for piece in short.split(100, dim=1):
    pieces = prefill(model, piece, pieces)
greedy = Sampling(temperature=0)
first, second = (
    generate_with_state(model, short[:, -1:], max_new_tokens=60, sampling=greedy, state=s) for s in (whole, pieces)
)
print("the same continuation:", torch.equal(first.tokens, second.tokens))

# %% [markdown]
# ## Save a text and resume it

# %%
done = generate_with_state(model, ids[:, :3000], max_new_tokens=120, sampling=greedy)
save_state("text.safetensors", done.continuation, model)
state = load_state("text.safetensors", model)
again = generate_with_state(model, None, max_new_tokens=120, sampling=greedy, state=state)
print(f"{Path('text.safetensors').stat().st_size:,} bytes in the file")
print(bytes([*done.tokens[0].tolist(), *again.tokens[0].tolist()]).decode(errors="replace"))

# %% [markdown]
# ## Does more context help?
#
# Bits per byte by the length of the context. Beyond the 512 bytes of its training this model neither breaks nor
# learns much from the past: one moment per feature holds no content to quote. Statistics in blocks do, see
# [Probes](../probes.md).

# %%
starts = torch.linspace(0, ids.shape[1] - 4096, 12).long().tolist()
windows = torch.cat([ids[:, s : s + 4096] for s in starts])
with torch.inference_mode():
    logits = torch.cat([model(row[None]) for row in windows])
bits = F.cross_entropy(logits[:, :-1].transpose(1, 2), windows[:, 1:], reduction="none") / torch.log(torch.tensor(2.0))
for low, high in itertools.pairwise([0, 16, 64, 256, 512, 1024, 2048, 4095]):
    print(f"after {low:>5} to {high:>5} bytes: {bits[:, low:high].mean():.2f} bits per byte")

# %% [markdown]
# Next: [Generate](../generate.md) for batches, stopping and streaming; [Scale out](../scale-out.md) for one sequence
# on several processes.
