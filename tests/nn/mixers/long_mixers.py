"""Small mixers for long sequences, each under a name."""

from functools import partial

import torch

import tost
from tests.models import tiny
from tost.nn import (
    S4,
    BigBird,
    CrossCovarianceAttention,
    LinearAttention,
    Linformer,
    Performer,
    Reformer,
    SoftmaxAttention,
    SubspaceAttention,
)

C, H = 12, 3
perturb = partial(tiny.perturb, by=0.2)
D = C // H
LONGEST = 64

MIXERS = {
    "tssa": tost.TSSAttention,
    "softmax": SoftmaxAttention,
    "xca": CrossCovarianceAttention,
    "mssa": SubspaceAttention,
    "linear": LinearAttention,
    "performer": lambda *sizes, **options: Performer(*sizes, **{"num_features": 6, **options}),
    "performer_relu": lambda *sizes, **options: Performer(*sizes, kernel="relu", **options),
    "linformer": lambda *sizes, **options: Linformer(*sizes, **{"max_length": LONGEST, "rank": 5, **options}),
    "bigbird": lambda *sizes, **options: BigBird(*sizes, **{"block_size": 3, "num_random": 1, **options}),
    "reformer": lambda *sizes, **options: Reformer(*sizes, **{"chunk_size": 4, "num_buckets": 4, **options}),
    "reformer_lra": lambda *sizes, **options: Reformer(*sizes, form="lra", **{"num_hashes": 1, **options}),
    "s4": lambda *sizes, **options: S4(*sizes, **{"max_length": LONGEST, "state_size": 4, **options}),
    "s4d": lambda *sizes, **options: S4(*sizes, kernel="s4d", **{"state_size": 4, **options}),
}


def make(name, dtype=torch.float64, **options):
    return perturb(MIXERS[name](C, H, dtype=dtype, **options))


def tokens(batch=2, length=20, dtype=torch.float64):
    return torch.randn(batch, length, C, dtype=dtype)


def heads(module, x, parts):
    """What the first projection makes of tokens [N, C]: `parts` tensors [H, N, D]."""
    projected = torch.nn.functional.linear(x, module.proj_in.weight, module.proj_in.bias)
    return projected.reshape(x.shape[0], parts, H, D).permute(1, 2, 0, 3).unbind(0)


def finish(module, mixed):
    """The output projection of heads [H, N, D]."""
    return module.proj_out(mixed.transpose(0, 1).flatten(1))
