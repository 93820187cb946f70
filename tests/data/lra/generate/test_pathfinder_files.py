"""Pathfinder images as files: the layout of the release, and that neither processes nor interruptions change a byte."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from tost.data import DataOptions, build_data
from tost.data.lra.generate.pathfinder import files as pathfinder_prepare
from tost.data.prepare import find_preparer, prepare


def everything(folder):
    return {file.relative_to(folder): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture
def tiny(monkeypatch):
    """Batches of six images in units of two, so that there are several of both."""
    monkeypatch.setattr(pathfinder_prepare, "_BATCH", 6)
    monkeypatch.setattr(pathfinder_prepare, "_UNIT", 2)


def test_the_layout_is_that_of_the_release(tmp_path, tiny):
    facts = prepare("lra/pathfinder32", {"count": 15, "seed": 4}, tmp_path)
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    assert facts["folder"] == str(folder)
    assert sorted(entry.name for entry in folder.iterdir()) == ["contours", "imgs", "metadata"]
    for batch, count in ((0, 6), (1, 6), (2, 3)):
        lines = (folder / "metadata" / f"{batch}.npy").read_text().splitlines()
        assert len(lines) == count
        with np.load(folder / "contours" / f"{batch}.npz", allow_pickle=False) as records:
            labels = records["labels"].tolist()
            assert records["targets"].shape == (count, 2, 14, 4)
        for number, line in enumerate(lines):
            fields = line.split(" ")
            assert fields[:3] == [f"imgs/{batch}", f"sample_{number}.png", str(number)]
            assert int(fields[3]) == labels[number]
            assert fields[4:] == ["1.0", "14", "4", "2", "0.5", "1", "1"]
            with Image.open(folder / fields[0] / fields[1]) as image:
                assert (image.mode, image.size) == ("L", (32, 32))
    assert len(list((folder / "imgs").rglob("*.png"))) == 15


def test_our_reader_reads_it(tmp_path, tiny):
    prepare("lra/pathfinder32", {"count": 20}, tmp_path)
    bundle = build_data(DataOptions(name="lra_pathfinder", path=str(tmp_path), options={"split": "order"}), seed=0)
    assert (len(bundle.train), len(bundle.validation)) == (16, 2)
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    lines = (folder / "metadata" / "0.npy").read_text().splitlines()
    sample = bundle.train[3]
    assert int(sample["targets"]) == int(lines[3].split()[3])
    with Image.open(folder / "imgs" / "0" / "sample_3.png") as image:
        assert sample["inputs"].tolist() == list(np.asarray(image).flatten())


def test_difficulties_have_their_folders(tmp_path, tiny):
    prepare("lra/pathfinder32", {"count": 2, "difficulty": "easy"}, tmp_path)
    assert (tmp_path / "pathfinder32" / "curv_baseline" / "metadata" / "0.npy").is_file()


def test_path_x_is_large(tmp_path, tiny):
    prepare("lra/pathx", {"count": 2}, tmp_path)
    with Image.open(tmp_path / "pathfinder128" / "curv_contour_length_14" / "imgs" / "0" / "sample_1.png") as image:
        assert image.size == (128, 128)
    assert find_preparer("lra/pathfinder64").resolution == 64


@pytest.mark.slow
def test_files_do_not_depend_on_the_number_of_processes(tmp_path):
    for workers in (1, 2):
        prepare("lra/pathfinder32", {"count": 510, "seed": 9}, tmp_path / str(workers), workers=workers)
    assert everything(tmp_path / "1") == everything(tmp_path / "2")


@pytest.mark.parametrize("stop_at", [2, 6, 8, 15])
def test_it_goes_on_where_it_was_stopped(tmp_path, tiny, stop_at):
    prepare("lra/pathfinder32", {"count": 15}, tmp_path / "whole")

    def stop(done, total, what):
        if done >= stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("lra/pathfinder32", {"count": 15}, tmp_path / "stopped", report=stop)
    seen = []
    prepare("lra/pathfinder32", {"count": 15}, tmp_path / "stopped", report=lambda *now: seen.append(now))
    if stop_at < 15:
        assert seen[0] == (stop_at, 15, "images"), "what was done is not done again"
    assert everything(tmp_path / "whole") == everything(tmp_path / "stopped")
    assert prepare("lra/pathfinder32", {"count": 15}, tmp_path / "stopped")["already there"]


@pytest.mark.slow
def test_a_killed_command_is_continued_with_the_same_bytes(tmp_path):
    prepare("lra/pathfinder32", {"count": 2000}, tmp_path / "whole")
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "tost.cli", "data", "prepare", "lra/pathfinder32", "--out", str(out)]
    command += ["--count", "2000", "--workers", "2"]
    running = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(out.rglob("sample_5.png")) and running.poll() is None:
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert not (out / "pathfinder32" / "curv_contour_length_14" / "metadata" / "1.npy").exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert everything(out) == everything(tmp_path / "whole")
