"""All targets by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuzz import images, parts, settings, texts, weights
from fuzz.harness import Harness

_MAKERS: tuple[Callable[[Path], Harness], ...] = (
    *(settings.config, settings.overrides, settings.bench, settings.report, settings.explorer),
    *(
        weights.safetensors,
        weights.model_folder,
        weights.resume,
        weights.state_file,
        weights.official,
        weights.hf_folder,
    ),
    *(weights.tokenizer, texts.tokens, texts.documents),
    *(images.image, images.parquet, images.idx, images.cifar, images.labels),
    *(texts.listops, texts.reviews, texts.pairs, texts.pathfinder),
    *(parts.value, parts.tensors, parts.idx_file, parts.listops_line),
    parts.pairs_file,
    parts.packing,
)
TARGETS = {make.__name__: make for make in _MAKERS}
"""What makes each harness, given an empty folder for its files."""
