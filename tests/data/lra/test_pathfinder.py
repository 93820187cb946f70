"""Generated Pathfinder images: labels by a tracer that walks the curves, statistics of the original, files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tost.data.lra import pathfinder
from tost.data.lra.pathfinder import ANGLES, CONTOUR_LENGTHS, make_pictures, make_shapes, pathfinder_settings
from tost.data.prepare import prepare


def near_and_far(curve):
    """The two ends of each dash, in the direction of the curve, float [dashes, 2, 2].

    The first dash is recorded from its beginning, all others from their end.
    """
    ends = curve.reshape(-1, 2, 2).astype(float)
    return np.concatenate((ends[:1], ends[1:, ::-1]))


def gaps(curve):
    """Distances from the end of each dash to the beginning of the next."""
    ends = near_and_far(curve)
    return np.linalg.norm(ends[1:, 0] - ends[:-1, 1], axis=1)


def reaches(curves, start, goal, reach):
    """Whether one can walk from the first dash at `start` to the last one at `goal`, over gaps of at most `reach`.

    The dashes between are taken as a heap without order. Steps from one curve to the other are not allowed.
    """
    for curve in curves:
        if (curve[0, :2] != start).any():
            continue
        dashes = curve.reshape(-1, 2, 2).astype(float)
        apart = np.linalg.norm(dashes[:, None, :, None] - dashes[None, :, None, :], axis=-1).min(axis=(2, 3))
        seen, todo = {0}, [0]
        while todo:
            new = set(np.flatnonzero(apart[todo.pop()] <= reach).tolist()) - seen
            seen |= new
            todo += new
        return len(dashes) - 1 in seen and bool((curve[-1, :2] == goal).all())
    raise AssertionError("no curve begins at the first disc")


# What may lie between two dashes, by margin: twice the margin, lengthened by rounding up to whole pixels.
REACH = {1: 5.0, 2: 7.0, 3: 9.0}


@pytest.fixture(scope="module")
def small():
    return make_pictures(pathfinder_settings(32), 300, seed=1)


@pytest.fixture(scope="module")
def large():
    return make_pictures(pathfinder_settings(128), 12, seed=1)


def test_few_directions_can_begin_at_32_pixels():
    usable = make_shapes(pathfinder_settings(32), 1).usable - ANGLES // 2
    assert 0.05 < len(usable) / ANGLES < 0.12
    assert ((usable > -180) & (usable < -90)).all(), "up and to the left"
    assert len(make_shapes(pathfinder_settings(128), 3).usable) == ANGLES


def check_geometry(pictures, size):
    dashes = np.concatenate([pictures.targets.reshape(-1, 4), pictures.distractors.reshape(-1, 4)])
    there = dashes[:, 0] >= 0
    assert (dashes[~there] == -1).all()
    assert ((dashes[there][:, :2] >= 1) & (dashes[there][:, :2] < size - 1)).all(), "the border is kept free"
    whole = (pictures.distractors >= 0).all(axis=-1)
    assert (whole.all(axis=2) == whole.any(axis=2)).all(), "a short curve is laid whole or not at all"
    sharp = []
    for targets, margin in zip(pictures.targets, pictures.margins, strict=True):
        for curve in targets:
            assert gaps(curve).max() <= REACH[int(margin)]
            ends = near_and_far(curve)
            headings = ends[:, 1] - ends[:, 0]
            sharp += ((headings[1:] * headings[:-1]).sum(axis=1) < 0).tolist()
    assert np.mean(sharp) < (0.3 if len(sharp) < 100 else 0.1), "curves bend, they do not fold"


def check_labels(pictures):
    for row, (start, goal) in enumerate(pictures.markers):
        curves = pictures.targets[row]
        found = reaches(curves, start, goal, REACH[int(pictures.margins[row])])
        assert found == bool(pictures.labels[row])
        assert found or reaches(curves[::-1], start, _other_end(curves, goal), REACH[int(pictures.margins[row])])


def _other_end(curves, goal):
    first, second = curves[0][-1, :2], curves[1][-1, :2]
    return first if (second == goal).all() else second


def check_ink(pictures):
    """Dashes are bright along their length, discs at their centres."""
    for pixels, curves, markers in zip(pictures.pixels, pictures.targets, pictures.markers, strict=True):
        middles = np.rint(curves.reshape(-1, 2, 2).mean(axis=1)).astype(int)
        around = [pixels[y - 1 : y + 2, x - 1 : x + 2].max() for y, x in middles]
        assert min(around) > 50
        assert all(pixels[y, x] > 180 for y, x in markers)


@pytest.mark.parametrize("size", [32, 128])
def test_labels_are_what_a_tracer_finds_on_connected_curves_that_are_painted(small, large, size):
    pictures = small if size == 32 else large
    check_labels(pictures)
    check_geometry(pictures, size)
    check_ink(pictures)


def test_images_have_the_statistics_of_the_original(small):
    # Measured on the original: 66 % zeros, mean about 20, ringing of 1 to 5, strokes from 90 to 200, discs near 255.
    ink = small.pixels[small.pixels > 0]
    assert abs((small.pixels == 0).mean() - 0.66) < 0.015
    assert abs(small.pixels.mean() - 20) < 1
    assert abs((ink <= 5).mean() - 0.5) < 0.05
    assert ((ink >= 90) & (ink <= 200)).sum() / (ink > 5).sum() > 0.5
    assert (small.pixels.max(axis=(1, 2)) == 255).all()
    assert (small.pixels.min(axis=(1, 2)) == 0).all()
    assert abs(small.labels.mean() - 0.5) < 4 * 0.5 / 300**0.5


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), count=st.integers(1, 5), level=st.sampled_from(sorted(CONTOUR_LENGTHS)))
def test_every_seed_gives_valid_images(seed, count, level):
    chosen = pathfinder_settings(32, level)
    first, again = (make_pictures(chosen, count, seed) for _ in range(2))
    assert all(np.array_equal(getattr(first, key), getattr(again, key)) for key in vars(first))
    assert first.pixels.shape == (count, 32, 32)
    assert first.targets.shape == (count, 2, CONTOUR_LENGTHS[level], 4)
    check_labels(first)
    check_geometry(first, 32)


def everything(folder):
    return {file.relative_to(folder): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture
def tiny(monkeypatch):
    """Batches of six images, two of which share a seed, so that there are several of both."""
    monkeypatch.setattr(pathfinder, "_BATCH", 6)
    monkeypatch.setattr(pathfinder, "_SEEDED", 2)


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


@pytest.mark.slow
def test_files_do_not_depend_on_the_number_of_processes(tmp_path):
    for workers in (1, 2):
        prepare("lra/pathfinder32", {"count": 510, "seed": 9}, tmp_path / str(workers), workers=workers)
    assert everything(tmp_path / "1") == everything(tmp_path / "2")


@pytest.mark.parametrize(("stop_at", "kept"), [(2, 6), (8, 12), (15, 15)])
def test_it_goes_on_where_it_was_stopped(tmp_path, tiny, stop_at, kept):
    prepare("lra/pathfinder32", {"count": 15}, tmp_path / "whole")

    def stop(done, total, what):
        if done >= stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("lra/pathfinder32", {"count": 15}, tmp_path / "stopped", report=stop)
    seen = []
    prepare("lra/pathfinder32", {"count": 15}, tmp_path / "stopped", report=lambda *now: seen.append(now))
    if kept < 15:
        assert seen[0] == (kept, 15, "images"), "batches that are complete are not made again"
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
