"""Teach a model whose attention was replaced to do what the original does."""

from __future__ import annotations

from tost.integrations.distill.teacher import load_teacher
from tost.integrations.distill.texts import TextBatches
from tost.integrations.distill.train import Progress, compare, distill

__all__ = ["Progress", "TextBatches", "compare", "distill", "load_teacher"]
