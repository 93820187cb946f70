"""Membership maps: which head (group) each patch of an image, or each token of a text, belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tost.analysis.maps import SHOWN, ImageMaps, collect_maps
from tost.analysis.records import Batch, LayerRecord, at_rest, attention_layers, capture, choose, observe, run_batch
from tost.analysis.result import Result, entropy, grid_rows, span
from tost.errors import ConfigError

if TYPE_CHECKING:
    from tost.analysis.run import Samples


@dataclass(frozen=True, kw_only=True)
class MembershipMaps(ImageMaps):
    """Memberships of image patches; the maps add up to 1 over the heads.

    Attributes:
        layers: Numbers of the layers.
        depth: How many TSSA layers the model has.
        entropy: Mean entropy of a patch's membership by layer over all images, ``[L]``; 1 is uniform.
    """

    name: ClassVar[str] = "membership-maps"
    drawing: ClassVar[str] = "maps:draw_memberships"
    layers: tuple[int, ...]
    depth: int
    entropy: Tensor

    def at(self, layer: int) -> MembershipMaps:
        """Return the same for one layer only.

        Raises:
            ConfigError: The layer is not among those that were looked at.
        """
        layer = layer % self.depth
        if layer not in self.layers:
            raise ConfigError(f"layer {layer} is not among {', '.join(map(str, self.layers))}.")
        i = self.layers.index(layer)
        parts = {key: getattr(self, key)[i : i + 1] for key in ("entropy", "area", "overlap")}
        return replace(self, layers=(layer,), maps=self.maps[:, i : i + 1], **parts)

    def best_heads(self) -> list[tuple[int, int, float, float]]:
        """Return for every layer: its number, the head most like the foreground, that head's area and overlap."""
        heads = self.area.argmax(dim=1).tolist()
        values = zip(self.layers, heads, self.area.tolist(), self.overlap.tolist(), strict=True)
        return [(layer, head, area[head], overlap[head]) for layer, head, area, overlap in values]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and head."""
        values = {"entropy": self.entropy, "foreground_area": self.area, "foreground_overlap": self.overlap}
        return grid_rows({"layer": self.layers, "head": range(self.area.shape[1])}, values)

    def summary(self) -> dict[str, Any]:
        """Return the entropy and the head that is most like the foreground."""
        layer, head, area, overlap = max(self.best_heads(), key=lambda best: best[2])
        return {
            "images": self.images,
            "entropy of memberships, least and most of a layer (1 = uniform)": span(self.entropy),
            f"foreground agreement: head {head} of layer {layer}, area under the curve (chance 0.5)": round(area, 4),
            f"foreground agreement: head {head} of layer {layer}, overlap (IoU)": round(overlap, 4),
        }


def membership_maps(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    layers: Sequence[int] | None = None,
    pixels: Tensor | None = None,
    foreground: Tensor | None = None,
    shown: int = SHOWN,
) -> MembershipMaps:
    """Look at the memberships of image patches.

    Args:
        model: An image model with TSSA layers.
        batches: Images, normalized as the model needs them.
        layers: Which layers; None for all.
        pixels: The same images in [0, 1], ``[S, 3, height, width]``, to be drawn and to find the foreground in; None
            for what a batch has as ``"pixels"``, or for the inputs, each stretched to [0, 1].
        foreground: Which patches are foreground, bool ``[S, rows, columns]``; None for an estimate, see
            `tost.analysis.foreground.foreground_by_border`.
        shown: Maps of so many images are kept. The numbers are over all.

    Raises:
        ConfigError: The model has no TSSA layers or works on something else than images.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_mini")
        >>> tost.analysis.membership_maps(model, [torch.randn(4, 3, 32, 32)]).maps.shape
        torch.Size([4, 6, 4, 8, 8])
    """
    depth = len(attention_layers(model))
    chosen = choose(layers, depth)
    spread = torch.zeros(len(chosen), dtype=torch.float64)
    found: dict[int, Tensor] = {}

    def visit(record: LayerRecord) -> None:
        pi = record.membership()
        found[record.layer.index] = pi.mT.unflatten(2, record.grid or _square(pi.shape[1])).cpu()  # type: ignore[no-untyped-call]

    def look(batch: Batch, images: Tensor) -> Tensor:
        run_batch(model, batch)
        maps = torch.stack([found[index] for index in chosen], dim=1)
        spread.add_(entropy(maps.double(), dim=2).flatten(2).mean(dim=2).sum(dim=0))
        return maps

    with at_rest(model), capture(model, chosen, visit=visit):
        seen = collect_maps(batches, look, pixels=pixels, foreground=foreground, shown=shown)
    return MembershipMaps(layers=tuple(chosen), depth=depth, entropy=spread / seen.images, **vars(seen))


def _square(tokens: int) -> tuple[int, int]:
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ConfigError(f"{tokens} tokens form no square, and the model has no attribute for their grid.")
    return side, side


@dataclass(frozen=True)
class TextMemberships(Result):
    """Memberships along a text.

    Attributes:
        layers: Numbers of the layers.
        tokens: The text, token by token.
        pi: Memberships, ``[L, N, H]``.
        entropy: Mean entropy by layer, ``[L]``; 1 is uniform.
    """

    name: ClassVar[str] = "text-memberships"
    drawing: ClassVar[str] = "text:draw_text_memberships"
    is_photographic: ClassVar[bool] = True
    layers: tuple[int, ...]
    tokens: tuple[str, ...] = field(repr=False)
    pi: Tensor = field(repr=False)
    entropy: Tensor

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and token, with a column for each head."""
        found = []
        for i, layer in enumerate(self.layers):
            for position, (token, pi) in enumerate(zip(self.tokens, self.pi[i].tolist(), strict=True)):
                heads = {f"pi_{head}": value for head, value in enumerate(pi)}
                best = max(range(len(pi)), key=pi.__getitem__)
                found.append({"layer": layer, "position": position, "token": token, "head": best, **heads})
        return found

    def summary(self) -> dict[str, Any]:
        """Return the entropy of the memberships."""
        return {
            "tokens": len(self.tokens),
            "entropy of memberships, least and most of a layer (1 = uniform)": span(self.entropy),
        }


def text_memberships(
    model: nn.Module, ids: Tensor, tokens: Sequence[str], *, layers: Sequence[int] | None = None
) -> TextMemberships:
    """Look at the memberships along one text.

    Args:
        model: A model of token sequences with TSSA layers, causal or not.
        ids: The text, int64 ``[1, N]`` or ``[N]``.
        tokens: How to write each of the N tokens.
        layers: Which layers; None for all.

    Raises:
        ConfigError: The model has no TSSA layers.
        ValueError: There are not as many strings as tokens.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_lm_base", embed_dim=32, depth=2, num_heads=4, vocab_size=256)
        >>> text = "def f(x):"
        >>> ids = torch.tensor(list(text.encode()))
        >>> tost.analysis.text_memberships(model, ids, text).pi.shape
        torch.Size([2, 9, 4])
    """
    ids = ids.reshape(1, -1) if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] != len(tokens):
        raise ValueError(f"ids have shape {tuple(ids.shape)} for {len(tokens)} tokens; one text is [1, N] or [N].")
    chosen = choose(layers, len(attention_layers(model)))
    found: dict[int, Tensor] = {}

    def visit(record: LayerRecord) -> None:
        pi = record.membership()[0].cpu()
        found[record.layer.index] = pi[pi.shape[0] - len(tokens) :]  # a class token in front has no string

    observe(model, [ids], visit, layers=chosen)
    pi = torch.stack([found[index] for index in chosen])
    return TextMemberships(tuple(chosen), tuple(tokens), pi, entropy(pi.double()).mean(dim=1))


def memberships_of_text(model: nn.Module, samples: Samples, *, layers: Sequence[int] | None = None) -> TextMemberships:
    """Look at the memberships along the text of some samples; see `text_memberships`."""
    if samples.text is None:
        raise ConfigError("text-memberships looks at a text, but there is none; give one.")
    ids, tokens = samples.text
    return text_memberships(model, ids, tokens, layers=layers)
