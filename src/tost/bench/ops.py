"""`tost bench ops`: our attention layers beside their two projections, the paper's listing, and other mixers.

All contenders map ``[B, N, C]`` to ``[B, N, C]``. Our layers, the paper's and the limit use the same two projections
and differ only between them. Axes: B batch, N tokens, H heads, D head width, C = H * D model width.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost._text import Table, grouped
from tost.bench.harness import (
    BOUNDS,
    MISSING,
    Benchmark,
    Check,
    Gate,
    Report,
    Row,
    cell,
    interleave,
    keep_freed_memory,
    kept_bytes,
    layer_trial,
    pivot,
    plain,
    plan_repeats,
    ratios,
    spread,
    spread_of,
    warm_up,
)
from tost.bench.plot import Line, Panel, Style, draw
from tost.errors import BackendError, ConfigError
from tost.nn import (
    BlockTSSAttention,
    CausalSoftmaxAttention,
    CausalTSSAttention,
    CrossCovarianceAttention,
    GatedTSSAttention,
    SoftmaxAttention,
    TSSAttention,
)
from tost.ops import available_backends, causal_tssa, causal_tssa_with_state, gated_tssa, tssa
from tost.ops.backends import BACKENDS
from tost.testing import relative_rms

OPS = ("tssa", "causal_tssa", "gated_tssa")
MODES = ("fwd", "fwd+bwd")
LIMIT = "limit"
"""Name of the contender that every ratio is relative to."""

CONTENDERS = {
    LIMIT: "the layer's linear projections alone",
    "tost": "our layer, fastest backend",
    "tost-torch": "our layer on plain PyTorch operations",
    "paper eager": "the paper's listing, one PyTorch operation per step",
    "paper compiled": "torch.compile of the same",
    "sdpa": "softmax attention on PyTorch's fused kernel",
    "xca": "cross-covariance attention of XCiT",
}
# Width and heads of the paper's small vision model and base language model.
_SIZES = {"tssa": (384, 8), "causal_tssa": (768, 12), "gated_tssa": (768, 12)}
# (batch, tokens); 8 x 196 is a small batch of 224-pixel images in 16-pixel patches.
_SHAPES = {
    "tssa": ((8, 196), (1, 1024), (1, 4096), (1, 10240), (1, 65536)),
    "causal_tssa": ((1, 1024), (1, 4096), (1, 8192)),
    "gated_tssa": ((1, 1024), (1, 8192)),
}
_QUICK_SHAPES = ((1, 256), (1, 1024))
# [B, N, H, D] of the checks: the smallest, odd sizes, and the head shapes of the paper's models.
_CHECKED = ((1, 1, 1, 1), (2, 63, 3, 5), (1, 257, 8, 64), (2, 130, 12, 64))
# Softmax attention is first run at this length; the square of the factor to the real one is its estimate.
_PROBE_TOKENS = 2048
_SKIP_SECONDS = 20.0
_STYLES = {
    "tost": Style("tost", "#D55E00", "o"),
    "tost-torch": Style("tost, plain PyTorch", "#E69F00", "s"),
    "paper eager": Style("paper's listing", "#0072B2", "^"),
    "paper compiled": Style("paper's listing, compiled", "#56B4E9", "v"),
    "xca": Style("cross-covariance (XCA)", "#009E73", "P"),
    "sdpa": Style("softmax attention (SDPA)", "#000000", "D"),
}


@dataclass(frozen=True)
class Case:
    """An attention layer of width `width` on `batch` sequences of `tokens` tokens, in one pass."""

    op: str
    batch: int
    tokens: int
    width: int
    heads: int
    dtype: str = "float32"
    block_size: int = 1
    mode: str = "fwd"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError(
                f"width={self.width} does not divide into heads={self.heads}; "
                f"choose a width that is a multiple of the heads, for example {self.heads * 64}."
            )
        if self.width // self.heads % self.block_size:
            raise ConfigError(
                f"block_size={self.block_size} does not divide the head width {self.width // self.heads}; "
                "choose one that does."
            )

    @property
    def label(self) -> str:
        """One line for progress reports."""
        blocks = "" if self.block_size == 1 else f" g={self.block_size}"
        return f"{self.op} {self.mode} {self.batch}x{self.tokens} d={self.width} H={self.heads}{blocks} {self.dtype}"


@dataclass
class Ops(Benchmark):
    """Time our attention layers against their projections, the paper's code and others.

    Attributes:
        op: Operators.
        mode: Passes: ``fwd`` without gradients, ``fwd+bwd``.
        tokens: Sequence lengths; None takes the standard shapes.
        width: Model width; None takes the operator's standard one.
        heads: Heads; None takes the operator's standard number.
        batch: Sequences; None takes those of the standard shapes, or 1 with `tokens`.
        dtype: Type of inputs and weights.
        block_size: Features in a block of `tssa`; that of `gated_tssa` is 8, or this one above 1.
        repeats: Least number of timed runs.
        compile: Also measure torch.compile of the paper's listing.
        quick: Measure few short sequences for a demonstration.
    """

    name: ClassVar[str] = "ops"
    heading: ClassVar[str] = "Attention layers against their limit"
    checked: ClassVar[str] = "every implementation with the reference"
    introduction: ClassVar[str] = (
        "Each contender ran untimed first; then came rounds in which each ran once, in shuffled order. A ratio "
        "compares two runs of one round. Medians, with quartiles in brackets."
    )
    draws: ClassVar[bool] = True
    selects: ClassVar[tuple[str, ...]] = ("op", "mode", "tokens", "width", "heads", "batch", "dtype", "block_size")

    op: tuple[str, ...] = OPS
    mode: tuple[str, ...] = MODES
    tokens: tuple[int, ...] | None = None
    width: int | None = None
    heads: int | None = None
    batch: int | None = None
    dtype: str = "float32"
    block_size: int = 1
    repeats: int = 30
    compile: bool = True
    quick: bool = False
    cases: list[Case] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.quick:
            self.repeats = min(self.repeats, 5)
        found = []
        for op in self.op:
            C, H = self.width or _SIZES[op][0], self.heads or _SIZES[op][1]
            standard = _QUICK_SHAPES if self.quick else _SHAPES[op]
            shapes = standard if self.tokens is None else [(1, tokens) for tokens in self.tokens]
            for (B, N), mode in product(shapes, self.mode):
                found.append(Case(op, self.batch or B, N, C, H, self.dtype, _block_size(op, self.block_size), mode))
        self.cases = list(dict.fromkeys(found))

    @property
    def steps(self) -> int:
        """One per case."""
        return len(self.cases)

    def about(self) -> dict[str, Any]:
        """Return the plan and the meaning of the contenders' names."""
        plan = {"repeats": self.repeats, "warmup": 3, "skip_seconds": _SKIP_SECONDS, "seed": 0}
        return {"plan": plan, "contenders": CONTENDERS}

    def check(self) -> Gate:
        """Compare every implementation with the reference."""
        return check_operators(self.op, self.block_size)

    def measure(self, results: dict[str, Any], watch: Callable[[str], None]) -> Iterator[str]:
        """Measure all cases."""
        for case in self.cases:
            watch(case.label)
            rows = self._measure_case(case)
            results["rows"] += rows
            shown = [f"{row['contender']} {row['ratio_to_limit_median']:.2f}" for row in rows[1:] if row["repeats"]]
            yield f"times the limit: {', '.join(shown)}"

    def _measure_case(self, case: Case) -> list[Row]:
        """Measure all contenders of one case in turns; a skipped one has no times but a note."""
        keep_freed_memory()  # otherwise chance decides in which processes every tensor is made of new pages
        x, cotangent = _inputs(case)
        ours = build_layer("tost", case).to(x.dtype)
        layers, trials, warmups = {}, {}, {}
        notes: dict[str, str] = {}
        for name in CONTENDERS:
            if (name == "xca" and case.op != "tssa") or (name == "paper compiled" and not self.compile):
                continue
            if name.startswith("paper") and case.block_size > 1:
                continue
            if notes.setdefault(name, _too_slow(case) if name == "sdpa" else ""):
                continue
            layers[name] = ours if name == "tost" else build_layer(name, case, ours).to(x.dtype)
            trials[name] = layer_trial(layers[name], x, cotangent)
            try:
                warmups[name] = warm_up(trials[name], runs=3)
            except RuntimeError as error:
                if name != "paper compiled":  # needs a C++ compiler; only its row is lost without one
                    raise
                first_line = (str(error).strip().splitlines() or [""])[0]
                notes[name] = f"could not run: {type(error).__name__}: {first_line}".rstrip(": ")
                del layers[name], trials[name]
        estimates = {name: min(seconds[1:] or seconds) for name, seconds in warmups.items()}
        budget = (
            {"case_seconds": 0.0, "most_seconds": 2.0} if self.quick else {"case_seconds": 4.0, "most_seconds": 20.0}
        )
        repeats = plan_repeats(estimates, always=(LIMIT, "tost"), least=self.repeats, **budget)
        rounds = interleave(trials, repeats)
        rows = []
        for name, note in notes.items():
            row = {**plain(case), "contender": name, "repeats": 0, "note": note}
            if name in trials:
                seconds, limit = spread_of(rounds, name), spread_of(rounds, LIMIT)
                ratio, layer = spread(ratios(rounds, name, LIMIT)), layers[name]
                row |= {
                    **{f"seconds_{part}": value for part, value in _quartiles(seconds).items()},
                    "repeats": seconds.count,
                    **{f"ratio_to_limit_{part}": value for part, value in _quartiles(ratio).items()},
                    "ratio_of_medians": seconds.median / limit.median,
                    "warmup_runs": len(warmups[name]),
                    "first_run_seconds": warmups[name][0],
                }
                if cotangent is not None:
                    row["kept_bytes"] = kept_bytes(partial(layer, x), excluding=layer.parameters())
                if seconds.count < limit.count:
                    row["note"] = f"slow, so timed in only {seconds.count} of {limit.count} rounds"
            rows.append(row)
        del layers, trials  # the next case may need the memory of these layers and graphs
        gc.collect()
        return rows

    def tables(self, results: Mapping[str, Any]) -> list[Table]:
        """Return ratios, memory of operators and layers, and times. Empty tables are left out."""
        rows = results["rows"]
        notes = [f"{row['op']} {row['tokens']}, {row['contender']}: {row['note']}" for row in rows if row["note"]]
        memory = [row for row in rows if row.get("kept_bytes") is not None]
        built = [
            _by_case("Time relative to the limit", rows, _relative, notes),
            _by_case("Megabytes kept for backward", memory, lambda row: cell(row["kept_bytes"], ".1f", 1e-6)),
            _by_case("Milliseconds of one run", rows, lambda row: _milliseconds(row.get("seconds_median"))),
        ]
        return [table for table in built if table.rows]

    def pictures(self, report: Report) -> dict[str, bytes]:
        """Draw the time of single sequences relative to the limit by length, one panel per operator and pass."""
        shown = [row for row in report.results["rows"] if row["batch"] == 1 and row["repeats"]]
        panels = []
        for title, rows in grouped(
            shown, lambda row: f"{row['op']}, {row['mode']} (d={row['width']}, H={row['heads']}, {row['dtype']})"
        ).items():
            lines = []
            for name, line in grouped(rows, lambda row: str(row["contender"])).items():
                if name != LIMIT:
                    line = sorted(line, key=lambda row: int(row["tokens"]))
                    lines.append(
                        Line(
                            style=_STYLES[name],
                            points=[(row["tokens"], row["ratio_to_limit_median"]) for row in line],
                            quartiles=[
                                (row["ratio_to_limit_lower_quartile"], row["ratio_to_limit_upper_quartile"])
                                for row in line
                            ],
                            bold=name == "tost",
                            # The time itself shows how long the ratios last.
                            end=_time(line[-1]["seconds_median"]) if name in ("tost", "sdpa") else "",
                        )
                    )
            sizes = sorted({row["tokens"] for row in rows})
            panels.append(Panel(title=title, lines=lines, sizes=sizes, level="the two projections alone", unit="x"))
        below = ["tokens", f"{report.machine} | medians and quartiles"]
        return {".svg": draw(panels, below=below, beside="time relative to the layer's two projections")}


def paper_tssa(w: Tensor, temperature: Tensor) -> Tensor:
    """TSSA as the paper's listing computes it, one tensor operation per step.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: One multiplier per head, ``[H]``.
    """
    w_BHND = w.transpose(1, 2)
    energy_BHN = F.normalize(w_BHND, dim=-2).square().sum(dim=-1)
    pi_BHN = torch.softmax(energy_BHN * temperature[:, None], dim=1)
    weight_BHN = pi_BHN / (pi_BHN.sum(dim=-1, keepdim=True) + 1e-8)
    moment_BH1D = weight_BHN.unsqueeze(-2) @ w_BHND.square()
    shrink_BH1D = 1 / (1 + moment_BH1D)
    return (-(w_BHND * pi_BHN.unsqueeze(-1) * shrink_BH1D)).transpose(1, 2)


def paper_causal_tssa(w: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    """Causal TSSA as the paper's listing computes it, with the two small constants of the authors' code.

    Args:
        w: Projected tokens, ``[B, N, H, D]``.
        temperature: One multiplier per head, ``[H]``.
        bias: Added to every feature's share, ``[H, >=N]``.
    """
    w_BHND = w.transpose(1, 2)
    square_BHND = w_BHND.square()
    share_BHND = square_BHND / square_BHND.cumsum(dim=-2).clamp_min(1e-12) + bias[:, : w.shape[1], None]
    pi_BHN = torch.softmax(share_BHND.sum(dim=-1) * temperature[:, None], dim=1)
    mass_BHN = pi_BHN.cumsum(dim=-1) + 1e-8
    moment_BHND = (square_BHND * pi_BHN.unsqueeze(-1)).cumsum(dim=-2) / mass_BHN.unsqueeze(-1)
    shrink_BHND = 1 / (1 + moment_BHND)
    return (-(w_BHND * pi_BHN.unsqueeze(-1) * shrink_BHND)).transpose(1, 2)


class PaperAttention(nn.Module):
    """The paper's attention layer: `paper_tssa` or `paper_causal_tssa` between two projections."""

    def __init__(self, case: Case, proj_in: nn.Module, proj_out: nn.Module) -> None:
        super().__init__()
        self.num_heads, self.proj_in, self.proj_out = case.heads, proj_in, proj_out
        self.temperature = nn.Parameter(torch.ones(case.heads))
        self.bias = nn.Parameter(torch.zeros(case.heads, case.tokens)) if case.op == "causal_tssa" else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, N, C]`` to ``[B, N, C]``."""
        w = self.proj_in(x).unflatten(-1, (self.num_heads, -1))
        extra = () if self.bias is None else (self.bias,)
        listing = paper_tssa if self.bias is None else paper_causal_tssa
        return self.proj_out(listing(w, self.temperature, *extra).flatten(-2))


class _Projections(nn.Module):
    """The linear projections of an attention layer, and the product with its gate if it has one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.proj_in, self.proj_out = layer.get_submodule("proj_in"), layer.get_submodule("proj_out")
        self.proj_gate: nn.Module | None = getattr(layer, "proj_gate", None)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, N, C]`` to ``[B, N, C]``."""
        w = self.proj_in(x)
        return self.proj_out(w if self.proj_gate is None else w * self.proj_gate(x))


def _block_size(op: str, chosen: int) -> int:
    """Return the features in a block of an operator."""
    return {"tssa": chosen, "causal_tssa": 1, "gated_tssa": chosen if chosen > 1 else 8}[op]


def build_layer(name: str, case: Case, ours: nn.Module | None = None) -> nn.Module:
    """Return a contender for a case; some share the projections of our layer, `ours`."""
    causal = case.op != "tssa"
    if name == "xca":
        return CrossCovarianceAttention(case.width, case.heads)
    if name == "sdpa":
        return (CausalSoftmaxAttention if causal else SoftmaxAttention)(case.width, case.heads)
    if ours is None or name == "tost-torch":
        backend = "auto" if ours is None else "torch"
        layer: nn.Module
        if case.op == "gated_tssa":
            layer = GatedTSSAttention(case.width, case.heads, block_size=case.block_size, backend=backend)
        elif causal:
            layer = CausalTSSAttention(case.width, case.heads, case.tokens, backend=backend)
        elif case.block_size > 1:
            layer = BlockTSSAttention(case.width, case.heads, block_size=case.block_size, backend=backend)
        else:
            layer = TSSAttention(case.width, case.heads, backend=backend)
        if ours is not None:
            layer.load_state_dict(ours.state_dict())
        return layer
    if name == LIMIT:
        return _Projections(ours)
    layer = PaperAttention(case, ours.get_submodule("proj_in"), ours.get_submodule("proj_out"))
    if name == "paper compiled":
        # One graph per case with its sizes fixed: the best that the compiler can do, and no recompilation in a round.
        torch.compiler.reset()
        layer.compile(dynamic=False, fullgraph=True)
    return layer


def _inputs(case: Case) -> tuple[Tensor, Tensor | None]:
    """Return the tokens, and the gradient at the output if there is a backward pass."""
    generator = torch.Generator().manual_seed(0)
    shape, dtype = (case.batch, case.tokens, case.width), getattr(torch, case.dtype)
    x, cotangent = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return (x, None) if case.mode == "fwd" else (x.requires_grad_(), cotangent)


def _too_slow(case: Case) -> str:
    """Return the reason to skip softmax attention at this length, or an empty string."""
    if case.tokens <= _PROBE_TOKENS:
        return ""
    probe = Case(**{**plain(case), "tokens": _PROBE_TOKENS})
    x, cotangent = _inputs(probe)
    seconds = warm_up(layer_trial(build_layer("sdpa", probe).to(x.dtype), x, cotangent), runs=2)[-1]
    estimate = seconds * (case.tokens / probe.tokens) ** 2
    if estimate <= _SKIP_SECONDS:
        return ""
    return f"skipped: about {estimate:.0f} s per run expected, more than the {_SKIP_SECONDS:.0f} s allowed"


class Sample(NamedTuple):
    """One call: positional arguments by name, tokens `w` ``[B, N, H, D]`` first, and a mask ``[B, N]`` or None."""

    arguments: dict[str, Tensor]
    mask: Tensor | None = None

    def leaves(self, dtype: torch.dtype) -> Sample:
        """Return a copy in another dtype whose tensors collect gradients."""
        copies = {name: x.detach().to(dtype, copy=True).requires_grad_() for name, x in self.arguments.items()}
        return Sample(copies, self.mask)


Call = Callable[[Sample], Tensor]


class Candidate(NamedTuple):
    """An implementation to check.

    Attributes:
        call: Runs it.
        overwrite: Runs the in-place form, which layers use when no gradient is needed; None if it has none.
        takes_mask: Whether it is also checked with a mask.
        threaded: Whether it divides its work among threads itself, and is therefore checked with all of them.
        dtypes: Dtypes it is checked in.
    """

    call: Call
    overwrite: Call | None = None
    takes_mask: bool = True
    threaded: bool = False
    dtypes: tuple[torch.dtype, ...] = tuple(BOUNDS)


def candidates(op: str, block_size: int = 1) -> dict[str, Candidate]:
    """Return every ready backend that `auto` may choose, and without blocks also the paper's listing.

    The listing has no masks, and in bfloat16 it sums in bfloat16.
    """
    statuses = available_backends(op)
    ready = [backend.name for backend in BACKENDS if backend.automatic and statuses[backend.name] == "ready"]
    found = {name: _backend(op, name, block_size) for name in ready}
    if op != "gated_tssa" and block_size == 1:
        listing = paper_causal_tssa if op == "causal_tssa" else paper_tssa
        dtypes = (torch.float64, torch.float32)
        found["paper eager"] = Candidate(lambda x: listing(*x.arguments.values()), takes_mask=False, dtypes=dtypes)
    return found


def check_operators(
    ops: Sequence[str] = OPS, block_size: int = 1, implementations: Mapping[str, Candidate] | None = None
) -> Gate:
    """Compare outputs and gradients of implementations with the reference in float64 on the same rounded inputs.

    Args:
        ops: Operators to check.
        block_size: Features in a block; above 1, `tssa` is also checked with it.
        implementations: Implementations by name; None takes everything that is ready here.
    """
    gate = Gate()
    for op, g in [(op, g) for op in ops for g in sorted({_block_size(op, each) for each in (1, block_size)})]:
        reference = _backend(op, "reference", g).call
        shapes = _CHECKED if g == 1 else ((2, 63, 3, g), (2, 130, 4, 3 * g))
        for name, candidate in (implementations or candidates(op, g)).items():
            for shape, masked, dtype in product(shapes, (False, True), candidate.dtypes):
                if masked and not candidate.takes_mask:
                    continue
                blocks, kind = f" g={g}" * (g > 1), str(dtype).removeprefix("torch.")
                title = f"{op} {name}{blocks} {'x'.join(map(str, shape))} {kind}{' masked' * masked}"
                inputs = _sample(op, shape, g, dtype, masked=masked)
                try:
                    gate.checks += _compare(title, candidate, reference, inputs, dtype)
                except BackendError as error:
                    gate.declined[title] = str(error)
    return gate


def _backend(op: str, name: str, block_size: int) -> Candidate:
    def call(x: Sample, overwrite: bool = False) -> Tensor:
        arguments: Any = x.arguments.values()
        options: dict[str, Any] = {"mask": x.mask, "backend": name}
        if op == "tssa":
            return tssa(*arguments, **options, block_size=block_size, overwrite=overwrite)
        if op == "gated_tssa":
            return gated_tssa(*arguments, **options)
        if overwrite:
            return causal_tssa_with_state(*arguments, **options, overwrite=True)[0]
        return causal_tssa(*arguments, **options)

    if op == "gated_tssa":
        return Candidate(call, threaded=name == "native")
    return Candidate(call, partial(call, overwrite=True), threaded=name == "native")


def _sample(op: str, shape: tuple[int, int, int, int], block_size: int, dtype: torch.dtype, *, masked: bool) -> Sample:
    B, N, H, D = shape
    generator = torch.Generator().manual_seed(sum(shape))
    # Tokens of different size keep the memberships away from uniform, where errors would hide.
    size = 0.5 + 2 * torch.rand(B, N, H, 1, generator=generator)
    arguments = {"w": size * torch.randn(shape, generator=generator)}
    if op == "gated_tssa":
        arguments["write"] = torch.rand(B, N, H, D // block_size, generator=generator)
    else:
        arguments["temperature"] = 1 + torch.rand(H, generator=generator)
    if op == "causal_tssa":
        arguments["bias"] = 0.1 * torch.randn(H, N, generator=generator)
    mask = None
    if masked:
        mask = torch.rand(B, N, generator=generator) < 0.7
        mask[:, N // 2] = True  # at least one token stays
    return Sample({name: x.to(dtype) for name, x in arguments.items()}, mask)


def _compare(title: str, candidate: Candidate, reference: Call, inputs: Sample, dtype: torch.dtype) -> list[Check]:
    cotangent = torch.randn(inputs.arguments["w"].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    # One thread is enough for what torch computes; on a busy machine waiting for the others takes most of the time.
    with nullcontext() if candidate.threaded else _one_thread():
        actual = _outputs(candidate.call, inputs.leaves(dtype), cotangent)
        if candidate.overwrite is not None:
            with torch.no_grad():
                actual["y, overwriting"] = candidate.overwrite(inputs.leaves(dtype))
    with _one_thread():
        expected = _outputs(reference, inputs.leaves(torch.float64), cotangent.double())
        expected["y, overwriting"] = expected["y"]
        return [
            Check(f"{title} {part}", relative_rms(value, expected[part]), BOUNDS[dtype])
            for part, value in actual.items()
        ]


def _outputs(call: Call, inputs: Sample, cotangent: Tensor) -> dict[str, Tensor]:
    """Return the output and the gradient of every input; an unused input has a gradient of zero."""
    y = call(inputs)
    torch.autograd.backward(y, cotangent)
    gradients = {f"d{name}": x.grad for name, x in inputs.arguments.items()}
    return {"y": y, **{name: y.new_zeros(1) if grad is None else grad for name, grad in gradients.items()}}


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _quartiles(value: Any) -> dict[str, float]:
    return {"median": value.median, "lower_quartile": value.lower, "upper_quartile": value.upper}


def _by_case(title: str, rows: Sequence[Row], text: Callable[[Row], str], notes: Sequence[str] = ()) -> Table:
    cells = [
        (
            (row["op"], f"{row['width']}/{row['heads']}", row["mode"], f"{row['batch']}x{row['tokens']}"),
            row["contender"],
            text(row),
        )
        for row in rows
    ]
    return pivot(title, ["op", "d/H", "pass", "tokens"], cells, notes=notes)


def _relative(row: Row) -> str:
    """Format the limit in milliseconds and every contender as a multiple of it."""
    if not row["repeats"]:
        return MISSING
    if row["contender"] == LIMIT:
        return f"{_milliseconds(row['seconds_median'])} ms"
    median, lower, upper = (
        _ratio(row[f"ratio_to_limit_{part}"]) for part in ("median", "lower_quartile", "upper_quartile")
    )
    return f"{median} ({lower}-{upper})" if row["contender"] == "tost" else median


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    return f"{1000 * seconds:.0f}" if seconds >= 0.1 else f"{1000 * seconds:#.3g}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
