"""One token through a language model without the cost of its modules.

A step reads every weight once and computes next to nothing, so what Python does between two matrices counts: calling a
hundred modules takes as long as reading a fifth of the weights of a base model. This step is `LanguageToST` written
out over a list of tensors. `why_not` says when a model has something that is not written out here; it then runs itself.

Shapes: tokens [B], x [B, C] (batch, width), w [B, 1, H, D] with C = H * D.
"""

from __future__ import annotations

import re
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost import parallel
from tost.models import LanguageToST
from tost.nn import MLP, CausalBlock, CausalTSSAttention, Extensions, LearnedPositions, ModelState, PaperForm
from tost.ops import TSSAState, causal_tssa_

__all__ = ["FlatStep", "why_not"]

_MODULES = (
    *(LanguageToST, CausalBlock, CausalTSSAttention, MLP, LearnedPositions),
    *(nn.Embedding, nn.LayerNorm, nn.Linear, nn.ModuleList),
)
_PARAMETERS = re.compile(
    r"tokens\.weight|positions\.weight|head\.weight|norm\.(weight|bias)|blocks\.\d+\.("
    r"gamma[12]|norm[12]\.(weight|bias)|(attention|mlp)\.proj_(in|out)\.(weight|bias)|"
    r"attention\.(temperature|position_bias))"
)
# Options that are seen in the modules and parameters, or that make no difference to a step.
_OPTIONS = {
    *("embed_dim", "depth", "num_heads", "mlp_ratio", "vocab_size", "max_length", "layer_scale", "bias", "tie_head"),
    *("position", "dropout", "gradient_checkpointing", "backend"),
}


def why_not(model: nn.Module) -> list[str]:
    """Return what stands in the way of a `FlatStep` for a model; an empty list means that it computes the same."""
    if strangers := sorted({type(module).__name__ for module in model.modules() if type(module) not in _MODULES}):
        return [f"it has modules of type {', '.join(strangers)}"]
    model = cast(LanguageToST, model)
    blocks = [cast(CausalBlock, block) for block in model.blocks]
    plain = PaperForm(step_size=None, tied=False, shared_temperature=False)
    fields = type(model.options).model_fields
    chosen = [name for name in fields if name not in _OPTIONS and getattr(model.options, name) != fields[name].default]
    unknown = [name for name, _ in model.named_parameters() if not _PARAMETERS.fullmatch(name)]
    checks = {
        f"the options {', '.join(chosen)} are set": chosen,
        f"it has parameters such as {unknown[:1]}": unknown,
        "a module has hooks": any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()),
        "a block has its norms behind the sums": any(block.norm != "pre" for block in blocks),
        "an attention has the paper's form": any(block.attention.form != plain for block in blocks),
        "an attention adds its bias per head": any(block.attention.position_bias_form == "head" for block in blocks),
        "an attention has extensions": any(block.attention.extensions != Extensions() for block in blocks),
        "sequences are shared between processes": parallel.active() is not None,
        "autocast is on": torch.is_autocast_enabled(model.tokens.weight.device.type),
    }
    return [reason for reason, found in checks.items() if found]


class _Affine(NamedTuple):
    """Weight and bias of a linear layer or a norm."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Module) -> _Affine:
        return cls(cast(Tensor, module.weight), cast("Tensor | None", module.bias))


class _Layer(NamedTuple):
    """The tensors of a block, in the order of their use."""

    norm1: _Affine
    attention_in: _Affine
    temperature: Tensor
    position_bias: Tensor | None
    attention_out: _Affine
    gamma1: Tensor | None
    norm2: _Affine
    mlp_in: _Affine
    mlp_out: _Affine
    gamma2: Tensor | None
    eps: tuple[float, float]

    @classmethod
    def of(cls, block: CausalBlock) -> _Layer:
        attention, mlp = cast(CausalTSSAttention, block.attention), cast(MLP, block.mlp)
        return cls(
            _Affine.of(block.norm1),
            _Affine.of(attention.proj_in),
            attention.temperature,
            attention.position_bias,
            _Affine.of(cast(nn.Module, attention.proj_out)),
            block.gamma1,
            _Affine.of(block.norm2),
            _Affine.of(mlp.proj_in),
            _Affine.of(mlp.proj_out),
            block.gamma2,
            (block.norm1.eps, block.norm2.eps),
        )


class FlatStep:
    """`decode_step` of one model, for as long as its parameters stay the same tensors.

    Args:
        model: A model that `why_not` has nothing to say about.
    """

    def __init__(self, model: LanguageToST) -> None:
        options = model.options
        self._width, self._heads, self._backend = options.embed_dim, options.num_heads, options.backend
        self._tokens = model.tokens.weight
        self._positions = None if model.positions is None else cast(LearnedPositions, model.positions).weight
        self._layers = [_Layer.of(cast(CausalBlock, block)) for block in model.blocks]
        self._norm, self._eps = _Affine.of(model.norm), model.norm.eps
        self._head = self._tokens if model.head is None else model.head.weight

    def __call__(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Advance every row by one token; see `decode_step`. Ids and positions are not checked."""
        width = (self._width,)
        x = F.embedding(tokens, self._tokens)
        if self._positions is not None:
            x = x + F.embedding(state.position, self._positions)
        w_shape = (len(x), 1, self._heads, self._width // self._heads)
        after = []
        for layer, before in zip(self._layers, state.layers, strict=True):
            u = F.layer_norm(x, width, *layer.norm1, layer.eps[0])
            w = F.linear(u, *layer.attention_in).view(w_shape)
            y, reached = causal_tssa_(
                w, layer.temperature, layer.position_bias, state=cast(TSSAState, before), backend=self._backend
            )
            after.append(reached)
            x = _add(x, F.linear(y.view(x.shape), *layer.attention_out), layer.gamma1)
            u = F.layer_norm(x, width, *layer.norm2, layer.eps[1])
            x = _add(x, F.linear(F.gelu(F.linear(u, *layer.mlp_in)), *layer.mlp_out), layer.gamma2)
        return F.linear(F.layer_norm(x, width, *self._norm, self._eps), self._head), ModelState(tuple(after))


def _add(x: Tensor, branch: Tensor, gamma: Tensor | None) -> Tensor:
    return x + branch if gamma is None else torch.addcmul(x, gamma, branch)
