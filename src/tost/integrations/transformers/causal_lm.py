"""The causal language model of transformers: `TostModel` and an output layer.

Shapes: input_ids [B, N] (batch, tokens), hidden states [B, N, C] with width C, logits [B, N, V] with vocabulary V.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
from transformers import Cache, GenerationConfig, GenerationMixin
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tost.errors import ConfigError
from tost.integrations.transformers import inputs
from tost.integrations.transformers.cache import adopt
from tost.integrations.transformers.configuration import TostConfig
from tost.integrations.transformers.modeling import SHARED, TostModel, TostPreTrainedModel
from tost.models import LanguageToST
from tost.nn import linear_cross_entropy
from tost.ops._numerics import statistics_dtype


class TostForCausalLM(TostPreTrainedModel, GenerationMixin):
    """A `LanguageToST` that transformers takes for one of its own models.

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
        with torch.device("meta"):  # nothing of this shell is kept but its attributes
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
        with torch.device("meta"):  # nothing of this shell is kept but its attributes
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
                mask says padding, nothing is predicted, and nothing predicts.
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
