"""The network without a head, as a model of transformers; the heads are in `causal_lm` and `classification`.

Shapes: input_ids [B, N] (batch, tokens), attention_mask [B, N] or [B, M + N] with M tokens in the cache, embeddings and
hidden states [B, N, C] with width C.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
from transformers import Cache, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from tost.errors import ConfigError
from tost.integrations.transformers import inputs
from tost.integrations.transformers.cache import adopt, read_states, write_states
from tost.integrations.transformers.configuration import TostConfig
from tost.models import LanguageToST
from tost.models.language.model import INITIAL_STD
from tost.nn import CausalBlock, CausalConvolution, CausalTSSAttention, LearnedPositions
from tost.ops import Packing

SHARED = ("tokens", "positions", "blocks", "norm")
"""Modules that `TostModel` and `LanguageToST` have in common, under the same names."""


class TostPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """What `TostModel` and the models with a head share: files, fresh weights and embeddings."""

    config_class = TostConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = {"CausalBlock"}  # noqa: RUF012  declared by the base class
    _is_stateful = True  # a sum cannot give back the tokens of a rejected draft
    _can_compile_fullgraph = True
    _input_embed_layer = "tokens"

    config: TostConfig

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: saved folders name a module that imports this class, so its source is not copied into them."""

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding; the vocabulary follows its size."""
        size = cast(nn.Embedding, value).num_embeddings
        base = cast(TostModel, self.base_model)
        base.tokens = cast(nn.Embedding, value)
        base.options = base.options.model_copy(update={"vocab_size": size})
        self.config.vocab_size = size

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Give one module fresh weights, those of a new `LanguageToST`; what was loaded is marked and stays."""
        if isinstance(module, nn.Linear) and self._ends_branch(module):
            init.normal_(module.weight, std=INITIAL_STD / math.sqrt(2 * self.config.depth))
            if module.bias is not None:
                init.zeros_(module.bias)
            return
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, LearnedPositions):
            init.normal_(module.weight, std=INITIAL_STD)
        elif isinstance(module, CausalConvolution):
            init.normal_(module.weight, std=module.width**-0.5)
        elif isinstance(module, CausalTSSAttention):
            init.ones_(module.temperature)
            if module.position_bias is not None:
                init.zeros_(module.position_bias)
            if module.decay_logit is not None:
                init.copy_(module.decay_logit, module._initial_forgetting().to(module.decay_logit))
            if module.norm_weight is not None:
                init.ones_(module.norm_weight)
            if module.extensions.unit_variance:
                init.normal_(module.proj_in.weight, std=module.embed_dim**-0.5)
        elif isinstance(module, CausalBlock):
            for gamma in (module.gamma1, module.gamma2):
                if gamma is not None:
                    init.constant_(gamma, cast(float, self.config.layer_scale))

    def _ends_branch(self, module: nn.Module) -> bool:
        """Tell whether a layer is the last of a residual branch, whose weights start smaller."""
        blocks = cast(Iterable[CausalBlock], self.base_model.blocks)
        return any(module in (block.attention.proj_out, block.mlp.proj_out) for block in blocks)


class Recomputed(GradientCheckpointingLayer):
    """The call of a block. transformers marks those layers of this kind that the backward pass computes once more.

    It has no parameters, so that the blocks, their names and their weights are those of `LanguageToST`.
    """

    def forward(self, x: Tensor, mask: Tensor | None, *, block: CausalBlock, packing: Packing | None) -> Tensor:
        """Return what the block gives for tokens x ``[B, N, C]``."""
        return cast(Tensor, block(x, mask, packing=packing))


class TostModel(TostPreTrainedModel):
    """The network of `tost.models.LanguageToST` up to its last norm, as ``AutoModel`` builds it.

    Padding on either side is left out exactly, positions count real tokens, and a batch gives what its rows give alone.

    Args:
        config: The options.

    Raises:
        ConfigError: The options are not usable.

    Example:
        >>> import torch
        >>> from tost.integrations.transformers import TostConfig, TostModel
        >>> model = TostModel(TostConfig(embed_dim=64, depth=2, num_heads=4, vocab_size=256))
        >>> model(torch.randint(256, (2, 10))).last_hidden_state.shape
        torch.Size([2, 10, 64])
    """

    _keys_to_ignore_on_load_unexpected = [r"\bhead\.", r"^lm_head\.", r"^score\."]  # noqa: RUF012  the heads

    # The modules of a LanguageToST are here under their own names, so its way from ids to vectors is used as it is.
    embed = LanguageToST.embed
    add_positions = LanguageToST.add_positions
    _position_vectors = LanguageToST._position_vectors

    def __init__(self, config: TostConfig) -> None:
        super().__init__(config)
        self.options = config.options()
        try:
            network = LanguageToST(self.options)
        except (MemoryError, RuntimeError, TypeError) as error:  # sizes beyond what torch can address
            raise ConfigError(f"a model of these sizes cannot be built: {error}") from error
        self.tokens, self.positions, self.blocks, self.norm = (getattr(network, name) for name in SHARED)
        self.calls = nn.ModuleList(Recomputed() for _ in self.blocks)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the features of every token from those up to it.

        Args:
            input_ids: Tokens, int64 ``[B, N]``.
            attention_mask: 1 for real tokens and 0 for padding, ``[B, N]``, or ``[B, M + N]`` with the M tokens that
                `past_key_values` has seen. Padding may hold any id and reaches no other token.
            past_key_values: What an earlier call returned; it is updated in place. None at the start.
            inputs_embeds: Vectors in place of those that the model has for `input_ids`, ``[B, N, C]``; positions are
                added to them.
            use_cache: Return `past_key_values`; by default as the configuration says, and never in training.
            output_hidden_states: Return the embeddings and what each block gives; the last after the last norm.
            **kwargs: ``position_ids``, which have to be the numbers of the real tokens, counted from 0; where
                sequences are packed into a row, what a padding-free collator gives: ``position_ids`` that return to 0,
                ``cu_seq_lens_q`` and ``cu_seq_lens_k``, or ``seq_idx``; and whatever else transformers may pass,
                which has to be None or False.

        Returns:
            ``last_hidden_state`` ``[B, N, C]``, ``past_key_values`` and ``hidden_states``, as far as asked for.

        Raises:
            ValueError: The input is not of this form, not in the vocabulary, or longer than the model has positions; or
                an argument asks for something that the model does not have.
        """
        hidden_wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        shape = self._input_shape(input_ids, inputs_embeds)
        packing = None
        if past_key_values is None:
            packing = inputs.read_packing(kwargs, shape, inputs.read_mask(attention_mask, shape, None), None)
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training and packing is None)
        if packing is not None and use_cache:
            raise ValueError("a cache holds one text per row, but several are packed into one; pass use_cache=False.")
        cache = None
        if use_cache or past_key_values is not None:
            cache = adopt(past_key_values, self.config.depth, grows=self.config.mixer == "softmax")
        before = [None] * self.config.depth if cache is None else read_states(cache)
        start = None if before[0] is None else before[0].position
        if start is not None and len(start) != shape[0]:
            raise ValueError(
                f"past_key_values holds {len(start)} sequences, but the input {shape[0]}; pass what came from the same "
                "batch, or None at the start of a text."
            )
        mask = inputs.read_mask(attention_mask, shape, cache)
        inputs.check_positions(kwargs.pop("position_ids", None), shape, mask, start)
        inputs.refuse_arguments(kwargs)
        if input_ids is not None:
            x = self.embed(input_ids, start, mask, packing)  # type: ignore[misc]
        else:
            x = self.add_positions(cast(Tensor, inputs_embeds), start, mask, packing)  # type: ignore[misc]
        hidden: list[Tensor] | None = [] if hidden_wanted else None
        after = []
        blocks = cast(Iterable[CausalBlock], self.blocks)
        for block, call, state in zip(blocks, cast(Iterable[Recomputed], self.calls), before, strict=True):
            if hidden is not None:
                hidden.append(x)
            if cache is not None:
                x, state = block.forward_with_state(x, state, mask)
                after.append(state)
            elif call.gradient_checkpointing and self.training:
                x = call(x, mask, block=block, packing=packing)
            else:
                x = block(x, mask, packing=packing)
        if cache is not None:
            write_states(cache, after, x.shape[1])
        x = self.norm(x)
        kept: Any = None if hidden is None else (*hidden, x)
        return BaseModelOutputWithPast(x, cache if use_cache else None, kept)

    def _input_shape(self, ids: Tensor | None, embeddings: Tensor | None) -> torch.Size:
        """Return [B, N] of whichever input is given."""
        if (ids is None) == (embeddings is None):
            given = "neither is" if ids is None else "both are"
            raise ValueError(f"a model needs either input_ids or inputs_embeds, but {given} given.")
        shape = inputs.check_embeddings(embeddings, self.config.embed_dim) if ids is None else ids.shape
        if len(shape) == 2 and shape[1] == 0:
            raise ValueError("there is no token in the input; a text begins with at least one, such as bos_token_id.")
        return shape
