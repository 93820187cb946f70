"""The language models as models of transformers: the network without a head, the causal model and the classifier.

Shapes: input_ids [B, N] (batch, tokens), attention_mask [B, N] or [B, M + N] with M tokens in the cache, embeddings and
hidden states [B, N, C] with width C, logits [B, N, V] with vocabulary V or [B, K] with K labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from tost.errors import ConfigError
from tost.integrations.transformers import _inputs as inputs
from tost.integrations.transformers.cache import StateLayer, adopt
from tost.integrations.transformers.configuration import TostConfig
from tost.models import LanguageToST
from tost.nn import CausalBlock, linear_cross_entropy
from tost.ops import Packing
from tost.ops._numerics import statistics_dtype

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
    def initialize_weights(self) -> None:
        """Initialize what was not loaded: the network as a new `LanguageToST`, heads as transformers does."""
        base = cast(TostModel, self.base_model)
        if not getattr(base, "_is_hf_initialized", False):
            missing = {n: p for n, p in base.named_parameters() if not getattr(p, "_is_hf_initialized", False)}
            fresh = LanguageToST(base.options).state_dict() if missing else {}
            for name, parameter in missing.items():
                parameter.copy_(fresh[name])
            for module in base.modules():
                cast(Any, module)._is_hf_initialized = True
        super().initialize_weights()  # type: ignore[no-untyped-call]


class Recomputed(GradientCheckpointingLayer):
    """The call of a block. transformers marks those layers of this kind that the backward pass computes once more.

    It has no parameters, so that the blocks, their names and their weights are those of `LanguageToST`.
    """

    def forward(self, x: Tensor, mask: Tensor | None, *, block: CausalBlock, packing: Packing | None) -> Tensor:
        """Call the block with tokens x ``[B, N, C]``."""
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
        layers = [] if cache is None else cast(list[StateLayer], cache.layers)
        before = [layer.read() for layer in layers] or [None] * self.config.depth
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
            x = cast(Tensor, inputs_embeds)
            if mask is not None:  # padding has the vector of id 0, as in `embed`
                x = x.where(mask.unsqueeze(-1), self.tokens(mask.new_zeros(1, dtype=torch.int64)).to(x.dtype))
            x = self.add_positions(x, start, mask, packing)  # type: ignore[misc]
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
        for layer, state in zip(layers, after, strict=True):
            layer.write(state, x.shape[1])
        x = self.norm(x)
        kept: Any = None if hidden is None else (*hidden, x)
        return BaseModelOutputWithPast(x, cache if use_cache else None, kept)

    def _input_shape(self, ids: Tensor | None, embeddings: Tensor | None) -> torch.Size:
        """Return [B, N] of whichever input is given."""
        if ids is None and embeddings is not None:
            width = self.config.embed_dim
            if embeddings.dim() != 3 or embeddings.shape[-1] != width or not embeddings.is_floating_point():
                raise ValueError(
                    f"inputs_embeds has shape {tuple(embeddings.shape)} and dtype {embeddings.dtype}; this model needs "
                    f"vectors [B, N, {width}]."
                )
            shape = embeddings.shape[:2]
        elif ids is None or embeddings is not None:
            given = "neither is" if ids is None else "both are"
            raise ValueError(f"a model needs either input_ids or inputs_embeds, but {given} given.")
        else:
            shape = ids.shape
        if len(shape) == 2 and shape[1] == 0:
            raise ValueError("there is no token in the input; a text begins with at least one, such as bos_token_id.")
        return shape


class TostForCausalLM(TostPreTrainedModel, GenerationMixin):
    """A `LanguageToST` as a model of transformers.

    ``model.model`` is the network without its head, a `TostModel`; ``model.lm_head`` is the output layer, with the
    weight of the embedding if they are tied. `from_tost` and `to_tost` lead from and to `LanguageToST`, which
    ``tost.generate`` and the rest of this package take. Texts are generated from the state, which ``past_key_values``
    carries; with TSSA its size does not depend on the text. Padding on either side is left out exactly, positions count
    real tokens, and a batch gives what its rows give alone.

    Example:
        >>> import torch
        >>> from tost.integrations.transformers import TostConfig, TostForCausalLM
        >>> config = TostConfig(embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> model = TostForCausalLM(config).eval()
        >>> prompt = torch.randint(256, (2, 10))
        >>> model.generate(prompt, max_new_tokens=5, do_sample=False).shape
        torch.Size([2, 15])
    """

    accepts_loss_kwargs: ClassVar[bool] = True  # the trainer hands in the number of targets of all its batches
    _tied_weights_keys = {"lm_head.weight": "model.tokens.weight"}  # noqa: RUF012  declared by the base class

    model: TostModel
    lm_head: nn.Linear

    def __init__(self, config: TostConfig) -> None:
        super().__init__(config)
        self.model = TostModel(config)
        self.lm_head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_tost(cls, model: nn.Module, **kwargs: Any) -> TostForCausalLM:
        """Wrap a language model of this package. The weights are shared, not copied.

        Args:
            model: A `LanguageToST`, as `tost.create_model`, `tost.load_model` and `tost.load_official` return.
            **kwargs: What else a `TostConfig` takes, such as `eos_token_id`.

        Raises:
            ConfigError: The model is of another kind.

        Example:
            >>> import tost
            >>> from tost.integrations.transformers import TostForCausalLM
            >>> ours = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
            >>> theirs = TostForCausalLM.from_tost(ours, eos_token_id=0)
            >>> theirs.model.blocks is ours.blocks
            True
        """
        if not isinstance(model, LanguageToST):
            raise ConfigError(
                f"{type(model).__name__} is no causal language model of this package (LanguageToST); "
                "transformers and timm have their own classes for the others."
            )
        dtype = model.tokens.weight.dtype
        config = TostConfig.from_options(model.options, dtype=str(dtype).removeprefix("torch."), **kwargs)
        with torch.device("meta"):  # only attributes of this shell are kept
            shell = cls(config)
        for name in SHARED:
            setattr(shell.model, name, getattr(model, name))
        if model.head is None:
            shell.lm_head.weight = model.tokens.weight
        else:
            shell.lm_head = model.head
        if model.options.gradient_checkpointing:
            shell.gradient_checkpointing_enable()
        shell.train(model.training)
        return shell

    def to_tost(self) -> LanguageToST:
        """Return the model as `tost.generate`, `tost.analysis` and the rest of this package take it.

        The modules are shared, not copied: both models stay the same as long as no module of either is replaced.

        Raises:
            ConfigError: The output layer is no plain linear layer, such as one with an adapter that is not merged.
        """
        with torch.device("meta"):  # only attributes of this shell are kept
            network = LanguageToST(self.model.options)
        for name in SHARED:
            setattr(network, name, getattr(self.model, name))
        tied = getattr(self.lm_head, "weight", None) is self.model.tokens.weight
        bias = getattr(self.lm_head, "bias", None)
        if type(self.lm_head) is not nn.Linear or bias is not None or (network.head is None) != tied:
            raise ConfigError(
                f"the output layer is {self.lm_head}, {'tied' if tied else 'not tied'} to the embedding; with "
                f"tie_head={self.config.tie_head} a LanguageToST has a plain linear layer without bias, "
                f"{'tied' if network.head is None else 'not tied'}. Merge adapters first."
            )
        if network.head is not None:
            network.head = self.lm_head
        network.training = self.training
        return network

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token after every token.

        Args:
            input_ids: Tokens, int64 ``[B, N]``.
            attention_mask: Which tokens are real, and which padding; see `TostModel.forward`.
            past_key_values: What an earlier call returned; it is updated in place. None at the start.
            inputs_embeds: Vectors in place of `input_ids`, ``[B, N, C]``.
            labels: The tokens once more, int64 ``[B, N]``, with -100 for those that are not to be predicted. Where the
                mask says padding, no token is predicted, and none predicts.
            logits_to_keep: Compute logits for the last tokens only, this many, or for tokens at these places; 0 for
                all.
            skip_logits: Leave the logits out, which the loss does not need; by default in training with labels, if
                the configuration says so.
            num_items_in_batch: Divide the sum of the losses by this instead of the number of targets.
            **kwargs: ``shift_labels``, labels that are already next to the tokens that predict them, in place of
                `labels`; ``use_cache``, ``output_hidden_states`` and what else `TostModel` takes.

        Returns:
            ``loss`` (scalar, with labels), ``logits``, ``past_key_values`` and ``hidden_states``, as far as asked for.

        Raises:
            ValueError: As in `TostModel.forward`.
        """
        # Not in the signature, where the trainer would take it for something that every batch has to hold.
        shift_labels = kwargs.pop("shift_labels", None)
        out = self.model(input_ids, attention_mask, past_key_values, inputs_embeds, return_dict=True, **kwargs)
        x = out.last_hidden_state
        targets = inputs.shift_targets(labels, shift_labels, attention_mask, x.shape[:2])
        loss: Any = None if targets is None else self._loss(x, targets, num_items_in_batch)
        if skip_logits is None:
            skip_logits = self.config.skip_logits and self.training and targets is not None
        places = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = None if skip_logits else self.lm_head(x[:, places])
        return CausalLMOutputWithPast(loss, logits, out.past_key_values, out.hidden_states)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding, and with it a tied head; the vocabulary follows its size."""
        super().set_input_embeddings(value)
        if self.config.tie_head:
            self.lm_head.weight, self.lm_head.out_features = self.model.tokens.weight, self.model.tokens.num_embeddings

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer.

        Raises:
            ConfigError: It is tied to the embedding, but the new one has another weight.
        """
        if self.config.tie_head and getattr(new_embeddings, "weight", None) is not self.model.tokens.weight:
            raise ConfigError(
                "the output layer of this model has the weight of its token embedding (tie_head=true); replace that "
                "with set_input_embeddings, or build the model with tie_head=False."
            )
        self.lm_head = cast(nn.Linear, new_embeddings)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """Return the mask as it is: there are no scores between pairs of tokens that would need another."""
        return attention_mask

    def _loss(self, x: Tensor, targets: Tensor, count: Tensor | int | None) -> Tensor:
        """Return the mean cross-entropy; where the output layer is just a weight, without ever holding all logits."""
        if _is_plain(self.lm_head):
            total = linear_cross_entropy(x, self.lm_head.weight, targets, reduction="sum")
        else:
            logits = self.lm_head(x).flatten(0, 1)
            total = F.cross_entropy(logits.to(statistics_dtype(logits.dtype)), targets.flatten(), reduction="sum")
        if count is None:
            count = (targets != inputs.IGNORED).sum().clamp_min(1)
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> bool:
        """Start `generate` with the cache of these models, and only if the text fits in."""
        done = super()._prepare_cache_for_generation(  # type: ignore[misc]  # its own self is annotated as a protocol
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            cache = adopt(cache, self.config.depth, grows=self.config.mixer == "softmax")
        mask = model_kwargs.get("attention_mask")
        inputs.check_prompt(mask)
        padding = 0 if mask is None else int((mask == 0).sum(dim=1).min())
        needed, limit = max_cache_length - padding, self.config.context_limit
        if limit is not None and needed > limit and (cache is None or cache.get_seq_length() == 0):
            raise ValueError(
                f"this text would take {needed} positions, but the model has learned {limit}. Generate "
                f"{needed - limit} tokens less (max_new_tokens), use a shorter prompt, or a model without such a "
                "limit: with position='sinusoidal' or position='none'."
            )
        return done


def _is_plain(head: nn.Module) -> bool:
    """Tell whether calling a layer does no more than multiply by its weight: no adapter, no hook, no offloading."""
    hooks = len(head._forward_hooks) + len(head._forward_pre_hooks) + len(head._backward_hooks)
    return type(head) is nn.Linear and getattr(head, "bias", None) is None and "forward" not in vars(head) and not hooks


# An output layer that is not tied is stored where LanguageToST has it; the last of the names is written.
register_checkpoint_conversion_mapping(
    TostForCausalLM.__name__,
    [WeightRenaming(rf"^{name}\.weight", "lm_head.weight") for name in ("head", r"model\.head")],
    overwrite=True,
)


class TostForSequenceClassification(TostPreTrainedModel):
    """A classifier of texts that reads them with `TostModel`, as ``AutoModelForSequenceClassification`` builds it.

    Args:
        config: The options; ``num_labels`` (or ``id2label``) is the number of labels and ``problem_type`` chooses the
            loss, as for every such model of transformers.

    Raises:
        ConfigError: The options are not usable.

    Example:
        >>> import torch
        >>> from tost.integrations.transformers import TostConfig, TostForSequenceClassification
        >>> config = TostConfig(embed_dim=64, depth=2, num_heads=4, vocab_size=256, num_labels=3)
        >>> model = TostForSequenceClassification(config)
        >>> model(torch.randint(256, (2, 10)), labels=torch.tensor([0, 2])).logits.shape
        torch.Size([2, 3])
    """

    accepts_loss_kwargs: ClassVar[bool] = False  # a mean over the sequences of a batch is all there is

    _keys_to_ignore_on_load_unexpected = [r"\bhead\.", r"^lm_head\."]  # noqa: RUF012  that of a language model

    model: TostModel

    def __init__(self, config: TostConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TostModel(config)
        self.score = nn.Linear(config.embed_dim, self.num_labels, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Classify every sequence.

        Arguments are those of `TostModel.forward`, except:

        Args:
            attention_mask: 1 for real tokens and 0 for padding on either side, as in `TostModel`. Without it, ids
                that equal ``pad_token_id`` at the end of a row are padding.
            labels: A class per sequence, int64 ``[B]``; numbers ``[B]`` or ``[B, K]`` for regression; float
                ``[B, K]`` of zeros and ones for several labels at once.
            **kwargs: ``use_cache``, ``output_hidden_states`` and what else `TostModel` takes. Packed sequences have a
                label and logits each, S in place of B.

        Returns:
            ``loss`` (scalar, with labels), ``logits`` ``[B, K]``, ``past_key_values`` and ``hidden_states``, as far as
            asked for.

        Raises:
            ValueError: As in `TostModel`.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        packing = None
        if tokens is not None and past_key_values is None:
            mask = inputs.read_mask(attention_mask, tokens.shape[:2], None)
            packing = inputs.read_packing(kwargs, tokens.shape[:2], mask, None)
            kwargs["packing"] = packing
        out = self.model(input_ids, attention_mask, past_key_values, inputs_embeds, return_dict=True, **kwargs)
        x = out.last_hidden_state
        if packing is None:
            last = self._last_tokens(x, input_ids, attention_mask)
            logits = self.score(x[torch.arange(len(x), device=x.device), last.to(x.device)])
        else:
            logits = self.score(x.flatten(0, 1)[packing.cu_seqlens[1:] - 1])
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(loss, logits, out.past_key_values, out.hidden_states)

    def _last_tokens(self, x: Tensor, ids: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return the place of the last real token of each row, int64 [B]."""
        B, N = x.shape[:2]
        if mask is not None:
            real = mask[:, -N:] != 0
        elif ids is not None and self.config.pad_token_id is not None:
            real = ids != self.config.pad_token_id
        else:
            return torch.full((B,), N - 1, device=x.device)
        return (real * torch.arange(N, device=real.device)).argmax(dim=1)
