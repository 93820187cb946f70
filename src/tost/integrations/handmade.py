"""Compare a hand-made TSSA with the operator of this package, and name the mistake that explains the difference.

What a module feeds into its last projection is compared with what follows from the output of its first one. The two
projections themselves can be anything, so that only the attention between them is judged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tost._text import html_card
from tost.errors import ConfigError
from tost.ops import causal_tssa, tssa

TOKENS = 7
TOLERANCE = 1e-5
"""Largest difference, relative to the largest value, that counts as equal in float64."""
_HEADS = ("num_heads", "heads", "n_heads", "n_head", "h", "H")


@dataclass(frozen=True)
class TSSACheck:
    """What `check_tssa` found.

    Attributes:
        is_tssa: Whether the module computes TSSA.
        finding: Which form it computes: ``"tssa"``, ``"causal"``, the name of a known mistake (after ``"causal, "`` in
            a copy of the causal operator), or ``"unknown"``.
        message: The same in a sentence, with what to change.
        errors: Largest difference from each form, relative to the largest value of it.
    """

    is_tssa: bool
    finding: str
    message: str
    errors: dict[str, float]

    def __bool__(self) -> bool:
        return self.is_tssa

    def _repr_html_(self) -> str:
        """Return a table for a notebook: how far it is from the right forms and from the nearest one."""
        shown = ("tssa", "causal", min(self.errors, key=self.errors.__getitem__))
        errors = {f"off from {name!r}": f"{self.errors[name]:.2g}" for name in shown}
        return html_card(self.message, {"finding": self.finding, **errors})


@dataclass(frozen=True)
class _Form:
    """A way to compute it: the right ones, and mistakes that copies have."""

    compute: Callable[..., Tensor]
    message: str
    is_right: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def causal(self) -> _Form:
        """The same mistake in a copy of the causal operator."""
        return replace(self, options={**self.options, "causal": True})

    def __call__(self, w: Tensor, temperature: Tensor) -> Tensor:
        """From projected tokens ``[B, N, H, D]`` and temperatures ``[H]`` to ``[B, N, H, D]``."""
        return self.compute(w, temperature, **self.options)


def _formula(
    w: Tensor,
    temperature: Tensor,
    *,
    normalized_over: int | None = 1,
    softmax_over: int = 2,
    moment: str = "weighted",
    sign: float = -1.0,
    causal: bool = False,
    looks_ahead: bool = False,
) -> Tensor:
    """Compute TSSA with one of its parts replaced; see the equations of `tost.ops.tssa` and `tost.ops.causal_tssa`."""

    def over_tokens(x: Tensor) -> Tensor:
        return x.cumsum(dim=1) if causal else x.sum(dim=1, keepdim=True)

    squares = w.square()
    share = squares
    if normalized_over is not None:
        over_all = looks_ahead or normalized_over != 1
        share = squares / (squares.sum(dim=normalized_over, keepdim=True) if over_all else over_tokens(squares))
    pi = (share.sum(dim=-1) * temperature).softmax(dim=softmax_over).unsqueeze(-1)  # [B, N, H, 1]
    mass = over_tokens(pi) if moment != "not divided" else 1.0
    second = over_tokens(pi * squares) / mass  # [B, 1 or N, H, D]
    if moment == "of the head":
        second = second.sum(dim=-1, keepdim=True)
    return sign * pi * w / (1 + second)


def _one_head(w: Tensor, temperature: Tensor, *, causal: bool = False) -> Tensor:
    squares = w.square()
    count = torch.arange(1, w.shape[1] + 1, dtype=w.dtype)[:, None, None]
    return -w / (1 + (squares.cumsum(dim=1) / count if causal else squares.mean(dim=1, keepdim=True)))


_MISTAKES: dict[str, _Form] = {
    "softmax over tokens": _Form(
        _formula,
        "The softmax of the memberships runs over the tokens. A token chooses among the heads: use dim=heads.",
        options={"softmax_over": 1},
    ),
    "one head": _Form(
        _one_head,
        "All tokens belong to one group: the softmax runs over an axis of length 1. Split the width into heads first.",
    ),
    "moment over features": _Form(
        _formula,
        "The second moment is summed over the features of a head. Each feature has one of its own: keep that axis.",
        options={"moment": "of the head"},
    ),
    "energy normalized over features": _Form(
        _formula,
        "The energy is normalized over the features of a token, so that it is 1 for every token and the memberships "
        "do not depend on the data. Normalize each feature over the tokens.",
        options={"normalized_over": 3},
    ),
    "energy normalized over heads": _Form(
        _formula,
        "The energy is normalized over the heads. Normalize each feature over the tokens.",
        options={"normalized_over": 2},
    ),
    "energy not normalized": _Form(
        _formula,
        "The energy is not normalized over the tokens. That is the equation of the paper, not its code; the option "
        "normalize=False of `tost.tssa` computes it.",
        options={"normalized_over": None},
    ),
    "moment not divided": _Form(
        _formula,
        "The second moment is a sum. Divide it by the mass of the group, sum of pi over the tokens.",
        options={"moment": "not divided"},
    ),
    "sign": _Form(
        _formula,
        "The sign is missing. TSSA takes away from the residual stream: multiply by -1.",
        options={"sign": 1.0},
    ),
    "temperature ignored": _Form(
        lambda w, t, causal=False: _formula(w, torch.ones_like(t), causal=causal),
        "The temperature has no effect. Multiply the energy of each head by its own, before the softmax.",
    ),
}
_FORMS: dict[str, _Form] = {
    "tssa": _Form(tssa, "It is TSSA.", is_right=True),
    "causal": _Form(causal_tssa, "It is causal TSSA, with inclusive prefix sums.", is_right=True),
    **_MISTAKES,
    **{f"causal, {name}": form.causal() for name, form in _MISTAKES.items()},
    "causal, energy looks ahead": _Form(
        _formula,
        "The energy is normalized over all tokens, also over those that come later. Use the prefix sum of the squares, "
        "as for the second moment.",
        options={"causal": True, "looks_ahead": True},
    ),
}


def check_tssa(module: nn.Module, *, num_heads: int | None = None, seed: int = 0) -> TSSACheck:
    """Compare a hand-made TSSA with the operator of this package.

    The module takes tokens ``[B, N, C]`` and returns as many. It is copied and run once, in float64 and in evaluation
    mode. Its first linear layer has to project the tokens onto the heads, side by side; what goes into its last linear
    layer, or what it returns if there is just one, is compared. Temperatures are parameters of H numbers, if there are
    any.

    Args:
        module: The module, with any names.
        num_heads: H; None for what the module has as ``num_heads``, ``heads`` or the like, or for the number of
            temperatures.
        seed: Decides the tokens and temperatures that it is tried with.

    Returns:
        Whether it is TSSA, and if not, which mistake explains the difference. True in a condition if it is.

    Raises:
        ConfigError: The module has no linear layer, or its number of heads is not known or does not fit.

    Example:
        >>> import tost
        >>> tost.check_tssa(tost.TSSAttention(64, num_heads=4)).message
        'It is TSSA.'
    """
    copied = copy.deepcopy(module).double().eval()
    linear = [layer for layer in copied.modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ConfigError(f"{type(module).__name__} has no linear layer, so that its tokens cannot be found.")
    heads = _find_heads(copied, num_heads)
    generator = torch.Generator().manual_seed(seed)
    temperature = _set_temperature(copied, heads, generator)
    w, y = _run(copied, linear, generator)
    if w.shape[-1] % heads or y.shape != w.shape:
        raise ConfigError(
            f"the first linear layer returns {tuple(w.shape)} and the last one takes {tuple(y.shape)}; with "
            f"{heads} heads both have to be [1, {TOKENS}, heads * width]. Name the heads with num_heads."
        )
    split = w.view(*w.shape[:-1], heads, -1)
    errors = {name: _error(form(split, temperature).flatten(2), y) for name, form in _FORMS.items()}
    best = min(errors, key=errors.__getitem__)
    if errors[best] > TOLERANCE:
        message = f"It is not TSSA, and no known mistake explains it; {best!r} is nearest, {errors[best]:.1%} off."
        return TSSACheck(False, "unknown", message, errors)
    return TSSACheck(_FORMS[best].is_right, best, _FORMS[best].message, errors)


def _find_heads(module: nn.Module, given: int | None) -> int:
    if given is not None:
        return given
    for part in module.modules():
        for name in _HEADS:
            value = getattr(part, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    sizes = [p.numel() for _, p in module.named_parameters() if p.numel() == max(p.shape, default=1) and p.dim() > 1]
    if sizes:
        return sizes[0]
    raise ConfigError(f"{type(module).__name__} does not say how many heads it has; give num_heads.")


def _set_temperature(module: nn.Module, heads: int, generator: torch.Generator) -> Tensor:
    """Give the heads different temperatures, where the module has any, and return them."""
    biases = {id(layer.bias) for layer in module.modules() if isinstance(layer, nn.Linear)}
    for _, parameter in module.named_parameters():
        if parameter.numel() == heads and id(parameter) not in biases:
            values = 1 + 3 * torch.rand(heads, dtype=torch.float64, generator=generator)
            with torch.no_grad():
                parameter.copy_(values.view(parameter.shape))
            return values
    return torch.ones(heads, dtype=torch.float64)


def _run(module: nn.Module, linear: list[nn.Linear], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return what the first linear layer gives and what the last one takes, in the order in which they are called."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen.append((inputs[0].detach().clone(), output.detach().clone()))

    handles = [layer.register_forward_hook(keep) for layer in linear]
    tokens = torch.randn(1, TOKENS, linear[0].in_features, dtype=torch.float64, generator=generator)
    # Tokens of different lengths, so that memberships differ.
    tokens = tokens * torch.linspace(0.3, 3, TOKENS, dtype=torch.float64)[:, None]
    try:
        with torch.no_grad():
            output: Tensor = module(tokens)
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise ConfigError(f"{type(module).__name__} does not call its linear layers; the tokens cannot be found.")
    return seen[0][1], seen[-1][0] if len(seen) > 1 else output


def _error(expected: Tensor, found: Tensor) -> float:
    return float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-300))
