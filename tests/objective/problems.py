"""Random problems for the objective, and naive implementations in numpy to compare with."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from tost.objective import EXP, LOG, RATIO, SQRT, Concave

STRICT = [LOG, SQRT, RATIO, EXP]
LINEAR = Concave("linear", lambda x: x, torch.ones_like)
NUMPY = {
    "log": lambda x: np.log(1 + x),
    "sqrt": lambda x: np.sqrt(1 + x) - 1,
    "ratio": lambda x: 1 - 1 / (1 + x),
    "exp": lambda x: 1 - np.exp(-x),
}

every_f = pytest.mark.parametrize("f", STRICT, ids=lambda f: f.name)
many = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def randn(seed, *shape):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def memberships(seed, *shape):
    return torch.softmax(2 * randn(seed + 1, *shape), -1)


def orthonormal(seed, *shape):
    return torch.linalg.qr(randn(seed + 2, *shape)).Q


def problem(n=7, d=5, K=3, p=4, seed=0, batch=()):
    return randn(seed, *batch, n, d), memberships(seed, *batch, n, K), orthonormal(seed, K, d, p)


def psd(seed, d, rank):
    a = randn(seed, d, rank)
    return a @ a.T / rank


def second_moments(z, pi):
    return torch.einsum("nk,nd,ne->kde", pi / pi.sum(0), z, z)


def naive_rate(z, eps, f="log"):
    n, d = z.shape
    return 0.5 * NUMPY[f](d / (n * eps**2) * np.linalg.eigvalsh(z.T @ z)).sum()


def naive_compression(z, pi, eps, f="log"):
    (n, d), total = z.shape, 0.0
    for p in pi.T:
        moment = sum(p[i] * np.outer(z[i], z[i]) for i in range(n)) / p.sum()
        total += p.sum() / n * NUMPY[f](d / eps**2 * np.linalg.eigvalsh(moment)).sum()
    return 0.5 * total


def naive_variational(z, pi, u, eps, f="log"):
    (n, d), total = z.shape, 0.0
    for k, p in enumerate(pi.T):
        for column in u[k].T:
            moment = sum(p[i] * (column @ z[i]) ** 2 for i in range(n)) / p.sum()
            total += p.sum() / n * NUMPY[f](d / eps**2 * moment)
    return 0.5 * total


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)
