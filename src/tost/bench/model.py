"""`tost bench model`: whole models in every runtime that is installed, with memory and the share of the machine.

Image models classify a batch; language models read a text from its beginning and give the logits after it. Every path
runs the same function of the same weights: `tost.deploy.graphs` describes it, and `tost.export` writes it.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.mkldnn import to_mkldnn

from tost._text import Table, grouped
from tost.bench.harness import (
    BOUNDS,
    NETWORK_BOUND,
    Benchmark,
    Check,
    Gate,
    Row,
    Trial,
    cell,
    columns,
    compare_networks,
    free_bytes,
    interleave,
    pivot,
    plain,
    plan_repeats,
    ratios,
    run_in_process,
    short,
    spread,
    spread_of,
    warm_up,
    watch_peak,
)
from tost.bench.ops import check_operators
from tost.deploy import export
from tost.deploy.graphs import Feed, describe, start
from tost.deploy.runtime import Model
from tost.errors import TostError
from tost.models import create_model, model_options, token_flops
from tost.models.options import LanguageOptions
from tost.models.registry import flops_per_image
from tost.testing import relative_rms

STANDARD_MODELS = (
    "tost_small_patch16_224",
    "vit_small_patch16_224",
    "xcit_small_nolpi_patch16_224",
    "tost_lm_base",
    "gpt2_base",
)
PATHS = {
    "torch fp32": torch.float32,
    "torch bf16": torch.bfloat16,
    "compile fp32": torch.float32,
    "ONNX Runtime fp32": torch.float32,
    "OpenVINO fp32": torch.float32,
    "OpenVINO bf16": torch.bfloat16,
}
"""Ways to run a model, with the arithmetic of its products."""
_PACKAGES = {"ONNX Runtime": "onnxruntime", "OpenVINO": "openvino"}
_SMALL = {"tost_mini": {}, "tost_lm_base": {"embed_dim": 64, "depth": 2, "num_heads": 4, "vocab_size": 256}}


@dataclass(frozen=True)
class Pass:
    """One model on one input.

    Attributes:
        model: A registered image or language model.
        size: Pixels of a side, or tokens of the text.
        batch: Images; 1 for texts.
        limit: Positions of a language model; 0 for an image model.
        folder: Where its exports are.
    """

    model: str
    size: int
    batch: int
    limit: int
    folder: str

    def build(self, **options: Any) -> nn.Module:
        """Return the model, with random weights."""
        torch.manual_seed(0)
        schema = type(model_options(self.model, {})).model_fields
        sized = {"image_size": self.size, "max_length": self.limit}
        return create_model(self.model, **{k: v for k, v in sized.items() if k in schema and v}, **options).eval()

    def exported(self, runtime: str) -> Path:
        """Return the folder of an export."""
        return Path(self.folder) / f"{self.model}-{runtime}-{'any' if self.limit else self.size}"

    def feed(self, vocabulary: int) -> Feed:
        """Return the input, without the state of a language model."""
        generator = torch.Generator().manual_seed(1)
        if not self.limit:
            return {"images": torch.rand(self.batch, 3, self.size, self.size, generator=generator)}
        ids = torch.randint(vocabulary, (1, self.size), generator=generator)
        return {"ids": ids, "at": torch.tensor([self.size - 1])}

    def exported_runner(self, runtime: str, arithmetic: str) -> Callable[[], Any]:
        """Return the call of an exported model that is timed."""
        precision = {"fp32": "f32"}.get(arithmetic, arithmetic)
        served = Model(self.exported(runtime), torch.get_num_threads(), precision)
        feed = self.feed((served.about["options"] or {}).get("vocab_size", 0))
        return partial(served, **{name: x.numpy() for name, x in feed.items()}, **served.start()[1])

    def runner(self, path: str, model: nn.Module | None = None) -> Callable[[], Any]:
        """Return the call that is timed; torch runs `model`, by default a new one."""
        runtime, _, arithmetic = path.rpartition(" ")
        if runtime in _PACKAGES:
            return self.exported_runner(runtime, arithmetic)
        model = self.build() if model is None else model
        graph = describe(model, None if self.limit else self.size)
        feed = self.feed(getattr(model.options, "vocab_size", 0)) | start(graph.inputs, 1)
        module: Any = graph.module
        run = torch.compile(module, dynamic=False) if runtime == "compile" else module
        arguments = tuple(feed.values())

        def call() -> Any:
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "bf16"):
                return run(*arguments)

        return call

    def flops(self, model: nn.Module) -> int | None:
        """Return the operations of a pass."""
        if not self.limit:
            per_image = flops_per_image(model, self.size, self.size)
            return None if per_image is None else self.batch * per_image
        options = model.options.model_copy(update={"max_length": self.size})  # type: ignore[union-attr,operator]
        skipped = 2 * options.embed_dim * options.vocab_size * (self.size - 1)  # the head runs once
        return int(self.size * token_flops(options).total - skipped)


@dataclass(frozen=True)
class Load:
    """A pass by one path, for a process of its own."""

    what: Pass
    path: str


def loaded_bytes(load: Load) -> int:
    """Return by how much the memory of this process grows at most while a model is loaded and run once."""
    with watch_peak() as peak:
        load.what.runner(load.path)()
    return peak[0]


def measure_machine() -> dict[str, Any]:
    """Return what this machine reaches: GFLOP/s of a large product by dtype, and GB/s of a copy; the best of some."""
    size, found = 2048, {}
    for dtype in (torch.float32, torch.bfloat16):
        layer, x = nn.Linear(size, size).to(dtype), torch.randn(size, size, dtype=dtype)
        with torch.inference_mode():
            trials = [Trial(partial(F.linear, x, layer.weight))]
            if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
                blocked = to_mkldnn(layer, dtype)  # type: ignore[no-untyped-call]
                trials.append(Trial(partial(blocked, x.to_mkldnn())))
            best = min(min(warm_up(trial, runs=8)) for trial in trials)
        found[str(dtype).removeprefix("torch.")] = 2 * size**3 / best / 1e9
    source = torch.ones(1 << 26)
    copied = min(warm_up(Trial(partial(torch.empty_like(source).copy_, source)), runs=8))
    return {"gflops": found, "gbytes": 2 * source.nbytes / copied / 1e9}


def check_model(name: str) -> list[Check]:
    """Compare a model's logits and gradients with those of the reference operators; only for models with TSSA."""
    if getattr(model_options(name, {}), "mixer", None) != "tssa" or is_language(name):
        return []

    def run(backend: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        model = create_model(name, backend=backend).to(dtype).train()
        images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
        logits = model(images)
        logits.logsumexp(dim=-1).mean().backward()
        return model, logits

    return compare_networks(name, run)


def check_paths(paths: tuple[str, ...]) -> list[Check]:
    """Compare every path with torch in float32, on small models."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in _SMALL.items():
            what = Pass(name, 32, 1 if sizes else 4, 64 if sizes else 0, folder)
            model = what.build(**sizes)
            write_exports(what, model, paths)
            expected = logits_of(what.runner("torch fp32", model)())
            for path in paths:
                bound = NETWORK_BOUND if PATHS[path] == torch.float32 else 2 * BOUNDS[torch.bfloat16]
                error = relative_rms(logits_of(what.runner(path, model)()), expected)
                found.append(Check(f"{name} by {path}", error, bound))
    return found


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a pass."""
    found = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return torch.as_tensor(found).float()


def write_exports(what: Pass, model: nn.Module, paths: tuple[str, ...]) -> None:
    """Export a model for the runtimes among the paths, unless that is done."""
    for runtime in {path.rpartition(" ")[0] for path in paths} & _PACKAGES.keys():
        target = what.exported(runtime)
        if not target.exists():
            size = None if what.limit else what.size
            export(model, target, format="onnx" if runtime == "ONNX Runtime" else "openvino", image_size=size)


@cache
def is_language(name: str) -> bool:
    """Return whether a registered model is a language model."""
    return isinstance(model_options(name, {}), LanguageOptions)


def installed() -> tuple[str, ...]:
    """Return the paths that can be measured here."""
    missing = [runtime for runtime, package in _PACKAGES.items() if find_spec(package) is None]
    return tuple(path for path in PATHS if path.rpartition(" ")[0] not in missing)


@dataclass
class Models(Benchmark):
    """Time whole models in every runtime, and measure their memory.

    Attributes:
        models: Registered image and language models; each kind is compared with its first.
        size: Images in a batch by their size.
        context: Tokens of a text.
        path: Ways to run them, of `PATHS`.
        repeats: Timed passes of each, fewer where they take long.
        memory: Also measure peak memory, in one process per model and path.
    """

    name: ClassVar[str] = "model"
    heading: ClassVar[str] = "Whole models in every runtime"
    checked: ClassVar[str] = "the operators and a model with the reference, every runtime with torch"
    introduction: ClassVar[str] = (
        "All models and runtimes took turns on the same inputs, in one process; the time is the median. GFLOP/s and "
        "GB/s are what a pass needs at least (its operations; its weights once) by its time, and their share of what "
        "the machine reached in the same run, in a large matrix product of that arithmetic and in a copy. Memory is "
        "the growth of a fresh process that loads the model and runs it once. Language models read a text and give "
        "the logits after it. Weights are random."
    )
    selects: ClassVar[tuple[str, ...]] = ("models", "size", "context", "path")

    models: tuple[str, ...] = STANDARD_MODELS
    size: dict[int, int] = field(default_factory=lambda: {224: 8, 512: 1, 1024: 1})
    context: tuple[int, ...] = (128, 1024, 8192)
    path: tuple[str, ...] = field(default_factory=installed)
    repeats: int = 11
    memory: bool = True

    def _cases(self) -> list[list[Pass]]:
        """Return the passes that are compared with each other."""
        images = [name for name in self.models if not is_language(name)]
        texts = [name for name in self.models if is_language(name)]
        cases = [[Pass(name, size, batch, 0, "") for name in images] for size, batch in self.size.items()]
        cases += [[Pass(name, length, 1, max(self.context), "") for name in texts] for length in self.context]
        return [case for case in cases if case]

    @property
    def steps(self) -> int:
        """One for the machine and one per size or context."""
        return 1 + len(self._cases())

    def check(self) -> Gate:
        """Compare the operators and the first model with the reference, and the paths with torch."""
        gate = check_operators(["tssa", "causal_tssa"])
        gate.checks += check_model(self.models[0])
        gate.checks += check_paths(self.path)
        return gate

    def measure(self, results: dict[str, Any], watch: Callable[[str], None]) -> Iterator[str]:
        """Measure the machine, then every size and context."""
        watch("the machine")
        machine = results["machine"] = measure_machine()
        rates = ", ".join(f"{rate:.0f} GFLOP/s in {dtype}" for dtype, rate in machine["gflops"].items())
        yield f"{rates}, {machine['gbytes']:.1f} GB/s"
        with tempfile.TemporaryDirectory() as folder:
            for case in self._cases():
                here = [replace(what, folder=folder) for what in case]
                watch(_label(plain(here[0])))
                rows = self._measure_case(here, machine)
                results["rows"] += rows
                timed = [row for row in rows if row["seconds"]]
                best = {row["model"]: row for row in sorted(timed, key=lambda row: -row["seconds"]["median"])}
                yield ", ".join(
                    f"{name} {row['seconds']['median']:.3g} s ({row['path']})" for name, row in best.items()
                )

    def _measure_case(self, case: list[Pass], machine: Mapping[str, Any]) -> list[Row]:
        """Return the rows of models on inputs of one size."""
        trials: dict[str, Trial] = {}
        estimates: dict[str, float] = {}
        rows: list[Row] = []
        for what in case:
            model = what.build()
            write_exports(what, model, self.path)
            weights = sum(p.numel() * p.element_size() for p in model.parameters())
            for path in self.path:
                row: Row = {"model": what.model, "path": path, "size": what.size, "batch": what.batch}
                row |= {"limit": what.limit, "parameters": sum(p.numel() for p in model.parameters())}
                row |= {"flops": what.flops(model), "weight_bytes": weights, "peak_bytes": None, "note": ""}
                rows.append(row)
                try:
                    if self.memory:
                        limit = free_bytes("cpu") * 3 // 4
                        label = f"{what.model} by {path}"
                        row["peak_bytes"] = run_in_process(
                            loaded_bytes, Load(what, path), label=label, timeout=600, limit_bytes=limit
                        )
                    trial = Trial(what.runner(path, model))
                    estimates[f"{what.model} {path}"] = min(warm_up(trial, runs=2))
                    trials[f"{what.model} {path}"] = trial
                except (TostError, RuntimeError) as error:  # too large for this machine
                    row["note"] = str(error).splitlines()[0]
        plan = plan_repeats(estimates, always=(), least=self.repeats, case_seconds=20, most_seconds=20)
        rounds = interleave(trials, plan) if trials else []
        for row in rows:
            name, base = f"{row['model']} {row['path']}", f"{case[0].model} {row['path']}"
            row |= {"seconds": plain(spread_of(rounds, name)) if name in trials else None, "ratio": None}
            if name in trials and base in trials and (found := ratios(rounds, name, base)):
                row["ratio"] = plain(spread(found))
            row |= _rates(row, machine)
        del trials
        gc.collect()
        return rows

    def tables(self, results: Mapping[str, Any]) -> list[Table]:
        """Return the milliseconds of all models beside each other, then everything about each pass."""
        tables = []
        for limit, rows in grouped(results["rows"], lambda row: bool(row["limit"])).items():
            what = "a text" if limit else "images"
            cells = [((_label(row), row["path"]), row["model"], _milliseconds(row)) for row in rows]
            notes = sorted(
                {f"{row['model']} by {row['path']}, {_label(row)}: {row['note']}" for row in rows if row["note"]}
            )
            tables.append(pivot(f"Milliseconds for {what}", ("input", "runtime"), cells, labels=2, notes=notes))
        tables.append(
            columns(
                "Share of the machine, and memory",
                results["rows"],
                [
                    ("input", _label),
                    ("model", lambda row: row["model"]),
                    ("runtime", lambda row: row["path"]),
                    ("ms", _milliseconds),
                    ("time / first model", lambda row: cell(row["ratio"] and row["ratio"]["median"], ".2f")),
                    ("GFLOP/s", lambda row: short(row["gflops"])),
                    ("of the product's", lambda row: cell(row["of_product"], ".0%")),
                    ("GB/s", lambda row: short(row["gbytes"])),
                    ("of the copy's", lambda row: cell(row["of_copy"], ".0%")),
                    ("peak MB", lambda row: cell(row["peak_bytes"], ",.0f", 1e-6)),
                ],
                labels=3,
            )
        )
        return tables

    def findings(self, results: Mapping[str, Any]) -> list[str]:
        """Return what the machine reaches, and each model's best runtime against that of the first."""
        machine = results["machine"]
        rates = " and ".join(f"{rate:,.0f} GFLOP/s in {dtype}" for dtype, rate in machine["gflops"].items())
        found = [f"The machine reaches {rates} in a matrix product, and {machine['gbytes']:.1f} GB/s in a copy."]
        for label, rows in grouped(results["rows"], _label).items():
            timed = sorted((row for row in rows if row["seconds"]), key=lambda row: -row["seconds"]["median"])
            best = {row["model"]: row for row in timed}
            first = best.pop(rows[0]["model"], None)
            for name, row in best.items() if first else ():
                times = row["seconds"]["median"] / first["seconds"]["median"]
                own, other = (f"{each['seconds']['median'] * 1e3:,.0f} ms by {each['path']}" for each in (first, row))
                found.append(f"{label}: {name} takes {times:.2f} times as long as {first['model']} ({other}, {own}).")
        return found


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['size']:,} tokens" if row["limit"] else f"{row['batch']} x {row['size']} px"


def _milliseconds(row: Row) -> str:
    return "does not fit" if row["note"] else short(row["seconds"] and 1e3 * row["seconds"]["median"])


def _rates(row: Row, machine: Mapping[str, Any]) -> Row:
    """Return the rates of a pass, and their shares of the machine's."""
    names = ("gflops", "of_product", "gbytes", "of_copy")
    if not row["seconds"] or row["flops"] is None:
        return dict.fromkeys(names)
    seconds = row["seconds"]["median"]
    gflops, gbytes = row["flops"] / seconds / 1e9, row["weight_bytes"] / seconds / 1e9
    peak = machine["gflops"][str(PATHS[row["path"]]).removeprefix("torch.")]
    return dict(zip(names, (gflops, gflops / peak, gbytes, gbytes / machine["gbytes"]), strict=True))
