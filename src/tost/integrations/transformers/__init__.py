"""The language models in transformers: the auto classes know ``tost`` after this import.

`TostModel` is the network of `tost.models.LanguageToST` with the same weights under the same names; `TostForCausalLM`
and `TostForSequenceClassification` put a head on it. What transformers offers for its own models works:
``save_pretrained`` and ``from_pretrained``, ``generate`` from the state of constant size, left-padded batches,
``pipeline``, ``Trainer``, gradient checkpointing, offloading.
"""

from __future__ import annotations

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for
from tost._lazy import naming_extras

# isort: split
with naming_extras():
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from tost.integrations.transformers.cache import StateLayer
from tost.integrations.transformers.configuration import TostConfig
from tost.integrations.transformers.modeling import TostForCausalLM, TostForSequenceClassification, TostModel

__all__ = ["StateLayer", "TostConfig", "TostForCausalLM", "TostForSequenceClassification", "TostModel"]

AutoConfig.register(TostConfig.model_type, TostConfig, exist_ok=True)
AutoModel.register(TostConfig, TostModel, exist_ok=True)
AutoModelForCausalLM.register(TostConfig, TostForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(TostConfig, TostForSequenceClassification, exist_ok=True)
