"""Classification of whole sequences: `TostModel` and a linear layer on the last real token.

Shapes: input_ids [B, N] (batch, tokens), logits [B, K] with K labels.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
from transformers import Cache
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils.generic import can_return_tuple

from tost.integrations.transformers import inputs
from tost.integrations.transformers.configuration import TostConfig
from tost.integrations.transformers.modeling import TostModel, TostPreTrainedModel


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
