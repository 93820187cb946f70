"""A classifier of sequences, of tokens or of numbers, or of pairs of them: the network of the long-range tasks.

Shapes: ids [B, N] or values [B, N, F] (batch, elements, numbers per element), pairs [B, 2, N] or [B, 2, N, F],
x [B, N, C] with width C, logits [B, K] with K classes, mask [B, N] or [B, 2, N].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.models.common import TokenModel, build_convolutions, build_mixer, check_ids
from tost.models.options import SequenceClassifierOptions
from tost.nn import (
    MLP,
    S4,
    Block,
    BlockTSSAttention,
    LearnedPositions,
    SequenceConvolution,
    SinusoidalPositions,
    run_blocks,
    token_positions,
)
from tost.nn._checks import refuse_context
from tost.nn.mixers import MixerBlock
from tost.ops import Packing
from tost.ops._checks import check_mask
from tost.ops.packing import count_tokens
from tost.parallel import active
from tost.parallel.context import find_packing


def sequence_mixer(options: SequenceClassifierOptions, value_conv: nn.Module | None = None) -> nn.Module:
    """Return a fresh mixer of the blocks of a `SequenceClassifier`; it is called as ``mixer(x, mask)``."""
    o = options
    # A class token is one more than the sequence has.
    chosen = {"max_length": o.max_length + (o.pooling == "cls"), "value_conv": value_conv}
    return build_mixer(o, drop=o.attention_dropout, in_bias=o.mixer_bias, out_bias=o.mixer_bias, **chosen)


class SequenceClassifier(TokenModel):
    """Blocks of non-causal TSSA, or of one of the mixers it is compared with, a pooled vector, and a head.

    The paper trains its long-range models in two code bases and describes neither input nor head. This is the reading
    nearest to Mega's: embeddings scaled by sqrt(C), or an affine map of real-valued input; a head that goes through the
    hidden width of the MLPs and a GELU to classes without a bias. With ``norm="post"`` the blocks normalize after the
    sums and the embedding is normalized first, as there; with ``norm="pre"`` they normalize inside the branches and
    once at the end, as in Skyformer and in the other models of this package. Linear layers start Xavier-uniform.

    With TSSA a token receives from the others only what scales its own features, so the mean over the elements is the
    better pooling; a class token is there for comparison.

    With ``towers=2`` each sample is a pair of sequences. Both go through the same network, apart from each other, and
    the head sees the two pooled vectors side by side, with their product and difference if ``pair="nli"``.

    The layout of S4 is ``block="mixer"`` with ``norm_kind="batch"``: no MLPs, and batch norms.

    Args:
        options: Sizes and choices, kept as ``model.options``.

    Example:
        >>> import torch, tost
        >>> model = tost.create_model("lra_image", depth=2)
        >>> model(torch.rand(3, 100, 1)).shape
        torch.Size([3, 10])
    """

    options: SequenceClassifierOptions

    def __init__(self, options: SequenceClassifierOptions) -> None:
        super().__init__()
        self.options = options
        C, post = options.embed_dim, options.norm == "post"
        self.embedding: nn.Embedding | nn.Linear
        if options.input == "tokens":
            self.embedding = nn.Embedding(options.vocab_size or 0, C)
        else:
            self.embedding = nn.Linear(options.in_features or 0, C)
        self.positions: LearnedPositions | SinusoidalPositions | None = None
        if options.position != "none":
            kind = LearnedPositions if options.position == "learned" else SinusoidalPositions
            self.positions = kind(options.max_length, C)
        self.class_token = nn.Parameter(0.02 * torch.randn(C)) if options.pooling == "cls" else None
        # S4 normalizes in its blocks only.
        self.norm_in = nn.LayerNorm(C) if post and options.block == "mlp" else None
        self.blocks = nn.ModuleList(self._block() for _ in range(1 if options.tied else options.depth))
        self.norm_out = None if post or options.block == "mixer" else nn.LayerNorm(C)
        self.head = self._head()
        self._initialize()

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Classify sequences.

        Args:
            x: int64 ids ``[B, N]``, or floating point values ``[B, N, F]``, according to ``options.input``; with two
                towers ``[B, 2, N]`` or ``[B, 2, N, F]``.
            mask: Real elements, bool ``[B, N]``, or ``[B, 2, N]`` with two towers; padding on either side. A padded
                sequence gives the logits of the sequence without its padding, which may hold anything, as far as the
                mixer allows. With TSSA this always holds; for the others see each class in `tost.nn`.
            cu_seqlens: Cumulative lengths of sequences that are packed into one row (B = 1), int32 ``[S + 1]``; or a
                `Packing`. Each is classified alone. Pairs are packed one after the other, two sequences for each.
            segment_ids: Another way to pack, int64 ``[B, N]``, the same for neighbours of one sequence.

        Returns:
            Logits, ``[B, K]``; ``[S, K]`` for packed sequences. With ``pooling="none"`` those of every element,
            ``[B, N, K]``, or ``[2 B, N, K]`` with two towers.

        Raises:
            ValueError: The input is not of this form, or longer than ``options.max_length``.
            ConfigError: Sequences are packed, but pooled by something else than their mean.
        """
        packing = find_packing(x.shape[:2], cu_seqlens, segment_ids)
        if self.options.towers == 2 and packing is None:
            x, mask = _side_by_side(x, mask)
        pooled = self.features(x, mask, packing)
        if self.options.towers == 2 and self.options.pooling != "none":
            u, v = pooled.reshape(-1, 2, pooled.shape[-1]).unbind(1)
            pooled = torch.cat((u, v, u * v, u - v) if self.options.pair == "nli" else (u, v), dim=-1)
        return self.head(pooled)

    def features(self, x: Tensor, mask: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Return the pooled vector of each sequence, ``[B, C]``; the arguments are those of one tower's `forward`.

        With ``pooling="none"`` it is the vector of each element, ``[B, N, C]``.
        """
        check_mask(mask, x)
        if packing is not None and self.options.pooling not in ("mean", "none"):
            raise ConfigError(
                f"a packed batch is pooled by the mean of each sequence, but this model has pooling="
                f"{self.options.pooling}; use pooling=mean, or pad the sequences."
            )
        tokens = self._embed(x, mask, packing)
        # The beginning of the sequence need not be here where processes share it.
        context = active()
        leads = self.class_token is not None and (context is None or context.rank == 0)
        if self.class_token is not None:
            # The other ranks take none of them, but a parameter that is not used at all would stall data parallelism.
            first = self.class_token.to(tokens.dtype).expand(tokens.shape[0], int(leads), -1)
            tokens = torch.cat((first, tokens), dim=1)
            mask = F.pad(mask, (int(leads), 0), value=True) if mask is not None else None
        if self.norm_in is not None:
            tokens = self.norm_in(tokens)
        tokens = F.dropout(tokens, self.options.dropout, self.training)
        blocks = list(self.blocks) * self.options.depth if self.options.tied else self.blocks
        tokens = run_blocks(blocks, tokens, mask, packing=packing, recompute=self.options.gradient_checkpointing)
        if self.norm_out is not None:
            tokens = self.norm_out(tokens)
        if self.options.pooling == "none":
            return tokens
        if self.class_token is not None:
            # Where the token is not, zeros that depend on x: the backward pass has to meet other processes there too.
            first = tokens[:, : int(leads)].sum(dim=1)
            return first if context is None else context.sum(first)
        if self.options.pooling == "first":
            return _first_real(tokens, mask)
        if packing is not None:
            total = packing.sum(tokens if mask is None else tokens.where(mask.unsqueeze(-1), 0))
            count = packing.num_tokens(mask)
            if context is not None:
                total, count = context.sum(total), context.sum(count)
            return total / count.clamp_min(1).unsqueeze(1)
        return _mean(tokens, mask)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay, `slow_parameters`."""
        return self.slow_parameters()

    def slow_parameters(self) -> set[str]:
        """Name the parameters that learn at a rate of their own, ``optim.slow_lr``: steps and state matrices of S4."""
        layers = [(name, module) for name, module in self.named_modules() if isinstance(module, S4)]
        kernels = {f"{name}.{parameter}" for name, module in layers for parameter in module.kernel_parameters}
        return kernels & {name for name, _ in self.named_parameters()}

    def _embed(self, x: Tensor, mask: Tensor | None, packing: Packing | None) -> Tensor:
        if isinstance(self.embedding, nn.Embedding):
            ids = x if mask is None else x.where(mask, 0)
            check_ids(ids, self.embedding.num_embeddings)
            tokens: Tensor = self.embedding(ids) * math.sqrt(self.options.embed_dim)
        else:
            if x.dim() != 3 or x.shape[-1] != self.embedding.in_features or not x.is_floating_point():
                raise ValueError(
                    f"x has shape {tuple(x.shape)} and dtype {x.dtype}; this model needs floating point values "
                    f"[B, N, {self.embedding.in_features}]. Use x[..., None] for one number per element."
                )
            tokens = self.embedding(x if mask is None else x.where(mask.unsqueeze(-1), 0))
        limit = self.options.max_length
        at = token_positions(x.shape[1], mask=mask, max_length=limit, device=x.device, packing=packing)
        return tokens if self.positions is None else tokens + self.positions(at).to(tokens.dtype)

    def _block(self) -> nn.Module:
        o = self.options
        convs = build_convolutions(o, SequenceConvolution)
        mixer = sequence_mixer(o, convs.pop("value_conv"))
        if o.block == "mixer":
            return MixerBlock(mixer, o.embed_dim, norm=o.norm, norm_kind=o.norm_kind)
        return Block(mixer, MLP(o.embed_dim, o.hidden_dim, drop=o.dropout), o.embed_dim, norm=o.norm, **convs)

    def _head(self) -> nn.Module:
        o = self.options
        width = o.embed_dim * (1 if o.towers == 1 or o.pooling == "none" else 4 if o.pair == "nli" else 2)
        if o.head_kind == "linear":
            return nn.Linear(width, o.num_classes)
        if o.head_kind == "mlp":
            hidden = (nn.Linear(width, o.hidden_dim), nn.GELU())
            return nn.Sequential(*hidden, nn.Linear(o.hidden_dim, o.num_classes, bias=False))
        layers: list[nn.Module] = [nn.Linear(width, o.hidden_dim), nn.ReLU()]
        last = o.hidden_dim
        if o.towers == 2 and o.pair == "concat":
            layers += [nn.Linear(last, last := max(last // 2, 1)), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(last, o.num_classes))

    @torch.no_grad()
    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, BlockTSSAttention):
                module.reset_scale()
        if isinstance(self.embedding, nn.Embedding):
            nn.init.normal_(self.embedding.weight, std=self.options.embed_dim**-0.5)
        else:
            # Mega's: without a bias a norm would leave nothing of a single number but its sign.
            nn.init.normal_(self.embedding.weight, std=self.embedding.in_features**-0.5)
            nn.init.normal_(self.embedding.bias, std=0.1)


def _first_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the first real token of each sequence of x [B, N, C]: [B, C]. None of it is real: the very first."""
    refuse_context("pooling=first")
    if mask is None:
        return x[:, 0]
    return x[torch.arange(x.shape[0], device=x.device), mask.to(torch.uint8).argmax(dim=1)]


def _side_by_side(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Make one batch of pairs [B, 2, N, ...]: [2 B, N, ...]."""
    if x.dim() < 3 or x.shape[1] != 2 or (mask is not None and mask.shape != x.shape[:3]):
        given = "None" if mask is None else tuple(mask.shape)
        raise ValueError(
            f"x has shape {tuple(x.shape)} and mask {given}, but this model compares two sequences: it needs ids "
            "[B, 2, N] or values [B, 2, N, F], and a mask [B, 2, N] or none. Use torch.stack((first, second), dim=1)."
        )
    return x.flatten(0, 1), None if mask is None else mask.flatten(0, 1)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Average the real tokens of x [B, N, C] over all processes that share a sequence; zeros if there are none."""
    context = active()
    total = (x if mask is None else x.where(mask.unsqueeze(-1), 0)).sum(dim=1)
    if context is None:
        count = max(x.shape[1], 1) if mask is None else mask.sum(dim=1, keepdim=True).clamp_min(1)
        return total / count
    count = context.sum(count_tokens(x.shape[1], mask, device=x.device)).clamp_min(1)
    return context.sum(total) / count.unsqueeze(1)
