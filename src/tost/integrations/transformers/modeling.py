"""A causal language model of transformers around `tost.models.LanguageToST`.

Shapes: input_ids [B, N] (batch, tokens), attention_mask [B, N] or [B, M + N] with M tokens in the cache, embeddings and
hidden states [B, N, C] with width C, logits [B, N, V] with vocabulary V.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tost.errors import ConfigError
from tost.integrations.transformers import inputs
from tost.integrations.transformers.cache import adopt, read_states, write_states
from tost.integrations.transformers.configuration import TostConfig
from tost.models import LanguageToST
from tost.models.language.model import INITIAL_STD
from tost.nn import CausalBlock, CausalConvolution, CausalTSSAttention, LearnedPositions, linear_cross_entropy


class TostForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A `LanguageToST` that transformers takes for one of its own models.

    ``model.model`` is the network itself, with the same weights under the same names: whatever takes a `LanguageToST`,
    such as ``tost.generate``, takes it. Texts are generated from the state, which ``past_key_values`` carries; with
    TSSA its size does not depend on the text. Padding on either side is left out exactly, positions count real tokens,
    and a batch gives what its rows give alone.

    Given `labels`, the loss is computed without ever holding all logits. In training mode the logits are then left out
    altogether (``skip_logits``).

    Args:
        config: The options.

    Raises:
        ConfigError: The options are not usable.

    Example:
        >>> import torch
        >>> from tost.integrations.transformers import TostConfig, TostForCausalLM
        >>> config = TostConfig(embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> model = TostForCausalLM(config).eval()
        >>> prompt = torch.randint(256, (2, 10))
        >>> model.generate(prompt, max_new_tokens=5, do_sample=False).shape
        torch.Size([2, 15])
    """

    config_class = TostConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs: ClassVar[bool] = True  # the trainer hands in the number of targets of all its batches
    _no_split_modules = {"CausalBlock"}  # noqa: RUF012  declared by the base class
    _is_stateful = True  # a sum cannot give back the tokens of a rejected draft
    _can_compile_fullgraph = True

    config: TostConfig
    model: LanguageToST

    def __init__(self, config: TostConfig) -> None:
        super().__init__(config)
        self.model = LanguageToST(config.options())
        self.gradient_checkpointing = False
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
            >>> theirs.model is ours
            True
        """
        if not isinstance(model, LanguageToST):
            raise ConfigError(
                f"{type(model).__name__} is no causal language model of this package (LanguageToST); "
                "transformers and timm have their own classes for the others."
            )
        dtype = model.tokens.weight.dtype
        config = TostConfig.from_options(model.options, dtype=str(dtype).removeprefix("torch."), **kwargs)
        with torch.device("meta"):  # nothing of this shell is kept but its attributes
            shell = cls(config)
        shell.model = model
        if model.options.gradient_checkpointing:
            shell.gradient_checkpointing_enable()
        shell.train(model.training)
        return shell

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token after every token.

        Args:
            input_ids: Tokens, int64 ``[B, N]``.
            attention_mask: 1 for real tokens and 0 for padding, ``[B, N]``, or ``[B, M + N]`` with the M tokens that
                `past_key_values` has seen. Padding may hold any id and reaches no other token.
            past_key_values: What an earlier call returned; it is updated in place. None at the start.
            inputs_embeds: Vectors in place of those that the model has for `input_ids`, ``[B, N, C]``; positions are
                added to them.
            labels: The tokens once more, int64 ``[B, N]``, with -100 for those that are not to be predicted. Where the
                mask says padding, nothing is predicted, and nothing predicts.
            use_cache: Return `past_key_values`; by default as the configuration says, and never in training.
            output_hidden_states: Return the embeddings and what each block gives; the last after the last norm.
            logits_to_keep: Compute logits for the last tokens only, this many, or for tokens at these places; 0 for
                all.
            skip_logits: Leave the logits out; by default in training with labels.
            num_items_in_batch: Divide the sum of the losses by this instead of the number of targets.
            **kwargs: ``shift_labels``, labels that are already next to the tokens that predict them, in place of
                `labels`; and whatever else transformers may pass, which has to be None or False.

        Returns:
            ``loss`` (scalar, with labels), ``logits``, ``past_key_values`` and ``hidden_states``, as far as asked for.

        Raises:
            ValueError: The input is not of this form, not in the vocabulary, or longer than the model has positions; or
                an argument asks for something that the model does not have.
        """
        # Not in the signature, where the trainer would take it for something that every batch has to hold.
        shift_labels = kwargs.pop("shift_labels", None)
        inputs.refuse_arguments(kwargs)
        hidden_wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        shape = self._input_shape(input_ids, inputs_embeds)
        cache = None
        if use_cache or past_key_values is not None:
            cache = adopt(past_key_values, self.config.depth, grows=self.config.mixer == "softmax")
        mask = inputs.read_mask(attention_mask, shape, 0 if cache is None else cache.get_seq_length())
        hidden: list[Tensor] | None = [] if hidden_wanted else None
        x = self._run(input_ids, inputs_embeds, mask, cache, hidden)
        loss = None
        targets = inputs.shift_targets(labels, shift_labels, mask, shape)
        if targets is not None:
            loss = self._loss(x, targets, num_items_in_batch)
        if skip_logits is None:
            skip_logits = self.training and targets is not None
        found: dict[str, Any] = {
            "loss": loss,
            "logits": None if skip_logits else self._logits(x, logits_to_keep),
            "past_key_values": cache if use_cache else None,
            "hidden_states": None if hidden is None else (*hidden, x),
        }
        return CausalLMOutputWithPast(**found)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.model.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding, and with it a tied head; the vocabulary follows its size."""
        size = cast(nn.Embedding, value).num_embeddings
        self.model.tokens = cast(nn.Embedding, value)
        self.model.options = self.model.options.model_copy(update={"vocab_size": size})
        self.config.vocab_size = size

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer; None if it is the embedding."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module | None) -> None:
        """Replace the output layer.

        Raises:
            ConfigError: It is tied to the embedding, so there is none.
        """
        if self.model.head is None and new_embeddings is not None:
            raise ConfigError(
                "the output layer of this model is its token embedding (tie_head=true); replace that with "
                "set_input_embeddings, or build the model with tie_head=False."
            )
        self.model.head = cast(nn.Linear, new_embeddings)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """Return the mask as it is: there are no scores between pairs of tokens that would need another."""
        return attention_mask

    def _input_shape(self, ids: Tensor | None, embeddings: Tensor | None) -> torch.Size:
        """Return [B, N] of whichever input is given."""
        if (ids is None) == (embeddings is None):
            given = "neither is" if ids is None else "both are"
            raise ValueError(f"a model needs either input_ids or inputs_embeds, but {given} given.")
        shape = inputs.check_embeddings(embeddings, self.config.embed_dim) if ids is None else ids.shape
        if len(shape) == 2 and shape[1] == 0:
            raise ValueError("there is no token in the input; a text begins with at least one, such as bos_token_id.")
        return shape

    def _run(
        self,
        ids: Tensor | None,
        embeddings: Tensor | None,
        mask: Tensor | None,
        cache: Cache | None,
        hidden: list[Tensor] | None,
    ) -> Tensor:
        """Return the tokens after the last norm, and add what goes into each block to `hidden`."""
        before = [None] * self.config.depth if cache is None else read_states(cache)
        start = None if before[0] is None else before[0].position
        rows = len(cast(Tensor, embeddings if ids is None else ids))
        if start is not None and len(start) != rows:
            raise ValueError(
                f"past_key_values holds {len(start)} sequences, but the input {rows}; pass what came from the same "
                "batch, or None at the start of a text."
            )
        if ids is not None:
            x = self.model.embed(ids, start, mask)
        else:
            x = self.model.add_positions(cast(Tensor, embeddings), start, mask)
        after = []
        recompute = self.gradient_checkpointing and self.training
        for block, state in zip(self.model.blocks, before, strict=True):
            if hidden is not None:
                hidden.append(x)
            if cache is not None:
                x, state = cast(CausalBlock, block).forward_with_state(x, state, mask)
                after.append(state)
            else:
                x = self._gradient_checkpointing_func(block.__call__, x, mask) if recompute else block(x, mask)
        if cache is not None:
            write_states(cache, after, x.shape[1])
        normed: Tensor = self.model.norm(x)
        return normed

    def _head(self) -> Tensor:
        return (self.model.tokens if self.model.head is None else self.model.head).weight

    def _logits(self, x: Tensor, keep: int | Tensor) -> Tensor:
        places = slice(-keep, None) if isinstance(keep, int) else keep
        return F.linear(x[:, places], self._head())

    def _loss(self, x: Tensor, targets: Tensor, count: Tensor | int | None) -> Tensor:
        if count is None:
            return linear_cross_entropy(x, self._head(), targets)
        total = linear_cross_entropy(x, self._head(), targets, reduction="sum")
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

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
        elif isinstance(module, CausalBlock):
            for gamma in (module.gamma1, module.gamma2):
                if gamma is not None:
                    init.constant_(gamma, cast(float, self.config.layer_scale))

    def _ends_branch(self, module: nn.Module) -> bool:
        """Tell whether a layer is the last of a residual branch, whose weights start smaller."""
        blocks = cast(Iterable[CausalBlock], self.model.blocks)
        return any(module in (block.attention.proj_out, block.mlp.proj_out) for block in blocks)

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
        if cache is None or cache.get_seq_length() == 0:
            self._check_room(max_cache_length, mask)
        return done

    def _check_room(self, num_tokens: int, mask: Tensor | None) -> None:
        """Refuse to read more tokens than there are positions, before any work is done."""
        padding = 0 if mask is None else int((mask == 0).sum(dim=1).min())
        needed, limit = num_tokens - padding, self.config.context_limit
        if limit is not None and needed > limit:
            raise ValueError(
                f"this text would take {needed} positions, but the model has learned {limit}. Generate "
                f"{needed - limit} tokens less (max_new_tokens), use a shorter prompt, or a model without such a "
                "limit: with after_last_position='repeat', position='sinusoidal' or position='none'."
            )
