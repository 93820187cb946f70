"""What can be chosen about a model, checked before anything is built. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tost._options import Options
from tost.models.sequence.options import MIXERS, MixerOptions, mixer_options, mixer_problems

__all__ = ["LanguageOptions", "ModelOptions", "SequenceClassifierOptions"]

# Strict, because a lenient parser reads `true` as 1 layer and 11.0 as 11.
Count = Annotated[int, Field(ge=1, strict=True)]
Switch = Annotated[bool, Field(strict=True)]


class ModelOptions(Options):
    """What every model of this package lets one choose."""

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


class LanguageOptions(ModelOptions):
    """Options of `LanguageToST`. What is marked as ours is not in the authors' code, and off by default."""

    vocab_size: Count = Field(50_304, description="number of token ids, V; 50304 is GPT-2's 50257, padded")
    max_length: Count = Field(1024, description="longest sequence in tokens, for learned positions")
    layer_scale: float | None = Field(
        1e-5, gt=0, description="initial value of the vectors that scale each residual branch; null has none"
    )
    bias: Switch = Field(False, description="biases of linear layers and norms")
    tie_head: Switch = Field(True, description="use the token embedding as the output layer too")
    mixer: Literal["tssa", "softmax"] = Field(
        "tssa", description="how tokens meet: token statistics, or softmax attention as in GPT-2"
    )
    activation: Literal["gelu", "gelu_tanh"] = Field(
        "gelu", description="activation of the MLPs: GELU, or the approximation of it that GPT-2 was trained with"
    )
    position: Literal["learned", "sinusoidal", "none"] = Field(
        "learned",
        description="learned: a vector per position at the input, and with TSSA a bias per head and position in each "
        "attention; sinusoidal: fixed waves at the input; none: nothing. The last two have no limit on the length",
    )
    beyond: Literal["error", "hold"] = Field(
        "error",
        description="what becomes of tokens behind the last learned position: error refuses them, hold gives them all "
        "the vector and the biases of the last one (ours)",
    )
    local: Annotated[int, Field(ge=0, strict=True)] = Field(
        0,
        description="width in tokens of a causal depth-wise convolution, the current one included; 0 has none (ours)",
    )
    local_at: Literal["attention", "mlp", "both"] = Field(
        "attention", description="whose normed input that convolution is added to (ours)"
    )
    gate: Switch = Field(False, description="gate the output of TSSA by a projection of its input (ours)")
    count_scaled: Switch = Field(
        False, description="multiply the energies of TSSA by the number of tokens up to each one (ours)"
    )
    forget: Switch = Field(False, description="let the statistics of each head fade at a rate that is learned (ours)")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Say which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        if values.get("position") == "sinusoidal":
            found += _waves_fit(values)
        if values.get("beyond") == "hold" and values.get("position", "learned") != "learned":
            found.append(
                f"beyond=hold is about learned positions, but position={values['position']} has no last one; "
                "leave beyond=error"
            )
        if values.get("local") == 1:
            found.append("local=1 reaches no token but the last one itself; use 2 or more, or 0 for none")
        if values.get("local") == 0 and values.get("local_at", "attention") != "attention":
            found.append(
                f"local_at={values['local_at']} places a convolution, but local=0 has none; set local, such as 4, or "
                "leave local_at=attention"
            )
        found += only_for_tssa(values, {"gate": False, "count_scaled": False, "forget": False, "backend": "auto"})
        return found


class SequenceClassifierOptions(ModelOptions):
    """Options of `SequenceClassifier`."""

    input: Literal["tokens", "values"] = Field(description="what a sequence is made of: ids, or vectors of numbers")
    vocab_size: Count | None = Field(None, description="number of token ids, padding included; for input=tokens")
    in_features: Count | None = Field(None, description="numbers per element, F; for input=values")
    num_classes: Annotated[int, Field(ge=2, strict=True)] = Field(description="number of classes, K")
    max_length: Count = Field(description="longest sequence in elements, padding not counted")
    towers: Literal[1, 2] = Field(1, description="sequences per sample; 2 are compared, after the same blocks")
    pair: Literal["nli", "concat"] = Field(
        "nli", description="what the head sees of two vectors u, v: u, v, u v, u - v side by side, or only u, v"
    )
    mixer: Literal[
        "tssa", "softmax", "reformer", "bigbird", "linformer", "linear", "performer", "nystrom", "s4", "s4d"
    ] = Field("tssa", description="how tokens meet: token statistics, or one of the mixers that it is compared with")
    mixer_form: Literal["paper", "lra"] = Field(
        "paper", description="whose defaults the mixer has: its paper's, or the official Long-Range Arena's"
    )
    mixer_options: Annotated[dict[str, Any], BeforeValidator(lambda given: {} if given is None else given)] = Field(
        {}, description="options of the mixer, such as {rank: 64}; see tost.models.sequence.options; null: none"
    )
    mixer_bias: Switch = Field(True, description="biases of the mixer's projections, where it lets one choose")
    attention_dropout: float | None = Field(
        None, ge=0, lt=1, description="dropout on attention weights, or gains of TSSA; null: the same as dropout"
    )
    pooling: Literal["mean", "cls", "first", "mean_padded"] = Field(
        "mean",
        description="mean: average of the real elements; cls: what becomes of a learned vector put in front; first: "
        "the first element; mean_padded: sum of the real elements divided by the length with padding, as in Skyformer",
    )
    position: Literal["sinusoidal", "learned", "none"] = Field(
        "sinusoidal", description="vectors added to tell positions apart: fixed waves, learned, or none"
    )
    block: Literal["mlp", "mixer"] = Field(
        "mlp", description="what a block is: a mixer and an MLP, or the mixer alone, as in S4"
    )
    norm: Literal["pre", "post"] = Field(
        "pre", description="pre: norms inside the branches and a last one; post: norms behind the sums and a first one"
    )
    norm_kind: Literal["layer", "batch"] = Field(
        "layer", description="layer norms, or batch norms as in S4, which go with block=mixer"
    )
    head_kind: Literal["mlp", "mlp_relu", "linear"] = Field(
        "mlp",
        description="mlp: a hidden layer as wide as that of the MLPs and a GELU, as in Mega; mlp_relu: a ReLU, and one "
        "layer more behind pair=concat, as in the official code; linear: none",
    )
    tied: Switch = Field(False, description="all blocks share their weights, as Mega's ListOps models do")

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def all_mixer_options(self) -> MixerOptions:
        """Return every option of the mixer, given or not."""
        return mixer_options(self.mixer, self.mixer_form, self.mixer_options)

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
        found += _waves_fit(values) if values.get("position") == "sinusoidal" else []
        mixer, given = values.get("mixer", "tssa"), values.get("mixer_options", {})
        if mixer in MIXERS and isinstance(given, Mapping):
            found += mixer_problems(mixer, values.get("mixer_form", "paper"), given)
        found += only_for_tssa(values, {"backend": "auto"})
        if values.get("norm_kind") == "batch" and values.get("block") == "mlp":
            found.append("norm_kind=batch goes with block=mixer; blocks with an MLP have layer norms")
        return found


def only_for_tssa(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Say which options of TSSA, given with their defaults, are set for another mixer."""
    mixer = values.get("mixer", "tssa")
    return [
        f"{name}={values[name]} is about TSSA, but mixer={mixer}; use mixer=tssa, or leave {name}={default}"
        for name, default in defaults.items()
        if mixer != "tssa" and values.get(name, default) != default
    ]


def _waves_fit(values: Mapping[str, Any]) -> list[str]:
    """Say if the width cannot be split into sines and cosines."""
    width = values.get("embed_dim")
    if not isinstance(width, int) or (width >= 4 and width % 2 == 0):
        return []
    return [
        f"embed_dim={width} cannot hold the sines and cosines of position=sinusoidal; "
        "use an even width of at least 4 or another position"
    ]


def _numbers(values: Mapping[str, Any], *names: str) -> bool:
    """Tell whether all these options are there and have been read; a number in quotes has not yet."""
    return all(isinstance(values.get(name), int | float) for name in names)
