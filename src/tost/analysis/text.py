"""Texts token by token: the share of each head in each token, and how many bits each one costs a language model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tost.analysis.records import LayerRecord, at_rest, attention_layers, choose, observe
from tost.analysis.result import Result, entropy, span
from tost.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tost.analysis.run import Samples

EXPECTED = 5
"""Tokens that are kept of what a model expected."""
WIDTH, MOST_ROWS = 84, 9
"""Characters of a line, and lines, of a text in a picture."""
_SIGNS = {"\n": "↵", "\t": "→", "\r": "↵", " ": " "}


@dataclass(frozen=True)
class TextMemberships(Result):
    """Memberships along a text, or in gated layers shares of the coding-rate gain.

    Attributes:
        layers: Numbers of the layers.
        tokens: The text, token by token.
        pi: Share of each head in each token, ``[L, N, H]``.
        entropy: Mean entropy by layer, ``[L]``; 1 is uniform.
    """

    name: ClassVar[str] = "text-memberships"
    is_photographic: ClassVar[bool] = True
    layers: tuple[int, ...]
    tokens: tuple[str, ...] = field(repr=False)
    pi: Tensor = field(repr=False)
    entropy: Tensor

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and token, with a column for each head."""
        rows = []
        for layer, each in zip(self.layers, self.pi, strict=True):
            largest = each.argmax(dim=-1).tolist()
            for position, (token, pi) in enumerate(zip(self.tokens, each.tolist(), strict=True)):
                heads = {f"pi_{head}": value for head, value in enumerate(pi)}
                rows.append({"layer": layer, "position": position, "token": token, "head": largest[position], **heads})
        return rows

    def summary(self) -> dict[str, Any]:
        """Return the entropy of the shares."""
        return {
            "tokens": len(self.tokens),
            "entropy of shares, least and most of a layer (1 = uniform)": span(self.entropy),
        }

    def figure(self) -> Figure:
        """Draw the beginning of the text, each token in the color of its largest head; first, middle and last layer.

        The stronger a color, the further the share is from uniform, by the scale of each layer.
        """
        from matplotlib.patches import Rectangle

        from tost.analysis import plots

        count, heads = len(self.layers), self.pi.shape[-1]
        shown = sorted({0, count // 2, count - 1})
        places = _lay_out(self.tokens)
        rows = max(row for _, row, _, _ in places) + 1
        width = max(48, *(column + len(text) for _, _, column, text in places))
        figure = plots.new_figure(0.13 * width, len(shown) * (0.24 * rows + 0.5) + 0.9)
        for axes, i in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
            excess = self.pi[i].amax(dim=-1) - 1 / heads
            strength = (excess / excess.quantile(0.95).clamp_min(1e-12)).clamp(0, 1).tolist()
            for index, row, column, text in places:
                shade = 0.08 + 0.72 * strength[index]
                face = tuple(1 - shade * (1 - part) for part in plots.rgb(int(self.pi[i, index].argmax())))
                axes.add_patch(Rectangle((column, row), len(text), 0.92, facecolor=face, edgecolor="none"))
                ink = "black" if sum(face) > 1.35 else "white"
                font: dict[str, Any] = {"fontsize": 9, "family": "DejaVu Sans Mono", "ha": "center", "va": "center"}
                for offset, letter in enumerate(text):
                    axes.text(column + offset + 0.5, row + 0.5, letter, color=ink, **font)
            axes.set_xlim(0, width)
            axes.set_ylim(rows, 0)
            axes.axis("off")
            title = f"layer {self.layers[i]};  entropy {self.entropy[i]:.4f} (1 = uniform)"
            axes.set_title(title, fontsize=plots.LABEL, loc="left")
        plots.add_head_legend(figure, heads)
        title = "Head with the largest share in each token; strong colors: far from uniform"
        figure.suptitle(title, fontsize=plots.TITLE)
        return figure


def _lay_out(tokens: tuple[str, ...]) -> list[tuple[int, int, int, str]]:
    """Return index, row, column and text of every token that fits, in rows of `WIDTH` characters."""
    places, row, column = [], 0, 0
    for index, token in enumerate(tokens):
        text = "".join(_SIGNS.get(letter, letter if letter.isprintable() else "·") for letter in token) or "·"
        if column + len(text) > WIDTH and column > 0:
            row, column = row + 1, 0
        if row >= MOST_ROWS:
            break
        places.append((index, row, column, text))
        row, column = (row + 1, 0) if token.endswith("\n") else (row, column + len(text))
    return places


def text_memberships(
    model: nn.Module, ids: Tensor, tokens: Sequence[str], *, layers: Sequence[int] | None = None
) -> TextMemberships:
    """Measure the memberships along one text, or the shares of the coding-rate gain; see `Statistics.share`.

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
    ids = _one_text(ids, tokens)
    chosen = choose(layers, len(attention_layers(model)))
    memberships: dict[int, Tensor] = {}

    def visit(record: LayerRecord) -> None:
        pi = record.share()[0].cpu()
        memberships[record.layer.index] = pi[len(pi) - len(tokens) :]  # a class token in front has no string

    observe(model, [ids], visit, layers=chosen)
    pi = torch.stack([memberships[index] for index in chosen])
    return TextMemberships(tuple(chosen), tuple(tokens), pi, entropy(pi.double()).mean(dim=1))


def memberships_of_text(model: nn.Module, samples: Samples, *, layers: Sequence[int] | None = None) -> TextMemberships:
    """Measure the memberships along the text of some samples; see `text_memberships`."""
    if samples.text is None:
        raise ConfigError("text-memberships looks at a text, but there is none; give one.")
    return text_memberships(model, *samples.text, layers=layers)


def _one_text(ids: Tensor, tokens: Sequence[str]) -> Tensor:
    """Return the ids of a text as ``[1, N]``."""
    ids = ids.reshape(1, -1) if ids.dim() == 1 else ids
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] != len(tokens):
        raise ValueError(f"ids have shape {tuple(ids.shape)} for {len(tokens)} tokens; one text is [1, N] or [N].")
    return ids


@dataclass(frozen=True)
class Surprise(Result):
    """Predictions of a language model along a text.

    Attributes:
        tokens: The text, token by token.
        bits: ``-log2 p`` of each token given those before it, ``[N]``, float64. NaN for the first, which has none.
        expected: The likeliest tokens to follow each token, by id, ``[N, 5]``; those after the last are the forecast.
        probability: Their probabilities, ``[N, 5]``.
    """

    name: ClassVar[str] = "surprise"
    tokens: tuple[str, ...] = field(repr=False)
    bits: Tensor = field(repr=False)
    expected: Tensor = field(repr=False)
    probability: Tensor = field(repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per token."""
        pairs = zip(self.tokens, self.bits.tolist(), strict=True)
        return [{"position": i, "token": token, "bits": bits} for i, (token, bits) in enumerate(pairs)]

    def summary(self) -> dict[str, Any]:
        """Return the mean."""
        known = self.bits[1:]
        return {"tokens": len(self.tokens), "bits per token": round(known.mean().item(), 4) if len(known) else None}


def surprise(model: nn.Module, ids: Tensor, tokens: Sequence[str]) -> Surprise:
    """Measure how many bits each token of a text costs a language model.

    Args:
        model: A causal language model, with any kind of attention.
        ids: The text, int64 ``[1, N]`` or ``[N]``.
        tokens: How to write each of the N tokens.

    Raises:
        ValueError: There are not as many strings as tokens.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.load_pretrained("bytes-tiny")
        >>> text = "import os"
        >>> found = tost.analysis.surprise(model, torch.tensor(list(text.encode())), text)
        >>> found.bits.shape
        torch.Size([9])
    """
    ids = _one_text(ids, tokens)
    with at_rest(model):
        log_probability = model(ids)[0].double().log_softmax(dim=-1)  # [N, V]
    bits = -log_probability[:-1].gather(1, ids[0, 1:, None])[:, 0] / math.log(2)
    top = log_probability.topk(min(EXPECTED, log_probability.shape[-1]), dim=-1)
    bits = torch.cat((bits.new_full((1,), math.nan), bits))
    return Surprise(tuple(tokens), bits.cpu(), top.indices.cpu(), top.values.exp().cpu())
