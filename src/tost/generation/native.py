"""One token through a language model in a single call of the native CPU library.

A step reads every weight once and computes next to nothing, so Python's work between two matrices counts. This step is
`LanguageToST` with causal TSSA in float32; `native_obstacles` lists the parts of a model that it does not have, and
such a model runs its own modules. Its matrices may be stored in fewer bits: then fewer bytes are read per token, and
every weight is rounded once. Sums, states and everything that is not a matrix stay float32.

Shapes: tokens [B], x [B, C], logits [B, V]; states as in `tost.nn.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost import parallel
from tost.errors import ConfigError
from tost.generation.decode import State, decode_step
from tost.models import LanguageToST
from tost.nn import (
    MLP,
    BlockState,
    CausalBlock,
    CausalConvolution,
    CausalTSSAttention,
    GatedTSSAttention,
    LearnedPositions,
    ModelState,
    PaperForm,
    SinusoidalPositions,
)
from tost.nn._checks import has_global_hooks, is_plain
from tost.nn.attention import NORM_EPS
from tost.ops import GatedState, TSSAState
from tost.ops import _library as library
from tost.ops.state import gated_shapes, sum_shapes

Weights = Literal["fp32", "bf16", "int8"]
WEIGHTS: tuple[Weights, ...] = ("fp32", "bf16", "int8")
Step = Callable[[Tensor, State | None], tuple[Tensor, State]]

# Rows from which on torch's matrix products are faster than reading each matrix once for all vectors.
_MANY = 32
# Bytes that one thread reads in some tenths of a millisecond. Meeting another thread takes a hundred times as long if
# its processor is busy with something else.
_ONE_THREAD = 1 << 22
_MODULES = (
    *(LanguageToST, CausalBlock, CausalTSSAttention, GatedTSSAttention, CausalConvolution, MLP),
    *(LearnedPositions, SinusoidalPositions),
    *(nn.Embedding, nn.LayerNorm, nn.Linear, nn.ModuleList),
)
_ATTENTIONS = (CausalTSSAttention, GatedTSSAttention)


def native_obstacles(model: nn.Module) -> list[str]:
    """Return the reasons against a `NativeStep` for a model; an empty list means that it computes the same."""
    if strangers := sorted({type(module).__name__ for module in model.modules() if type(module) not in _MODULES}):
        return [f"it has modules of type {', '.join(strangers)}"]
    if reasons := library.unavailable():
        return reasons
    model = cast(LanguageToST, model)
    blocks = [cast(CausalBlock, block) for block in model.blocks]
    attentions = [block.attention for block in blocks]
    kinds = {type(attention) for attention in attentions}
    paper = [attention for attention in attentions if isinstance(attention, CausalTSSAttention)]
    known = {id(parameter) for parameter in _parameters(model)}
    unknown = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    backend = model.options.backend
    checks = {
        f"it has parameters such as {unknown[:1]}": unknown,
        "its parameters are not all float32": any(p.dtype != torch.float32 for p in model.parameters()),
        "it is not on a CPU": any(p.device.type != "cpu" for p in model.parameters()),
        "its parameters are no plain tensors": not all(map(_is_plain_tensor, model.parameters())),
        "its blocks have several kinds of attention": len(kinds) > 1 or not kinds <= {*_ATTENTIONS},
        "a module has hooks or another forward": has_global_hooks() or not all(map(is_plain, model.modules())),
        "a block has its norms after the sums": any(block.norm != "pre" for block in blocks),
        "an attention has the paper's form": any(attention.paper != PaperForm.free() for attention in paper),
        "an attention adds its bias per head": any(attention.position_bias_form == "head" for attention in paper),
        f"its backend is {backend}": backend not in ("auto", "native"),
        "sequences are shared between processes": parallel.active() is not None,
        "autocast is on": torch.is_autocast_enabled(model.tokens.weight.device.type),
    }
    return [reason for reason, applies in checks.items() if applies]


def _parameters(model: LanguageToST) -> Iterator[Tensor | None]:
    """Return the parameters that the step reads."""
    layers: list[Any] = [model.tokens, model.positions, model.norm, model.head]
    for block in cast(Any, model.blocks):
        a, mlp = block.attention, block.mlp
        layers += [block.norm1, block.norm2, block.conv, block.conv_mlp, mlp.proj_in, mlp.proj_out]
        layers += [getattr(a, name, None) for name in ("proj_in", "proj_out", "proj_gate", "proj_write")]
        yield from (block.gamma1, block.gamma2)
        yield from (getattr(a, name, None) for name in ("temperature", "position_bias", "norm_weight"))
    for layer in layers:
        yield getattr(layer, "weight", None)
        yield getattr(layer, "bias", None)


def _is_plain_tensor(x: Tensor) -> bool:
    """Return whether the memory of a tensor holds its values: no subclass, no lazily negated view."""
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_neg()


def make_step(model: nn.Module, weights: Weights = "fp32") -> Step:
    """Return the fastest `decode_step` of one model.

    Args:
        model: A causal language model, whose parameters stay the same for as long as the function is used.
        weights: Storage of the matrices; see `pack_rows`. Anything but ``"fp32"`` takes the native library.

    Raises:
        ConfigError: The weights cannot be stored like that, and why.
    """
    reasons = native_obstacles(model) if weights in WEIGHTS else [f"it takes one of {', '.join(WEIGHTS)}"]
    if weights != "fp32" and reasons:
        raise ConfigError(f"weights={weights!r} cannot be used: {'; '.join(reasons)}. Leave it out.")
    native = None if reasons else NativeStep(cast(LanguageToST, model), weights)

    def step(tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        few = weights != "fp32" or tokens.shape[0] < _MANY
        if native is None or not few or state is None or not native.fits(tokens, state):
            return decode_step(model, tokens, state)  # the model explains a state that does not fit
        with torch.no_grad():
            return native(tokens, state)

    return step


def step_bytes(model: nn.Module, weights: Weights = "fp32") -> int:
    """Return the bytes of the matrices that a step reads as they are stored: linear layers and the head."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    if isinstance(model, LanguageToST) and model.head is None:
        matrices.append(model.tokens.weight)
    sizes = {"bf16": 2, "int8": 1}
    return sum(matrix.numel() * sizes.get(weights, matrix.element_size()) for matrix in matrices)


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


class NativeStep:
    """`decode_step` of one model, for as long as its parameters stay the same.

    States are not checked by the call, which would read other memory; see `fits`.

    Args:
        model: A model without `native_obstacles`.
        weights: Storage of the matrices; see `pack_rows`. Anything but ``"fp32"`` is a copy.

    Raises:
        ConfigError: There is no such storage.
    """

    @torch.no_grad()
    def __init__(self, model: LanguageToST, weights: Weights = "fp32") -> None:
        if weights not in WEIGHTS:
            raise ConfigError(f"weights={weights!r} is not known; it takes one of {', '.join(WEIGHTS)}.")
        options = model.options
        self._weights = weights
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[weights]
        self._alive: list[Tensor] = []  # the library has their addresses only
        first, heads = model.blocks[0].attention, (options.num_heads, options.embed_dim // options.num_heads)
        # Shapes of a row's state, without the batch.
        if isinstance(first, GatedTSSAttention):
            self._state: Any = GatedState
            shapes = gated_shapes(1, *heads, first.block_size)
        else:
            self._state, shapes = TSSAState, sum_shapes(1, *heads)
        self._sums = tuple(torch.Size(shape[1:]) for shape in shapes)
        self._tokens = model.tokens.weight.detach()
        self._positions = model.positions.weight.detach() if isinstance(model.positions, LearnedPositions) else None
        self._waves = model._position_vectors if self._positions is None and model.positions is not None else None
        self._last = options.max_length - 1
        blocks = [cast(CausalBlock, block) for block in model.blocks]
        convs = [[conv for conv in (block.conv, block.conv_mlp) if conv is not None] for block in blocks]
        self._windows = [[(conv.width - 1, conv.embed_dim) for conv in each] for each in convs]
        self._layers = (library.Layer * len(blocks))(*map(self._layer, blocks))
        self._places = [
            [place for place in (layer.conv, layer.conv_mlp) if place.taps is not None] for layer in self._layers
        ]
        self._step = library.Step(C=options.embed_dim, H=options.num_heads, hidden=options.hidden_dim)
        self._step.depth, self._step.bias_length, self._step.layers = len(blocks), options.max_length, self._layers
        self._step.norm = self._norm(model.norm)
        head = self._tokens if model.head is None else model.head.weight
        self._step.head = self._matrix(head)
        self._size = len(head)
        self._bytes = step_bytes(model, weights)

    def fits(self, tokens: Tensor, state: Any) -> bool:
        """Return whether a state has the shapes and dtypes of this model, for tokens ``[B]``."""
        if not isinstance(state, ModelState) or len(state.layers) != len(self._windows):
            return False
        rows = tokens.shape
        for layer, expected in zip(state.layers, self._windows, strict=True):
            mixer, windows = layer if isinstance(layer, BlockState) else (layer, ())
            if not isinstance(mixer, self._state) or len(windows) != len(expected) or mixer.position.shape != rows:
                return False
            pairs = [*zip(mixer[:3], self._sums, strict=True), *zip(windows, expected, strict=True)]
            if any(x.dtype != torch.float32 or x.shape != (*rows, *shape) for x, shape in pairs):
                return False
        return True

    def __call__(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Advance every row by one token; see `decode_step`.

        Positions are not checked: tokens after the last learned position share it.
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
        windows = [[x.new_empty(count, *shape) for shape in shapes] for shapes in self._windows]
        alive = [self._point(*each) for each in zip(range(depth), state.layers, after, windows, strict=True)]
        logits = x.new_empty(count, self._size)
        step.threads = 1 if self._bytes * count <= _ONE_THREAD else library.num_threads()
        step.B = count
        step.position, step.place = position.data_ptr(), place.data_ptr()
        step.x, step.logits = x.data_ptr(), logits.data_ptr()
        library.run_step(self._dtype, step)
        del alive  # the memory behind the addresses has to stay until here
        mixers = [self._state(*each, position + 1) for each in after]
        layers = [BlockState(m, tuple(w)) if w else m for m, w in zip(mixers, windows, strict=True)]
        return logits, ModelState(tuple(layers))

    def _point(self, index: int, before: Any, after: tuple[Tensor, ...], windows: list[Tensor]) -> list[Tensor]:
        """Set the addresses of a layer's state and of the next one; returns the tensors that must stay alive."""
        layer = self._layers[index]
        mixer, kept = before if isinstance(before, BlockState) else (before, ())
        dense = [x.contiguous() for x in (*mixer[:3], *kept)]
        layer.squares_in, layer.weighted_in, layer.mass_in = (x.data_ptr() for x in dense[:3])
        layer.squares, layer.weighted, layer.mass = (x.data_ptr() for x in after)
        for conv, window_in, window in zip(self._places[index], dense[3:], windows, strict=True):
            conv.window_in, conv.window = window_in.data_ptr(), window.data_ptr()
        return dense

    def _layer(self, block: CausalBlock) -> library.Layer:
        attention, mlp = cast(Any, block.attention), cast(MLP, block.mlp)
        if isinstance(attention, GatedTSSAttention):
            own: dict[str, Any] = {
                "write": self._linear(attention.proj_write),
                "gate": self._linear(attention.proj_gate),
                "heads": library.Norm(self._keep(attention.norm_weight), None, NORM_EPS),
                "block_size": attention.block_size,
            }
        else:
            own = {"temperature": self._keep(attention.temperature), "bias": self._keep(attention.position_bias)}
        return library.Layer(
            norm1=self._norm(block.norm1),
            norm2=self._norm(block.norm2),
            conv=self._convolution(block.conv),
            conv_mlp=self._convolution(block.conv_mlp),
            proj_in=self._linear(attention.proj_in),
            proj_out=self._linear(attention.proj_out),
            mlp_in=self._linear(mlp.proj_in),
            mlp_out=self._linear(mlp.proj_out),
            gamma1=self._keep(block.gamma1),
            gamma2=self._keep(block.gamma2),
            tanh=mlp.activation == "gelu_tanh",
            **own,
        )

    def _keep(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor, and keep it there."""
        if tensor is None:
            return None
        self._alive.append(tensor.detach().contiguous())
        return self._alive[-1].data_ptr()

    def _norm(self, norm: nn.LayerNorm) -> library.Norm:
        return library.Norm(self._keep(norm.weight), self._keep(norm.bias), norm.eps)

    def _convolution(self, conv: CausalConvolution | None) -> library.Convolution:
        taps = None if conv is None else conv.weight.t()
        return library.Convolution(self._keep(taps), None, None, 1 if taps is None else len(taps))

    def _linear(self, linear: nn.Linear | None) -> library.Matrix:
        layer = cast(nn.Linear, linear)
        return self._matrix(layer.weight, layer.bias)

    def _matrix(self, matrix: Tensor, bias: Tensor | None = None) -> library.Matrix:
        weight, scale = pack_rows(matrix.detach(), self._weights)
        self._alive += [weight] if scale is None else [weight, scale]
        return library.Matrix(weight.data_ptr(), self._keep(scale), self._keep(bias), *weight.shape)
