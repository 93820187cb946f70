"""The causal language model of the paper: the layout of GPT-2 with TSSA in place of softmax attention, or with it.

Shapes: ids [B, N] (batch, tokens), x [B, N, C] with width C, logits [B, N, V] with vocabulary V, mask [B, N].
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.errors import ConfigError
from tost.models.common import TokenModel, build_mixer, check_ids
from tost.models.options import LanguageOptions
from tost.nn import (
    MLP,
    CausalBlock,
    CausalConvolution,
    GatedTSSAttention,
    LearnedPositions,
    ModelState,
    SinusoidalPositions,
    linear_cross_entropy,
    run_blocks,
    token_positions,
)
from tost.nn._checks import is_plain_linear
from tost.nn.recompute import recompute
from tost.ops import Packing
from tost.ops._checks import check_mask
from tost.parallel import active
from tost.parallel.context import find_packing

INITIAL_STD = 0.02


class LanguageToST(TokenModel):
    """A causal language model; with TSSA its state is of constant size.

    .. code-block:: text

        x = tokens[ids] + positions
        x = x + gamma1 * attention(norm1(x)),  x = x + gamma2 * mlp(norm2(x))        for every block
        logits = norm(x) @ tokens^T

    It is the authors' network: LayerScale on both branches, exact GELU, a bias per head and position in every
    attention. Weights start as N(0, 0.02), those at the end of a residual branch as N(0, 0.02 / sqrt(2 depth)),
    temperatures as 1, position biases as 0. With ``mixer="softmax"`` and without layer scale it is GPT-2. Not in
    the paper and off by default: convolutions (`CausalConvolution`), and ``mixer="tssa_plus"`` (`GatedTSSAttention`).

    Sinusoidal positions are scaled to the size of a fresh embedding, so that they do not drown the tokens.

    Args:
        options: Sizes and choices, kept as ``model.options``.

    Example:
        >>> import torch, tost
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> logits, state = model.forward_with_state(torch.randint(256, (1, 10)))
        >>> logits, state = model.forward_with_state(torch.randint(256, (1, 1)), state)
        >>> logits.shape, state.position.tolist()
        (torch.Size([1, 1, 256]), [11])
    """

    options: LanguageOptions

    def __init__(self, options: LanguageOptions) -> None:
        super().__init__()
        self.options = options
        C, V = options.embed_dim, options.vocab_size
        self.tokens = nn.Embedding(V, C)
        self.positions: LearnedPositions | SinusoidalPositions | None = None
        if options.position != "none":
            learned = options.position == "learned"
            self.positions = LearnedPositions(options.max_length, C) if learned else SinusoidalPositions(None, C)
        self.blocks = nn.ModuleList(self._block() for _ in range(options.depth))
        self.norm = nn.LayerNorm(C, bias=options.bias)
        # A tied head is the embedding itself, not a second name for it: every weight is stored once.
        self.head = None if options.tie_head else nn.Linear(C, V, bias=False)
        self._initialize()

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        chunk: int | None = None,
        truncate: int | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token after every token.

        Args:
            ids: Tokens, int64 ``[B, N]``.
            mask: Real tokens, bool ``[B, N]``, padding on either side. Positions count real tokens only. Padding may
                hold any id and reaches no other token; its logits mean nothing.
            targets: Tokens to be predicted; then the result is ``loss(ids, targets, mask, reduction="sum")``, which
                wrappers around the model, such as data parallelism, only reach through this function.
            chunk: Tokens per piece of the loss; only with `targets`.
            truncate: Pieces after which the gradient of the loss is cut off; only with `chunk`.
            cu_seqlens: Cumulative lengths of texts that are packed into one row (B = 1), int32 ``[S + 1]``; or a
                `Packing`. Each text is taken alone, from position 0 on. Where processes share the row, it is that of
                the whole row.
            segment_ids: Another way to pack, int64 ``[B, N]``, the same for neighbours of one text. Where processes
                share the rows, those of the tokens here.

        Returns:
            Logits, ``[B, N, V]``; with `targets` a scalar.

        Raises:
            ValueError: The input is not of this form, or longer than the model's positions.
        """
        packing = find_packing(ids.shape, cu_seqlens, segment_ids, chunk=chunk)
        if targets is not None:
            return self.loss(ids, targets, mask, reduction="sum", chunk=chunk, truncate=truncate, cu_seqlens=packing)
        return self.logits(self._features(ids, mask, packing))

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        mask: Tensor | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        ignore_index: int = -100,
        chunk: int | None = None,
        truncate: int | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the cross-entropy of the predictions in nats, without ever holding all logits.

        With `chunk` it never holds the activations of a whole sequence either: each piece continues from the state
        after the one before, and is computed again in the backward pass, the last one first. Gradients are those of
        the whole sequence, since they flow through the states. Memory is that of one piece plus a state per piece, so
        with a state of constant size there is no limit on the length.

        Args:
            ids: Tokens, int64 ``[B, N]``.
            targets: The token after each of them, int64 ``[B, N]``.
            mask: Real tokens, bool ``[B, N]``, as in `forward`; padding predicts nothing.
            reduction: ``"mean"`` over the predicted tokens, or ``"sum"``. Where processes share a sequence, a mean is
                this process's share of it; see `ContextParallel.mean_loss`.
            ignore_index: A target that does not count.
            chunk: Tokens per piece; None takes the sequence as a whole.
            truncate: Cut the gradient after every so many pieces (truncated back-propagation); None never does.
            cu_seqlens: Cumulative lengths of packed texts, as in `forward`. The target of a text's last token counts as
                any other: give it `ignore_index` if it is the first token of the next text.
            segment_ids: The text of each token, as in `forward`.

        Returns:
            A scalar; see `tost.nn.linear_cross_entropy`.

        Raises:
            ValueError: As in `forward`, or the targets are not of this form, or `chunk` or `truncate` is not positive.
            ConfigError: `chunk` is given, but the mixer has no state, or one that grows with packed texts.
        """
        packing = find_packing(ids.shape, cu_seqlens, segment_ids, chunk=chunk)
        if targets.shape != ids.shape:
            raise ValueError(
                f"targets have shape {tuple(targets.shape)}, but ids {tuple(ids.shape)}; there is one target per token."
            )
        if mask is not None:
            targets = targets.where(mask, ignore_index)
        if chunk is None:
            if truncate is not None:
                raise ValueError(f"truncate={truncate} counts pieces, but there is no chunk; give both, or neither.")
            total = self._cross_entropy(self._features(ids, mask, packing), targets, ignore_index)
        else:
            total = self._loss_by_pieces(ids, targets, mask, ignore_index, chunk, truncate, packing)
        if reduction == "sum":
            return total
        count, context = (targets != ignore_index).sum(), active()
        return total / count.clamp_min(1) if context is None else context.mean_loss(total, count)

    def _loss_by_pieces(
        self,
        ids: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        ignore_index: int,
        chunk: int,
        truncate: int | None,
        packing: Packing | None,
    ) -> Tensor:
        """Return the summed loss; see `loss`."""
        if chunk < 1 or (truncate is not None and truncate < 1):
            raise ValueError(f"chunk={chunk} and truncate={truncate} must be at least 1, or None.")
        if packing is not None and self.options.mixer == "softmax":
            raise ConfigError(
                f"chunk={chunk} cuts packed texts where the state has a constant size, but that of softmax attention "
                "grows with its text; leave chunk out, or use another mixer."
            )

        def piece(begin: int, state: ModelState | None) -> tuple[Tensor, ModelState]:
            part, here = slice(begin, begin + chunk), None
            if packing is not None:
                here = packing.piece(begin, min(begin + chunk, ids.shape[1]))
                state = None if state is None else state.go_on(here.goes_on)
            x, after = self.features_with_state(
                ids[:, part],
                state,
                None if mask is None else mask[:, part],
                None if here is None else here.packing,
            )
            after = after if here is None else after.select(here.last)
            return self._cross_entropy(x, targets[:, part], ignore_index), after

        run = partial(recompute, piece) if torch.is_grad_enabled() else piece
        total, state = run(0, None)
        for index, begin in enumerate(range(chunk, ids.shape[1], chunk), start=1):
            if truncate is not None and index % truncate == 0:
                state = state.detach()
            loss, state = run(begin, state)
            total = total + loss
        return total

    def forward_with_state(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Continue sequences of which `state` has seen the beginning: a whole prompt, a piece, or one token.

        Args:
            ids: The next tokens, int64 ``[B, N]``.
            state: The state returned with the tokens before; None at the start.
            mask: Real tokens, bool ``[B, N]``, as in `forward`.
            cu_seqlens: Cumulative lengths of packed texts, as in `forward`; states then have an entry for each.
            segment_ids: The text of each token, as in `forward`.

        Returns:
            Logits, ``[B, N, V]``, and the state after these tokens. Logits of pieces are those of the whole.

        Raises:
            ValueError: As in `forward`, or the state belongs to another batch or another model.
        """
        x, after = self.features_with_state(ids, state, mask, find_packing(ids.shape, cu_seqlens, segment_ids))
        return self.logits(x), after

    def features_with_state(
        self, ids: Tensor, state: ModelState | None = None, mask: Tensor | None = None, packing: Packing | None = None
    ) -> tuple[Tensor, ModelState]:
        """Do as `forward_with_state` up to the last block, and return ``[B, N, C]`` and the state after these tokens.

        `logits` of the tokens that are wanted does the rest.
        """
        if state is not None:
            self._check_state(state, ids, packing)
        x = self.embed(ids, None if state is None else state.position, mask, packing)
        layers = []
        again = self.options.gradient_checkpointing and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks):
            before = None if state is None else state.layers[index]
            run = partial(cast(CausalBlock, block).forward_with_state, packing=packing)
            x, after = recompute(run, x, before, mask) if again else run(x, before, mask)
            layers.append(after)
        return x, ModelState(tuple(layers))

    def logits(self, x: Tensor) -> Tensor:
        """Turn outputs of the last block, ``[..., C]``, into logits ``[..., V]``."""
        x = self.norm(x)
        if self.head is not None:
            return self.head(x)
        self._check_tied(x)
        return F.linear(x, self.tokens.weight)

    def _check_state(self, state: ModelState, ids: Tensor, packing: Packing | None) -> None:
        if len(state.layers) != len(self.blocks):
            raise ValueError(
                f"the state has {len(state.layers)} layers, but this model has {len(self.blocks)}; "
                "pass the state that this model returned, or None at the start of a sequence."
            )
        sequences = ids.shape[0] if packing is None else packing.num_sequences
        if state.position.shape[0] != sequences:
            packed = "" if packing is None else f" with {sequences} packed sequences"
            raise ValueError(
                f"the state holds {state.position.numel()} sequences, but ids have shape {tuple(ids.shape)}{packed}; "
                "pass the state that came from the same batch, or None at the start of a sequence."
            )

    def _cross_entropy(self, x: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        """Return the summed loss of outputs of the last block; without all logits where the head is only a matrix."""
        x = self.norm(x)
        if self.head is not None and not is_plain_linear(self.head):
            logits = self.head(x).flatten(0, -2).float()
            return F.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction="sum")
        self._check_tied(x)
        weight = self.tokens.weight if self.head is None else self.head.weight
        return linear_cross_entropy(x, weight, targets, ignore_index=ignore_index, reduction="sum")

    def _check_tied(self, x: Tensor) -> None:
        """Refuse an embedding that is offloaded: its weight is only there while the embedding is called."""
        if self.head is None and self.tokens.weight.is_meta and not x.is_meta:
            raise ConfigError(
                "the output layer of this model is its token embedding, which is on the meta device while it is not "
                "called, as offloading leaves it; keep the embedding where the model runs, or use tie_head=false."
            )

    def _features(self, ids: Tensor, mask: Tensor | None, packing: Packing | None) -> Tensor:
        x = self.embed(ids, None, mask, packing)
        return run_blocks(self.blocks, x, mask, packing=packing, recompute=self.options.gradient_checkpointing)

    def embed(self, ids: Tensor, start: Tensor | None, mask: Tensor | None, packing: Packing | None = None) -> Tensor:
        """Return the input of the first block: token vectors plus position vectors, ``[B, N, C]``.

        Args:
            ids: Token ids, ``[B, N]``.
            start: Tokens that came before, ``[B]``, or ``[S]`` for packed texts; None for none.
            mask: True where a token counts, ``[B, N]``; None if all do.
            packing: Where texts begin, if several are packed into a row.
        """
        check_mask(mask, ids)
        if mask is not None:
            ids = ids.where(mask, 0)
        check_ids(ids, self.options.vocab_size)
        try:
            x = self.tokens(ids)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise ConfigError(
                "the weights are sharded, and gathered in forward only; call model(ids, targets=targets), or "
                'torch.distributed.fsdp.register_fsdp_forward_method(model, "loss") before model.loss.'
            ) from error
        return self.add_positions(x, start, mask, packing)

    def add_positions(
        self, x: Tensor, start: Tensor | None, mask: Tensor | None, packing: Packing | None = None
    ) -> Tensor:
        """Add position vectors to token vectors ``[B, N, C]``, then apply dropout; see `embed`."""
        if self.positions is not None:
            x = x + self._position_vectors(x.shape[1], start, mask, x.device, packing).to(x.dtype)
        return F.dropout(x, self.options.dropout) if self.training and self.options.dropout > 0 else x

    def _position_vectors(
        self,
        num_tokens: int,
        start: Tensor | None,
        mask: Tensor | None,
        device: torch.device,
        packing: Packing | None = None,
    ) -> Tensor:
        learned, length = isinstance(self.positions, LearnedPositions), self.options.max_length
        limit = length if learned else None
        at = token_positions(num_tokens, mask=mask, start=start, max_length=limit, device=device, packing=packing)
        vectors: Tensor = cast(nn.Module, self.positions)(at)
        return vectors if learned else vectors * (INITIAL_STD * math.sqrt(2))

    def _block(self) -> CausalBlock:
        o, C = self.options, self.options.embed_dim
        mlp = MLP(C, o.hidden_dim, bias=o.bias, drop=o.dropout, activation=o.activation)
        bias = "feature" if o.position == "learned" else None
        mixer = build_mixer(o, in_bias=o.bias, out_bias=o.bias, max_length=o.max_length, position_bias=bias)

        def conv(at: str) -> CausalConvolution | None:
            if not o.conv_width or o.conv_at not in (at, "both"):
                return None
            return CausalConvolution(C, width=o.conv_width, start=o.conv_start if at == "attention" else "random")

        return CausalBlock(
            mixer, mlp, C, norm_bias=o.bias, layer_scale=o.layer_scale, conv=conv("attention"), conv_mlp=conv("mlp")
        )

    @torch.no_grad()
    def _initialize(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith(".proj_out")
                scale = 1 / math.sqrt(2 * self.options.depth) if residual else 1.0
                nn.init.normal_(module.weight, std=INITIAL_STD * scale)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, GatedTSSAttention):
                module.reset_scale()
