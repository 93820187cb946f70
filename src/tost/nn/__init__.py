"""Modules around the operators."""

from __future__ import annotations

from tost.nn.attention import CausalTSSAttention, PaperForm, TSSAttention

__all__ = ["CausalTSSAttention", "PaperForm", "TSSAttention"]
