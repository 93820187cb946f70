"""The language models in transformers: ``AutoModelForCausalLM`` and ``AutoConfig`` know ``tost`` after this import.

`TostForCausalLM` is a shell around `tost.models.LanguageToST`, which it holds as ``.model`` with the same weights under
the same names. What transformers offers for its own models works: ``save_pretrained`` and ``from_pretrained``,
``generate`` from the state of constant size, left-padded batches, ``pipeline``, ``Trainer``, gradient checkpointing.
"""

from __future__ import annotations

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
from transformers import AutoConfig, AutoModelForCausalLM

from tost.integrations.transformers.cache import StateLayer
from tost.integrations.transformers.configuration import TostConfig
from tost.integrations.transformers.modeling import TostForCausalLM

__all__ = ["StateLayer", "TostConfig", "TostForCausalLM"]

AutoConfig.register(TostConfig.model_type, TostConfig, exist_ok=True)
AutoModelForCausalLM.register(TostConfig, TostForCausalLM, exist_ok=True)
