"""Options that models share, checked before anything is built. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from tost._options import Count, Depth, Options, Switch
from tost.errors import ConfigError
from tost.models.mixers import MixerSpec, Place, find_mixer, list_mixers, mixer_problems
from tost.ops.backends import BackendName


class ModelOptions(Options):
    """Options of every model in this package."""

    embed_dim: Count = Field(description="width of the tokens, C")
    depth: Depth = Field(description="number of blocks, L")
    num_heads: Count = Field(description="number of heads (groups) of each attention, H; divides embed_dim")
    mlp_ratio: float = Field(4.0, gt=0, description="hidden width of the MLPs as a multiple of embed_dim")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout on embeddings, attention gains, attention outputs and MLP outputs"
    )
    gradient_checkpointing: Switch = Field(
        False, description="compute each block again in the backward pass: less memory, a third more work"
    )
    backend: BackendName = Field("auto", description="implementation of the operator")

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the MLPs, M."""
        return round(self.embed_dim * self.mlp_ratio)

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `Options.conflicts`."""
        found: list[str] = []
        if _numbers(values, "embed_dim", "num_heads") and values["embed_dim"] % values["num_heads"]:
            found.append(
                f"embed_dim={values['embed_dim']} is not divisible by num_heads={values['num_heads']}: "
                "every head takes an equal share of the width; change one of the two"
            )
        elif _numbers(values, "block_size"):
            found += _blocks_fit(values, values["block_size"])
        if _numbers(values, "embed_dim", "mlp_ratio"):
            hidden = values["embed_dim"] * values["mlp_ratio"]
            if abs(hidden - round(hidden)) > 1e-6 or round(hidden) < 1:
                found.append(
                    f"mlp_ratio={values['mlp_ratio']} times embed_dim={values['embed_dim']} is {hidden:g}, "
                    "which is not a width; choose a ratio that gives a whole number"
                )
        return found


class MixedOptions(ModelOptions):
    """Options of a model whose token mixer can be chosen.

    A model may have options of TSSA as options of its own; the other mixers have theirs in `mixer_options`.
    """

    place: ClassVar[Place]
    """The kind of models that the mixer has to fit."""
    for_all_mixers: ClassVar[frozenset[str]] = frozenset()
    """Those of the options of TSSA that make a difference with other mixers too."""

    mixer: str = Field(
        "tssa",
        description="how tokens meet: tssa, token statistics, or one of the mixers that `tost ls mixers` lists",
        json_schema_extra=lambda schema: schema.update(enum=[*list_mixers()]),
    )
    mixer_options: Annotated[dict[str, Any], BeforeValidator(lambda given: {} if given is None else given)] = Field(
        {}, description="options of the mixer, such as {rank: 64}; null: none"
    )

    def mixer_spec(self) -> MixerSpec:
        """Return the registered mixer, in the form for this kind of models."""
        return find_mixer(self.mixer, self.place)

    def all_mixer_options(self) -> BaseModel:
        """Return every option of the mixer, given or not."""
        own = {name: getattr(self, name) for name in self._tssa_options() if self.mixer == "tssa"}
        official = getattr(self, "mixer_form", "paper") == "lra"
        return self.mixer_spec().validate({**own, **self.mixer_options}, official=official)

    @classmethod
    def _tssa_options(cls) -> list[str]:
        return [name for name in find_mixer("tssa", cls.place).options.model_fields if name in cls.model_fields]

    @field_validator("mixer")
    @classmethod
    def _is_registered(cls, mixer: str) -> str:
        try:
            find_mixer(mixer, cls.place)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return mixer

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        mixer, given, own = values.get("mixer", "tssa"), values.get("mixer_options"), cls._tssa_options()
        if mixer == "tssa" and given and own:
            found.append(f"mixer_options={given}: with mixer=tssa, set options of the model: {', '.join(own)}")
        elif isinstance(mixer, str) and isinstance(given, Mapping):
            found += cls._mixer_problems(mixer, values)
        others: set[str] = set() if mixer == "tssa" else {*own} - cls.for_all_mixers
        others = others if cls._is_tssa(mixer) else {*others, "backend"}
        for name in (name for name in (*own, "backend") if name in others):
            default = cls.model_fields[name].default
            if values.get(name, default) != default:
                found.append(
                    f"{name}={values[name]} is about TSSA, but mixer={mixer}; use mixer=tssa, or leave {name}={default}"
                )
        return found

    @classmethod
    def _is_tssa(cls, mixer: Any) -> bool:
        """Return whether a mixer is TSSA under one of its names."""
        try:
            return isinstance(mixer, str) and hasattr(find_mixer(mixer, cls.place).options, "extensions")
        except ConfigError:
            return False  # reported with the mixer itself

    @classmethod
    def _mixer_problems(cls, mixer: str, values: Mapping[str, Any]) -> list[str]:
        try:
            spec = find_mixer(mixer, cls.place)
        except ConfigError:
            return []  # reported with the mixer itself
        given, block_size = values["mixer_options"], spec.options.model_fields.get("block_size")
        problems = mixer_problems(spec, given, official=values.get("mixer_form") == "lra")
        if problems or block_size is None or not cls._is_tssa(mixer):  # other mixers have blocks of another kind
            return problems
        return _blocks_fit(values, spec.filled(given).get("block_size", block_size.default))


class ConvolutionOptions(MixedOptions):
    """Options of a model whose blocks may have depth-wise convolutions over the neighbours of a token."""

    conv_width: Annotated[int, Field(ge=0, strict=True)] = Field(
        0, description="width of a depth-wise convolution over the tokens around each one, an odd number; 0 has none"
    )
    conv_at: Literal["attention", "mlp", "both", "block", "values"] = Field(
        "attention",
        description="what it is added to: the normed input of the mixer, of the MLP, or of both; the tokens "
        "in front of each block (conditional positions); the output of the mixer, from its values (extension)",
    )

    def has_convolution(self, place: str) -> bool:
        """Return whether there is a convolution at one of the places ``attention``, ``mlp``, ``block``, ``values``."""
        both = self.conv_at == "both" and place in ("attention", "mlp")
        return self.conv_width > 0 and (both or self.conv_at == place)

    @property
    def num_convolutions(self) -> int:
        """Convolutions of each block."""
        return sum(map(self.has_convolution, ("attention", "mlp", "block", "values")))

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        width, at = values.get("conv_width", 0), values.get("conv_at", "attention")
        if isinstance(width, int) and width > 0 and width % 2 == 0:
            found.append(f"conv_width={width} has no middle: the convolution needs an odd width; use {width + 1}, or 0")
        if width == 0 and at != "attention":
            found.append(
                f"conv_at={at} places a convolution, but conv_width=0 has none; set conv_width, such as 3, or leave "
                "conv_at=attention"
            )
        return found


def waves_fit(values: Mapping[str, Any]) -> list[str]:
    """Return the problem, if any, of a width that cannot be split into sines and cosines."""
    width = values.get("embed_dim")
    if not isinstance(width, int) or (width >= 4 and width % 2 == 0):
        return []
    return [
        f"embed_dim={width} cannot hold the sines and cosines of position=sinusoidal; "
        "use an even width of at least 4 or another position"
    ]


def _blocks_fit(values: Mapping[str, Any], block_size: int) -> list[str]:
    """Return the problem, if any, of blocks of features that do not divide a head."""
    if not _numbers(values, "embed_dim", "num_heads") or values["embed_dim"] % values["num_heads"]:
        return []
    head_dim = values["embed_dim"] // values["num_heads"]
    if head_dim % block_size == 0:
        return []
    return [
        f"block_size={block_size} does not divide the width of a head, {head_dim}: blocks take whole features of one "
        "head; change block_size or num_heads"
    ]


def _numbers(values: Mapping[str, Any], *names: str) -> bool:
    """Return whether all these options are given and are numbers; one in quotes has not been parsed yet."""
    return all(isinstance(values.get(name), int | float) for name in names)
