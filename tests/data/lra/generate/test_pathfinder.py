"""Generated Pathfinder images: labels by a tracer that walks the curves, statistics of the original."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.lra.generate.tracer import follow, gaps, near_and_far, reaches
from tost.data.lra.generate.pathfinder.grow import Uniform, _first_places
from tost.data.lra.generate.pathfinder.paint import make_pictures
from tost.data.lra.generate.pathfinder.settings import CONTOUR_LENGTHS, RESOLUTIONS, pathfinder_settings
from tost.data.lra.generate.pathfinder.shapes import ANGLES, make_shapes

DISTRACTORS = {32: 5, 64: 5, 128: 8, 256: 7}
# What may lie between two dashes, by margin: twice the margin, lengthened by rounding up to whole pixels.
REACH = {1: 5.0, 2: 7.0, 3: 9.0}


@pytest.fixture(scope="module")
def small():
    return make_pictures(pathfinder_settings(32), 300, seed=1)


@pytest.fixture(scope="module")
def large():
    return make_pictures(pathfinder_settings(128), 12, seed=1)


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_settings_of_the_release(resolution):
    hard = pathfinder_settings(resolution)
    assert (hard.size, hard.contour_length, hard.distractor_length) == (resolution, 14, 4)
    assert hard.distractors == DISTRACTORS[resolution]
    assert [pathfinder_settings(resolution, level).contour_length for level in CONTOUR_LENGTHS] == [6, 9, 14]


def test_dashes_are_where_they_should_be():
    shapes = make_shapes(pathfinder_settings(128), 2)
    assert shapes.steps.shape[0] == len(shapes.angles)
    radius = np.linalg.norm(shapes.steps, axis=1)
    assert ((radius > 5.5) & (radius < 8.5)).all(), "5 pixels of dash and a margin of 2"
    assert len(shapes.ink.values) == len(shapes.steps) + ANGLES
    for dash in (0, 17, len(shapes.steps) + 90, len(shapes.steps) + 233):
        picture = np.zeros((41, 41))
        picture[20 + shapes.ink.rows[dash], 20 + shapes.ink.columns[dash]] = shapes.ink.values[dash]
        far = shapes.far_ends[dash]
        assert 4 <= np.linalg.norm(far) <= 7
        for share in (0.1, 0.5, 0.9):
            row, column = np.rint(20 + share * far).astype(int)
            assert picture[row - 1 : row + 2, column - 1 : column + 2].max() > 150
        assert picture[tuple(20 - far)] < 10, "nothing behind the beginning"


def test_first_places_are_the_middle_minus_the_dash():
    places, counts = _first_places(pathfinder_settings(32), 1)
    used = np.concatenate([places[angle, : counts[angle]] for angle in range(ANGLES)])
    assert ((used >= 14) & (used <= 17)).all()
    assert counts.max() < 16


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


def test_labels_are_what_a_tracer_finds(small, large):
    check_labels(small)
    check_labels(large)


def test_curves_are_connected_and_inside(small, large):
    check_geometry(small, 32)
    check_geometry(large, 128)


def test_what_is_recorded_is_painted(small, large):
    check_ink(small)
    check_ink(large)


def statistics(pixels):
    ink = pixels[pixels > 0]
    return {
        "zeros": (pixels == 0).mean(),
        "mean": pixels.mean(),
        "faint": (ink <= 5).mean(),
        "strokes": (((ink >= 90) & (ink <= 200)).sum()) / (ink > 5).sum(),
    }


def test_images_have_the_statistics_of_the_original(small):
    # Measured on the original: 66 % zeros, mean about 20, ringing of 1 to 5, strokes from 90 to 200, discs near 255.
    found = statistics(small.pixels)
    assert abs(found["zeros"] - 0.66) < 0.015
    assert abs(found["mean"] - 20) < 1
    assert abs(found["faint"] - 0.5) < 0.05
    assert found["strokes"] > 0.5
    assert (small.pixels.max(axis=(1, 2)) == 255).all()
    assert (small.pixels.min(axis=(1, 2)) == 0).all()
    assert abs(small.labels.mean() - 0.5) < 4 * 0.5 / 300**0.5


def test_path_x_has_the_statistics_of_the_original(large):
    found = statistics(large.pixels)
    assert abs(found["zeros"] - 0.87) < 0.02
    assert abs(found["mean"] - 7.5) < 1
    assert set(large.margins.tolist()) == {2, 3}


def test_labels_leave_no_trace_in_the_brightness(small):
    means = [small.pixels[small.labels == label].mean() for label in (0, 1)]
    assert abs(means[0] - means[1]) < 1


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


def test_seeds_differ(small):
    other = make_pictures(pathfinder_settings(32), 300, seed=2)
    assert (small.pixels != other.pixels).any(axis=(1, 2)).all()
    assert len(np.unique(small.pixels.reshape(300, -1), axis=0)) == 300


def test_random_numbers_are_uniform_and_fixed():
    uniform = Uniform(7)
    drawn = uniform(20_000)
    assert 0 <= drawn.min() < 0.001 < 0.999 < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.01
    assert np.bincount(Uniform(0).below(3, 3000)).min() > 900
    assert Uniform(7)(4).tolist() == drawn[:4].tolist()


@pytest.mark.slow
def test_a_thousand_images_have_the_statistics_of_the_original():
    pictures = make_pictures(pathfinder_settings(32), 1000, seed=0)
    check_labels(pictures)
    check_geometry(pictures, 32)
    check_ink(pictures)
    found = statistics(pictures.pixels)
    assert abs(found["zeros"] - 0.66) < 0.01
    assert abs(found["mean"] - 20) < 0.7
    assert abs(pictures.labels.mean() - 0.5) < 4 * 0.5 / 1000**0.5


@pytest.mark.slow
@pytest.mark.parametrize(("resolution", "share"), [(64, 0.7), (128, 0.75)])
def test_an_eye_can_follow_the_curves(resolution, share):
    pictures = make_pictures(pathfinder_settings(resolution), 100, seed=0)
    right = [
        follow(pictures.targets[row], *pictures.markers[row], REACH[int(pictures.margins[row])])
        == bool(pictures.labels[row])
        for row in range(100)
    ]
    assert np.mean(right) > share
