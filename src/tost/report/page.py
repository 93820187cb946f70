"""One HTML page about runs: results, curves, what is inside the models, speed. It needs no other file."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from tost._io import read_json, write_atomic
from tost._text import byte_size, duration, grouped, number, percent, printable, real, rounded
from tost._yaml import flatten
from tost.analysis.plots import Line, draw_lines, encode
from tost.analysis.registry import find_analysis
from tost.errors import ConfigError, StorageError, TostError
from tost.report.runs import LAYERS, RunRecord, as_cells, differences, read_runs, summarize

if TYPE_CHECKING:
    from tost.report.samples import LoadedRun, Passage

_LONGEST = 30_000  # letters of a text
_MOST_SVG = 400_000  # bytes of a picture of lines; with more of them pixels are smaller
_MOST_ROWS, _MOST_COLUMNS = 80, 12
_MOST_METRICS, _MOST_SETTINGS, _MOST_CHARTS = 4, 12, 4
# The loss has a chart of its own, and these are the same in other units.
_NO_CHART = ("step", "loss", "perplexity", "bits_per_token", "bits_per_byte", "loss_error", "tokens", "accuracy_top5")
_RATES = {
    "layer": "compression term by layer",
    "change": "change of the compression term by the attention, below 0: compresses",
}
_FACTS = {
    "model": ("name", "mixer", "embed_dim", "depth", "num_heads", "patch_size", "max_length"),
    "data": ("name", "path"),
    "train": ("steps", "batch_size", "precision", "clip_norm", "seed"),
    "optim": ("name", "lr", "weight_decay"),
    "schedule": ("name", "warmup_steps"),
}
# Columns of measurements that tell charts apart, and ends of the names of those that are not shown.
_KINDS = ("op", "mode", "figure", "part", "training", "block_size", "width", "heads", "depth", "batch", "dtype")
_SPREAD = (" lower", " upper", " count", "_lower_quartile", "_upper_quartile", "repeats", "warmup_runs")


class Table(NamedTuple):
    """A table of the page; `best` are rows to be marked."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    best: Sequence[int] = ()


class Picture(NamedTuple):
    """A picture that is part of the page, and its description."""

    source: Markup
    words: str


class Finding(NamedTuple):
    """Result of an analysis of a model."""

    pictures: list[Picture]
    verdict: str
    numbers: Table


@dataclass
class Insight:
    """Results of the model of a run.

    Attributes:
        findings: By the name of the analysis.
        notes: What could not be shown.
        verdicts: Conclusions of the analyses.
        texts: Generated text.
        silence: Why there is none.
    """

    findings: dict[str, Finding] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    texts: list[Passage] = field(default_factory=list)
    silence: str = ""


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    benchmarks: Sequence[Path] = (),
    analyses: Sequence[str] | None = None,
    prompts: Sequence[str] = (),
    command: Sequence[str] = ("tost", "report"),
    log: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write one HTML page about runs.

    Args:
        folders: Run folders.
        out: File to write; replaced if it is there.
        benchmarks: JSON files of `tost bench`.
        analyses: Names of analyses; None for all that apply, empty for none.
        prompts: Texts for language models to continue; empty for the beginning of their validation text.
        command: The command line, shown on the page.
        log: Receives lines about progress.

    Returns:
        The file.

    Raises:
        ConfigError: A run folder, a measurement or an analysis is not there, or the file cannot be named so.
        StorageError: The file cannot be written.
    """
    for name in analyses or ():
        find_analysis(name)  # a wrong name is an error before anything is read
    if out.is_dir() or not out.name.endswith((".html", ".htm")):
        raise ConfigError(f"--out {out} is not the name of a page; give a file such as report.html.")
    runs = read_runs(folders)
    measured = {file.name: read_bench(file) for file in benchmarks}
    insights = {}
    for run in runs:
        for problem in run.problems:
            log(f"{run.name}: {problem}")
        insights[run.name] = _look_into(run, analyses, prompts, log)
    page = render(runs, benchmarks=measured, insights=insights, command=command).encode()
    try:
        write_atomic(out, page)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}; give another --out.") from error
    log(f"{len(page) / 1e6:.2f} MB")
    return out


def render(
    runs: Sequence[RunRecord],
    *,
    benchmarks: Mapping[str, Mapping[str, Any]] | None = None,
    insights: Mapping[str, Insight] | None = None,
    command: Sequence[str] = ("tost", "report"),
) -> str:
    """Return the page as HTML.

    Args:
        runs: At least one run.
        benchmarks: Contents of measurements, by file name; see `read_bench`.
        insights: What the models show, by name of the run.
        command: The command line.
    """
    measured, insights = benchmarks or {}, insights or {}
    compared = list(grouped(runs, lambda run: run.subject).values())
    verdicts = [f"{run}: {verdict}" for run, insight in insights.items() for verdict in insight.verdicts]
    known = dict.fromkeys(name for insight in insights.values() for name in insight.findings)
    environment = Environment(loader=PackageLoader("tost.report", "."), autoescape=True, finalize=_written)
    return environment.get_template("page.html").render(
        title=("Report on " + ", ".join(run.name for run in runs))[:200],
        style=Markup(Path(__file__).with_name("style.css").read_text(encoding="utf-8")),
        runs=runs,
        unfinished=", ".join(run.name for run in runs if run.status != "finished"),
        sentences=[sentence for sentence in [*map(_judgement, compared), *verdicts] if sentence],
        groups=[
            {"title": _title(group[0]), "results": _results(group), "fair": _fairness(group), "charts": _curves(group)}
            for group in compared
        ],
        settings=_settings(runs),
        insights=insights,
        analyses={name: find_analysis(name) for name in known},
        measurements=[_measurement(name, content) for name, content in measured.items()],
        commands="\n".join(_commands(runs, measured, command)),
        environments={
            run.name: {k: v for k, v in flatten(dict(run.environment)).items() if k != "command"} for run in runs
        },
        closing=f"Written on {datetime.now(UTC):%Y-%m-%d %H:%M UTC} by: {shlex.join(command)}",
    )


def _written(value: object) -> object:
    """Return anything as text without control characters, cut where it is too long; markup as it is."""
    return value if isinstance(value, Markup) else printable(str(value)[:_LONGEST])


def read_bench(file: Path) -> dict[str, Any]:
    """Read a JSON file of `tost bench`; without its rows if its results were wrong.

    Raises:
        ConfigError: It is not there, or is something else.
    """
    remedy = "give the JSON file that `tost bench ... --out DIR` wrote"
    try:
        content = read_json(file, error=ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("theme"), str):
        raise ConfigError(f"{file} is not a measurement: it has no theme; {remedy}.")
    rows = content.get("rows")
    rows = rows if isinstance(rows, list) and _object(content, "gate").get("passed", True) is True else []
    return {**content, "rows": [row for row in rows if isinstance(row, dict)]}


def _object(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _title(run: RunRecord) -> str:
    return f"{run.subject[1]}: {run.subject[0].replace('_', ' ')}"


def _metric(name: str, value: object) -> str:
    return percent(value) if name.startswith("accuracy") else number(value)


def _judgement(runs: Sequence[RunRecord]) -> str:
    """Return a sentence about the results of comparable runs, best first."""
    metric, mode = runs[0].metric
    ended = [(run.final[metric], run) for run in runs if metric in run.final]
    ended.sort(key=lambda pair: pair[0], reverse=mode == "max")
    listed = ", ".join(
        f"{run.name} ({run.setting('model.name', 'unknown model')}) {_metric(metric, value)}" for value, run in ended
    )
    return f"{_title(runs[0])}: {metric} on the validation set: {listed}." if listed else ""


def _results(runs: Sequence[RunRecord]) -> Table:
    """Return the table of comparable runs."""
    metric, mode = runs[0].metric
    others = [name for name in dict.fromkeys(name for run in runs for name in run.final) if name != metric]
    shown = [metric, *others[:_MOST_METRICS]]
    rows = []
    for run in runs:
        cells = as_cells(summarize(run))
        cells["time"] += " since it was resumed" if run.resumed else ""
        metrics = {name: _metric(name, run.final.get(name)) for name in shown}
        rows.append({**cells, "peak memory": byte_size(run.summary.get("peak_memory_bytes")), **metrics})
    ended = {place: run.final[metric] for place, run in enumerate(runs) if metric in run.final}
    top = (max if mode == "max" else min)(ended.values(), default=None)
    marked = [place for place, value in ended.items() if value == top] if len(set(ended.values())) > 1 else []
    caption = f"{_title(runs[0])}. One run with one seed per row; measured on the validation set at the end."
    return Table(list(rows[0]), [list(row.values()) for row in rows], caption, marked)


def _fairness(runs: Sequence[RunRecord]) -> str:
    """Return whether comparable runs differ in more than the model; empty if there is no other to compare with."""
    known = [run for run in runs if run.config]
    if len(known) < 2:
        return ""
    other = [key for key in differences(known) if not key.startswith("model.")]
    if not other:
        return "These runs differ in nothing but the model: data, steps, batches and recipe are the same."
    listed = ", ".join(other[:_MOST_SETTINGS]) + (" and more" if len(other) > _MOST_SETTINGS else "")
    return f"These runs differ not only in the model but also in {listed}."


def _curves(runs: Sequence[RunRecord]) -> list[Picture]:
    """Return charts of comparable runs: loss, other metrics, and the compression term of the layers."""
    lines = [
        Line(f"{run.name}, training", run.curve("loss", training=True), i, thin=True) for i, run in enumerate(runs)
    ]
    lines += [Line(f"{run.name}, validation", run.curve("loss"), i) for i, run in enumerate(runs)]
    values = [value for line in lines for _, value in line.points]
    wide = bool(values) and min(values) > 0 and max(values) / min(values) > 20
    charts = [_chart(lines, title="Loss by step, lower is better", x="step", y="loss (nats)", log_y=wide)]
    names = dict.fromkeys(str(key) for run in runs for record in run.evaluations for key in record)
    metrics = [key for key in names if key not in _NO_CHART and not key.startswith(LAYERS)]
    for name in [key for key in metrics if any(run.curve(key) for run in runs)][:_MOST_METRICS]:
        lines = [Line(run.name, run.curve(name), i) for i, run in enumerate(runs)]
        charts.append(_chart(lines, title=f"{name} on the validation set", x="step", y=name))
    for run in runs:
        measured = [record for record in run.evaluations if any(key.startswith(LAYERS) for key in record)]
        moments = dict.fromkeys([0, len(measured) // 2, len(measured) - 1]) if measured else ()
        for kind, title in _RATES.items():
            lines = []
            for i, moment in enumerate(moments):
                layers = {key.removeprefix(f"{LAYERS}{kind}_"): real(value) for key, value in measured[moment].items()}
                points = [(float(key), value) for key, value in layers.items() if key.isdigit() and value is not None]
                lines.append(Line(f"step {measured[moment]['step']}", sorted(points), i))
            charts.append(_chart(lines, title=f"{run.name}: {title}", x="layer", y="R_c^var (nats)"))
    return list(filter(None, charts))


def _chart(lines: Sequence[Line], *, title: str, x: str, y: str, **options: bool) -> Picture | None:
    """Draw lines as a picture, described by the range of each; None if there are no points."""

    def label(words: str) -> str:
        return printable(words)[:80].replace("$", r"\$")  # between dollars matplotlib reads formulas

    with_points = [line for line in lines if line.points]
    labelled = [line._replace(label=label(line.label)) for line in with_points]
    figure = draw_lines(labelled, title=label(title), x=label(x), y=label(y), **options)
    if figure is None:
        return None
    ranges = [f"{line.label} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in with_points]
    return _picture(encode(figure, "svg"), "svg+xml", f"{title}: {'; '.join(ranges)}.")


def _picture(content: bytes, kind: str, words: str) -> Picture:
    source = Markup(f"data:image/{kind};base64,{base64.b64encode(content).decode()}")
    return Picture(source, words[:600])


def _settings(runs: Sequence[RunRecord]) -> Table:
    """Return the main settings, a column for each run."""
    rows = [["parameters", *(rounded(run.summary.get("parameters")) for run in runs)]]
    for part, keys in _FACTS.items():
        given = [[(key, run.setting(f"{part}.{key}")) for key in keys] for run in runs]
        cells = [[f"{key.replace('_', ' ')} {value}" for key, value in each if value is not None] for each in given]
        rows.append([part, *(", ".join(cell) or "unknown" for cell in cells)])
    return Table(["", *(run.name for run in runs)], rows, "The main settings.")


def _look_into(
    run: RunRecord, analyses: Sequence[str] | None, prompts: Sequence[str], log: Callable[[str], None]
) -> Insight:
    """Analyze the newest model of a run and let it write; what fails becomes a note."""
    writes = run.subject[0] == "language_modeling"
    insight = Insight()
    if analyses == () and not writes:
        return insight
    from tost.report.samples import continue_prompts, load_run

    try:
        loaded = load_run(run.folder, log=log)
    except (TostError, OSError) as error:
        insight.notes.append(f"The model could not be loaded: {error}")
        return insight
    if analyses != ():
        _analyze(run.name, loaded, analyses, insight, log)
    try:
        insight.texts = continue_prompts(loaded, prompts) if writes else []
    except TostError as error:
        insight.silence = f"No text was generated: {error}"
    return insight


def _analyze(
    run: str, loaded: LoadedRun, wanted: Sequence[str] | None, insight: Insight, log: Callable[[str], None]
) -> None:
    from tost.analysis import analyze, applicable, control_of, image_bytes, unsupported_reason

    try:
        control = control_of(loaded.model)
    except (TostError, TypeError):  # a model of another package has no options
        control = None
    for name in applicable(loaded.model) if wanted is None else wanted:
        if reason := unsupported_reason(loaded.model, name):
            insight.notes.append(f"{name}: left out, because {reason}.")
            continue
        try:
            result = analyze(name, loaded.model, loaded.samples, control=control)
            kind, content = "svg+xml", b"" if result.is_photographic else image_bytes(result, "svg")
            if not content or len(content) > _MOST_SVG:
                kind, content = "png", image_bytes(result, "png")
        except (TostError, ValueError) as error:
            insight.notes.append(f"{name}: could not be done: {error}")
            log(f"{run}: {name} could not be done: {error}")
            continue
        spec, verdict = find_analysis(name), result.verdict()
        numbers = [[key, value if isinstance(value, str) else number(value)] for key, value in result.summary().items()]
        caption = f"{name}; weights of {loaded.checkpoint.name}, samples of the validation set."
        pictures = [_picture(content, kind, f"{spec.title or name} {run}. {verdict}")] if content else []
        insight.findings[name] = Finding(pictures, verdict, Table(["what", "value"], numbers, caption))
        insight.verdicts += [verdict] if verdict else []
        log(f"{run}: {name}: {verdict or '; '.join(' '.join(row) for row in numbers[:2])}")


def _measurement(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a measurement: the machine, whether results were right, charts over the number of tokens, and the rows."""
    environment, gate = _object(content, "environment"), _object(content, "gate")
    keys = ("cpu", "threads", "load", "torch", "tost", "revision", "measured")
    facts = {key: environment[key] for key in keys if environment.get(key) is not None}
    rows = content["rows"] if gate.get("passed", True) is True else []
    charts = []
    kinds = grouped(rows, lambda row: tuple(f"{key} {row[key]}" for key in _KINDS if key in row))
    for kind, same in list(kinds.items())[:_MOST_CHARTS]:
        points: dict[str, list[tuple[float, float]]] = {}
        for row in same:
            seconds = row.get("seconds", row.get("seconds_median"))
            value = real(seconds.get("median") if isinstance(seconds, dict) else seconds)
            tokens = real(row.get("tokens"))
            if value is not None and tokens is not None:
                points.setdefault(str(row.get("contender")), []).append((tokens, value))
        lines = [Line(contender, sorted(line), i) for i, (contender, line) in enumerate(points.items())]
        if any(len(line.points) > 1 for line in lines):
            charts.append(_chart(lines, title=", ".join(kind), x="tokens", y="seconds", log_x=True, log_y=True))
    flat = [flatten(row, " ") for row in rows[:_MOST_ROWS]]
    columns = [key for key in dict.fromkeys(key for row in flat for key in row) if not key.endswith(_SPREAD)]
    cells = [[_cell(key, row.get(key)) for key in columns[:_MOST_COLUMNS]] for row in flat]
    more = f", the first {len(flat)} of {len(rows)} rows" if len(flat) < len(rows) else ""
    return {
        "theme": content["theme"],
        "facts": {**facts, "file": name},
        "interrupted": content.get("complete") is False,
        "checks": number(gate.get("checks")),
        "passed": gate.get("passed"),
        "charts": list(filter(None, charts)),
        "rows": Table(columns[:_MOST_COLUMNS], cells, f"{name}{more}"),
    }


def _cell(key: str, value: object) -> str:
    if real(value) is None:
        return "" if value is None else str(value)
    return duration(value) if "seconds" in key else byte_size(value) if "bytes" in key else number(value)


def _commands(
    runs: Sequence[RunRecord], benchmarks: Mapping[str, Mapping[str, Any]], command: Sequence[str]
) -> list[str]:
    known = [run.environment.get("command") for run in runs]
    commands = [shlex.join(map(str, words)) for words in known if isinstance(words, list)]
    commands += [str(content["command"]) for content in benchmarks.values() if content.get("command")]
    return list(dict.fromkeys([*commands, shlex.join(command)]))
