"""Options of the sequence classifiers. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tost._options import Count, Switch
from tost.models.mixers import Place
from tost.models.options import ConvolutionOptions, waves_fit


class SequenceClassifierOptions(ConvolutionOptions):
    """Options of `SequenceClassifier`."""

    place: ClassVar[Place] = "sequence"

    input: Literal["tokens", "values"] = Field(description="what a sequence is made of: ids, or vectors of numbers")
    vocab_size: Count | None = Field(None, description="number of token ids, padding included; for input=tokens")
    in_features: Count | None = Field(None, description="numbers per element, F; for input=values")
    num_classes: Annotated[int, Field(ge=2, strict=True)] = Field(description="number of classes, K")
    max_length: Count = Field(description="longest sequence in elements, padding not counted")
    towers: Literal[1, 2] = Field(1, description="sequences per sample; 2 are compared, after the same blocks")
    pair: Literal["nli", "concat"] = Field(
        "nli", description="what the head sees of two vectors u, v: u, v, u v, u - v side by side, or only u, v"
    )
    mixer_form: Literal["paper", "lra"] = Field(
        "paper", description="whose defaults the mixer has: its paper's, or the official Long-Range Arena's"
    )
    mixer_bias: Switch = Field(True, description="biases of the mixer's projections, for mixers that have the choice")
    attention_dropout: float | None = Field(
        None, ge=0, lt=1, description="dropout on attention weights, or gains of TSSA; null: the same as dropout"
    )
    pooling: Literal["mean", "cls", "first", "mean_padded", "none"] = Field(
        "mean",
        description="mean: average of the real elements; cls: what becomes of a learned vector put in front; first: "
        "the first element; mean_padded: sum of the real elements divided by the length with padding, as in Skyformer; "
        "none: every element has logits of its own",
    )
    position: Literal["sinusoidal", "learned", "none"] = Field(
        "sinusoidal", description="vectors added to tell positions apart: fixed waves, learned, or none"
    )
    block: Literal["mlp", "mixer"] = Field(
        "mlp", description="what a block is: a mixer and an MLP, or the mixer alone, as in S4"
    )
    norm: Literal["pre", "post"] = Field(
        "pre", description="pre: norms inside the branches and a last one; post: norms after the sums and a first one"
    )
    norm_kind: Literal["layer", "batch"] = Field(
        "layer", description="layer norms, or batch norms as in S4, which go with block=mixer"
    )
    head_kind: Literal["mlp", "mlp_relu", "linear"] = Field(
        "mlp",
        description="mlp: a hidden layer as wide as that of the MLPs and a GELU, as in Mega; mlp_relu: a ReLU, and one "
        "layer more after pair=concat, as in the official code; linear: none",
    )
    num_averages: Annotated[int, Field(ge=0, strict=True)] = Field(
        0,
        description="damped moving averages of each feature, in both directions, that are added to the normed input of "
        "the mixer, as in Mega; 0 has none (extension)",
    )
    tied: Switch = Field(False, description="all blocks share their weights, as Mega's ListOps models do")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        if kind := values.get("input"):
            needed, other = ("vocab_size", "in_features") if kind == "tokens" else ("in_features", "vocab_size")
            if values.get(needed, 0) is None:
                found.append(f"input={kind} needs {needed}; set it")
            if values.get(other) is not None:
                found.append(f"input={kind} has no use for {other}={values[other]}; set it to null")
        found += waves_fit(values) if values.get("position") == "sinusoidal" else []
        conv, averages = values.get("conv_width", 0), values.get("num_averages", 0)
        if values.get("block") == "mixer" and (conv or averages):
            found.append(
                f"conv_width={conv} and num_averages={averages} belong to blocks with an MLP; use block=mlp, or set "
                "both to 0"
            )
        if conv and averages and values.get("conv_at", "attention") in ("attention", "both"):
            found.append(
                f"conv_width={conv} and num_averages={averages} would both be in front of the mixer; move the "
                "convolution, such as conv_at=block, or leave one of them out"
            )
        if values.get("norm_kind") == "batch" and values.get("block") == "mlp":
            found.append("norm_kind=batch goes with block=mixer; blocks with an MLP have layer norms")
        return found
