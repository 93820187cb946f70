"""What can be chosen about a model, checked before anything is built. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["LanguageOptions", "ModelOptions", "SequenceClassifierOptions"]

# Strict, because a lenient parser reads `true` as 1 layer and 11.0 as 11.
Count = Annotated[int, Field(ge=1, strict=True)]
Switch = Annotated[bool, Field(strict=True)]


class ModelOptions(BaseModel):
    """What every model of this package lets one choose."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    embed_dim: Count = Field(description="width of the tokens, C")
    depth: Count = Field(description="number of blocks, L")
    num_heads: Count = Field(description="number of heads (groups) of each attention, H; divides embed_dim")
    mlp_ratio: float = Field(4.0, gt=0, description="hidden width of the MLPs as a multiple of embed_dim")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout on embeddings, attention gains, attention outputs and MLP outputs"
    )
    gradient_checkpointing: Switch = Field(
        False, description="compute each block again in the backward pass: less memory, a third more work"
    )
    backend: Literal["auto", "native", "torch", "reference"] = Field(
        "auto", description="implementation of the operator"
    )

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the MLPs, M."""
        return round(self.embed_dim * self.mlp_ratio)

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Say which options do not go together.

        Args:
            values: Options, each valid by itself. Those that are not are left out, and so is what involves them.

        Returns:
            One sentence per conflict, with the values and the remedy.
        """
        found: list[str] = []
        if _numbers(values, "embed_dim", "num_heads") and values["embed_dim"] % values["num_heads"]:
            found.append(
                f"embed_dim={values['embed_dim']} is not divisible by num_heads={values['num_heads']}: "
                "every head takes an equal share of the width; change one of the two"
            )
        if _numbers(values, "embed_dim", "mlp_ratio"):
            hidden = values["embed_dim"] * values["mlp_ratio"]
            if abs(hidden - round(hidden)) > 1e-6 or round(hidden) < 1:
                found.append(
                    f"mlp_ratio={values['mlp_ratio']} times embed_dim={values['embed_dim']} is {hidden:g}, "
                    "which is not a width; choose a ratio that gives a whole number"
                )
        return found

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if found := self.conflicts(dict(self)):
            raise ValueError("; ".join(found))
        return self


class LanguageOptions(ModelOptions):
    """Options of `LanguageToST`."""

    vocab_size: Count = Field(50_304, description="number of token ids, V; 50304 is GPT-2's 50257, padded")
    max_length: Count = Field(1024, description="longest sequence in tokens, for learned positions")
    layer_scale: float | None = Field(
        1e-5, gt=0, description="initial value of the vectors that scale each residual branch; null has none"
    )
    bias: Switch = Field(False, description="biases of linear layers and norms")
    tie_head: Switch = Field(True, description="use the token embedding as the output layer too")
    position: Literal["learned", "none"] = Field(
        "learned",
        description="learned: a vector per position at the input and a bias per head and position in each attention; "
        "none: neither, and no limit on the length",
    )


class SequenceClassifierOptions(ModelOptions):
    """Options of `SequenceClassifier`."""

    input: Literal["tokens", "values"] = Field(description="what a sequence is made of: ids, or vectors of numbers")
    vocab_size: Count | None = Field(None, description="number of token ids, padding included; for input=tokens")
    in_features: Count | None = Field(None, description="numbers per element, F; for input=values")
    num_classes: Annotated[int, Field(ge=2, strict=True)] = Field(description="number of classes, K")
    max_length: Count = Field(description="longest sequence in elements, padding not counted")
    pooling: Literal["mean", "cls"] = Field(
        "mean", description="mean: average of the real elements; cls: what becomes of a learned vector put in front"
    )
    position: Literal["sinusoidal", "learned", "none"] = Field(
        "sinusoidal", description="vectors added to tell positions apart: fixed waves, learned, or none"
    )
    norm: Literal["pre", "post"] = Field(
        "pre", description="pre: norms inside the branches and a last one; post: norms behind the sums and a first one"
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Say which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        if kind := values.get("input"):
            needed, other = ("vocab_size", "in_features") if kind == "tokens" else ("in_features", "vocab_size")
            if values.get(needed, 0) is None:
                found.append(f"input={kind} needs {needed}; set it")
            if values.get(other) is not None:
                found.append(f"input={kind} has no use for {other}={values[other]}; set it to null")
        if _numbers(values, "embed_dim") and values.get("position") == "sinusoidal":
            width = values["embed_dim"]
            if width < 4 or width % 2:
                found.append(
                    f"embed_dim={width} cannot hold the sines and cosines of position=sinusoidal; "
                    "use an even width of at least 4 or another position"
                )
        return found


def _numbers(values: Mapping[str, Any], *names: str) -> bool:
    """Tell whether all these options are there and have been read; a number in quotes has not yet."""
    return all(isinstance(values.get(name), int | float) for name in names)
