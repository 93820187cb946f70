"""The sections about training: models, curves and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tost._text import byte_size, duration, grouped, number, percent, real, rounded
from tost._yaml import flatten
from tost.data import find_data
from tost.errors import ConfigError
from tost.models import model_spec
from tost.report.charts import Axis, Series, line_chart
from tost.report.html import definitions, note, table, text
from tost.report.runs import LAYERS, RunRecord

# The loss has a chart of its own, which shows as much as the same in other units.
_NO_CHART = ("step", "loss", "perplexity", "bits_per_token", "bits_per_byte", "loss_error", "tokens", "accuracy_top5")
_MOST_METRICS, _MOST_KEYS = 4, 12
UNSEEN = "not measured"
_NAMES = {
    "loss": "loss (nats)",
    "accuracy": "accuracy",
    "accuracy_top5": "accuracy, best five",
    "accuracy_real": "accuracy, ReaL labels",
    "bits_per_token": "bits per token",
    "bits_per_byte": "bits per byte",
}


def groups(runs: Sequence[RunRecord]) -> dict[tuple[str, str], list[RunRecord]]:
    """Return the runs by what they can be compared on: the task and the data."""
    return grouped(runs, lambda run: run.subject)


def group_title(subject: tuple[str, str]) -> str:
    """Return what a group of runs is about, such as ``digits: classification``."""
    recipe, data = subject
    return f"{data}: {recipe.replace('_', ' ')}"


def metric_text(name: str, value: object) -> str:
    """Write the value of a metric."""
    return percent(value) if name.startswith("accuracy") else number(value)


def judgement(runs: Sequence[RunRecord]) -> str:
    """Return a sentence about which of several runs ended best; nothing if there is nothing to compare."""
    metric, mode = runs[0].metric
    ended = [(run, run.final[metric]) for run in runs if metric in run.final]
    if not ended:
        return ""
    ended.sort(key=lambda pair: -pair[1] if mode == "max" else pair[1])
    told = ", ".join(f"{run.name} ({_model_name(run)}) {metric_text(metric, value)}" for run, value in ended)
    best = "" if len(ended) == 1 else ", best first"
    steps = {run.last_step for run, _ in ended}
    when = f" after {number(steps.pop())} steps" if len(steps) == 1 else ""
    return f"{group_title(runs[0].subject)}: {_NAMES.get(metric, metric)} on the validation set{when}{best}: {told}."


def results(runs: Sequence[RunRecord]) -> str:
    """Return the table of all runs of a group, side by side."""
    metric, mode = runs[0].metric
    names = dict.fromkeys(name for run in runs for name in run.final)
    others = [name for name in names if name != metric][:_MOST_METRICS]
    headers = ["run", "model", "parameters", "steps", f"{metric}, at the end", f"{metric}, best"]
    headers += [_NAMES.get(name, name) for name in others]
    open_ended = any(run.status != "finished" for run in runs)
    headers += ["time", "peak memory", *(["status"] if open_ended else [])]
    rows = []
    for run in runs:
        best = run.best(metric, mode)
        shown = UNSEEN if best is None else f"{metric_text(metric, best[1])} (step {best[0]:,.0f})"
        row = [run.name, _model_name(run), rounded(run.summary.get("parameters")), number(run.last_step)]
        row += [metric_text(metric, run.final.get(metric)), shown]
        row += [metric_text(name, run.final.get(name)) for name in others]
        time = duration(run.summary.get("seconds")) + (" *" if run.resumed else "")
        row += [time, byte_size(run.summary.get("peak_memory_bytes"))]
        row += [run.status] if open_ended else []
        rows.append(row)
    ended = {place: run.final[metric] for place, run in enumerate(runs) if metric in run.final}
    pick = (max if mode == "max" else min)(ended.values(), default=None)
    best_rows = [place for place, value in ended.items() if value == pick] if len(set(ended.values())) > 1 else []
    caption = f"{group_title(runs[0].subject)}. Every row is one run with one seed; measured on the validation set."
    caption += " * Time since it was resumed." if any(run.resumed for run in runs) else ""
    return table(headers, rows, caption=caption, labels=2, best=best_rows) + _fairness(runs)


def _fairness(runs: Sequence[RunRecord]) -> str:
    """Return a note about the settings in which compared runs differ."""
    known = [flatten(run.config) for run in runs if run.config]
    if len(known) < 2:
        return ""
    keys = dict.fromkeys(key for settings in known for key in settings)
    different = [key for key in keys if any(settings.get(key) != known[0].get(key) for settings in known)]
    recipe = [key for key in different if not key.startswith("model.")]
    if not recipe:
        return note("These runs differ in nothing but the model: data, steps, batches and recipe are the same.")
    listed = ", ".join(recipe[:_MOST_KEYS]) + (" and more" if len(recipe) > _MOST_KEYS else "")
    return note(f"These runs differ not only in the model but also in {listed}.")


def trained(run: RunRecord) -> str:
    """Return what a run trained, on what and how."""
    parts = [f"<h3>{text(run.name)}</h3>", *(note(problem, "warning") for problem in run.problems)]
    if run.status != "finished" and run.summary:
        parts.append(note(f"This run is not finished: its status is {run.status}.", "warning"))
    if not run.config:
        return "".join(parts)
    facts = {
        "model": _model(run),
        "parameters": rounded(run.summary.get("parameters")),
        "data": _data(run),
        "training": _training(run),
        "optimizer": _optimizer(run),
    }
    return "".join([*parts, definitions(facts)])


def _model_name(run: RunRecord) -> str:
    name = str(run.setting("model.name", "unknown model"))
    mixer = run.setting("model.mixer")
    return f"{name}, {mixer}" if mixer not in (None, "tssa") else name


def _model(run: RunRecord) -> str:
    name = str(run.setting("model.name", "unknown"))
    try:
        described = f"{name}: {model_spec(name).description}. As built here: "
    except ConfigError:
        described = f"{name}: "
    sizes = {
        "embed_dim": "width",
        "depth": "layers",
        "num_heads": "heads",
        "mixer": "token mixer",
        "patch_size": "pixels per patch side",
        "max_length": "longest sequence",
    }
    found = [(words, run.setting(f"model.{key}")) for key, words in sizes.items()]
    return described + ", ".join(f"{words} {value}" for words, value in found if value is not None)


def _data(run: RunRecord) -> str:
    name = str(run.setting("data.name", "unknown"))
    try:
        described = f"{name}: {find_data(name).description}"
    except ConfigError:
        described = name
    path = run.setting("data.path")
    return described + (f"; from {path}" if path else "; embedded, nothing was downloaded")


def _training(run: RunRecord) -> str:
    steps, size = run.setting("train.steps"), run.setting("train.batch_size")
    parts = [f"{number(steps)} steps of {number(size)} samples", f"precision {run.setting('train.precision', 'fp32')}"]
    parts += [f"seed {run.setting('train.seed', 0)}"]
    if speeds := [value for _, value in run.training_curve("tokens_per_second")]:
        unit = {"img": "images"}.get(str(run.steps[-1].get("unit", "tok")), "tokens")
        parts.append(f"{rounded(sorted(speeds)[len(speeds) // 2])} {unit} per second (median)")
    return ", ".join(parts)


def _optimizer(run: RunRecord) -> str:
    keys: dict[str, Any] = {
        "": run.setting("optim.name"),
        "learning rate": run.setting("optim.lr"),
        "schedule": run.setting("schedule.name"),
        "warm-up steps": run.setting("schedule.warmup_steps"),
        "weight decay": run.setting("optim.weight_decay"),
        "gradient clipped at": run.setting("train.clip_norm"),
        "label smoothing": run.setting("regularize.label_smoothing"),
    }
    return ", ".join(f"{words} {value}".strip() for words, value in keys.items() if value not in (None, 0, 0.0))


def curves(runs: Sequence[RunRecord]) -> str:
    """Return the charts of a group of runs: loss, the other metrics, and what the layers did while they learned."""
    charts = [_loss_chart(runs)]
    names = dict.fromkeys(key for run in runs for record in run.evaluations for key in record)
    metrics = [key for key in names if key not in _NO_CHART and any(run.curve(key) for run in runs)]
    chosen = [key for key in metrics if not key.startswith(LAYERS)][:_MOST_METRICS]
    charts += [_metric_chart(runs, name) for name in chosen]
    charts += [_layers_chart(run) for run in runs]
    shown = [chart for chart in charts if chart]
    if not shown:
        return note("There are no records of steps or evaluations yet, so there are no curves.")
    return f'<div class="charts">{"".join(shown)}</div>'


def _loss_chart(runs: Sequence[RunRecord]) -> str:
    lines = []
    for look, run in enumerate(runs):
        lines.append(Series(f"{run.name}, training", run.training_curve(), look, "thin"))
        lines.append(Series(f"{run.name}, validation", run.curve("loss"), look))
    values = [value for line in lines for _, value in line.points]
    wide = bool(values) and min(values) > 0 and max(values) / min(values) > 20
    is_long = any(len(run.steps) > 240 for run in runs)
    remark = "Training: one batch per point" + (", averaged over stretches." if is_long else ".")
    steps, loss = Axis("step", whole=True), Axis("loss (nats)", log=wide)
    return line_chart(lines, title="Loss by step, lower is better", x=steps, y=loss, note=remark)


def _metric_chart(runs: Sequence[RunRecord], name: str) -> str:
    lines = [Series(run.name, run.curve(name), look) for look, run in enumerate(runs)]
    axis = Axis(_NAMES.get(name, name))
    if name.startswith("accuracy"):
        axis = replace(axis, write=lambda value: f"{100 * value:.4g} %")
    title = f"{axis.label} on the validation set"
    return line_chart(lines, title=title[0].upper() + title[1:], x=Axis("step", whole=True), y=axis)


def _layers_chart(run: RunRecord) -> str:
    """Draw the compression term by layer at the first, a middle and the last evaluation that has it."""
    found = [record for record in run.evaluations if any(str(key).startswith(LAYERS) for key in record)]
    if not found:
        return ""
    moments = dict.fromkeys([0, len(found) // 2, len(found) - 1])
    lines = []
    for look, moment in enumerate(moments):
        record = found[moment]
        numbers = {key.removeprefix(LAYERS): real(value) for key, value in record.items() if key.startswith(LAYERS)}
        points = [(float(key), value) for key, value in numbers.items() if key.isdigit() and value is not None]
        lines.append(Series(f"step {record['step']}", sorted(points), look))
    return line_chart(
        lines,
        title=f"{run.name}: compression term R_c^var by layer while it learned",
        x=Axis("layer", whole=True),
        y=Axis("R_c^var (nats)"),
        note="Measured on the tokens that go into each attention. In theory the lines fall to the right.",
    )
