"""The registered models of sequences: a small one, and those of the Long-Range Arena. No torch here.

Of the latter there are the paper's sizes, those of the official benchmark, and those of S4.

The paper gives sizes for five tasks and none for Path-X, which takes those of Pathfinder. Its table has a column
"pre-norm" that most likely repeats a switch of fairseq and not the layout of the blocks; the blocks here are pre-norm,
and ``norm=post`` is the other reading. Where the paper is silent, the choices are those of the two code bases it builds
on: real numbers for images and tokens for Pathfinder, the mean over the real elements, waves or learned positions.

The official benchmark has narrower attention than blocks in Image, Pathfinder and Path-X (half the width); here
attention is always as wide as the blocks. Its sizes differ from mixer to mixer there; these are the Transformer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tost.models.sequence.options import SequenceClassifierOptions
from tost.models.spec import ModelSpec

_TASKS = {
    "listops": "value of a nested list expression",
    "text": "sentiment of a film review, byte by byte",
    "retrieval": "whether one of two papers cites the other, byte by byte",
    "image": "grey CIFAR-10 images, pixel by pixel",
    "pathfinder": "whether two dots lie on the same dashed curve, 32 x 32 pixels",
    "pathx": "the same on 128 x 128 pixels",
}


def _tokens(vocab_size: int, max_length: int, num_classes: int, **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": vocab_size, "max_length": max_length, "num_classes": num_classes}
    return {"input": "tokens", **sizes, **more}


def _values(max_length: int, num_classes: int, **more: Any) -> dict[str, Any]:
    return {"input": "values", "in_features": 1, "max_length": max_length, "num_classes": num_classes, **more}


def _blocks(
    depth: int, embed_dim: int, num_heads: int, mlp_ratio: float, dropout: float, **more: Any
) -> dict[str, Any]:
    sizes = {"depth": depth, "embed_dim": embed_dim, "num_heads": num_heads, "mlp_ratio": mlp_ratio}
    return {**sizes, "dropout": dropout, **more}


_PATHS = _blocks(2, 64, 2, 2.0, 0.1, position="learned", head_kind="mlp_relu")
_PAPER: dict[str, Mapping[str, Any]] = {
    "listops": _tokens(16, 2000, 10) | _blocks(6, 512, 8, 4.0, 0.1),  # 15 symbols and padding
    "text": _tokens(258, 4001, 2) | _blocks(4, 256, 4, 4.0, 0.1),  # bytes, padding, end
    "retrieval": _tokens(258, 4001, 2, towers=2, pair="concat") | _blocks(6, 128, 4, 4.0, 0.1),
    "image": _values(1024, 10) | _blocks(8, 64, 8, 2.0, 0.0),
    "pathfinder": _tokens(256, 1024, 2) | _PATHS,
    "pathx": _tokens(256, 16_384, 2) | _PATHS,
}

_LRA = {"mixer_form": "lra", "mixer_bias": False, "head_kind": "mlp_relu"}
_OFFICIAL: dict[str, Mapping[str, Any]] = {
    "listops": _tokens(17, 2000, 10) | _blocks(4, 512, 8, 2.0, 0.1, pooling="cls"),
    "text": _tokens(257, 1000, 2) | _blocks(4, 256, 4, 4.0, 0.1, pooling="cls"),
    # No class token is put in front there, so the pooled vector is that of the first byte.
    "retrieval": _tokens(257, 4000, 2, towers=2, pair="concat") | _blocks(4, 128, 4, 4.0, 0.1, pooling="first"),
    "image": _tokens(256, 1024, 10)
    | _blocks(1, 128, 8, 1.0, 0.3, attention_dropout=0.2, pooling="cls", position="learned"),
    "pathfinder": _tokens(256, 1024, 2) | _blocks(4, 32, 4, 1.0, 0.2, attention_dropout=0.1),
    "pathx": _tokens(256, 16_384, 2) | _blocks(1, 32, 2, 1.0, 0.1, position="learned"),
}

_SSM = {
    "mixer": "s4",
    "block": "mixer",
    "norm_kind": "batch",
    "position": "none",
    "head_kind": "linear",
    "mlp_ratio": 1.0,
}


def _s4(embed_dim: int, groups: int, state_size: int, norm: str, **more: Any) -> dict[str, Any]:
    sizes = {"depth": 6, "embed_dim": embed_dim, "num_heads": groups, "norm": norm}
    return {**sizes, "mixer_options": {"state_size": state_size, **more.pop("mixer_options", {})}, **more}


_S4: dict[str, Mapping[str, Any]] = {
    "listops": _tokens(18, 2048, 10) | _s4(256, 1, 4, "post"),
    "text": _tokens(135, 4096, 2) | _s4(256, 1, 4, "pre"),
    "retrieval": _tokens(135, 4000, 2, towers=2, pair="nli") | _s4(256, 1, 4, "pre") | {"head_kind": "mlp"},
    "image": _values(1024, 10) | _s4(512, 1, 64, "post", dropout=0.1, mixer_options={"tied_drop": True}),
    "pathfinder": _values(1024, 2) | _s4(256, 256, 64, "pre"),
    "pathx": _values(16_384, 2) | _s4(256, 256, 64, "pre", mixer_options={"step_min": 1e-4}),
}


def _spec(name: str, description: str, defaults: Mapping[str, Any]) -> ModelSpec:
    return ModelSpec(
        name=name,
        build="tost.models.sequence.model:SequenceClassifier",
        options=SequenceClassifierOptions,
        tasks=("classification",),
        defaults=defaults,
        description=description,
    )


_FORMS: tuple[tuple[str, str, Mapping[str, Any], Mapping[str, Mapping[str, Any]]], ...] = (
    ("", "", {}, _PAPER),
    ("_official", ", official sizes", _LRA, _OFFICIAL),
    ("_s4", ", sizes of S4", _SSM, _S4),
)
SEQUENCE_MODELS = (
    _spec("tost_sequence", "small classifier of sequences of numbers", _values(1024, 10) | _blocks(4, 64, 8, 2.0, 0.0)),
    *(
        _spec(f"lra_{task}{suffix}", f"Long-Range Arena{whose}: {_TASKS[task]}", {**common, **options[task]})
        for task in _TASKS
        for suffix, whose, common, options in _FORMS
    ),
)
