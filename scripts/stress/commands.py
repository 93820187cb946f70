"""Other commands that are killed at random moments and repeated."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from job import Job, Scenario
from training import BYTES, TINY

Command = Callable[[Path], list[str]]
"""Makes the command line that writes to a folder."""


def killed_command(about: str, command: Command, *, model: bool = False, share: float = 0.8) -> Scenario:
    """Return the scenario of a command that is killed, then repeated until it ends.

    After every kill each file that has its final name must be whole: the one of the undisturbed command.

    Args:
        about: What the command does.
        command: Makes the command line. It writes to ``result`` in the folder; ``model`` there is a run.
        model: Train the run first.
        share: Part of the kills.
    """

    def run(job: Job) -> None:
        if model:
            options = (*TINY, *BYTES, "train.steps=3")
            job.run(["train", "demo/stdlib_bytes", *options, "--out", str(job.folder / "model")])
        whole = 0.0
        for name in ("reference", "result"):  # the second time shows that the result is the same every time
            _clear(job.folder)
            started = time.monotonic()
            job.run(command(job.folder))
            whole = time.monotonic() - started
            if name == "reference":
                (job.folder / "result").rename(job.folder / "reference")
        _compare(job, "undisturbed")
        while not job.done:
            _clear(job.folder)
            _one_result(job, command(job.folder), whole)

    return Scenario(f"{about} killed", run, share=share)


def _one_result(job: Job, command: Sequence[str], whole: float) -> None:
    while not job.done:
        victim = job.start(command)
        victim.wait_for(lambda: False, job.chance.random() * whole)
        if victim.poll() is not None:
            job.expect(victim.poll() == 0, f"ended by itself: {victim.output[-2000:]}")
            victim.sweep_up()
            break
        victim.kill(alone=job.chance.random() < 0.5)
        job.counts["kills"] += 1
        _expect_whole(job)
    job.run(command)
    job.counts["compared"] += _compare(job, "after kills")


def _clear(folder: Path) -> None:
    shutil.rmtree(folder / "result", ignore_errors=True)
    (folder / "result").mkdir()


def _visible(folder: Path) -> list[Path]:
    """Return the files that are not drafts; a name with a dot in front belongs to an unfinished write."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _content(path: Path) -> bytes:
    """Return what a file holds, without the minute in which a page was written."""
    return re.sub(rb"Written on [-\d]+ [\d:]+ UTC", b"", path.read_bytes())


def _expect_whole(job: Job) -> None:
    for path in _visible(job.folder / "result"):
        original = job.folder / "reference" / path.relative_to(job.folder / "result")
        if original.is_file():  # not a part that is put together at the end
            job.expect(_content(original) == _content(path), f"{path.name} is not whole after a kill")


def _compare(job: Job, when: str) -> bool:
    reference, result = (
        {str(path.relative_to(folder)): _content(path) for path in _visible(folder)}
        for folder in (job.folder / "reference", job.folder / "result")
    )
    wrong = sorted(name for name in reference.keys() | result.keys() if reference.get(name) != result.get(name))
    return job.expect(not wrong, f"{when}: {', '.join(wrong[:10])}")


def _report(folder: Path) -> list[str]:
    return ["report", str(folder / "model"), "--out", str(folder / "result" / "page.html"), "--analyses", "none"]


def _generate(folder: Path) -> list[str]:
    place = str(folder / "result" / "state.safetensors")
    return [
        "generate",
        str(folder / "model"),
        "--prompt",
        "def ",
        "--max-new-tokens",
        "20",
        "--seed",
        "1",
        "--save-state",
        place,
    ]


def _to_file(folder: Path) -> list[str]:
    return ["convert", str(folder / "model"), "--out", str(folder / "result" / "model.pth"), "--force"]


def _to_folder(folder: Path) -> list[str]:
    place = str(folder / "result" / "model")
    return ["convert", str(folder / "model"), "--out", place, "--to", "tost", "--force"]


def _digits(folder: Path) -> list[str]:
    return ["data", "prepare", "digits", "--out", str(folder / "result"), "--workers", "1"]


def _listops(folder: Path) -> list[str]:
    options = ("count=3000", "min_length=5", "max_length=60", "max_depth=4")
    return ["data", "prepare", "lra/listops", *options, "--out", str(folder / "result"), "--workers", "1"]


SCENARIOS = {
    "prepare-digits": killed_command("tost data prepare digits", _digits),
    "prepare-listops": killed_command("tost data prepare lra/listops", _listops),
    "report": killed_command("tost report", _report, model=True),
    "convert": killed_command("tost convert to a folder", _to_folder, model=True),
    "convert-official": killed_command("tost convert to a file of the authors' code", _to_file, model=True),
    "generate": killed_command("tost generate --save-state", _generate, model=True),
}
