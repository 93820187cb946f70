"""The token mixers: what each is called, which options it has, where it fits and how much it computes. Loads no torch.

A mixer is one entry in `builtin` and one class in `tost.nn`, or a class of another package with `register_mixer`. Every
model with an option ``mixer`` takes those that fit it.
"""

from __future__ import annotations

from tost.models.mixers.builtin import tssa_flops
from tost.models.mixers.registry import (
    MixerOptions,
    MixerSizes,
    MixerSpec,
    Place,
    describe_mixer,
    find_mixer,
    list_mixers,
    mixer_problems,
    mixer_spec,
    register_mixer,
)

__all__ = [
    "MixerOptions",
    "MixerSizes",
    "MixerSpec",
    "Place",
    "describe_mixer",
    "find_mixer",
    "list_mixers",
    "mixer_problems",
    "mixer_spec",
    "register_mixer",
    "tssa_flops",
]
