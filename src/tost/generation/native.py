"""One token through a language model in a single call of the native CPU library.

It computes what `FlatStep` computes, in float32. Its matrices may be stored in fewer bits: then fewer bytes are read
per token, which is what a step takes its time for, and every weight is rounded once. Sums, states and everything that
is not a matrix stay float32.

Shapes: tokens [B], x [B, C], logits [B, V]; states as in `tost.nn.state`.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.generation.flat import Affine, Layer, StateForm, Statistics, flat_obstacles
from tost.models import LanguageToST
from tost.nn import BlockState, CausalBlock, CausalTSSAttention, LearnedPositions, ModelState
from tost.ops import TSSAState
from tost.ops import _library as library
from tost.ops.form import Form

Weights = Literal["fp32", "bf16", "int8"]
WEIGHTS: tuple[Weights, ...] = ("fp32", "bf16", "int8")


def native_obstacles(model: nn.Module) -> list[str]:
    """Return what prevents a `NativeStep` for a model; an empty list means that it computes the same."""
    if found := flat_obstacles(model) or library.unavailable():
        return found
    parameters = list(model.parameters())
    backend = cast(LanguageToST, model).options.backend
    checks = {
        "its mixer is not TSSA": not all(
            isinstance(block.attention, CausalTSSAttention) for block in cast(LanguageToST, model).blocks
        ),
        "its parameters are not all float32": any(p.dtype != torch.float32 for p in parameters),
        "it is not on a CPU": any(p.device.type != "cpu" for p in parameters),
        f"its backend is {backend}": backend not in ("auto", "native"),
    }
    return [reason for reason, true in checks.items() if true]


def pack_rows(weight: Tensor, weights: Weights) -> tuple[Tensor, Tensor | None]:
    """Return a matrix ``[R, C]`` as a step stores it.

    Args:
        weight: float32 ``[R, C]``.
        weights: ``"fp32"`` as it is; ``"bf16"`` with 8 bits of precision instead of 24; ``"int8"`` as whole numbers
            from -127 to 127 times a scale per row, which is the row's largest entry over 127.

    Returns:
        The matrix, and for bytes the scale of every row, ``[R]``.
    """
    if weights == "fp32":
        return weight.contiguous(), None
    if weights == "bf16":
        return weight.to(torch.bfloat16).contiguous(), None
    scale = weight.abs().amax(dim=1).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
    return (weight / scale.unsqueeze(1)).round_().to(torch.int8).contiguous(), scale


@torch.no_grad()
def round_weights(model: nn.Module, weights: Weights) -> None:
    """Round the matrices of a model in place, to what a step with such weights computes with; for measuring the loss.

    Args:
        model: A `LanguageToST`. An output layer that is tied to the embedding becomes one of its own:
            tokens are looked up as they are.
        weights: As in `pack_rows`.
    """
    language = cast(LanguageToST, model)
    if language.head is None:
        size, width = language.tokens.weight.shape
        language.head = nn.Linear(width, size, bias=False).to(language.tokens.weight)
        language.head.weight.copy_(language.tokens.weight)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            packed, scale = pack_rows(module.weight, weights)
            module.weight.copy_(packed if scale is None else packed * scale.unsqueeze(1))


class NativeStep:
    """`decode_step` of one model, for as long as its parameters stay what they are.

    States are not checked: see `StateForm`.

    Args:
        model: A model without `native_obstacles`.
        weights: How matrices are stored; see `pack_rows`. Anything but ``"fp32"`` is a copy.

    Raises:
        ConfigError: There is no such way of storing them.
    """

    @torch.no_grad()
    def __init__(self, model: LanguageToST, weights: Weights = "fp32") -> None:
        if weights not in WEIGHTS:
            raise ConfigError(f"weights={weights!r} is not known; it takes one of {', '.join(WEIGHTS)}.")
        options = model.options
        self._weights = weights
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[weights]
        self._alive: list[Tensor] = []  # the library has their addresses only
        self._sums = StateForm(model).sums
        self._tokens = model.tokens.weight.detach()
        self._positions = model.positions.weight.detach() if isinstance(model.positions, LearnedPositions) else None
        self._waves = model._position_vectors if self._positions is None and model.positions is not None else None
        self._last = options.max_length - 1
        layers = [Layer.of(cast(CausalBlock, block)) for block in model.blocks]
        self._widths = [[len(taps) for taps in (layer.conv, layer.conv_mlp) if taps is not None] for layer in layers]
        self._layers = (library.Layer * len(layers))(*map(self._layer, layers))
        self._places = [
            [place for place in (layer.conv, layer.conv_mlp) if place.taps is not None] for layer in self._layers
        ]
        self._step = library.Step(C=options.embed_dim, H=options.num_heads, hidden=options.hidden_dim)
        self._step.depth, self._step.bias_length, self._step.layers = len(layers), options.max_length, self._layers
        self._step.norm = self._norm(Affine.of(model.norm), model.norm.eps)
        head = self._tokens if model.head is None else model.head.weight
        self._step.head = self._matrix(Affine(head, None))
        self._size = len(head)

    def __call__(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Advance every row by one token; see `decode_step`.

        Positions are not checked: after the last one it goes on as with ``after_last_position="repeat"``.
        """
        step, count, depth = self._step, tokens.shape[0], len(self._layers)
        position, place = state.position.contiguous(), state.position.clamp_max(self._last)
        x = F.embedding(tokens, self._tokens)
        if self._positions is not None:
            x = x + F.embedding(place, self._positions)
        if self._waves is not None:
            x = x + self._waves(1, position, None, x.device).squeeze(1)
        squares, weighted, mass = (x.new_empty(depth, count, *shape).unbind(0) for shape in self._sums)
        after = list(zip(squares, weighted, mass, strict=True))
        windows = [[x.new_empty(count, width - 1, x.shape[1]) for width in widths] for widths in self._widths]
        alive = [self._point(*each) for each in zip(range(depth), state.layers, after, windows, strict=True)]
        logits = x.new_empty(count, self._size)
        step.threads, step.B = library.num_threads(), count
        step.position, step.place = position.data_ptr(), place.data_ptr()
        step.x, step.logits = x.data_ptr(), logits.data_ptr()
        library.run_step(self._dtype, step)
        del alive  # what the addresses point to had to stay until here
        reached = position + 1
        mixers = [TSSAState(*each, reached) for each in after]
        layers = [BlockState(m, tuple(w)) if w else m for m, w in zip(mixers, windows, strict=True)]
        return logits, ModelState(tuple(layers))

    def _point(self, index: int, before: Any, after: tuple[Tensor, ...], windows: list[Tensor]) -> list[Tensor]:
        """Set the addresses of a layer's state and of the next one; returns what must stay alive meanwhile."""
        layer = self._layers[index]
        mixer, kept = before if isinstance(before, BlockState) else (before, ())
        given = [x.contiguous() for x in (*cast(TSSAState, mixer)[:3], *kept)]
        layer.squares_in, layer.weighted_in, layer.mass_in = (x.data_ptr() for x in given[:3])
        layer.squares, layer.weighted, layer.mass = (x.data_ptr() for x in after)
        for conv, window_in, window in zip(self._places[index], given[3:], windows, strict=True):
            conv.window_in, conv.window = window_in.data_ptr(), window.data_ptr()
        return given

    def _layer(self, layer: Layer) -> library.Layer:
        by = cast(Statistics, layer.mixer)
        bias = None if by.position_bias is None else by.position_bias.t()
        options = dict(by.operator_options)
        decay = options.pop("decay")
        if by.forget is not None:  # then that was the decay of no token
            decay, rows = None, len(by.forget.weight)
            options |= {"token_decay": True, "channel_decay": rows > len(by.temperature)}
        heads = Affine(by.head_norm, None) if by.head_norm is not None else None
        return library.Layer(
            norm1=self._norm(layer.norm1, layer.eps[0]),
            norm2=self._norm(layer.norm2, layer.eps[1]),
            heads=library.Norm() if heads is None else self._norm(heads, CausalTSSAttention.norm_eps),
            conv=self._convolution(layer.conv),
            conv_mlp=self._convolution(layer.conv_mlp),
            proj_in=self._matrix(layer.attention_in),
            forget=library.Matrix() if by.forget is None else self._matrix(by.forget),
            gate=library.Matrix() if by.gate is None else self._matrix(by.gate),
            proj_out=self._matrix(layer.attention_out),
            mlp_in=self._matrix(layer.mlp_in),
            mlp_out=self._matrix(layer.mlp_out),
            temperature=self._keep(by.temperature),
            bias=self._keep(bias),
            decay=self._keep(decay),
            gamma1=self._keep(layer.gamma1),
            gamma2=self._keep(layer.gamma2),
            form=library.Flags(*Form(**options).flags()),
            tanh=layer.activation == "tanh",
        )

    def _keep(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor, and keep it there."""
        if tensor is None:
            return None
        self._alive.append(tensor.detach().contiguous())
        return self._alive[-1].data_ptr()

    def _norm(self, norm: Affine, eps: float) -> library.Norm:
        return library.Norm(self._keep(norm.weight), self._keep(norm.bias), eps)

    def _convolution(self, taps: Tensor | None) -> library.Convolution:
        return library.Convolution(self._keep(taps), None, None, 1 if taps is None else len(taps))

    def _matrix(self, affine: Affine) -> library.Matrix:
        weight, scale = pack_rows(affine.weight.detach(), self._weights)
        self._alive += [weight] if scale is None else [weight, scale]
        return library.Matrix(weight.data_ptr(), self._keep(scale), self._keep(affine.bias), *weight.shape)
