"""The options of all models, checked before anything is built. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from tost._options import Count, Depth, Options, Switch
from tost.errors import ConfigError
from tost.models.mixers import MixerSpec, Place, find_mixer, list_mixers
from tost.ops.backends import BackendName

# Options of earlier revisions, with the values that turn them off; `saved_options` leaves them out of files.
_REMOVED = {
    **{"window_every": 0, "window": 128, "num_averages": 0, "mixer_form": "paper", "count_scaled": False},
    **{"centered": False, "block_size": 1, "gate": False, "head_norm": False, "unit_variance": False},
    **{"forget": False, "after_last_position": "error"},
}


class ModelOptions(Options):
    """Options of every model in this package."""

    embed_dim: Count = Field(description="width of the tokens, C")
    depth: Depth = Field(description="number of blocks, L")
    num_heads: Count = Field(description="number of heads (groups) of each attention, H; divides embed_dim")
    mlp_ratio: float = Field(4.0, gt=0, description="hidden width of the MLPs as a multiple of embed_dim, rounded")
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
        if _numbers(values, "embed_dim", "mlp_ratio"):
            hidden = values["embed_dim"] * values["mlp_ratio"]
            if not 0.5 < hidden < 2**31:
                found.append(
                    f"mlp_ratio={values['mlp_ratio']} times embed_dim={values['embed_dim']} is {hidden:g}; the hidden "
                    "width, rounded, has to be at least 1 and below 2147483648: choose another ratio"
                )
        return found


class MixedOptions(ModelOptions):
    """Options of a model whose token mixer can be chosen.

    A model may have options of TSSA as options of its own; the other mixers have theirs in `mixer_options`.
    """

    place: ClassVar[Place]
    """The kind of models that the mixer has to fit."""

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
        own = {name: getattr(self, name) for name in self.tssa_options() if self.mixer == "tssa"}
        spec = self.mixer_spec()
        return spec.options.model_validate({**spec.defaults, **own, **self.mixer_options})

    @classmethod
    def tssa_options(cls) -> list[str]:
        """Return the options of this kind of models that belong to TSSA."""
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
        mixer, given, own = values.get("mixer", "tssa"), values.get("mixer_options"), cls.tssa_options()
        try:
            spec = find_mixer(mixer, cls.place) if isinstance(mixer, str) else None
        except ConfigError:
            spec = None  # reported with the mixer itself
        is_tssa = mixer in ("tssa", "tssa_plus")
        if mixer == "tssa" and given and own:
            found.append(f"mixer_options={given}: with mixer=tssa, set options of the model: {', '.join(own)}")
        elif spec is not None and isinstance(given, Mapping):
            problems, block_size = spec.problems(given), spec.options.model_fields.get("block_size")
            found += problems
            if is_tssa and not problems and block_size is not None:  # other mixers have blocks of another kind
                found += _blocks_fit(values, {**spec.defaults, **given}.get("block_size", block_size.default))
        others: set[str] = set() if mixer == "tssa" else {*own}
        others = others if is_tssa else {*others, "backend"}
        for name in (name for name in (*own, "backend") if name in others):
            default = cls.model_fields[name].default
            if values.get(name, default) != default:
                found.append(
                    f"{name}={values[name]} is about TSSA, but mixer={mixer}; use mixer=tssa, or leave {name}={default}"
                )
        return found


class ConvolutionOptions(MixedOptions):
    """Options of a model whose blocks may have depth-wise convolutions over the neighbours of a token."""

    conv_width: Annotated[int, Field(ge=0, le=1024, strict=True)] = Field(
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


def saved_options(given: Mapping[str, Any], schema: type[BaseModel]) -> dict[str, Any]:
    """Return the options of a file of an earlier revision without those that were removed since.

    Raises:
        ConfigError: The model uses one of them.
    """
    former = {name: given[name] for name in _REMOVED if name in given and name not in schema.model_fields}
    used = [f"{name}={value}" for name, value in former.items() if value != _REMOVED[name]]
    used += ["mixer=gated_tssa"] if given.get("mixer") == "gated_tssa" else []
    if used:
        raise ConfigError(
            f"{', '.join(used)}: this option was removed after revision 1ae0fcd of tost; use that revision to read it."
        )
    return {name: value for name, value in given.items() if name not in former}


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


class LanguageOptions(MixedOptions):
    """Options of `LanguageToST`. Those marked as extensions are not in the authors' code and are off by default."""

    place: ClassVar[Place] = "language"

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
    conv_width: Annotated[int, Field(ge=0, le=1024, strict=True)] = Field(
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

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        if values.get("position") == "sinusoidal":
            found += waves_fit(values)
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
        return found


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
    mixer_bias: Switch = Field(True, description="biases of the mixer's projections, for mixers that have the choice")
    attention_dropout: float | None = Field(
        None, ge=0, lt=1, description="dropout on attention weights, or gains of TSSA; null: the same as dropout"
    )
    pooling: Literal["mean", "cls", "first", "none"] = Field(
        "mean",
        description="mean: average of the real elements; cls: what becomes of a learned vector put in front; first: "
        "the first element; none: every element has logits of its own",
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
        if values.get("block") == "mixer" and (conv := values.get("conv_width")):
            found.append(f"conv_width={conv} belongs to blocks with an MLP; use block=mlp, or conv_width=0")
        if values.get("norm_kind") == "batch" and values.get("block") == "mlp":
            found.append("norm_kind=batch goes with block=mixer; blocks with an MLP have layer norms")
        return found


Rate = Annotated[float, Field(ge=0, lt=1)]


class ImageOptions(ModelOptions):
    """Options of every image model."""

    patch_size: Count = Field(16, description="edge of the square of pixels of a token, P")
    in_chans: Count = Field(3, description="channels of an image")
    num_classes: Annotated[int, Field(ge=0, strict=True)] = Field(
        1000, description="number of classes, K; 0 has no head and gives the features"
    )
    global_pool: Literal["token", "avg", ""] = Field(
        "token", description="what the head sees: the class token, the average of the patches, or (empty) every token"
    )
    head_dropout: Rate = Field(0.0, description="dropout in front of the head")
    drop_path: Rate = Field(0.0, description="probability with which a residual branch is left out for an image")
    drop_path_rule: Literal["constant", "linear"] = Field(
        "constant", description="drop_path of the blocks: the same for all, or growing from 0 at the first to the last"
    )

    def drop_paths(self) -> list[float]:
        """Return the drop path rate of each block."""
        if self.drop_path_rule == "constant" or self.depth == 1:
            return [self.drop_path] * self.depth
        return [self.drop_path * i / (self.depth - 1) for i in range(self.depth)]


class FixedSizeOptions(ImageOptions):
    """Options of an image model with learned positions, whose number follows from the size of the images."""

    image_size: Count | tuple[Count, Count] = Field(224, description="size of the images, or (height, width)")

    @field_validator("image_size")
    @classmethod
    def _one_number(cls, size: int | tuple[int, int]) -> int | tuple[int, int]:
        """Write squares in one way, so that equal models have equal options."""
        return size[0] if isinstance(size, tuple) and size[0] == size[1] else size

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else size

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        size, patch = values.get("image_size"), values.get("patch_size")
        sides = (size,) if isinstance(size, int) else tuple(size or ())
        if isinstance(patch, int) and any(isinstance(side, int) and side % patch for side in sides):
            found.append(
                f"image_size={size} is not made of whole patches of patch_size={patch}: "
                "resize the images to multiples of the patch, or choose another patch_size"
            )
        if values.get("backend", "auto") != "auto":
            found.append(f"backend={values['backend']} chooses an implementation of TSSA, which this model has not")
        return found


class VisionOptions(ImageOptions, ConvolutionOptions):
    """Options of `VisionToST`."""

    place: ClassVar[Place] = "vision"

    patch_size: Literal[2, 4, 8, 16] = Field(
        16, description="edge of the square of pixels of a token, P: one convolution of stride 2 per factor of 2"
    )
    feed_forward: Literal["mlp", "ista"] = Field(
        "mlp", description="what follows it: an MLP with a residual connection, or a sparsifying step (CRATE)"
    )
    normalize: Switch = Field(True, description="normalize features over the tokens before memberships are taken")
    layer_scale: float | None = Field(
        1.0, gt=0, description="initial value of the vectors that scale each residual branch; null has none"
    )
    class_depth: Depth = Field(2, description="number of class-attention blocks after the others")
    tokens_norm: Switch = Field(True, description="second norm of class attention for all tokens, not the class alone")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        width, patch = values.get("embed_dim"), values.get("patch_size")
        if isinstance(width, int) and patch in (2, 4, 8, 16) and width % (patch // 2):
            found.append(
                f"embed_dim={width} is not divisible by {patch // 2}: with patch_size={patch} the stem starts with "
                f"1/{patch // 2} of the width and doubles it; change one of the two"
            )
        return found


class CrateOptions(FixedSizeOptions):
    """Options of `CRATE`. `mlp_ratio` has no meaning here: the sparsifying step has no hidden width."""

    step_size: float = Field(0.1, gt=0, description="step of the sparsifying block, eta")
    threshold: float = Field(0.1, ge=0, description="what the sparsifying block charges for being non-zero, lambda")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options do not go together; see `ModelOptions.conflicts`."""
        found = super().conflicts(values)
        if values.get("mlp_ratio", 4.0) != 4.0:
            found.append(f"mlp_ratio={values['mlp_ratio']} has no meaning for CRATE, which has no MLP; leave it out")
        return found


class VitOptions(FixedSizeOptions):
    """Options of `ViT`, which is timm's VisionTransformer."""

    drop_path_rule: Literal["linear"] = Field("linear", description="timm's drop path grows from 0 at the first block")
