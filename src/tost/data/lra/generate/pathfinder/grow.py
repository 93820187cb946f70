"""Laying dashed curves, many images at once.

A pair of long curves is laid by trial and error, and only about one trial in 300 succeeds. Trials do not depend on each
other. So thousands run side by side, one dash after the other, as arrays; those that get stuck are dropped. Every
trial that succeeds has taken equally many steps, hence the first that succeed are a fair sample of all that do.

Axes: T trials or images, Q steps, P pixels of a stamp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tost.data.lra.generate.pathfinder.settings import PathfinderSettings
from tost.data.lra.generate.pathfinder.shapes import ANGLES, Floats, Ints, Places, Shapes, make_shapes, translate

NONE: Final = -1
"""Stands for a dash that is not there."""

_DRAWS = 3  # end points that are tried for a dash
_SHORT_TRIES = 5  # attempts at a short curve
_STUCK = 1e-4  # less weight than this on all end points together is none
_COLLISION = 459  # 1.8 in units of 1/255: two dashes that occupy a pixel that much collide
_FREE = 76  # up to 0.3: a pixel counts as free for a first dash
_FULL_SHARE = 0.01  # with fewer free pixels than this no more short curves are begun
_BLIND_PICKS = 48  # places that are tried before all are looked at
_CELLS = 6_000_000  # bytes of occupied space that trials may take at once: about what fits into a cache
_TRIALS = 40  # trials for each image that is missing, or fewer where they take too much room


class Uniform:
    """Random numbers in [0, 1) from raw bits, whose sequence numpy promises not to change.

    Args:
        seed: Any 64 bits.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def __call__(self, *shape: int) -> Floats:
        """Return numbers of this shape."""
        raw = self._bits.random_raw(int(np.prod(shape, dtype=np.int64)))
        return np.asarray((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)

    def below(self, limit: int, count: int) -> NDArray[np.int64]:
        """Return `count` whole numbers from 0 to ``limit - 1``."""
        return (self(count) * limit).astype(np.int64)


@dataclass(frozen=True)
class Curves:
    """Positions of the curves of images, dash by dash.

    Attributes:
        anchors: Pixel of each dash, int32 ``[T, curves, dashes, 2]``.
        dashes: Its number among the shapes, int32 ``[T, curves, dashes]``; `NONE` where a curve could not be laid.
    """

    anchors: Ints
    dashes: Ints


class _Field:
    """The occupied space of T images, each with a border into which stamps may reach.

    Attributes:
        cells: Space that dashes occupy, uint8 ``[T, width * width]``.
        crowd: The same with their margins.
    """

    def __init__(self, settings: PathfinderSettings, shapes: Shapes, images: int) -> None:
        self.settings, self.shapes = settings, shapes
        # A pivot is up to margin + 1 pixels outside the image. From there it is a step and two margins at most.
        self.border = settings.dash_length + int(np.ceil(settings.dash_thickness)) + 4 * shapes.margin + 2
        self.width = settings.size + 2 * self.border
        self.cells, self.crowd = (
            np.tile(self._frame(settings.padding + grown), (images, 1)) for grown in (0, shapes.margin)
        )
        self._steps = shapes.steps[:, 0].astype(np.intp) * self.width + shapes.steps[:, 1]
        self._space, self._crowd = shapes.space.flat(self.width), shapes.crowd.flat(self.width)

    def _frame(self, padding: int) -> NDArray[np.uint8]:
        frame = np.zeros((self.width, self.width), dtype=np.uint8)
        for inset, value in ((0, 255), (padding, 0)):
            inner = slice(self.border + inset, -self.border - inset)
            frame[inner, inner] = value
        return frame.reshape(-1)

    def take(self, rows: Places | slice) -> _Field:
        """Return a copy of some of the images."""
        taken = _Field(self.settings, self.shapes, 0)
        taken.cells, taken.crowd = self.cells[rows].copy(), self.crowd[rows].copy()
        return taken

    def at(self, points: Ints) -> Places:
        """Return the places of pixels: intp ``[...]`` from ``[..., 2]``."""
        return (points[..., 0].astype(np.intp) + self.border) * self.width + points[..., 1] + self.border

    def inside(self, points: Ints) -> NDArray[np.bool_]:
        """Return which pixels are inside the image."""
        return np.asarray(((points >= 0) & (points < self.settings.size)).all(axis=-1))

    def occupy(self, rows: Places, anchors: Ints, dashes: Ints) -> None:
        """Merge the space of one dash into each of these images."""
        for canvas, flat, stamps in (
            (self.cells, self._space, self.shapes.space),
            (self.crowd, self._crowd, self.shapes.crowd),
        ):
            where = (rows[:, None], self.at(anchors)[:, None] + flat[dashes])
            canvas[where] = np.maximum(canvas[where], stamps.values[dashes])

    def collides(self, rows: Places, anchors: Ints, dashes: Ints) -> NDArray[np.bool_]:
        """Return which dashes would overlap others. In the border nothing is dense enough to collide."""
        where = self.at(anchors)[:, None] + self._space[dashes]
        there = self.cells[rows[:, None], where].astype(np.int16)
        return np.asarray((there + self.shapes.space.values[dashes]).max(axis=1) >= _COLLISION)

    def weights(self, rows: Places, pivots: Ints, angles: Floats) -> Floats:
        """Return how likely each step is, float64 ``[T, Q]``: free space times closeness to the last direction."""
        inside = self.inside(pivots[:, None] + self.shapes.steps)
        crowd = self.crowd[rows[:, None], self.at(pivots)[:, None] + self._steps]
        turn = np.abs(self.shapes.angles - angles[:, None])
        turn = np.minimum(turn, 2 * np.pi - turn) * self.settings.continuity
        straight = np.cos(np.minimum(turn, np.pi / 2)) ** 2
        return np.asarray(np.where(inside, (255 - crowd.astype(np.int16)) / 255 * straight, 0.0))


@dataclass
class _Tips:
    """The growing ends of one curve per trial; entries of trials that got stuck are meaningless."""

    pivots: Ints
    angles: Floats
    anchors: Ints
    dashes: Ints


def lay_curves(
    settings: PathfinderSettings, margin: int, images: int, uniform: Uniform
) -> tuple[Shapes, Curves, Curves]:
    """Lay the curves of images.

    Args:
        settings: Sizes.
        margin: One of the margins of `settings`.
        images: How many.
        uniform: Source of all random numbers.

    Returns:
        The shapes that dashes are numbered by, the two long curves, and the short ones.
    """
    shapes = make_shapes(settings, margin)
    most = max(256, _CELLS // settings.size**2)
    fields: list[_Field] = []
    long: list[Curves] = []
    while (missing := images - sum(len(field.cells) for field in fields)) > 0:
        field, curves = _try_pairs(settings, shapes, min(most, _TRIALS * missing + _TRIALS), uniform)
        fields.append(field)
        long.append(curves)
    field = _Field(settings, shapes, 0)
    field.cells = np.concatenate([one.cells for one in fields])[:images]
    field.crowd = np.concatenate([one.crowd for one in fields])[:images]
    pairs = Curves(
        np.concatenate([curves.anchors for curves in long])[:images],
        np.concatenate([curves.dashes for curves in long])[:images],
    )
    return shapes, pairs, _lay_short_curves(field, uniform)


def _try_pairs(settings: PathfinderSettings, shapes: Shapes, trials: int, uniform: Uniform) -> tuple[_Field, Curves]:
    """Begin so many pairs of long curves and return those that can be finished."""
    field = _Field(settings, shapes, trials)
    rows = np.arange(trials)
    anchors = np.zeros((trials, 2, settings.contour_length, 2), dtype=np.int32)
    dashes = np.full((trials, 2, settings.contour_length), NONE, dtype=np.int32)
    tips = _begin_pairs(field, trials, uniform)
    for number in range(settings.contour_length):
        for curve, tip in enumerate(tips):
            if number:
                rows = _extend(field, rows, tip, uniform)
            anchors[rows, curve, number], dashes[rows, curve, number] = tip.anchors[rows], tip.dashes[rows]
    # Both curves can end in one pixel, as their last dashes do not see each other; then any label would be right.
    rows = rows[(tips[0].anchors[rows] != tips[1].anchors[rows]).any(axis=1)]
    # As in the original, of the two last dashes only that of the second curve is kept free of short curves.
    field.occupy(rows, tips[1].anchors[rows], tips[1].dashes[rows])
    return field.take(rows), Curves(anchors[rows], dashes[rows])


def _begin_pairs(field: _Field, trials: int, uniform: Uniform) -> list[_Tips]:
    """Place the first dashes of both curves."""
    settings = field.settings
    places, counts = _first_places(settings, field.shapes.margin)
    # A trial with another angle would fail at once, and be followed by the next one.
    usable = field.shapes.usable[counts[field.shapes.usable] > 0]
    angles = [usable[uniform.below(len(usable), trials)], uniform.below(ANGLES, trials)]
    pick = (uniform(trials) * counts[angles[0]]).astype(np.int64)
    first = places[angles[0], pick]
    around = np.deg2rad(uniform.below(360, trials))
    away = settings.seed_distance * np.stack((np.sin(around), np.cos(around)), axis=-1)
    second = np.rint(first + away).astype(np.int32)
    return [_first_dash(field, at, angle) for at, angle in zip((first, second), angles, strict=True)]


@lru_cache(maxsize=16)
def _first_places(settings: PathfinderSettings, margin: int) -> tuple[Ints, NDArray[np.int64]]:
    """Return where the first curve may begin, by angle: int32 ``[360, most, 2]`` and how many there are, ``[360]``."""
    size, keep, core = settings.size, 2 * settings.seed_distance, make_shapes(settings, margin).core
    taken = np.ones((size, size), dtype=bool)
    taken[keep : size - keep, keep : size - keep] = False
    middle = np.argwhere(~taken).astype(np.int32)
    places = np.zeros((ANGLES, len(middle), 2), dtype=np.int32)
    counts = np.zeros(ANGLES, dtype=np.int64)
    for angle in range(ANGLES):
        rows, columns = middle[:, :1] + core.rows[angle], middle[:, 1:] + core.columns[angle]
        free = middle[~taken[rows, columns].any(axis=1)]
        places[angle, : len(free)], counts[angle] = free, len(free)
    return places, counts


def _first_dash(field: _Field, at: Ints, angle: NDArray[np.int64]) -> _Tips:
    settings, shapes = field.settings, field.shapes
    radians = np.deg2rad(angle - ANGLES // 2)
    heads = translate(at, radians, settings.dash_length)
    back = np.where(radians < 0, radians + np.pi, radians - np.pi)
    pivots = translate(heads, back, settings.dash_length + shapes.margin)
    return _Tips(pivots, radians, at, (len(shapes.steps) + angle).astype(np.int32))


def _extend(field: _Field, rows: Places, tips: _Tips, uniform: Uniform) -> Places:
    """Lay one more dash; return the rows where that was possible."""
    settings, shapes = field.settings, field.shapes
    pivots = translate(tips.pivots[rows], tips.angles[rows], settings.dash_length + 2 * shapes.margin)
    weights = field.weights(rows, pivots, tips.angles[rows]).cumsum(axis=1)
    able = weights[:, -1] >= _STUCK
    rows, pivots, weights = rows[able], pivots[able], weights[able]
    steps = np.full(len(rows), NONE, dtype=np.int32)
    waiting = np.arange(len(rows))
    for _ in range(_DRAWS):
        level = uniform(len(waiting)) * weights[waiting, -1]
        drawn = (weights[waiting] <= level[:, None]).sum(axis=1).astype(np.int32)
        ends = pivots[waiting] + shapes.steps[drawn]
        fits = ~field.collides(rows[waiting], ends, drawn)
        steps[waiting[fits]] = drawn[fits]
        waiting = waiting[~fits]
    laid = steps != NONE
    rows, pivots, steps = rows[laid], pivots[laid], steps[laid]
    # Only now: a curve does not collide with its own last dash.
    field.occupy(rows, tips.anchors[rows], tips.dashes[rows])
    tips.pivots[rows], tips.angles[rows] = pivots, shapes.angles[steps]
    tips.anchors[rows], tips.dashes[rows] = pivots + shapes.steps[steps], steps
    return rows


def _lay_short_curves(field: _Field, uniform: Uniform) -> Curves:
    settings, images = field.settings, len(field.cells)
    shape = (images, settings.distractors, settings.distractor_length)
    curves = Curves(np.zeros((*shape, 2), dtype=np.int32), np.full(shape, NONE, dtype=np.int32))
    for curve in range(settings.distractors):
        waiting = np.arange(images)
        for _ in range(_SHORT_TRIES):
            done, anchors, dashes = _try_short_curve(field, waiting, uniform)
            curves.anchors[done, curve], curves.dashes[done, curve] = anchors, dashes
            waiting = np.setdiff1d(waiting, done)
    return curves


def _try_short_curve(field: _Field, images: Places, uniform: Uniform) -> tuple[Places, Ints, Ints]:
    """Begin one short curve in each of these images; return those where it could be finished, and its dashes."""
    settings = field.settings
    draft = field.take(images)  # thrown away where the curve gets stuck
    rows, tips = _begin_short_curves(draft, uniform)
    anchors = np.zeros((len(images), settings.distractor_length, 2), dtype=np.int32)
    dashes = np.full((len(images), settings.distractor_length), NONE, dtype=np.int32)
    for number in range(settings.distractor_length):
        if number:
            rows = _extend(draft, rows, tips, uniform)
        anchors[rows, number], dashes[rows, number] = tips.anchors[rows], tips.dashes[rows]
    draft.occupy(rows, tips.anchors[rows], tips.dashes[rows])
    field.cells[images[rows]], field.crowd[images[rows]] = draft.cells[rows], draft.crowd[rows]
    return images[rows], anchors[rows], dashes[rows]


def _begin_short_curves(field: _Field, uniform: Uniform) -> tuple[Places, _Tips]:
    settings, images = field.settings, len(field.cells)
    inner = slice(field.border, field.border + settings.size)
    free = field.cells.reshape(images, field.width, field.width)[:, inner, inner] <= _FREE
    angles = np.zeros(images, dtype=np.int64)
    at = np.zeros((images, 2), dtype=np.int32)
    waiting = np.flatnonzero(free.mean(axis=(1, 2)) >= _FULL_SHARE)
    placed = np.zeros(images, dtype=bool)
    for _ in range(_DRAWS):
        angles[waiting] = uniform.below(ANGLES, len(waiting))
        waiting = waiting[np.isin(angles[waiting], field.shapes.usable)]
        found, at[waiting] = _pick_free(field, waiting, angles[waiting], uniform)
        waiting = waiting[found]  # images without any place are given up
        tips = _first_dash(field, at, angles)
        heads = translate(at, tips.angles, settings.dash_length)
        fits = (field.inside(heads) & field.inside(tips.pivots))[waiting]
        placed[waiting[fits]] = True
        waiting = waiting[~fits]
    return np.flatnonzero(placed), tips


def _pick_free(
    field: _Field, rows: Places, angles: NDArray[np.int64], uniform: Uniform
) -> tuple[NDArray[np.bool_], Ints]:
    """Pick a pixel per image, uniformly among those where a first dash has free space; first return where one is."""
    size = field.settings.size
    core = field.shapes.core.flat(field.width)[angles]  # [T, P]
    picks = uniform.below(size * size, len(rows) * _BLIND_PICKS).reshape(len(rows), _BLIND_PICKS)
    free = _is_free(field, rows, core, picks)
    chosen = picks[np.arange(len(rows)), free.argmax(axis=1)]
    found = np.asarray(free.any(axis=1))
    last = uniform(len(rows))  # drawn for all, so that the sequence does not depend on which images need it
    for row in np.flatnonzero(~found):
        everywhere = np.arange(size * size)[None]
        allowed = np.flatnonzero(_is_free(field, rows[row : row + 1], core[row : row + 1], everywhere)[0])
        if len(allowed):
            found[row], chosen[row] = True, allowed[int(last[row] * len(allowed))]
    return found, np.stack((chosen // size, chosen % size), axis=-1).astype(np.int32)


def _is_free(field: _Field, rows: Places, core: Places, picks: NDArray[np.int64]) -> NDArray[np.bool_]:
    points = np.stack((picks // field.settings.size, picks % field.settings.size), axis=-1).astype(np.int32)
    where = field.at(points)[..., None] + core[:, None]  # [T, picks, P]
    return np.asarray((field.cells[rows[:, None, None], where] <= _FREE).all(axis=2))
