"""Class attention: where the class token looks, as in DINO, for ToST, XCiT, ViT and CRATE.

Post-softmax weights of the class token's query over itself and the patches. The entry for itself is left out and the
rest is not normalized again. Maps are enlarged by repeating patches and drawn from their own minimum to maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  timm imports torchvision, which a CPU build of torch has to be prepared for

# isort: split
from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import ClassAttentionBlock

from tost.analysis.maps import SHOWN, ImageMaps, collect_maps, masked
from tost.analysis.records import Batch, at_rest, choose, run_batch
from tost.analysis.result import entropy, grid_rows, span
from tost.errors import ConfigError
from tost.models.vision.baselines import CRATE
from tost.models.vision.tost import ClassBlock
from tost.nn import SubspaceAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MASS = 0.6


class ClassAttentionLayer(NamedTuple):
    """A module with attention from the class token to patches, and the function of its weights."""

    name: str
    module: nn.Module
    weights: Callable[..., Tensor]
    """From the module's arguments to ``[B, H, prefix + N]``."""
    prefix: int
    """Entries in front of the patches."""


@dataclass(frozen=True, kw_only=True)
class ClassAttentionMaps(ImageMaps):
    """Where the class token looks; with what it gives to itself, the weights on the patches add up to 1.

    Attributes:
        names: Paths of the layers in the model.
        itself: Mean weight of the class token on itself (and other tokens that are no patches), ``[L, H]``.
        entropy: Mean entropy of the map as a distribution over patches, ``[L, H]``; 1 is uniform.
    """

    name: ClassVar[str] = "class-attention"
    names: tuple[str, ...]
    itself: Tensor
    entropy: Tensor

    def kept(self, mass: float = MASS) -> Tensor:
        """Return the patches that hold the given share of each map, bool ``[S, L, H, rows, columns]``."""
        return keep_mass(self.maps.flatten(3), mass).view(self.maps.shape)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and head."""
        values = {"weight_on_itself": self.itself, "entropy": self.entropy}
        rows = grid_rows({"layer": self.layers, "head": range(self.entropy.shape[1])}, values)
        names = dict(zip(self.layers, self.names, strict=True))
        return [{"layer": row["layer"], "name": names[row["layer"]], **row} for row in rows]

    def summary(self) -> dict[str, Any]:
        """Return how concentrated the maps are."""
        return {
            "images": self.images,
            "entropy of the maps, least and most of a head (1 = uniform)": span(self.entropy),
        }

    def figure(self) -> Figure:
        """Draw the first of the layers: the photograph, what the mean over heads keeps, that mean, and every head."""
        from tost.analysis import plots

        mean = self.maps[:, 0].mean(dim=1)
        kept = keep_mass(mean.flatten(1), MASS).view(mean.shape)
        pictures = {
            f"{MASS:.0%} of the mean": list(map(masked, self.pixels, kept)),
            "mean of heads": list(mean.numpy()),
        }
        figure = self.draw(pictures, (0.0, 0.9))
        title = f"Where the class token looks in {self.names[0]}; each map from its least (dark) to its most (light)"
        figure.suptitle(title, fontsize=plots.TITLE)
        return figure


def keep_mass(weights: Tensor, mass: float) -> Tensor:
    """Return the largest entries along the last axis that together hold a share of the sum, as DINO does.

    Args:
        weights: Not negative, ``[..., N]``.
        mass: Share to keep, in (0, 1].

    Returns:
        bool ``[..., N]``.
    """
    order = weights.argsort(dim=-1)
    ascending = weights.gather(-1, order)
    share = ascending.cumsum(dim=-1) / ascending.sum(dim=-1, keepdim=True)
    kept = torch.zeros_like(weights, dtype=torch.bool)
    return kept.scatter(-1, order, share > 1 - mass)


def class_attention_layers(model: nn.Module) -> list[ClassAttentionLayer]:
    """Return the layers with attention from a class token to patches, in order; none for other models."""
    named = list(model.named_modules())
    blocks = [(name, module) for name, module in named if isinstance(module, ClassAttentionBlock)]
    if blocks:
        return [
            ClassAttentionLayer(
                name, module, module.weights if isinstance(module, ClassBlock) else partial(_of_class_block, module), 1
            )
            for name, module in blocks
        ]
    if isinstance(model, VisionTransformer) and model.cls_token is not None:
        attentions = [(name, module) for name, module in named if type(module) is Attention]
        return [ClassAttentionLayer(n, m, partial(_of_attention, m), model.num_prefix_tokens) for n, m in attentions]
    if isinstance(model, CRATE):
        mixers = [(name, module) for name, module in named if isinstance(module, SubspaceAttention)]
        return [ClassAttentionLayer(name, mixer, partial(_of_subspaces, mixer), 1) for name, mixer in mixers]
    return []


def _of_class_block(block: ClassAttentionBlock, x: Tensor) -> Tensor:
    x, attn = block.norm1(x), block.attn
    B, N, _ = x.shape
    query = attn.q(x[:, 0]).view(B, attn.num_heads, 1, -1)
    key = attn.k(x).view(B, N, attn.num_heads, -1).transpose(1, 2)
    return _weights(query, key, attn.scale)


def _of_attention(attention: Attention, x: Tensor) -> Tensor:
    B, N, _ = x.shape
    query, key, _ = attention.qkv(x).view(B, N, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key = attention.q_norm(query[:, :, :1]), attention.k_norm(key)
    return _weights(query, key, attention.scale)


def _of_subspaces(mixer: SubspaceAttention, x: Tensor) -> Tensor:
    w = mixer.proj_in(x).view(*x.shape[:2], mixer.num_heads, mixer.head_dim).transpose(1, 2)
    return _weights(w[:, :, :1], w, mixer.head_dim**-0.5)


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the weights of one query [B, H, 1, D] over keys [B, H, N, D]."""
    return ((query * scale) @ key.mT).softmax(dim=-1).squeeze(2)


def _grid(model: nn.Module, images: Tensor, patches: int) -> tuple[int, int]:
    """Return the rows and columns of the patches of these images."""
    size = getattr(getattr(model, "options", None), "patch_size", None)
    if size is None:
        size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    height, width = size if isinstance(size, tuple) else (size or 1, size or 1)
    grid = (-(-images.shape[2] // height), -(-images.shape[3] // width))
    if grid[0] * grid[1] != patches:
        raise ConfigError(
            f"{patches} patches do not form the grid {grid[0]} x {grid[1]} that images of {images.shape[2]} x "
            f"{images.shape[3]} pixels should have in patches of {height} x {width}."
        )
    return grid


def class_attention_maps(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    layers: Sequence[int] | None = None,
    shown: int = SHOWN,
) -> ClassAttentionMaps:
    """Measure where the class token of an image model looks.

    Args:
        model: A model with class-attention blocks (ToST, XCiT), timm's VisionTransformer or CRATE.
        batches: Images, normalized as the model needs them; see `membership_maps`.
        layers: Which of the layers that look from a class token; None for the last but one, as in the paper.
        shown: Maps of so many images are kept. The numbers are over all.

    Raises:
        ConfigError: The model has no class token that looks at patches.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("vit_mini")
        >>> tost.analysis.class_attention_maps(model, [torch.randn(4, 3, 32, 32)]).maps.shape
        torch.Size([4, 1, 4, 8, 8])
    """
    every = class_attention_layers(model)
    usual = [max(len(every) - 2, 0)] if layers is None else layers
    chosen = choose(usual, len(every), "layers in which a class token looks at patches")
    wanted = [every[index] for index in chosen]
    weights: list[Tensor] = []
    sums: list[Tensor] = []

    def visit(layer: ClassAttentionLayer, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        weights.append(layer.weights(*arguments[: 2 if isinstance(module, ClassBlock) else 1]))

    def measure(batch: Batch, images: Tensor) -> Tensor:
        weights.clear()
        run_batch(model, batch)
        pairs = list(zip(weights, wanted, strict=True))
        itself = torch.stack([each[..., : layer.prefix].sum(-1) for each, layer in pairs], dim=1).cpu()
        maps = torch.stack([each[..., layer.prefix :] for each, layer in pairs], dim=1).cpu()  # [B, L, H, N]
        share = maps.double() / maps.double().sum(dim=-1, keepdim=True).clamp_min(1e-30)
        sums.append(torch.stack((itself.double(), entropy(share))).sum(dim=1))
        return maps.unflatten(-1, _grid(model, images, maps.shape[-1]))  # type: ignore[no-untyped-call]

    with at_rest(model), ExitStack() as hooks:
        for layer in wanted:
            hooks.enter_context(layer.module.register_forward_pre_hook(partial(visit, layer)))
        shared = collect_maps(batches, measure, shown=shown)
    itself, spread = torch.stack(sums).sum(dim=0) / shared["images"]
    names = tuple(layer.name for layer in wanted)
    return ClassAttentionMaps(
        layers=tuple(chosen), names=names, depth=len(every), itself=itself, entropy=spread, **shared
    )
