"""Replace the self-attention of models of timm and transformers by TSSA."""

from __future__ import annotations

from tost.integrations.replace.run import replace_attention

__all__ = ["replace_attention"]
