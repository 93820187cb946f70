"""Small language models with weights that leave nothing out, and prompts for them."""

import torch

from tests.models.tiny import make_tiny, perturb

VOCABULARY = 11


def make(dtype=torch.float64, **overrides):
    """A model whose next token is far from certain and depends on everything before it."""
    torch.manual_seed(0)
    return perturb(make_tiny("tost_lm_base", **{"position": "learned", "max_length": 64, **overrides}).to(dtype)).eval()


def endless(dtype=torch.float64, **overrides):
    return make(dtype, **{"position": "none", **overrides})


def prompts(*lengths, seed=0):
    """Rows of different length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)
