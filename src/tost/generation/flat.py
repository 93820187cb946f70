"""One token through a language model without the cost of its modules.

A step reads every weight once and computes next to nothing, so what Python does between two matrices counts: calling a
hundred modules takes as long as reading a fifth of the weights of a base model. This step is `LanguageToST` with TSSA
or gated means written out over a list of tensors. `flat_obstacles` lists what a model has that is not written out here;
such a model runs its own modules.

Shapes: tokens [B], x [B, C] (batch, width), w [B, 1, H, D] with C = H * D, window [B, K - 1, C] for K taps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost import parallel
from tost.models import LanguageToST
from tost.nn import (
    MLP,
    BlockState,
    CausalBlock,
    CausalConvolution,
    CausalTSSAttention,
    GatedTSSA,
    LearnedPositions,
    MinGRU,
    ModelState,
    PaperForm,
    SinusoidalPositions,
)
from tost.nn.state import RecurrentState
from tost.ops import TSSAState, causal_tssa_with_state
from tost.ops.form import Form, OperatorOptions
from tost.ops.state import sum_shapes

_MODULES = (
    *(LanguageToST, CausalBlock, CausalTSSAttention, GatedTSSA, MinGRU, CausalConvolution, MLP),
    *(LearnedPositions, SinusoidalPositions),
    *(nn.Embedding, nn.LayerNorm, nn.Linear, nn.ModuleList),
)
_PARAMETERS = re.compile(
    r"tokens\.weight|positions\.weight|head\.weight|norm\.(weight|bias)|blocks\.\d+\.("
    r"gamma[12]|norm[12]\.(weight|bias)|(attention|mlp)\.proj_(in|out)\.(weight|bias)|conv(_mlp)?\.weight|"
    r"attention\.(temperature|share|position_bias|decay_logit|norm_weight|proj_decay\.weight|proj_gate\.weight|proj_gate\.bias))"
)
# Extensions that a step has: those of the operator, which it passes on, and those that are written out here.
_EXTENSIONS = {
    *(field.name for field in fields(OperatorOptions)),
    *("gate", "forget", "after_last_position", "head_norm", "unit_variance"),
}
# Options that are seen in the modules and parameters, or that make no difference to a step.
_OPTIONS = {
    *("embed_dim", "depth", "num_heads", "mlp_ratio", "vocab_size", "max_length", "layer_scale", "bias", "tie_head"),
    *(
        "mixer",
        "activation",
        "position",
        "conv_width",
        "conv_at",
        "conv_start",
        "dropout",
        "gradient_checkpointing",
        "backend",
    ),
    *_EXTENSIONS,
}


def flat_obstacles(model: nn.Module) -> list[str]:
    """Return what prevents a `FlatStep` for a model; an empty list means that it computes the same."""
    if strangers := sorted({type(module).__name__ for module in model.modules() if type(module) not in _MODULES}):
        return [f"it has modules of type {', '.join(strangers)}"]
    model = cast(LanguageToST, model)
    blocks = [cast(CausalBlock, block) for block in model.blocks]
    attentions = [block.attention for block in blocks if isinstance(block.attention, CausalTSSAttention)]
    plain = PaperForm(step_size=None, tied=False, shared_temperature=False)
    known = type(model.options).model_fields
    chosen = [name for name in known if name not in _OPTIONS and getattr(model.options, name) != known[name].default]
    unknown = [name for name, _ in model.named_parameters() if not _PARAMETERS.fullmatch(name)]
    checks = {
        f"the options {', '.join(chosen)} are set": chosen,
        f"it has parameters such as {unknown[:1]}": unknown,
        "an attention has extensions that came later": any(map(_extended, attentions)),
        "a module has hooks": any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()),
        "a block has its norms after the sums": any(block.norm != "pre" for block in blocks),
        "an attention has the paper's form": any(attention.paper != plain for attention in attentions),
        "an attention adds its bias per head": any(attention.position_bias_form == "head" for attention in attentions),
        "sequences are shared between processes": parallel.active() is not None,
        "autocast is on": torch.is_autocast_enabled(model.tokens.weight.device.type),
    }
    return [reason for reason, found in checks.items() if found]


def _extended(attention: CausalTSSAttention) -> bool:
    """Return whether an attention has an extension that this step does not have."""
    later = [field for field in fields(attention.extensions) if field.name not in _EXTENSIONS]
    return any(getattr(attention.extensions, field.name) != field.default for field in later)


class Affine(NamedTuple):
    """Weight and bias of a linear layer or a norm."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Module | None) -> Affine:
        """Return those of a module that has both."""
        return cls(cast(Tensor, cast(Any, module).weight), cast("Tensor | None", cast(Any, module).bias))


Decay = Callable[[Tensor], Tensor | None]
"""Finds the decays of tokens, from [B, 1, C]."""


class Statistics(NamedTuple):
    """What the operator of causal TSSA takes besides tokens, and what is done to its output."""

    temperature: Tensor
    position_bias: Tensor | None
    operator_options: dict[str, Any]
    decay: Decay | None
    forget: Affine | None  # what `decay` computes with: a sigmoid of it
    backend: str
    head_norm: Tensor | None
    gate: Affine | None

    @classmethod
    def of(cls, attention: CausalTSSAttention) -> Statistics:
        """Return those of an attention."""
        bias, rates, gate = attention.position_bias, attention.proj_decay, attention.proj_gate
        return cls(
            attention.temperature,
            None if bias is None else bias.t(),
            attention.operator_options(),
            None if rates is None else attention.decay,
            None if rates is None else Affine(rates.weight, attention.decay_logit),
            attention.backend,
            attention.norm_weight,
            None if gate is None else Affine.of(gate),
        )


class Layer(NamedTuple):
    """The tensors of a block, in the order of their use."""

    norm1: Affine
    conv: Tensor | None
    attention_in: Affine
    mixer: Statistics | GatedTSSA | MinGRU
    attention_out: Affine
    gamma1: Tensor | None
    norm2: Affine
    conv_mlp: Tensor | None
    mlp_in: Affine
    activation: str
    mlp_out: Affine
    gamma2: Tensor | None
    eps: tuple[float, float]

    @classmethod
    def of(cls, block: CausalBlock) -> Layer:
        """Return those of a block with causal TSSA or a gated mean, and an MLP."""
        attention, mlp = cast(CausalTSSAttention | GatedTSSA | MinGRU, block.attention), cast(MLP, block.mlp)
        return cls(
            Affine.of(block.norm1),
            _taps(block.conv),
            Affine.of(attention.proj_in),
            Statistics.of(attention) if isinstance(attention, CausalTSSAttention) else attention,
            Affine.of(attention.proj_out),
            block.gamma1,
            Affine.of(block.norm2),
            _taps(block.conv_mlp),
            Affine.of(mlp.proj_in),
            "none" if mlp.activation == "gelu" else "tanh",
            Affine.of(mlp.proj_out),
            block.gamma2,
            (block.norm1.eps, block.norm2.eps),
        )


class StateForm:
    """The shapes and dtypes of a model's states. Steps do not check them, and the native one would read other memory.

    Args:
        model: A model without `flat_obstacles`.

    Attributes:
        sums: Shapes of the three sums of a layer, without the batch.
    """

    def __init__(self, model: LanguageToST) -> None:
        options = model.options
        heads, extensions = (options.num_heads, options.embed_dim // options.num_heads), options.extensions()
        forget = extensions.forget
        form = Form(
            **extensions.operator_options(),
            token_decay=forget in ("head", "channel"),
            channel_decay=forget == "channel",
        )
        # Without their first dimension, that of the batch.
        self.sums = tuple(torch.Size(shape[1:]) for shape in sum_shapes(1, *heads, form))
        self._dtype = torch.promote_types(model.tokens.weight.dtype, torch.float32)
        blocks = [cast(CausalBlock, block) for block in model.blocks]
        self._memories = [
            None if isinstance(block.attention, CausalTSSAttention) else cast(MinGRU, block.attention).memory_shape()
            for block in blocks
        ]
        convs = [[conv for conv in (block.conv, block.conv_mlp) if conv is not None] for block in blocks]
        self._windows = [[(conv.width - 1, conv.embed_dim) for conv in each] for each in convs]

    def fits(self, tokens: Tensor, state: Any) -> bool:
        """Return whether a state is one of the model, for tokens ``[B]``."""
        if not isinstance(state, ModelState) or len(state.layers) != len(self._windows):
            return False
        rows = tokens.shape
        for layer, memory, expected in zip(state.layers, self._memories, self._windows, strict=True):
            mixer, windows = layer if isinstance(layer, BlockState) else (layer, ())
            if not isinstance(mixer, TSSAState if memory is None else RecurrentState) or len(windows) != len(expected):
                return False
            *sums, position = mixer
            shapes = self.sums if memory is None else (torch.Size(memory),)
            if position.shape != rows or any(x.dtype != self._dtype for x in sums):
                return False
            if any(x.shape != rows + shape for x, shape in zip(sums, shapes, strict=True)):
                return False
            if any(window.shape != (*rows, *shape) for window, shape in zip(windows, expected, strict=True)):
                return False
        return True


class FlatStep:
    """`decode_step` of one model, for as long as its parameters stay what they are.

    Args:
        model: A model without `flat_obstacles`.
    """

    @torch.no_grad()
    def __init__(self, model: LanguageToST) -> None:
        options = model.options
        self._width = (options.embed_dim,)
        self._heads = (options.num_heads, options.embed_dim // options.num_heads)
        self._last = options.max_length - 1
        self._tokens = model.tokens.weight
        self._positions, self._waves = None, None
        if isinstance(model.positions, LearnedPositions):
            self._positions = model.positions.weight
        elif model.positions is not None:
            self._waves = model._position_vectors
        self._layers = [Layer.of(cast(CausalBlock, block)) for block in model.blocks]
        self._norm, self._eps = Affine.of(model.norm), model.norm.eps
        self._head = self._tokens if model.head is None else model.head.weight

    def __call__(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Advance every row by one token; see `decode_step`.

        Neither ids nor positions are checked: after the last one it goes on as with ``after_last_position="repeat"``.
        """
        x = F.embedding(tokens, self._tokens)
        place = state.position
        if self._positions is not None:
            place = place.clamp_max(self._last)
            x = x + F.embedding(place, self._positions)
        if self._waves is not None:
            x = x + self._waves(1, place, None, x.device).squeeze(1).to(x.dtype)
        after = []
        for layer, before in zip(self._layers, state.layers, strict=True):
            x, reached = self._block(layer, x, before, place.unsqueeze(1))
            after.append(reached)
        logits = F.linear(F.layer_norm(x, self._width, *self._norm, self._eps), self._head)
        return logits, ModelState(tuple(after))

    def _block(
        self, layer: Layer, x: Tensor, before: Any, place: Tensor
    ) -> tuple[Tensor, TSSAState | RecurrentState | BlockState]:
        mixer, windows = before if isinstance(before, BlockState) else (before, ())
        kept: list[Tensor] = []
        u = F.layer_norm(x, self._width, *layer.norm1, layer.eps[0])
        if layer.conv is not None:
            u = _look(u, layer.conv, windows, kept)
        projected = F.linear(u, *layer.attention_in)
        reached: TSSAState | RecurrentState
        if isinstance(layer.mixer, Statistics):
            w = projected.view(len(x), 1, *self._heads)
            y, reached = self._attend(layer.mixer, u, w, cast(TSSAState, mixer), place)
        else:
            parts, known = projected.view(len(x), 1, layer.mixer.parts, *self._heads), cast(RecurrentState, mixer)
            y, memory = layer.mixer.recur(u.unsqueeze(1), parts, known.memory, None)
            y, reached = y.to(x.dtype).view(x.shape), RecurrentState(memory, known.position + 1)
        x = _add(x, F.linear(y, *layer.attention_out), layer.gamma1)
        u = F.layer_norm(x, self._width, *layer.norm2, layer.eps[1])
        if layer.conv_mlp is not None:
            u = _look(u, layer.conv_mlp, windows, kept)
        hidden = F.gelu(F.linear(u, *layer.mlp_in), approximate=layer.activation)
        x = _add(x, F.linear(hidden, *layer.mlp_out), layer.gamma2)
        return x, BlockState(reached, tuple(kept)) if kept else reached

    def _attend(
        self, by: Statistics, u: Tensor, w: Tensor, before: TSSAState, place: Tensor
    ) -> tuple[Tensor, TSSAState]:
        """Return the output of TSSA [B, C] for the tokens u [B, C], projected to w [B, 1, H, D]."""
        bias = None if by.position_bias is None else F.embedding(place, by.position_bias)
        options = {"state": before, "backend": by.backend, **by.operator_options}
        if by.decay is not None:
            options["decay"] = by.decay(u.unsqueeze(1))
        y, reached = causal_tssa_with_state(w, by.temperature, bias, **options, overwrite=True)
        if by.head_norm is not None:
            weight = by.head_norm.to(y.dtype).view(self._heads)
            y = F.rms_norm(y, self._heads[1:], eps=CausalTSSAttention.norm_eps) * weight
        y = y.view(u.shape)
        if by.gate is not None:
            y = y * F.silu(F.linear(u, *by.gate))
        return y, reached


def _taps(conv: CausalConvolution | None) -> Tensor | None:
    """Return the kernel of a convolution as [K, C]."""
    return None if conv is None else conv.weight.t()


def _look(u: Tensor, taps: Tensor, windows: tuple[Tensor, ...], kept: list[Tensor]) -> Tensor:
    """Return u [B, C] plus its convolution with the tokens before it; the next of the windows moves on into `kept`."""
    seen = torch.cat((windows[len(kept)].to(u.dtype), u.unsqueeze(1)), dim=1)
    kept.append(seen[:, 1:])
    wide = torch.promote_types(u.dtype, torch.float32)
    return u + (seen.to(wide) * taps.to(wide)).sum(dim=1).to(u.dtype)


def _add(x: Tensor, branch: Tensor, gamma: Tensor | None) -> Tensor:
    return x + branch if gamma is None else torch.addcmul(x, gamma, branch)
