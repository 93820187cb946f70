"""The mixers of this package: name, class, options, arithmetic. A new one is an entry here. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from tost._options import Count, Switch
from tost.models.extensions import CausalExtensionOptions, ExtensionOptions
from tost.models.mixers.spec import MixerOptions, MixerSizes, MixerSpec
from tost.ops.flops import tssa_flops


class TSSAOptions(ExtensionOptions, MixerOptions):
    """Options of token statistics self-attention."""

    normalize: Switch = Field(True, description="normalize features over the tokens before memberships are taken")

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `TSSAttention`."""
        return {"normalize": self.normalize, "extensions": self.extensions()}


class CausalTSSAOptions(CausalExtensionOptions, MixerOptions):
    """Options of causal token statistics self-attention, all of them extensions; see `LanguageOptions`."""

    after_last_position: Literal["error", "repeat"] = "error"

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `CausalTSSAttention`."""
        return {"extensions": self.extensions()}


def _tssa_products(sizes: MixerSizes, own: TSSAOptions | CausalTSSAOptions) -> int:
    extensions = own.extensions()
    decays = {"head": sizes.num_heads, "channel": sizes.embed_dim // extensions.block_size}
    forget = decays[extensions.forget] if isinstance(extensions.forget, str) else 0
    return ((3 if extensions.gate else 2) * sizes.embed_dim + forget) * sizes.embed_dim


def _tssa_statistics(sizes: MixerSizes, own: TSSAOptions) -> int:
    C, H = sizes.embed_dim, sizes.num_heads
    return tssa_flops(H, C // H, causal=False, **own.extensions().operator_options())


def _causal_tssa_statistics(sizes: MixerSizes, own: CausalTSSAOptions) -> int:
    C, H, _, bias = sizes
    extensions = own.extensions()
    forget = extensions.forget is not False
    return tssa_flops(H, C // H, causal=True, bias=bias, forget=forget, **extensions.operator_options())


def _softmax_products(sizes: MixerSizes, own: MixerOptions) -> int:
    return 4 * sizes.embed_dim**2 + 2 * sizes.num_tokens * sizes.embed_dim


class WindowOptions(MixerOptions):
    """Options of attention over a window."""

    window: Count = Field(128, description="tokens that a token sees, itself included")


def window_products(sizes: MixerSizes, own: WindowOptions) -> int:
    """A chunk of queries meets the keys of all its windows, nearly twice as many as each query needs."""
    C, _, N, _ = sizes
    return 4 * C * C + 2 * (own.window - 1 + min(N, own.window)) * C


def _xca_products(sizes: MixerSizes, own: MixerOptions) -> int:
    return 4 * sizes.embed_dim**2 + 2 * sizes.embed_dim**2 // sizes.num_heads


def _mssa_products(sizes: MixerSizes, own: MixerOptions) -> int:
    return 2 * sizes.embed_dim**2 + 2 * sizes.num_tokens * sizes.embed_dim


class ReformerOptions(MixerOptions):
    """Options of LSH attention."""

    num_hashes: Count = Field(2, description="rounds of hashing")
    chunk_size: Count = Field(64, description="sorted tokens that are attended to together; not for form=lra")
    num_buckets: Annotated[int, Field(ge=2, le=1024, multiple_of=2, strict=True)] | None = Field(
        None, description="buckets, an even number; null: the power of two up to twice the number of chunks"
    )
    form: Literal["paper", "lra"] = Field("paper", description="lra: ten chunks, as in the official code")
    redraw: Switch = Field(False, description="take new hashes in each forward pass in training")


def _reformer_products(sizes: MixerSizes, own: ReformerOptions) -> int:
    """Fewer projections, hashes, and two chunks that every token sees."""
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


def _bigbird_products(sizes: MixerSizes, own: BigBirdOptions) -> int:
    """Five blocks, the random ones, and two that attend to all."""
    C = sizes.embed_dim
    return 4 * C * C + 2 * own.block_size * (7 + own.num_random) * C


class LinformerOptions(MixerOptions):
    """Options of attention to learned mixtures."""

    rank: Count = Field(256, description="number of mixtures")
    share: Literal["kv", "heads", "none"] = Field(
        "heads", description="what shares a matrix: keys, values and heads (kv), the heads, or none"
    )


def _linformer_products(sizes: MixerSizes, own: LinformerOptions) -> int:
    return 4 * sizes.embed_dim**2 + 4 * own.rank * sizes.embed_dim


class PerformerOptions(MixerOptions):
    """Options of attention by random features."""

    num_features: Count | None = Field(None, description="random features; null: D ln D for heads of width D")
    kernel: Literal["softmax", "relu"] = Field("softmax", description="what the features stand for")
    redraw: Switch = Field(False, description="take new features in each forward pass in training")


def _linear_products(sizes: MixerSizes, own: MixerOptions) -> int:
    C, H, _, _ = sizes
    return 4 * C * C + C + 2 * C * C // H


def _performer_products(sizes: MixerSizes, own: PerformerOptions) -> int:
    if own.kernel == "relu":
        return _linear_products(sizes, own)
    C, H, _, _ = sizes
    features = own.num_features or max(1, int(C // H * math.log(C // H)))
    return 4 * C * C + features * (4 * C + H)


class NystromOptions(MixerOptions):
    """Options of attention through landmarks."""

    num_landmarks: Count = Field(64, description="landmarks")
    conv_width: Annotated[int, Field(ge=0, strict=True)] = Field(
        33, description="width of a convolution of the values, odd; 0 has none"
    )
    iterations: Count = Field(6, description="steps of the pseudo-inverse")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        """Return which options exclude each other; see `Options.conflicts`."""
        width = values.get("conv_width", 0)
        has_centre = width == 0 or width % 2 == 1
        return [] if has_centre else [f"conv_width={width} has no centre; use an odd number, or 0 for none"]


def _nystrom_products(sizes: MixerSizes, own: NystromOptions) -> int:
    C, H, N, _ = sizes
    M, near = own.num_landmarks, own.conv_width * C
    if M >= N:
        return _softmax_products(sizes, own) + near
    inverse = 4 * own.iterations * H * M**3 + 2 * M * M * C
    return 4 * C * C + 4 * M * C + near + inverse // N


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
        own = dict(self)
        step, init = (own.pop("step_min"), own.pop("step_max")), own.pop("init", None)
        return {**own, "kernel": "s4" if init is None else f"s4d-{init}", "step": step}


class S4DOptions(S4Options):
    """Options of the diagonal state space layers."""

    init: Literal["legs", "lin"] = Field("legs", description="initial eigenvalues: HiPPO-LegS, or evenly spaced")


class CausalS4DOptions(S4DOptions):
    """Options of the diagonal state space layers in language models, which only look back."""

    bidirectional: Literal[False] = False

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `CausalS4D`."""
        return {key: value for key, value in super().arguments().items() if key != "bidirectional"}


def _s4_products(sizes: MixerSizes, own: S4Options) -> int:
    return 2 * sizes.embed_dim**2


def _gated_delta_products(sizes: MixerSizes, own: MixerOptions) -> int:
    """Five projections and the rates; then read, compare and write a memory of width C / H per feature."""
    C, H, _, _ = sizes
    return 5 * C * C + 2 * C * H + 3 * C * C // H


_Products = Callable[[MixerSizes, Any], int]

# Options of the official code of the Long Range Arena. Its Performer on ListOps has other options still.
_OFFICIAL: dict[str, dict[str, Any]] = {
    "reformer": {"num_hashes": 1, "form": "lra"},
    "bigbird": {"random_length": 1024},
    "linformer": {"rank": 16, "share": "kv"},
    "performer": {"kernel": "relu"},
    "nystrom": {"conv_width": 35},
}


def _mixer(
    name: str, module: str, description: str, products: _Products, options: type = MixerOptions, **more: Any
) -> MixerSpec:
    build, more["official"] = f"tost.nn:{module}", _OFFICIAL.get(name, {})
    return MixerSpec(name=name, build=build, options=options, description=description, products=products, **more)


def _causal(name: str, module: str, products: _Products, options: type = MixerOptions, **more: Any) -> MixerSpec:
    """Return the form of a mixer for language models, where it is another one."""
    return _mixer(name, module, "", products, options, places=("language",), **more)


# The arithmetic of mixers whose work per token depends on the length is that of sequences of N tokens. The Fourier
# transforms and kernels of S4 are left out.
BUILTIN = (
    _mixer(
        "tssa",
        "TSSAttention",
        "token statistics self-attention, linear in the tokens",
        _tssa_products,
        TSSAOptions,
        statistics=_tssa_statistics,
        causal=_causal(
            "tssa", "CausalTSSAttention", _tssa_products, CausalTSSAOptions, statistics=_causal_tssa_statistics
        ),
    ),
    _mixer(
        "tssa_plus",
        "TSSAttention",
        "tssa with statistics in blocks, output norm, gate and unit variance",
        _tssa_products,
        TSSAOptions,
        statistics=_tssa_statistics,
        defaults={"block_size": 8, "gate": True, "head_norm": True, "unit_variance": True},
    ),
    _mixer(
        "softmax",
        "SoftmaxAttention",
        "softmax attention between all pairs of tokens",
        _softmax_products,
        causal=_causal("softmax", "CausalSoftmaxAttention", _softmax_products),
    ),
    _mixer(
        "window",
        "WindowAttention",
        "softmax attention to the last tokens only",
        window_products,
        WindowOptions,
        places=("language",),
    ),
    _mixer("xca", "CrossCovarianceAttention", "cross-covariance attention, between features (XCiT)", _xca_products),
    _mixer("mssa", "SubspaceAttention", "multi-head subspace self-attention (CRATE)", _mssa_products),
    _mixer("reformer", "Reformer", "softmax attention within buckets of hashes", _reformer_products, ReformerOptions),
    _mixer(
        "bigbird",
        "BigBird",
        "softmax attention to global, neighbouring and random blocks",
        _bigbird_products,
        BigBirdOptions,
    ),
    _mixer(
        "linformer",
        "Linformer",
        "softmax attention to learned mixtures of the tokens",
        _linformer_products,
        LinformerOptions,
        places=("sequence",),
    ),
    _mixer(
        "linear",
        "LinearAttention",
        "attention by products of features (Linear Transformer)",
        _linear_products,
        causal=_causal("linear", "CausalLinearAttention", _linear_products),
    ),
    _mixer(
        "performer",
        "Performer",
        "softmax attention estimated by random features",
        _performer_products,
        PerformerOptions,
    ),
    _mixer("nystrom", "NystromAttention", "softmax attention through landmarks", _nystrom_products, NystromOptions),
    _mixer(
        "s4",
        "S4",
        "state space layer with a diagonal plus low-rank matrix",
        _s4_products,
        S4Options,
        places=("sequence",),
    ),
    _mixer(
        "s4d",
        "S4",
        "state space layer with a diagonal matrix",
        _s4_products,
        S4DOptions,
        causal=_causal("s4d", "CausalS4D", _s4_products, CausalS4DOptions),
    ),
    _mixer(
        "mingru",
        "MinGRU",
        "a gated mean per channel (minGRU)",
        lambda sizes, own: 4 * sizes.embed_dim**2,
        places=("language",),
    ),
    _mixer(
        "gated_tssa",
        "GatedTSSA",
        "centered token statistics over windows from the data, with their mean",
        lambda sizes, own: 4 * sizes.embed_dim**2,
        places=("language",),
    ),
    _mixer(
        "gated_delta",
        "GatedDeltaNet",
        "a memory of keys and values that forgets and overwrites (Gated DeltaNet)",
        _gated_delta_products,
        places=("language",),
    ),
    _mixer(
        "none",
        "NoMixer",
        "nothing: the control without any mixing",
        lambda sizes, own: 0,
        places=("vision", "sequence", "language"),
    ),
)
