"""What can be chosen about the token mixers of the long-range models. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

__all__ = ["MIXERS", "MixerOptions", "TSSAOptions", "mixer_options", "mixer_problems"]

Count = Annotated[int, Field(ge=1, strict=True)]
Switch = Annotated[bool, Field(strict=True)]


class MixerOptions(BaseModel):
    """Options of one kind of mixer; the names are those of its class in `tost.nn`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TSSAOptions(MixerOptions):
    """Options of token statistics self-attention."""

    normalize: Switch = Field(True, description="normalise features over the tokens before memberships are taken")
    gate: Switch = Field(False, description="gate the output by a projection of the input (ours)")
    count_scaled: Switch = Field(False, description="multiply the energies by the number of tokens (ours)")


class SoftmaxOptions(MixerOptions):
    """Softmax attention has none."""


class ReformerOptions(MixerOptions):
    """Options of LSH attention."""

    num_hashes: Count = Field(2, description="rounds of hashing")
    chunk_size: Count = Field(64, description="sorted tokens that are attended to together; not for form=lra")
    num_buckets: Annotated[int, Field(ge=2, le=1024, multiple_of=2, strict=True)] | None = Field(
        None, description="buckets, an even number; null: the power of two up to twice the number of chunks"
    )
    form: Literal["paper", "lra"] = Field("paper", description="lra: ten chunks, as in the official code")
    redraw: Switch = Field(False, description="take new hashes in each forward pass in training")


class BigBirdOptions(MixerOptions):
    """Options of block-sparse attention."""

    block_size: Count = Field(64, description="tokens per block")
    num_random: Annotated[int, Field(ge=0, strict=True)] = Field(3, description="random blocks that a block attends to")
    random_length: Count | None = Field(None, description="draw them from the first so many tokens only; null: all")


class LinformerOptions(MixerOptions):
    """Options of attention to learned mixtures."""

    rank: Count = Field(256, description="number of mixtures")
    share: Literal["kv", "heads", "none"] = Field(
        "heads", description="who shares a matrix: keys, values and heads (kv), the heads, or nobody"
    )


class LinearOptions(MixerOptions):
    """Linear attention has none."""


class PerformerOptions(MixerOptions):
    """Options of attention by random features."""

    num_features: Count | None = Field(None, description="random features; null: D ln D for heads of width D")
    kernel: Literal["softmax", "relu"] = Field("softmax", description="what the features stand for")
    redraw: Switch = Field(False, description="take new features in each forward pass in training")


class NystromOptions(MixerOptions):
    """Options of attention through landmarks."""

    num_landmarks: Count = Field(64, description="landmarks")
    conv_width: Annotated[int, Field(ge=0, strict=True)] = Field(
        33, description="width of a convolution of the values, odd; 0 has none"
    )
    iterations: Count = Field(6, description="steps of the pseudo-inverse")


class S4Options(MixerOptions):
    """Options of the state space layers."""

    state_size: Annotated[int, Field(ge=2, multiple_of=2, strict=True)] = Field(
        64, description="states per channel, counted with their conjugates"
    )
    bidirectional: Switch = Field(True, description="a second kernel that runs backwards")
    step_min: float = Field(1e-3, gt=0, description="smallest initial step")
    step_max: float = Field(1e-1, gt=0, description="largest initial step")
    tied_drop: Switch = Field(False, description="dropout decides once for all tokens of a sequence and feature")


class S4DOptions(S4Options):
    """Options of the diagonal state space layers."""

    init: Literal["legs", "lin"] = Field("legs", description="initial eigenvalues: HiPPO-LegS, or evenly spaced")


MIXERS: dict[str, type[MixerOptions]] = {
    "tssa": TSSAOptions,
    "softmax": SoftmaxOptions,
    "reformer": ReformerOptions,
    "bigbird": BigBirdOptions,
    "linformer": LinformerOptions,
    "linear": LinearOptions,
    "performer": PerformerOptions,
    "nystrom": NystromOptions,
    "s4": S4Options,
    "s4d": S4DOptions,
}
"""The options of every mixer by its name."""

# What the official Long-Range Arena has where it differs from the papers. The Performer on ListOps is another matter.
_OFFICIAL: dict[str, dict[str, Any]] = {
    "reformer": {"num_hashes": 1, "form": "lra"},
    "bigbird": {"random_length": 1024},
    "linformer": {"rank": 16, "share": "kv"},
    "performer": {"kernel": "relu"},
    "nystrom": {"conv_width": 35},
}


def mixer_options(mixer: str, form: str, given: Mapping[str, Any]) -> MixerOptions:
    """Return all options of a mixer.

    Args:
        mixer: Its name.
        form: ``"paper"`` or ``"lra"``: whose defaults hold.
        given: Options that replace them.

    Raises:
        ValidationError: The options are not usable.
    """
    return MIXERS[mixer].model_validate({**(_OFFICIAL.get(mixer, {}) if form == "lra" else {}), **given})


def mixer_problems(mixer: str, form: str, given: Mapping[str, Any]) -> list[str]:
    """Say what is wrong with the options of a mixer, one sentence each; see `mixer_options`."""
    known = MIXERS[mixer].model_fields
    found: list[str] = []
    try:
        options = mixer_options(mixer, form, given)
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            name = ".".join(map(str, entry["loc"][:1]))
            if entry["type"] == "extra_forbidden":
                near = get_close_matches(name, known, n=1)
                meant = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known) or 'none'}"
                found.append(
                    f"mixer_options.{name}: mixer={mixer} has no such option; {meant} If the options belong to another "
                    "mixer, clear them with mixer_options=null"
                )
            else:
                found.append(f"mixer_options.{name}={entry['input']!r}: {entry['msg'][0].lower()}{entry['msg'][1:]}")
        return found
    if isinstance(options, S4Options) and options.step_min > options.step_max:
        found.append(f"mixer_options: step_min={options.step_min} is above step_max={options.step_max}; exchange them")
    if isinstance(options, NystromOptions) and options.conv_width and options.conv_width % 2 == 0:
        found.append(f"mixer_options.conv_width={options.conv_width} has no centre; use an odd number, or 0 for none")
    return found
