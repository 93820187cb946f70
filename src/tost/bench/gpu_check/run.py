"""Compares the compiled Triton kernels with the reference on the GPU, then times them beside what else there is.

The comparison is that of the tests, on the device: outputs, states and every gradient, masks, options, packed
sequences, steps of decoding, dtypes, and the same bits twice. Times are medians of CUDA events with a cold cache
(`triton.testing.do_bench`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tost._text import Table
from tost.bench.gpu_check.cases import Case, GpuCheckScale, Shape
from tost.bench.harness.gate import BOUNDS, Check, GateResult
from tost.bench.harness.measurement import Measurement, page
from tost.bench.harness.report import Report
from tost.bench.harness.table import pivot
from tost.errors import ConfigError
from tost.ops import TSSAState, causal_tssa, causal_tssa_with_state, tssa
from tost.ops._numerics import statistics_dtype
from tost.ops.backends import TRITON_INTERPRETS
from tost.ops.triton import approval, unavailable
from tost.testing import relative_rms

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What a call of each operator varies, the causal one second.
FORMS = (("", "all options", "packed", "not normalized"), ("", "all options", "packed", "one token"))
_BOUNDS = BOUNDS | {torch.float16: 5e-3}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Time of one contender on one case, or why it has none."""

    case: str
    contender: str
    seconds: float | None
    note: str = ""


@dataclass(kw_only=True)
class GpuCheckResults:
    """All times, and the record that lets ``backend="auto"`` use the kernels."""

    rows: list[Row] = field(default_factory=list)
    recorded: str = ""


def _leaves(shape: Shape, dtype: torch.dtype, device: str, *, causal: bool, form: str) -> dict[str, Tensor]:
    """Return what an operator is differentiated in, by name, rounded to a dtype."""
    g = torch.Generator().manual_seed(0)
    B, N, H, D = shape
    sums = statistics_dtype(dtype)
    # Memberships should not be all or nothing, or gradients are rounding. Energies that are not normalized, and those
    # of first tokens, are as large as D, and scaled ones as N.
    sharpness = {"not normalized": 1 / D, "all options": 1 / max(N, 1)}.get(form, min(1, 16 / D) if causal else 1.0)
    temperature = (sharpness * torch.randn(H, generator=g)).to(sums)
    found = {"w": torch.randn(shape, generator=g).to(dtype), "temperature": temperature}
    if causal:
        found["bias"] = (0.3 * torch.randn(H, N + 4, generator=g)).to(sums)
    if causal and form in ("all options", "one token"):
        sizes = {"squares": (B, H, D), "weighted_squares": (B, H, D), "mass": (B, H)}
        found |= {name: (3 * torch.rand(size, generator=g)).to(sums) for name, size in sizes.items()}
    if causal and form:
        found["decay"] = torch.tensor([0.9, 1.0, 0.5, 0.999])[torch.arange(H) % 4].to(sums)
    if form == "one token":
        found["w"] = found["w"][:, :1].contiguous()
    if form == "packed":
        found["w"] = found["w"].reshape(1, B * N, H, D)
    return {name: x.to(device) for name, x in found.items()}


def _options(shape: Shape, device: str, form: str) -> dict[str, Any]:
    """Return the arguments of a form that are not differentiated in."""
    B, N = shape[:2]
    if form == "all options":
        mask = torch.rand((B, N), generator=torch.Generator().manual_seed(1)) > 0.3
        return {"mask": mask.to(device), "count_scaled": True}
    if form == "packed":  # the rows, the first one cut after a token, and an empty sequence
        begins = sorted([*range(0, B * N + 1, N), min(1, B * N), B * N])
        return {"cu_seqlens": torch.tensor(begins, dtype=torch.int32, device=device)}
    return {"normalize": False} if form == "not normalized" else {}


def _run(leaves: dict[str, Tensor], options: dict[str, Any], backend: str, *, causal: bool) -> dict[str, Tensor]:
    """Return outputs and gradients of an operator, for the same cotangents in every dtype.

    A single token is a step of decoding, which has no gradients.
    """
    step = causal and leaves["w"].shape[1] == 1 and "mass" in leaves
    inputs = {name: x.detach().requires_grad_(not step) for name, x in leaves.items()}
    w, temperature = inputs["w"], inputs["temperature"]
    if not causal:
        outputs = {"y": tssa(w, temperature, **options, backend=backend)}
    else:
        state = None
        if "mass" in inputs:
            position = torch.ones(w.shape[0], dtype=torch.int64, device=w.device)
            state = TSSAState(inputs["squares"], inputs["weighted_squares"], inputs["mass"], position)
        y, after = causal_tssa_with_state(
            w, temperature, inputs["bias"], state=state, decay=inputs.get("decay"), **options, backend=backend
        )
        outputs = {"y": y, **dict(zip(TSSAState._fields[:3], after[:3], strict=True))}
    if step:
        return outputs
    g = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(x.shape, generator=g).bfloat16().to(x) for x in outputs.values()]
    gradients = torch.autograd.grad(list(outputs.values()), list(inputs.values()), cotangents)
    return {**outputs, **{f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}}


def compare(shape: Shape, dtype: torch.dtype, device: str, *, causal: bool, form: str) -> list[Check]:
    """Compare the kernels with the reference in float64 on the same rounded inputs, and with themselves.

    Kernels that do not run at all are a check that fails, and its name has the reason.
    """
    leaves = _leaves(shape, dtype, device, causal=causal, form=form)
    options = _options(shape, device, form)
    name = f"{'causal_tssa' if causal else 'tssa'} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
    name += f", {form}" if form else ""
    try:
        found, again = (_run(leaves, options, "triton", causal=causal) for _ in range(2))
        expected = _run({name: x.double() for name, x in leaves.items()}, options, "reference", causal=causal)
    except Exception as error:  # compilers and drivers may fail in any way
        reason = str(error).partition("\n")[0]
        return [Check(name=f"{name}: {type(error).__name__}: {reason}", error=float("inf"), bound=0.0)]
    same = all(torch.equal(found[key], again[key]) for key in found)
    checks = [Check(name=f"{name}: bits of a second run", error=0.0 if same else float("inf"), bound=0.0)]
    return checks + [
        Check(name=f"{name}: {key}", error=relative_rms(found[key], expected[key]), bound=_BOUNDS[dtype])
        for key in expected
    ]


def _contenders(case: Case, *, compiled: bool) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return what is timed, by name: functions of w and the temperature."""
    operator = causal_tssa if case.causal else tssa

    def attention(w: Tensor, temperature: Tensor) -> Tensor:
        q = w.transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=case.causal)

    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "triton": partial(operator, backend="triton"),
        "torch": partial(operator, backend="torch"),
        "reference": partial(operator, backend="reference"),
    }
    if compiled:
        torch.compiler.reset()
        found["torch compiled"] = torch.compile(found["torch"], dynamic=False)
    found["sdpa"] = attention
    if case.causal and find_spec("fla"):
        found["fla linear attention"] = _linear_attention
    return found


def _linear_attention(w: Tensor, temperature: Tensor) -> Tensor:
    """Return causal linear attention by the package flash-linear-attention: a state per head too, but D x D numbers."""
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(w, w, w, normalize=False)[0]


def measure_case(case: Case, device: str, *, compiled: bool, clock: Callable[..., float]) -> list[Row]:
    """Time all contenders; one that fails, say for lack of memory, leaves its reason."""
    w = torch.randn(case.batch, case.tokens, case.heads, case.width, device=device).bfloat16()
    temperature, dy = torch.ones(case.heads, device=device), torch.randn_like(w)
    leaves = (w.requires_grad_(case.backward), temperature.requires_grad_(case.backward))
    rows = []
    for name, run in _contenders(case, compiled=compiled).items():

        def once(run: Callable[[Tensor, Tensor], Tensor] = run) -> None:
            y = run(*leaves)
            if case.backward:
                torch.autograd.grad(y, leaves[:1], dy.reshape(y.shape))

        try:
            rows.append(Row(case=case.label, contender=name, seconds=clock(once)))
        except Exception as error:  # code of other packages may fail in any way
            rows.append(Row(case=case.label, contender=name, seconds=None, note=str(error).splitlines()[0]))
    return rows


def events(call: Callable[[], None]) -> float:
    """Return the median seconds of a call on the GPU."""
    from triton.testing import do_bench

    milliseconds: float = do_bench(call, return_mode="median")
    return milliseconds / 1000


def _tables(results: GpuCheckResults) -> list[Table]:
    cells = [
        ((row.case,), row.contender, "" if row.seconds is None else f"{1e6 * row.seconds:,.0f}") for row in results.rows
    ]
    notes = [f"{row.case}, {row.contender}: {row.note}" for row in results.rows if row.note]
    return [pivot("Microseconds of one run, bfloat16", ["case"], cells, notes=notes)] if cells else []


def _subject() -> str:
    """Return the device and the versions, in words."""
    return ", ".join(f"{key} {value}" for key, value in approval.subject().items())


def _findings(results: GpuCheckResults) -> list[str]:
    times = {(row.case, row.contender): row.seconds for row in results.rows}
    ratios = sorted(
        other / own
        for (case, name), other in times.items()
        if name == "torch" and other and (own := times.get((case, "triton")))
    )
    if not ratios:
        return []
    outcome = "`auto` now uses the kernels here" if results.recorded else "nothing was recorded"
    return [
        f"To paste into an issue: the Triton kernels passed `tost bench gpu-check` ({_subject()}). Against the PyTorch "
        f"backend they took 1/{ratios[0]:.2g} to 1/{ratios[-1]:.2g} of the time; {outcome}."
    ]


def _page(report: Report[GpuCheckResults]) -> str:
    return page("Triton kernels on a GPU", report, *_findings(report.results), *_tables(report.results))


class GpuCheck(Measurement[GpuCheckScale, GpuCheckResults]):
    """The benchmark `tost bench gpu-check`."""

    results = GpuCheckResults
    checked = "the compiled Triton kernels with the reference"

    tables, findings, page = staticmethod(_tables), staticmethod(_findings), staticmethod(_page)

    def __init__(self, scale: GpuCheckScale) -> None:
        super().__init__(scale)
        if scale.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "there is nothing to check here: torch finds no GPU. Run the same command on a machine that has one, "
                "with a build of torch for it; `tost info` shows what is there."
            )
        if reasons := unavailable():
            raise ConfigError(f"there is nothing to check here: {'; '.join(reasons)}.")
        if scale.device == "cuda":
            if TRITON_INTERPRETS:
                raise ConfigError("TRITON_INTERPRET=1 is set, so that no kernel would run on the GPU; unset it.")
            self.accelerator = torch.cuda.get_device_name()

    def check(self) -> GateResult:
        """Compare the kernels with the reference, on the device."""
        checks = [
            check
            for shape in self.scale.checked
            for dtype in DTYPES
            for causal in (False, True)
            for form in FORMS[causal]
            for check in compare(shape, dtype, self.scale.device, causal=causal, form=form)
        ]
        return GateResult(checks=tuple(checks))

    def regrets(self, gate: GateResult) -> list[str]:
        """Return what to paste into an issue if a comparison failed."""
        return [
            f"To paste into an issue, with the lines above: the Triton kernels failed {len(gate.failures)} of "
            f"{len(gate.checks)} comparisons of `tost bench gpu-check` ({_subject()}). `auto` does not use them here."
        ]

    def about(self) -> dict[str, Any]:
        """Return what was checked: the device and the versions."""
        return {"subject": approval.subject()}

    def measure(self, results: GpuCheckResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Time all cases, and record at the end that the kernels may be used. Runs only behind a green gate."""
        for number, case in enumerate(self.scale.cases, 1):
            watch(case.label)
            rows = measure_case(case, self.scale.device, compiled=self.scale.compile, clock=events)
            results.rows += rows
            if number == len(self.scale.cases) and self.scale.record:
                results.recorded = approval.approve().name
            yield ", ".join(f"{row.contender} {1e6 * row.seconds:.0f} us" for row in rows if row.seconds)
