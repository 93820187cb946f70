"""Following the curves of generated Pathfinder images from their records, without the program that laid them."""

from __future__ import annotations

import numpy as np


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


def follow(curves, start, goal, reach):
    """Walk from `start` as an eye would: to the dash that continues the last one best, of whichever curve.

    Returns whether the walk ends at `goal`.
    """
    left = [dash.reshape(2, 2).astype(float) for curve in curves for dash in curve]
    begin = min(range(len(left)), key=lambda dash: np.linalg.norm(left[dash] - start, axis=1).min())
    dash = left.pop(begin)
    if np.linalg.norm(dash[1] - start) < np.linalg.norm(dash[0] - start):
        dash = dash[::-1]
    while True:
        heading = (dash[1] - dash[0]) / max(np.linalg.norm(dash[1] - dash[0]), 1e-9)
        choices = []
        for number, other in enumerate(left):
            for way in (other, other[::-1]):
                gap = way[0] - dash[1]
                if np.linalg.norm(gap) <= reach:
                    ahead = (way[1] - dash[1]) / max(np.linalg.norm(way[1] - dash[1]), 1e-9)
                    turn = (way[1] - way[0]) / max(np.linalg.norm(way[1] - way[0]), 1e-9)
                    choices.append((np.linalg.norm(gap) / reach - heading @ ahead - heading @ turn, number, way))
        if not choices:
            return bool((np.linalg.norm(dash - goal, axis=1) < 1).any())
        _, number, dash = min(choices, key=lambda choice: choice[0])
        left.pop(number)
