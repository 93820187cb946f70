"""The token mixers: name, class, options, where each fits and how much it computes. Loads no torch.

A mixer is one entry in `BUILTIN` and one class in `tost.nn`, or a class of another package with `register_mixer`. Every
model with an option ``mixer`` takes those that fit it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, Field

from tost._lazy import load
from tost._options import Count, Options, Switch, check_options, options_of_signature
from tost._plugins import Registry
from tost.errors import ConfigError
from tost.ops.flops import gated_flops, tssa_flops

if TYPE_CHECKING:
    from torch import nn

Class = TypeVar("Class", bound=Callable[..., Any])
Place = Literal["vision", "sequence", "language"]


class MixerSizes(NamedTuple):
    """Sizes that the arithmetic of a mixer depends on, besides its options.

    Attributes:
        embed_dim: Width of the tokens, C.
        num_heads: Number of heads, H.
        num_tokens: Length of the sequence, N.
        position_bias: Whether there is a bias per head and position.
    """

    embed_dim: int
    num_heads: int
    num_tokens: int
    position_bias: bool = False


Operations = Callable[[MixerSizes, Any], int]


class MixerOptions(Options):
    """Options of one kind of mixer; the names are those of its class in `tost.nn`."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the class."""
        return dict(self)


@dataclass(frozen=True, kw_only=True)
class MixerSpec:
    """A registered mixer.

    Attributes:
        name: Name in configurations.
        build: The class, or its address as ``"module:Class"``; see `register_mixer` for how it is called.
        options: Class of its options.
        places: Kinds of models that it fits.
        description: One line for listings.
        products: Returns the multiply-adds per token, projections included; None if unknown.
        statistics: Returns other operations per token, where there are enough to count.
        defaults: Defaults of its options, where they differ from those of `options`.
        causal: Its form in language models, where that is another class.
    """

    name: str
    build: str | Callable[..., nn.Module]
    options: type[BaseModel] = MixerOptions
    places: tuple[Place, ...] = ("vision", "sequence")
    description: str = ""
    products: Operations | None = None
    statistics: Operations = lambda sizes, own: 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    causal: MixerSpec | None = None

    def form(self, place: Place) -> MixerSpec | None:
        """Return the form of this mixer for a kind of models; None if there is none."""
        form = self.causal if place == "language" and self.causal is not None else self
        return form if place in form.places else None

    def factory(self) -> Callable[..., nn.Module]:
        """Return the class."""
        return load(self.build) if isinstance(self.build, str) else self.build

    def problems(self, given: Mapping[str, Any]) -> list[str]:
        """Return the mistakes in the options of this mixer, one sentence each."""
        _, problems = check_options(self.options, {**self.defaults, **given}, prefix="mixer_options.")
        other = f"; if it is an option of another mixer than {self.name}, clear them all with mixer_options=null"
        return [f"{one.key}: {one.text}{other if one.text.startswith('unknown') else ''}" for one in problems]


class TSSAOptions(MixerOptions):
    """Options of token statistics self-attention."""

    normalize: Switch = Field(True, description="normalize features over the tokens before memberships are taken")


class BlockTSSAOptions(TSSAOptions):
    """Options of token statistics self-attention in blocks."""

    block_size: Count = Field(8, description="features of a head whose second moments are taken together")


class GatedTSSAOptions(MixerOptions):
    """Options of token statistics over gated windows."""

    block_size: Count = Field(8, description="features of a head whose covariances are kept: 8 and more recall")


def _tssa_statistics(sizes: MixerSizes, own: TSSAOptions) -> int:
    C, H, _, _ = sizes
    return tssa_flops(H, C // H, causal=False, block_size=getattr(own, "block_size", 1))


def _causal_tssa_statistics(sizes: MixerSizes, own: MixerOptions) -> int:
    C, H, _, bias = sizes
    return tssa_flops(H, C // H, causal=True, bias=bias)


def _gated_tssa(sizes: MixerSizes, own: GatedTSSAOptions) -> int:
    return 3 * sizes.embed_dim**2 + sizes.embed_dim**2 // own.block_size


def _gated_statistics(sizes: MixerSizes, own: GatedTSSAOptions) -> int:
    return gated_flops(sizes.embed_dim, own.block_size)


def _softmax(sizes: MixerSizes, own: MixerOptions) -> int:
    return 4 * sizes.embed_dim**2 + 2 * sizes.num_tokens * sizes.embed_dim


class ReformerOptions(MixerOptions):
    """Options of LSH attention."""

    num_hashes: Count = Field(2, description="rounds of hashing")
    chunk_size: Count = Field(64, description="sorted tokens that are attended to together; not for form=lra")
    num_buckets: Annotated[int, Field(ge=2, le=1024, multiple_of=2, strict=True)] | None = Field(
        None, description="buckets, an even number; null: the power of two up to twice the number of chunks"
    )
    form: Literal["paper", "lra"] = Field("paper", description="lra: ten chunks, as in the official code")
    redraw: Switch = Field(False, description="take new hashes in each forward pass in training")


def _reformer(sizes: MixerSizes, own: ReformerOptions) -> int:
    """Fewer projections, hashes, and two chunks that every token attends to."""
    C, _, N, _ = sizes
    if own.form == "lra":
        projections, chunk, buckets = 2 * C * C, N // 10 + 1, 10
    else:
        projections, chunk, buckets = 3 * C * C, own.chunk_size, max(2 * N // own.chunk_size, 2)
    return projections + own.num_hashes * C * ((own.num_buckets or buckets) // 2 + 4 * chunk)


class BigBirdOptions(MixerOptions):
    """Options of block-sparse attention."""

    block_size: Count = Field(64, description="tokens per block")
    num_random: Annotated[int, Field(ge=0, strict=True)] = Field(3, description="random blocks that a block attends to")
    random_length: Count | None = Field(None, description="draw them from the first so many tokens only; null: all")


class LinformerOptions(MixerOptions):
    """Options of attention to learned mixtures."""

    rank: Count = Field(256, description="number of mixtures")
    share: Literal["kv", "heads", "none"] = Field(
        "heads", description="what shares a matrix: keys, values and heads (kv), the heads, or none"
    )


class PerformerOptions(MixerOptions):
    """Options of attention by random features."""

    num_features: Count | None = Field(None, description="random features; null: D ln D for heads of width D")
    kernel: Literal["softmax", "relu"] = Field("softmax", description="what the features stand for")
    redraw: Switch = Field(False, description="take new features in each forward pass in training")


def _linear(sizes: MixerSizes, own: MixerOptions) -> int:
    C, H, _, _ = sizes
    return 4 * C * C + C + 2 * C * C // H


def _performer(sizes: MixerSizes, own: PerformerOptions) -> int:
    if own.kernel == "relu":
        return _linear(sizes, own)
    C, H, _, _ = sizes
    features = own.num_features or max(1, int(C // H * math.log(C // H)))
    return 4 * C * C + features * (4 * C + H)


class S4Options(MixerOptions):
    """Options of the state space layers."""

    state_size: Annotated[int, Field(ge=2, multiple_of=2, strict=True)] = Field(
        64, description="states per channel, counted with their conjugates"
    )
    bidirectional: Switch = Field(True, description="a second kernel that runs backwards")
    step_min: float = Field(1e-3, gt=0, description="smallest initial step")
    step_max: float = Field(1e-1, gt=0, description="largest initial step")
    tied_drop: Switch = Field(False, description="dropout decides once for all tokens of a sequence and feature")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options exclude each other; see `Options.conflicts`."""
        low, high = values.get("step_min", 0.0), values.get("step_max", 1.0)
        return [f"step_min={low} is above step_max={high}; exchange them"] if low > high else []

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `S4`."""
        given = dict(self)
        return {"step": (given.pop("step_min"), given.pop("step_max")), **given}


class S4DOptions(S4Options):
    """Options of the diagonal state space layers."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `S4`."""
        return {**super().arguments(), "kernel": "s4d"}


class CausalS4DOptions(S4Options):
    """Options of the diagonal state space layers in language models, which only look back."""

    bidirectional: Literal[False] = False

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `CausalS4D`."""
        return {key: value for key, value in super().arguments().items() if key != "bidirectional"}


def _projections(count: int) -> Operations:
    """Return the arithmetic of a mixer whose work is in its projections."""
    return lambda sizes, own: count * sizes.embed_dim**2


def _gated_delta(sizes: MixerSizes, own: MixerOptions) -> int:
    """Five projections and the rates; then read, compare and write a memory of width C / H per feature."""
    C, H, _, _ = sizes
    return 5 * C * C + 2 * C * H + 3 * C * C // H


def _mixer(
    name: str, module: str, products: Operations, description: str = "", options: type = MixerOptions, **more: Any
) -> MixerSpec:
    build = f"tost.nn:{module}"
    return MixerSpec(name=name, build=build, options=options, description=description, products=products, **more)


def _causal(name: str, module: str, products: Operations, options: type = MixerOptions, **more: Any) -> MixerSpec:
    """Return the form of a mixer for language models."""
    return _mixer(name, module, products, "", options, places=("language",), **more)


_LANGUAGE: tuple[Place, ...] = ("language",)
_SEQUENCE: tuple[Place, ...] = ("sequence",)
_GATED_TSSA = _causal("tssa_plus", "GatedTSSAttention", _gated_tssa, GatedTSSAOptions, statistics=_gated_statistics)
_CAUSAL_TSSA = _causal("tssa", "CausalTSSAttention", _projections(2), statistics=_causal_tssa_statistics)

# The arithmetic of mixers whose work per token depends on the length is that of sequences of N tokens. The Fourier
# transforms and kernels of S4 are left out.
BUILTIN = (
    _mixer(
        "tssa",
        "TSSAttention",
        _projections(2),
        "token statistics self-attention, linear in the tokens",
        TSSAOptions,
        statistics=_tssa_statistics,
        causal=_CAUSAL_TSSA,
    ),
    _mixer(
        "tssa_plus",
        "BlockTSSAttention",
        _projections(3),
        "tssa in blocks of features; in language models over gated windows, which recall",
        BlockTSSAOptions,
        statistics=_tssa_statistics,
        causal=_GATED_TSSA,
    ),
    _mixer(
        "softmax",
        "SoftmaxAttention",
        _softmax,
        "softmax attention between all pairs of tokens",
        causal=_causal("softmax", "CausalSoftmaxAttention", _softmax),
    ),
    _mixer(
        "xca",
        "CrossCovarianceAttention",
        lambda sizes, own: 4 * sizes.embed_dim**2 + 2 * sizes.embed_dim**2 // sizes.num_heads,
        "cross-covariance attention, between features (XCiT)",
    ),
    _mixer(
        "mssa",
        "SubspaceAttention",
        lambda sizes, own: 2 * sizes.embed_dim**2 + 2 * sizes.num_tokens * sizes.embed_dim,
        "multi-head subspace self-attention (CRATE)",
    ),
    _mixer("reformer", "Reformer", _reformer, "softmax attention within buckets of hashes", ReformerOptions),
    _mixer(
        "bigbird",
        "BigBird",
        # Five blocks, the random ones, and two that attend to all.
        lambda sizes, own: 4 * sizes.embed_dim**2 + 2 * own.block_size * (7 + own.num_random) * sizes.embed_dim,
        "softmax attention to global, near and random blocks",
        BigBirdOptions,
    ),
    _mixer(
        "linformer",
        "Linformer",
        lambda sizes, own: 4 * sizes.embed_dim**2 + 4 * own.rank * sizes.embed_dim,
        "softmax attention to learned mixtures of the tokens",
        LinformerOptions,
        places=_SEQUENCE,
    ),
    _mixer(
        "linear",
        "LinearAttention",
        _linear,
        "attention by products of features (Linear Transformer)",
        causal=_causal("linear", "CausalLinearAttention", _linear),
    ),
    _mixer("performer", "Performer", _performer, "softmax attention estimated by random features", PerformerOptions),
    _mixer(
        "s4", "S4", _projections(2), "state space layer, diagonal plus low-rank matrix", S4Options, places=_SEQUENCE
    ),
    _mixer(
        "s4d",
        "S4",
        _projections(2),
        "state space layer with a diagonal matrix",
        S4DOptions,
        causal=_causal("s4d", "CausalS4D", _projections(2), CausalS4DOptions),
    ),
    _mixer("mingru", "MinGRU", _projections(4), "a gated mean per channel (minGRU)", places=_LANGUAGE),
    _mixer("gated_delta", "GatedDeltaNet", _gated_delta, "a memory with a gated delta rule", places=_LANGUAGE),
    _mixer("none", "NoMixer", _projections(0), "no mixer: the control without any mixing", places=get_args(Place)),
)

# Arguments that the model decides. A mixer gets those that its constructor names; they are not options of the mixer.
_FROM_MODEL = frozenset(
    {"embed_dim", "num_heads", "max_length", "in_bias", "out_bias", "attn_drop", "gain_drop", "out_drop", "drop"}
    | {"position_bias", "backend", "device", "dtype"}
)


def register_mixer(
    name: str,
    *,
    options: type[BaseModel] | None = None,
    places: Sequence[Place] = ("vision", "sequence"),
    description: str = "",
    products: Operations | None = None,
) -> Callable[[Class], Class]:
    """Make a token mixer available as ``mixer=<name>`` in every model that has this option.

    The class is called as ``Class(embed_dim, num_heads, **options)``. If its constructor names `max_length`, `in_bias`,
    `out_bias`, `attn_drop`, `out_drop` or `backend`, it gets the model's choice of these as well. Its modules are
    called as ``mixer(x, mask)``, from tokens ``[B, N, C]`` and a bool mask ``[B, N]`` of the real ones, or None, to
    ``[B, N, C]``. What else a mixer takes is its attribute ``accepts``; see `tost.nn.Accepts`.

    In a language model it has to be causal. To generate text it also needs ``forward_with_state(x, state, mask)``,
    which returns the output and the state after these tokens: a named tuple of tensors with the batch as their first
    axis, one of them ``position``, the number of tokens seen.

    Args:
        name: Name in configurations.
        options: Pydantic class of its options; by default they are the arguments of its constructor.
        places: Kinds of models that it fits: ``"vision"``, ``"sequence"``, ``"language"``.
        description: One line for listings.
        products: Returns the multiply-adds per token, from `tost.models.mixers.MixerSizes` and the options. Without it
            the arithmetic of models with this mixer is not counted.

    Returns:
        A decorator that registers a class and returns it as it is.

    Raises:
        ConfigError: The name is taken or cannot be a name, or there is no such place.

    Example:
        >>> import torch, tost
        >>> @tost.register_mixer("mean_of_all", description="the mean of all tokens, for each of them")
        ... class MeanOfAll(torch.nn.Module):
        ...     def __init__(self, embed_dim: int, num_heads: int, scale: float = 1.0) -> None:
        ...         super().__init__()
        ...         self.scale = scale
        ...
        ...     def forward(self, x, mask=None):
        ...         return self.scale * x.mean(dim=1, keepdim=True).expand_as(x)
        >>> model = tost.create_model("tost_mini", mixer="mean_of_all", mixer_options={"scale": 0.5})
    """
    if unknown := [place for place in places if place not in get_args(Place)]:
        raise ConfigError(
            f"there is no place {unknown[0]!r} for a mixer; the places are: {', '.join(get_args(Place))}."
        )

    def register(build: Class) -> Class:
        spec = _adapt(name, build) if options is None else MixerSpec(name=name, build=build, options=options)
        MIXERS.add(name, replace(spec, places=tuple(places), description=description, products=products))
        return build

    return register


def list_mixers(pattern: str = "*", *, place: Place | None = None) -> list[str]:
    """List the registered mixers.

    Args:
        pattern: Which ones, with the wildcards of a shell.
        place: Only those that fit this kind of models. Mixers of other packages that have not been loaded are listed.

    Returns:
        Names in alphabetical order.
    """
    names = MIXERS.names(pattern)
    if place is None:
        return names
    return [name for name in names if (spec := MIXERS.peek(name)) is None or spec.form(place) is not None]


def mixer_spec(name: str) -> MixerSpec:
    """Return the spec that is registered under a name.

    Raises:
        ConfigError: There is no such mixer; the message suggests one.
    """
    return MIXERS.get(name)


def find_mixer(name: str, place: Place) -> MixerSpec:
    """Return the form of a mixer that fits a kind of models.

    Raises:
        ConfigError: There is no such mixer, or it does not fit.
    """
    form = mixer_spec(name).form(place)
    if form is None:
        raise ConfigError(
            f"mixer {name!r} does not fit {place} models; those that do: {', '.join(list_mixers(place=place))}."
        )
    return form


def _adapt(name: str, build: Any) -> MixerSpec:
    """Make a spec of the class that an entry point or ``package.module:Class`` refers to."""
    if (spec := MIXERS.renamed(name, build)) is not None:
        return spec
    if not callable(build):
        raise ConfigError(f"mixer {name!r} refers to {build!r}, which is not a class.")
    places: tuple[Place, ...] = ("language",) if hasattr(build, "forward_with_state") else ("vision", "sequence")
    return MixerSpec(name=name, build=build, options=options_of_signature(build, skip=_FROM_MODEL), places=places)


def _columns(spec: MixerSpec) -> dict[str, str]:
    return {"models": ", ".join(place for place in get_args(Place) if spec.form(place) is not None)}


MIXERS: Registry[MixerSpec] = Registry("mixer", "tost.mixers", _adapt, BUILTIN, columns=_columns)
