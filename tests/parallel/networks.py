"""Modules and models run on a shared sequence and in one process: what a rank contributes, and what it should make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tost
from tost.models import create_model
from tost.nn import PaperForm
from tost.parallel import ContextParallel

B, C, H, V, CLASSES = 2, 24, 4, 17, 3
PAPER = PaperForm(step_size=2.0, eps=3.0)
SMALL = {"embed_dim": C, "depth": 2, "num_heads": H, "max_length": 64}


@dataclass(frozen=True)
class Network:
    """How to make a network, and what it takes and gives."""

    make: Callable[[], nn.Module]
    takes: str = "tokens"  # "tokens" [B, N, C] or "ids" [B, N]
    pooled: bool = False  # gives one row per sequence, on every rank


def language_model(**options: object) -> Network:
    return Network(lambda: create_model("tost_lm_base", **SMALL, vocab_size=V, layer_scale=None, **options), "ids")


def classifier(**options: object) -> Network:
    sizes = {**SMALL, "vocab_size": V, "num_classes": CLASSES, "dropout": 0.0}
    return Network(lambda: create_model("lra_listops", **sizes, **options), "ids", pooled=True)


NETWORKS = {
    "plain": Network(lambda: tost.TSSAttention(C, H)),
    "plain, paper": Network(lambda: tost.TSSAttention(C, H, paper=PAPER)),
    "plain, unnormalized": Network(lambda: tost.TSSAttention(C, H, normalize=False)),
    "causal": Network(lambda: tost.CausalTSSAttention(C, H, 64)),
    "causal, paper": Network(lambda: tost.CausalTSSAttention(C, H, 64, paper=PAPER, position_bias="head")),
    "language model": language_model(),
    "gated": Network(lambda: tost.GatedTSSAttention(C, H, 64, block_size=3)),
    "blocks": Network(lambda: tost.BlockTSSAttention(C, H, block_size=3)),
    "language model, recomputed": language_model(gradient_checkpointing=True),
    "language model, gated": language_model(
        mixer="tssa_plus", mixer_options={"block_size": 3}, position="none", conv_width=4, conv_at="both"
    ),
    "classifier": classifier(pooling="mean"),
    "classifier, class token": classifier(pooling="cls", position="learned"),
}


def make_network(name: str, dtype: torch.dtype) -> nn.Module:
    """The same network in every process, with no parameter at a value where it could be left out unnoticed."""
    torch.manual_seed(0)
    module = NETWORKS[name].make().to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def make_inputs(name: str, num_tokens: int, masked: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """The whole sequence, its mask, and a cotangent of the result."""
    network = NETWORKS[name]
    g = torch.Generator().manual_seed(1)
    if network.takes == "ids":
        x = torch.randint(V, (B, num_tokens), generator=g)
    else:
        x = torch.randn(B, num_tokens, C, generator=g, dtype=torch.float64).to(dtype)
    mask = torch.rand(B, num_tokens, generator=g) > 0.3 if masked else None
    wide = (B, CLASSES) if network.pooled else (B, num_tokens, V if network.takes == "ids" else C)
    return x, mask, torch.randn(wide, generator=g, dtype=torch.float64).to(dtype)


def gradients_of(module: nn.Module) -> Tensor:
    """All gradients of the parameters in one vector; none counts as zero."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()])


def differentiate(
    name: str,
    lengths: tuple[int, ...],
    masked: bool,
    dtype: torch.dtype,
    context: ContextParallel | None = None,
    exact: bool = False,
) -> dict[str, Tensor]:
    """The result, and the gradients of the input and of the parameters; `exact` computes in float64 all the same."""
    network, module = NETWORKS[name], make_network(name, dtype)
    x, mask, cotangent = make_inputs(name, sum(lengths), masked, dtype)
    if exact:
        module, x, cotangent = module.double(), x.double() if x.is_floating_point() else x, cotangent.double()
    if context is not None:
        x = context.split(x, lengths=lengths)
        mask = None if mask is None else context.split(mask, lengths=lengths)
        # A pooled result is on every rank: together they have the loss once.
        cotangent = cotangent / context.size if network.pooled else context.split(cotangent, lengths=lengths)
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    y = module(x, mask=mask)
    # Padding means nothing in the output of a model, and the rest of the model does not look at it.
    weight = 1 if mask is None or network.pooled else mask.unsqueeze(-1)
    (y * weight * cotangent).sum().backward()
    result = {"y": (y * weight).detach(), "dparameters": gradients_of(module)}
    return result | ({"dx": x.grad} if x.grad is not None else {})


def assemble(name: str, results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole from the ranks."""
    whole = {"dparameters": torch.stack([result["dparameters"] for result in results]).sum(dim=0)}
    for key in results[0].keys() - whole.keys():
        values = [result[key] for result in results]
        if key == "y" and NETWORKS[name].pooled:
            assert all(torch.equal(values[0], value) for value in values), "ranks disagree about the pooled result"
            whole[key] = values[0]
        else:
            whole[key] = torch.cat(values, dim=1)
    return whole
