"""Membership maps: which head (group) each patch of an image, or each token of a text, belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tost.analysis.foreground import agreement, foreground_by_border
from tost.analysis.records import Batch, LayerRecord, attention_layers, choose, observe
from tost.analysis.result import entropy, plain
from tost.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "MembershipMaps",
    "TextMemberships",
    "display_of",
    "membership_maps",
    "text_memberships",
    "to_display",
]

SHOWN = 6


def to_display(images: Tensor) -> Tensor:
    """Return images ``[S, channels, height, width]`` of any range as colours in [0, 1], each by its own range."""
    low, high = (images.flatten(1).aminmax(dim=1)[i].view(-1, 1, 1, 1) for i in (0, 1))
    scaled = (images - low) / (high - low).clamp_min(1e-12)
    return scaled.expand(-1, 3, -1, -1) if images.shape[1] == 1 else scaled[:, :3]


def display_of(batch: Batch, images: Tensor, pixels: Tensor | None, position: int) -> Tensor:
    """Return the images of a batch as they are drawn: given for all, given with the batch, or made of the inputs."""
    if pixels is not None:
        return pixels[position : position + len(images)]
    given = None if isinstance(batch, Tensor) else batch.get("pixels")
    return to_display(images) if given is None else given


@dataclass(frozen=True)
class MembershipMaps:
    """Memberships of image patches.

    Attributes:
        layers: Numbers of the layers.
        depth: How many TSSA layers the model has.
        maps: Memberships of the first images, ``[S, L, H, rows, columns]``; they add up to 1 over H.
        pixels: Those images in [0, 1], ``[S, 3, height, width]``.
        foreground: Their estimated foreground, bool ``[S, rows, columns]``.
        entropy: Mean entropy of a patch's membership by layer over all images, ``[L]``; 1 is uniform.
        area: Mean probability that a foreground patch has more of a head than a background patch, ``[L, H]``, over all
            images: 1 if the head is the foreground, 0 if it is the background, 1/2 if it does not care.
        overlap: Mean intersection over union of the patches whose largest membership is the head's, and the
            foreground, ``[L, H]``.
        images: How many images were looked at.
        compared: How many of them have a foreground to compare with.
    """

    name: ClassVar[str] = "membership-maps"
    layers: tuple[int, ...]
    depth: int
    maps: Tensor = field(repr=False)
    pixels: Tensor = field(repr=False)
    foreground: Tensor = field(repr=False)
    entropy: Tensor
    area: Tensor
    overlap: Tensor
    images: int
    compared: int

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

    def to_json(self) -> dict[str, Any]:
        """Return everything but the pixels as plain data."""
        keys = ("layers", "depth", "images", "compared", "entropy", "area", "overlap", "maps", "foreground")
        return {**{key: plain(getattr(self, key)) for key in keys}, "summary": plain(self.summary())}

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and head."""
        return [
            {
                "layer": layer,
                "head": head,
                "entropy": self.entropy[i].item(),
                "foreground_area": self.area[i, head].item(),
                "foreground_overlap": self.overlap[i, head].item(),
            }
            for i, layer in enumerate(self.layers)
            for head in range(self.area.shape[1])
        ]

    def summary(self) -> dict[str, Any]:
        """Return the entropy and the head that is most like the foreground."""
        layer, head, area, overlap = max(self.best_heads(), key=lambda best: best[2])
        return {
            "images": self.images,
            "entropy of memberships, least and most of a layer (1 = uniform)": (
                f"{self.entropy.min().item():.4f}, {self.entropy.max().item():.4f}"
            ),
            f"foreground agreement: head {head} of layer {layer}, area under the curve (chance 0.5)": round(area, 4),
            f"foreground agreement: head {head} of layer {layer}, overlap (IoU)": round(overlap, 4),
        }

    def figure(self) -> Figure:
        """Draw a grid: images in rows; the image, its hard clusters and every head in columns; one layer."""
        from tost.analysis.figures.maps import draw_memberships

        shown = self.layers[0] if len(self.layers) == 1 else _usual_layer(self)
        return draw_memberships(self.at(shown))


def _usual_layer(result: MembershipMaps) -> int:
    """Return the layer at three quarters of the depth, where the paper's pictures come from, or the nearest."""
    wanted = round(0.75 * (result.depth - 1))
    return min(result.layers, key=lambda layer: abs(layer - wanted))


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
        batches: Images, normalised as the model wants them.
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
    chosen = choose(layers, len(attention_layers(model)))
    collector = _Collector(chosen, pixels, foreground, shown)
    images = observe(model, collector.watch(batches), collector.visit, layers=chosen)
    return collector.result(len(attention_layers(model)), images)


class _Collector:
    """Sums of the numbers over all images, and the maps of the first."""

    def __init__(self, chosen: list[int], pixels: Tensor | None, foreground: Tensor | None, shown: int) -> None:
        self.chosen, self.given_pixels, self.given_foreground, self.shown = chosen, pixels, foreground, shown
        self.position = 0
        self.images = torch.empty(0)
        self.maps: dict[int, list[Tensor]] = {index: [] for index in chosen}
        self.sums: dict[int, list[Tensor]] = {index: [] for index in chosen}
        self.pixels: list[Tensor] = []
        self.foreground: list[Tensor] = []
        self.mask: Tensor | None = None
        self.compared = 0

    def watch(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        for batch in batches:
            images = batch if isinstance(batch, Tensor) else batch.get("inputs")
            if not isinstance(images, Tensor) or images.dim() != 4:
                raise ConfigError("membership maps need images [B, channels, height, width]; use text_memberships.")
            self.images = display_of(batch, images, self.given_pixels, self.position)
            self.mask = None
            yield batch
            self.position += len(images)

    def visit(self, record: LayerRecord) -> None:
        pi = record.membership()
        rows, columns = record.grid or _square(pi.shape[1])
        maps = pi.mT.unflatten(2, (rows, columns)).cpu()  # type: ignore[no-untyped-call]
        if self.mask is None:
            self._find_foreground(rows, columns)
        assert self.mask is not None
        index = record.layer.index
        self.sums[index].append(_numbers(maps, self.mask))
        if self.position < self.shown:
            self.maps[index].append(maps[: self.shown - self.position].clone())

    def _find_foreground(self, rows: int, columns: int) -> None:
        if self.given_foreground is None:
            self.mask = foreground_by_border(self.images, (rows, columns))
        else:
            self.mask = self.given_foreground[self.position : self.position + len(self.images)]
        flat = self.mask.flatten(1)
        self.compared += int((flat.any(dim=1) & ~flat.all(dim=1)).sum())
        if self.position < self.shown:
            self.pixels.append(self.images[: self.shown - self.position].cpu())
            self.foreground.append(self.mask[: self.shown - self.position].cpu())

    def result(self, depth: int, images: int) -> MembershipMaps:
        totals = torch.stack([torch.stack(self.sums[index]).sum(dim=0) for index in self.chosen])  # [L, 1 + 2 H]
        heads = (totals.shape[1] - 1) // 2
        compared = max(self.compared, 1)
        return MembershipMaps(
            layers=tuple(self.chosen),
            depth=depth,
            maps=torch.stack([torch.cat(self.maps[index]) for index in self.chosen], dim=1),
            pixels=torch.cat(self.pixels),
            foreground=torch.cat(self.foreground),
            entropy=totals[:, 0] / images,
            area=totals[:, 1 : 1 + heads] / compared,
            overlap=totals[:, 1 + heads :] / compared,
            images=images,
            compared=self.compared,
        )


def _numbers(maps: Tensor, mask: Tensor) -> Tensor:
    """Return sums over the images: of the mean entropy, and of area and overlap of every head, [1 + 2 H]."""
    total = torch.zeros(1 + 2 * maps.shape[1], dtype=torch.float64)
    total[0] = entropy(maps.double(), dim=1).flatten(1).mean(dim=1).sum()
    for pi, truth in zip(maps, mask, strict=True):
        found = agreement(pi.flatten(1), truth.flatten())
        if found is not None:
            total[1:] += torch.cat(found)
    return total


def _square(tokens: int) -> tuple[int, int]:
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ConfigError(f"{tokens} tokens form no square, and the model does not say what their grid is.")
    return side, side


@dataclass(frozen=True)
class TextMemberships:
    """Memberships along a text.

    Attributes:
        layers: Numbers of the layers.
        tokens: The text, token by token.
        pi: Memberships, ``[L, N, H]``.
        entropy: Mean entropy by layer, ``[L]``; 1 is uniform.
    """

    name: ClassVar[str] = "text-memberships"
    layers: tuple[int, ...]
    tokens: tuple[str, ...] = field(repr=False)
    pi: Tensor = field(repr=False)
    entropy: Tensor

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        keys = ("layers", "tokens", "pi", "entropy")
        return {**{key: plain(getattr(self, key)) for key in keys}, "summary": plain(self.summary())}

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
        low, high = self.entropy.min().item(), self.entropy.max().item()
        return {
            "tokens": len(self.tokens),
            "entropy of memberships, least and most of a layer (1 = uniform)": f"{low:.4f}, {high:.4f}",
        }

    def figure(self) -> Figure:
        """Draw the text in rows, every token in the colour of its head; first, middle and last layer."""
        from tost.analysis.figures.text import draw_text_memberships

        return draw_text_memberships(self)


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
