"""Machines that misbehave: full and read-only disks, damage, clocks that jump, little memory, a second writer."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from compare import compare_runs
from job import Job, Scenario
from training import train_command

from tost.train.checkpoint.files import verify

CAPABILITY_VERSION = 0x20080522
OVERRIDE = 0b1110
"""The capabilities CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER."""
YEAR = 365 * 86_400.0


def disturbed(about: str, disturb: Callable[[Job, Path], None], *, share: float = 0.3) -> Scenario:
    """Return the scenario of a run that something happens to, once or several times, and that is resumed and compared.

    Args:
        about: What happens.
        disturb: Does it to the run in the folder; `Job.expect` notes what is wrong at once.
        share: Part of the kills.
    """

    def run(job: Job) -> None:
        reference = job.folder / "reference"
        job.run(train_command(reference))
        while not job.done:
            out = job.folder / "victim"
            disturb(job, out)
            job.counts["kills"] += 1
            for path in out.glob("checkpoints/step-*/manifest.json") if disturb is not _damage_newest else ():
                job.expect(verify(path.parent) is None, f"{path.parent.name}: {verify(path.parent)}")
            if job.differences:
                return
            job.run(train_command(out))
            wrong = compare_runs(reference, out)
            job.expect(not wrong, ", ".join(wrong[:20]))
            if not job.differences:
                job.counts["compared"] += 1
                shutil.rmtree(out)

    return Scenario(about, run, share=share, counted="times")


def _kill_somewhere(job: Job, out: Path, prepare: Callable[[], None] | None = None) -> None:
    """Start or resume a run and kill it after it has saved something, or soon."""
    victim = job.start(train_command(out), prepare=prepare)
    wanted = job.chance.randrange(6)
    victim.wait_for(lambda: _newest(out) >= 2 * wanted, 20)
    victim.kill()


def _newest(out: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in out.glob("checkpoints/step-*")), default=0)


def _fill_disk(job: Job, out: Path) -> None:
    """Let the disk become full, at a random size."""
    out.mkdir()
    size = job.chance.randrange(8, 100) * 4096
    with _small_disk(out, size) as (prepare, is_disk):
        victim = job.start(train_command(out), prepare=prepare)
        if victim.wait() != 0:
            job.expect_message(victim, [1], "StorageError", "cannot write")
            job.counts["refused"] += 1
        if is_disk:  # what is on it goes on elsewhere, where there is room
            shutil.copytree(out, job.folder / "copy", symlinks=True)
    if is_disk:
        shutil.rmtree(out)
        (job.folder / "copy").rename(out)


@contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[tuple[Callable[[], None] | None, bool]]:
    """Give a folder a disk of some bytes; where that takes more rights, limit the size of files."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "stress", folder], capture_output=True)
    if mounted.returncode != 0:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 16, size // 16)), False
        return
    try:
        yield None, True
    finally:
        subprocess.run(["umount", folder], check=True)


def _respect_permissions() -> None:
    """Give up the right of root to ignore permissions."""
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    sets = ctypes.create_string_buffer(24)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, sets) == 0:
        words = [word & ~OVERRIDE if place < 3 else word for place, word in enumerate(struct.unpack("6I", sets))]
        libc.capset(header, struct.pack("6I", *words))


def _forbid_writing(job: Job, out: Path) -> None:
    """Make a run folder read-only: before it exists, or while the run is at work."""
    out.mkdir()
    early = job.chance.random() < 0.3
    if early:
        out.chmod(0o555)
    victim = job.start(train_command(out), prepare=_respect_permissions)
    if not early:
        wanted = job.chance.randrange(1, 8)
        victim.wait_for(lambda: _newest(out) >= 2 * wanted, 20)
        _chmod_folders(out, 0o555)
    code = victim.wait()
    _chmod_folders(out, 0o755)
    if code != 0:
        job.expect_message(victim, [1], "StorageError", "cannot write")
        job.counts["refused"] += 1
    job.expect(code != 0 or not early, "a folder without permission was written to")


def _chmod_folders(out: Path, mode: int) -> None:
    for path in (out, out / "checkpoints"):  # what is inside a checkpoint comes and goes
        if path.exists():
            path.chmod(mode)


def _damage_newest(job: Job, out: Path) -> None:
    """Damage one or two of the newest checkpoints, up to all."""
    _kill_somewhere(job, out)
    newest = sorted(out.glob("checkpoints/step-*"), reverse=True)
    for path in newest[: job.chance.randrange(1, 3)]:
        _damage(path, job.chance)


def _damage(checkpoint: Path, chance: Random) -> None:
    file = chance.choice(sorted(checkpoint.iterdir()))
    content = bytearray(file.read_bytes())
    match chance.randrange(6):
        case 0:
            file.unlink()
        case 1:
            file.write_bytes(content[: chance.randrange(len(content))])
        case 2:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
        case 3:
            (checkpoint / "manifest.json").write_text("{}")
        case 4:
            (checkpoint / "manifest.json").write_text("[" * 100_000)
        case 5:
            shutil.rmtree(checkpoint)
            checkpoint.write_bytes(b"")


def _turn_clocks(job: Job, out: Path) -> None:
    """Let the clock jump by years between starts, and with it the times of all files."""
    for _ in range(2):
        _kill_somewhere(job, out, _shifted_clock((job.chance.random() - 0.5) * 40 * YEAR))
        for path in out.rglob("*"):
            moment = job.chance.random() * 60 * YEAR
            os.utime(path, (moment, moment), follow_symlinks=False)


def _shifted_clock(seconds: float) -> Callable[[], None]:
    def prepare() -> None:
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + seconds
        time.time_ns = lambda: now_ns() + int(seconds * 1e9)

    return prepare


def _write_twice(job: Job, out: Path) -> None:
    """Start a second run in the folder of one that is at work, then kill that."""
    first = job.start(train_command(out))
    first.wait_for(lambda: f"process {first.pid} " in _read(out / ".lock"), 20)
    second = job.start(train_command(out))
    # The first may end before the second begins, which then has nothing to do.
    if second.wait() != 0:
        job.expect_message(second, [2], f"process {first.pid} on {platform.node()}", "--out")
        job.counts["refused"] += 1
    first.kill(alone=True)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _starve(job: Job, out: Path) -> None:
    """Leave a run between nothing and 100 MB more than what it has loaded."""
    room = int(job.chance.random() ** 2 * 100e6)

    def prepare() -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))

    victim = job.start(train_command(out), prepare=prepare)
    if victim.wait() != 0:
        job.expect_message(victim, [1], "memory")
        job.counts["refused"] += 1


SCENARIOS = {
    "full-disk": disturbed("a disk that becomes full", _fill_disk),
    "read-only": disturbed("a folder that becomes read-only", _forbid_writing),
    "damage": disturbed("damage to the newest checkpoints", _damage_newest),
    "clock": disturbed("clocks and file times that jump by years", _turn_clocks),
    "two-writers": disturbed("a second writer, then kill -9 of the first", _write_twice),
    "memory": disturbed("too little memory", _starve),
}
