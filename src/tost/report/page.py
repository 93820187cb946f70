"""One HTML page about runs: results, curves, what is inside the models, speed. It needs nothing but itself."""

from __future__ import annotations

import base64
import html
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from tost._io import read_json, write_atomic
from tost._text import byte_size, duration, grouped, number, percent, printable, real, rounded
from tost._yaml import flatten
from tost.analysis.plots import Line, draw_lines, encode
from tost.analysis.registry import find_analysis
from tost.errors import ConfigError, StorageError, TostError
from tost.report.runs import LAYERS, RunRecord, differences, read_runs

if TYPE_CHECKING:
    from tost.report.samples import LoadedRun

_LONGEST = 4000  # letters of a text
_MOST_SVG = 400_000  # bytes of a picture of lines; with more of them pixels are smaller
_MOST_ROWS, _MOST_COLUMNS = 80, 12
_MOST_METRICS, _MOST_SETTINGS = 4, 12
# The loss has a chart of its own, and these are the same in other units.
_NO_CHART = ("step", "loss", "perplexity", "bits_per_token", "bits_per_byte", "loss_error", "tokens", "accuracy_top5")
_FACTS = {
    "model": ("name", "mixer", "embed_dim", "depth", "num_heads", "patch_size", "max_length"),
    "data": ("name", "path"),
    "train": ("steps", "batch_size", "precision", "clip_norm", "seed"),
    "optim": ("name", "lr", "weight_decay"),
    "schedule": ("name", "warmup_steps"),
}
# Columns of measurements that tell charts apart, and ends of the names of those that are not shown.
_KINDS = (
    "op",
    "mode",
    "figure",
    "part",
    "training",
    "block_size",
    "width",
    "heads",
    "depth",
    "batch",
    "dtype",
    "weights",
)
_SPREAD = (" lower", " upper", " count", "_lower_quartile", "_upper_quartile", "repeats", "warmup_runs")


@dataclass
class Insight:
    """What the model of a run shows, as HTML.

    Attributes:
        findings: Pictures and numbers of the analyses.
        verdicts: Their conclusions, as plain text.
        texts: Generated text.
    """

    findings: list[str] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


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
        find_analysis(name)  # a wrong name is found before anything is read
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
    measured, seen = benchmarks or {}, insights or {}
    compared = grouped(runs, lambda run: run.subject).values()
    verdicts = [f"{run}: {verdict}" for run, insight in seen.items() for verdict in insight.verdicts]
    short = "".join(f"<li>{text(sentence)}</li>" for sentence in [*map(_judgement, compared), *verdicts] if sentence)
    unfinished = ", ".join(run.name for run in runs if run.status != "finished")
    warning = note(f"Not finished: {unfinished}. The numbers are those so far.", "warning") if unfinished else ""
    sections = {
        "In short": warning + (f"<ul>{short}</ul>" if short else note("Nothing has been measured yet.")),
        "Results": "".join(map(_results, compared)),
        "Curves": "".join(map(_curves, compared)),
        "What was trained": "".join(map(_trained, runs)),
        "Looking inside": _by_run({name: insight.findings for name, insight in seen.items()}),
        "Generated text": _by_run({name: insight.texts for name, insight in seen.items()}),
        "Speed": "".join(_measurement(name, content) for name, content in measured.items()),
        "How to repeat it": _repeat(runs, measured, command),
    }
    shown = [(f"part-{i}", title, body) for i, (title, body) in enumerate(sections.items()) if body]
    title = "Report on " + ", ".join(run.name for run in runs)
    return Template(_file("page.html")).substitute(
        title=text(title[:200]),
        style=_file("style.css"),
        links="".join(f'<li><a href="#{anchor}">{name}</a></li>' for anchor, name, _ in shown),
        main="".join(f'<section id="{anchor}"><h2>{name}</h2>{body}</section>' for anchor, name, body in shown),
        closing=text(f"Written on {datetime.now(UTC):%Y-%m-%d %H:%M UTC} by: {shlex.join(command)}"),
    )


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


def text(value: object, most: int = _LONGEST) -> str:
    """Return anything as text that is safe inside elements and quoted attributes, cut where it is too long."""
    shown = str(value)
    return html.escape(printable(shown if len(shown) <= most else f"{shown[: most - 1]}…"))


def note(value: str, kind: str = "note") -> str:
    """Return a paragraph that stands out; `kind` is ``note`` or ``warning``."""
    return f'<p class="{kind}">{text(value)}</p>'


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, best: Sequence[int] = ()) -> str:
    """Return a table; `best` are rows to be marked."""
    head = "".join(f'<th scope="col">{text(cell, 60)}</th>' for cell in headers)
    body = ""
    for place, (first, *others) in enumerate(rows):
        cells = "".join(f"<td>{text(cell, 200)}</td>" for cell in others)
        body += f'<tr{" class=best" * (place in best)}><th scope="row">{text(first, 200)}</th>{cells}</tr>'
    label = text(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table><caption><span>{label}</span>'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def definitions(entries: Mapping[str, object]) -> str:
    """Return names and values, one below the other."""
    return "<dl>" + "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in entries.items()) + "</dl>"


def preformatted(value: str, label: str, title: str = "") -> str:
    """Return text in which spaces and lines count, below a title in bold."""
    bold = f"<b>{text(title)}</b>" if title else ""
    return f'<pre tabindex="0" role="region" aria-label="{text(label)}">{bold}{text(value, 30_000)}</pre>'


def picture(content: bytes, description: str, kind: str = "svg+xml") -> str:
    """Return an image that is part of the page."""
    data = base64.b64encode(content).decode("ascii")
    return f'<div class="picture"><img src="data:image/{kind};base64,{data}" alt="{text(description, 600)}"></div>'


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _object(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = content.get(key)
    return found if isinstance(found, dict) else {}


def _by_run(parts: Mapping[str, Sequence[str]]) -> str:
    return "".join(f"<h3>{text(name)}</h3>{''.join(found)}" for name, found in parts.items() if found)


def _title(run: RunRecord) -> str:
    return f"{run.subject[1]}: {run.subject[0].replace('_', ' ')}"


def _model(run: RunRecord) -> str:
    mixer = run.setting("model.mixer", "tssa")
    return str(run.setting("model.name", "unknown model")) + (f", {mixer}" if mixer != "tssa" else "")


def _metric(name: str, value: object) -> str:
    return percent(value) if name.startswith("accuracy") else number(value)


def _judgement(runs: Sequence[RunRecord]) -> str:
    """Return a sentence about the results of comparable runs, best first."""
    metric, mode = runs[0].metric
    ended = sorted(((run.final[metric], run) for run in runs if metric in run.final), key=lambda pair: pair[0])
    listed = [f"{run.name} ({_model(run)}) {_metric(metric, value)}" for value, run in ended]
    listed = listed[::-1] if mode == "max" else listed
    return f"{_title(runs[0])}: {metric} on the validation set: {', '.join(listed)}." if listed else ""


def _results(runs: Sequence[RunRecord]) -> str:
    """Return the table of comparable runs, and whether they differ in more than the model."""
    metric, mode = runs[0].metric
    others = [name for name in dict.fromkeys(name for run in runs for name in run.final) if name != metric]
    shown = [metric, *others[:_MOST_METRICS]]
    rows = []
    for run in runs:
        best = run.best()
        rows.append(
            [
                run.name,
                _model(run),
                rounded(run.summary.get("parameters")),
                number(run.last_step),
                "not measured" if best is None else f"{_metric(metric, best[1])} (step {best[0]:,.0f})",
                *(_metric(name, run.final.get(name)) for name in shown),
                duration(run.summary.get("seconds")) + (" since it was resumed" if run.resumed else ""),
                byte_size(run.summary.get("peak_memory_bytes")),
                run.status,
            ]
        )
    headers = ["run", "model", "parameters", "steps", f"best {metric}", *shown, "time", "peak memory", "status"]
    ended = {place: run.final[metric] for place, run in enumerate(runs) if metric in run.final}
    top = (max if mode == "max" else min)(ended.values(), default=None)
    marked = [place for place, value in ended.items() if value == top] if len(set(ended.values())) > 1 else []
    caption = f"{_title(runs[0])}. One run with one seed per row; measured on the validation set at the end."
    found = table(headers, rows, caption=caption, best=marked)
    known = [run for run in runs if run.config]
    if len(known) < 2:
        return found
    other = [key for key in differences(known) if not key.startswith("model.")]
    if not other:
        return found + note("These runs differ in nothing but the model: data, steps, batches and recipe are the same.")
    listed = ", ".join(other[:_MOST_SETTINGS]) + (" and more" if len(other) > _MOST_SETTINGS else "")
    return found + note(f"These runs differ not only in the model but also in {listed}.")


def _curves(runs: Sequence[RunRecord]) -> str:
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
        lines = []
        for look, moment in enumerate(dict.fromkeys([0, len(measured) // 2, len(measured) - 1]) if measured else ()):
            layers = {key.removeprefix(LAYERS): real(value) for key, value in measured[moment].items()}
            points = [(float(key), value) for key, value in layers.items() if key.isdigit() and value is not None]
            lines.append(Line(f"step {measured[moment]['step']}", sorted(points), look))
        title = f"{run.name}: compression term by layer"
        charts.append(_chart(lines, title=title, x="layer", y="R_c^var (nats)"))
    drawn = "".join(charts) or note("There are no records of steps or evaluations yet, so there are no curves.")
    return f'<h3>{text(_title(runs[0]))}</h3><div class="charts">{drawn}</div>'


def _chart(lines: Sequence[Line], *, title: str, x: str, y: str, **options: bool) -> str:
    """Draw lines as a picture, described by the range of each; nothing if there are no points."""

    def label(words: str) -> str:
        return printable(words)[:80].replace("$", r"\$")  # between dollars matplotlib reads formulas

    with_points = [line for line in lines if line.points]
    labelled = [line._replace(label=label(line.label)) for line in with_points]
    figure = draw_lines(labelled, title=label(title), x=label(x), y=label(y), **options)
    if figure is None:
        return ""
    ranges = [f"{line.label} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}" for line in with_points]
    return picture(encode(figure, "svg"), f"{title}: {'; '.join(ranges)}.")


def _trained(run: RunRecord) -> str:
    facts = {"parameters": rounded(run.summary.get("parameters"))}
    for part, keys in _FACTS.items():
        found = [(key.replace("_", " "), run.setting(f"{part}.{key}")) for key in keys]
        facts[part] = ", ".join(f"{key} {value}" for key, value in found if value is not None) or "unknown"
    problems = "".join(note(problem, "warning") for problem in run.problems)
    return f"<h3>{text(run.name)}</h3>{problems}{definitions(facts)}"


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
        insight.findings.append(note(f"The model could not be loaded: {error}"))
        return insight
    if analyses != ():
        _analyze(run.name, loaded, analyses, insight, log)
    try:
        for passage in continue_prompts(loaded, prompts) if writes else ():
            speed = f"{passage.tokens / passage.seconds:,.0f} tokens per second" if passage.seconds > 0 else ""
            insight.texts.append(preformatted(passage.text, f"Text by {run.name}", passage.prompt))
            insight.texts.append(f"<p>{passage.tokens} tokens, {speed}. The prompt is in bold.</p>")
    except TostError as error:
        insight.texts.append(note(f"No text was generated: {error}"))
    return insight


def _analyze(
    name: str, loaded: LoadedRun, wanted: Sequence[str] | None, insight: Insight, log: Callable[[str], None]
) -> None:
    from tost.analysis import analyze, applicable, control_of, image_bytes, unsupported_reason

    source = f"Weights of {loaded.checkpoint.name}, samples of the validation set (and of the training set to compare)."
    insight.findings.append(f'<p class="lead">{text(source)}</p>')
    try:
        control = control_of(loaded.model)
    except (TostError, TypeError):  # a model of another package has no options
        control = None
    for analysis in applicable(loaded.model) if wanted is None else wanted:
        if reason := unsupported_reason(loaded.model, analysis):
            insight.findings.append(note(f"{analysis}: left out, because {reason}."))
            continue
        try:
            result = analyze(analysis, loaded.model, loaded.samples, control=control)
            kind, content = "svg+xml", b"" if result.is_photographic else image_bytes(result, "svg")
            if not content or len(content) > _MOST_SVG:
                kind, content = "png", image_bytes(result, "png")
        except (TostError, ValueError) as error:
            insight.findings.append(note(f"{analysis}: could not be done: {error}"))
            log(f"{name}: {analysis} could not be done: {error}")
            continue
        spec, verdict = find_analysis(analysis), result.verdict()
        numbers = [[key, value if isinstance(value, str) else number(value)] for key, value in result.summary().items()]
        title = spec.title or spec.summary or analysis
        parts = [f"<h4>{text(title)}</h4><p>{text(spec.explanation)}</p>"]
        parts += [f'<p class="verdict">{text(verdict)}</p>'] if verdict else []
        parts += [picture(content, f"{title} {name}. {verdict}", kind)] if content else []
        parts += [table(["what", "value"], numbers, caption=f"{name}: {analysis} in numbers")]
        insight.findings.append("".join(parts))
        insight.verdicts += [verdict] if verdict else []
        log(f"{name}: {analysis}: {verdict or '; '.join(' '.join(row) for row in numbers[:2])}")


def _measurement(name: str, content: Mapping[str, Any]) -> str:
    """Return a measurement: the machine, whether results were right, charts over the number of tokens, and the rows."""
    environment, gate = _object(content, "environment"), _object(content, "gate")
    keys = ("cpu", "threads", "load", "torch", "tost", "revision", "measured")
    facts = {key: environment[key] for key in keys if environment.get(key) is not None}
    parts = [f"<h3>tost bench: {text(content['theme'])}</h3>", definitions({**facts, "file": name})]
    if content.get("complete") is False:
        parts.append(note("This measurement was interrupted before its end.", "warning"))
    checks = f"{number(gate.get('checks'))} comparisons with the reference"
    if "passed" not in gate:
        parts.append(note("This measurement has no gate: results were not checked in the same run."))
    elif gate["passed"] is True:
        parts.append(note(f"Gate: green. {checks} were right before anything was timed."))
    else:
        return "".join([*parts, note(f"Gate: red. Some of {checks} failed, so no speed is shown.", "warning")])
    rows = content["rows"]
    charts = ""
    for kind, same in grouped(rows, lambda row: tuple(f"{key} {row[key]}" for key in _KINDS if key in row)).items():
        points: dict[str, list[tuple[float, float]]] = {}
        for row in same:
            seconds = row.get("seconds", row.get("seconds_median"))
            value = real(seconds.get("median") if isinstance(seconds, dict) else seconds)
            tokens = real(row.get("tokens"))
            if value is not None and tokens is not None:
                points.setdefault(str(row.get("contender")), []).append((tokens, value))
        lines = [Line(contender, sorted(found), i) for i, (contender, found) in enumerate(points.items())]
        if any(len(line.points) > 1 for line in lines):
            charts += _chart(lines, title=", ".join(kind), x="tokens", y="seconds", log_x=True, log_y=True)
    flat = [flatten(row, " ") for row in rows[:_MOST_ROWS]]
    columns = [key for key in dict.fromkeys(key for row in flat for key in row) if not key.endswith(_SPREAD)]
    columns = columns[:_MOST_COLUMNS]
    cells = [[_cell(key, row.get(key)) for key in columns] for row in flat]
    more = f", the first {len(flat)} of {len(rows)} rows" if len(flat) < len(rows) else ""
    parts.append(f'<div class="charts">{charts}</div>' if charts else "")
    parts.append(table(columns, cells, caption=f"As measured{more}") if columns else note("The file holds no rows."))
    return "".join(parts)


def _cell(key: str, value: object) -> str:
    if real(value) is None:
        return "" if value is None else str(value)
    return duration(value) if "seconds" in key else byte_size(value) if "bytes" in key else number(value)


def _repeat(runs: Sequence[RunRecord], benchmarks: Mapping[str, Mapping[str, Any]], command: Sequence[str]) -> str:
    known = [run.environment.get("command") for run in runs]
    commands = [shlex.join(map(str, words)) for words in known if isinstance(words, list)]
    commands += [str(content["command"]) for content in benchmarks.values() if content.get("command")]
    parts = [preformatted("\n".join(dict.fromkeys([*commands, shlex.join(command)])), "Commands")]
    for run in runs:
        facts = {key: value for key, value in flatten(dict(run.environment)).items() if key != "command"}
        shown = definitions(facts) + preformatted(run.config_text, f"Configuration of {run.name}")
        parts.append(f"<details><summary>{text(run.name)}: environment and config.yaml</summary>{shown}</details>")
    return "".join(parts)
