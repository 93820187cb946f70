"""Options of the language models. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tost._options import Count, Switch
from tost.models.extensions import CausalExtensionOptions
from tost.models.mixers import Place
from tost.models.options import MixedOptions, waves_fit


class LanguageOptions(CausalExtensionOptions, MixedOptions):
    """Options of `LanguageToST`. Extensions are not in the authors' code and are off by default."""

    place: ClassVar[Place] = "language"
    for_all_mixers: ClassVar[frozenset[str]] = frozenset({"after_last_position"})

    vocab_size: Count = Field(50_304, description="number of token ids, V; 50304 is GPT-2's 50257, padded")
    max_length: Count = Field(1024, description="longest sequence in tokens, for learned positions")
    layer_scale: float | None = Field(
        1e-5, gt=0, description="initial value of the vectors that scale each residual branch; null has none"
    )
    bias: Switch = Field(False, description="biases of linear layers and norms")
    tie_head: Switch = Field(True, description="use the token embedding as the output layer too")
    activation: Literal["gelu", "gelu_tanh"] = Field(
        "gelu", description="activation of the MLPs: GELU, or the approximation of it that GPT-2 was trained with"
    )
    position: Literal["learned", "sinusoidal", "none"] = Field(
        "learned",
        description="learned: a vector per position at the input, and with TSSA a bias per head and position in each "
        "attention; sinusoidal: fixed waves at the input; none: nothing. The last two have no limit on the length",
    )
    after_last_position: Literal["error", "repeat"] = Field(
        "error",
        description="tokens after the last learned position: error refuses them, repeat gives them all "
        "the vector and the biases of the last one (extension)",
    )
    conv_width: Annotated[int, Field(ge=0, strict=True)] = Field(
        0, description="width in tokens of a causal depth-wise convolution, this one included; 0: none (extension)"
    )
    conv_at: Literal["attention", "mlp", "both"] = Field(
        "attention", description="the branch whose normed input the convolution is added to (extension)"
    )
    conv_start: Literal["random", "previous"] = Field(
        "random",
        description="initial kernel of the convolution before the attention: random, or mostly the token before, from "
        "which TSSA learns sooner to recall what followed a token (extension)",
    )
    window_every: Annotated[int, Field(ge=0, strict=True)] = Field(
        0,
        description="the last of every so many blocks has softmax attention over a window of tokens "
        "in place of the mixer; 0: none (extension)",
    )
    window: Count = Field(128, description="tokens that a token sees there, itself included (extension)")

    def is_window(self, block: int) -> bool:
        """Return whether a block, counted from 0, has attention over a window in place of the mixer."""
        return self.window_every > 0 and block % self.window_every == self.window_every - 1

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        if values.get("position") == "sinusoidal":
            found += waves_fit(values)
        if values.get("after_last_position") == "repeat" and values.get("position", "learned") != "learned":
            found.append(
                f"after_last_position=repeat is about learned positions, but position={values['position']} has no "
                "last one; leave after_last_position=error"
            )
        if values.get("conv_width") == 1:
            found.append("conv_width=1 reaches no token but the last one itself; use 2 or more, or 0 for none")
        if values.get("conv_width") == 0 and values.get("conv_at", "attention") != "attention":
            found.append(
                f"conv_at={values['conv_at']} places a convolution, but conv_width=0 has none; set conv_width, such as "
                "4, or leave conv_at=attention"
            )
        none_before = values.get("conv_width", 0) == 0 or values.get("conv_at") == "mlp"
        if none_before and values.get("conv_start", "random") != "random":
            found.append(
                f"conv_start={values['conv_start']} is about a convolution before the attention, but there is none; "
                "set conv_width, such as 4, and conv_at=attention or both, or leave conv_start=random"
            )
        if values.get("window_every") == 0 and values.get("window", 128) != 128:
            found.append(
                f"window={values['window']} is the size of windows, but window_every=0 has none; set window_every, "
                "such as 4, or leave window=128"
            )
        return found
