"""Pathfinder: two long dashed curves among short ones, two discs, and the question whether they mark one curve.

Settings and layout are those of the Long Range Arena: ``pathfinder32/curv_contour_length_14/`` holds
``imgs/<batch>/sample_<i>.png`` and ``metadata/<batch>.npy``, which is plain text in spite of its name. Beside them is
``contours/<batch>.npz`` with the curves themselves, the fields of `Pictures` other than the pixels.

A pair of long curves is laid by trial and error, and only about one trial in 300 succeeds. Trials do not depend on each
other, so thousands run side by side, one dash after the other, as arrays; those that get stuck are dropped. Every trial
that succeeds has taken equally many steps, hence the first that succeed are a fair sample of all that do.

Coordinates are (row, column). Axes: T trials or images, Q steps, P pixels of a stamp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy.ndimage import grey_dilation  # type: ignore[import-untyped]

from tost._io import atomic_path
from tost.data._pool import share_work
from tost.data._random import mix
from tost.data.lra.options import PATHFINDER_FOLDERS, PathfinderFilesOptions
from tost.data.prepare import Report

Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Places = NDArray[np.intp]
Floats = NDArray[np.float64]

NONE: Final = -1
"""Stands for a dash that is not there."""
ANGLES: Final = 360
"""Directions of a first dash, in whole degrees."""
CONTOUR_LENGTHS: Final = {"easy": 6, "intermediate": 9, "hard": 14}
"""Dashes of each of the two long curves."""

_BATCH = 1000  # images of a folder, as in the release
_SEEDED = 250  # images that share a seed; divides the above
_FINE = 2  # how much finer than the image dashes are drawn
_DRAWS = 3  # end points that are tried for a dash
_SHORT_TRIES = 5  # attempts at a short curve
_STUCK = 1e-4  # less weight than this on all end points together is none
_COLLISION = 459  # 1.8 in units of 1/255: two dashes that occupy a pixel that much collide
_FREE = 76  # up to 0.3: a pixel counts as free for a first dash
_FULL_SHARE = 0.01  # with fewer free pixels than this no more short curves are begun
_BLIND_PICKS = 48  # places that are tried before all are looked at
_CELLS = 6_000_000  # bytes of occupied space that trials may take at once: about what fits into a cache
_TRIALS = 40  # trials for each image that is missing, or fewer where they take too much room


@dataclass(frozen=True)
class PathfinderSettings:
    """Sizes in pixels, and brightness.

    Attributes:
        size: Height and width of an image.
        seed_distance: Distance of the first ends of the two long curves; they start twice as far from the borders.
        marker_radius: Radius of the discs.
        dash_length: Length of a dash.
        dash_thickness: Thickness of a dash.
        margins: Half the gap between dashes, and the space kept free around them; one is drawn for each image.
        continuity: The larger, the straighter the curves.
        distractor_total: Dashes of all short curves together, about.
        target_contrast: Brightness of the long curves.
        distractor_contrast: Brightness of the short ones.
        padding: Pixels along the borders that dashes keep free.
        contour_length: Dashes of each long curve.
    """

    size: int
    seed_distance: int  # at least dash_length + max(margins) + 1, so that first dashes cannot leave the image
    marker_radius: float
    dash_length: int
    dash_thickness: float
    margins: tuple[int, ...]
    continuity: float
    distractor_total: int
    target_contrast: float
    distractor_contrast: float
    padding: int
    contour_length: int = CONTOUR_LENGTHS["hard"]

    @property
    def distractor_length(self) -> int:
        """Dashes of a short curve."""
        return self.contour_length // 3

    @property
    def distractors(self) -> int:
        """Number of short curves that are tried."""
        return self.distractor_total // self.distractor_length


_ROWS = (
    (32, 7, 1.5, 2, 0.5, (1,), 1.0, 20, 1.5, 2.0, 1),
    (64, 12, 2.5, 5, 1.0, (1,), 1.8, 22, 0.8, 0.8, 1),
    (128, 20, 3.0, 5, 1.5, (2, 3), 1.8, 35, 0.9, 0.9, 1),
    (256, 27, 5.0, 5, 2.0, (3,), 1.8, 30, 1.0, 1.0, 22),
)
RESOLUTIONS: Final = {row[0]: PathfinderSettings(*row) for row in _ROWS}
"""The settings of each resolution, at the hard level; 128 is Path-X."""


def pathfinder_settings(resolution: int, difficulty: str = "hard") -> PathfinderSettings:
    """Return the settings of the official release."""
    return replace(RESOLUTIONS[resolution], contour_length=CONTOUR_LENGTHS[difficulty])


# Dashes and discs: small lists of pixels, drawn once for each direction at twice the resolution, and pasted.


@dataclass(frozen=True)
class Stamps:
    """Small pictures by number, each a list of pixels.

    Attributes:
        rows: int32 ``[stamps, pixels]``, relative to the anchor. Shorter lists repeat their first pixel.
        columns: The same for columns.
        values: uint8 ``[stamps, pixels]``.
    """

    rows: Ints
    columns: Ints
    values: Bytes

    def flat(self, width: int) -> Places:
        """Return where pixels are relative to the anchor in an image of this width that is stored row after row."""
        return (self.rows.astype(np.intp) * width) + self.columns


@dataclass(frozen=True)
class Shapes:
    """Dashes and steps of the curves of one margin.

    Steps are the ways to continue from a pivot: to each belongs a dash that is anchored at its far end. Dashes are
    numbered with the steps first, then the 360 first dashes, which are anchored at their beginning.

    Attributes:
        margin: The margin.
        steps: Position of the far end, relative to the pivot, int32 ``[Q, 2]``.
        angles: Direction of each step in radians, float64 ``[Q]``.
        ink: Painted pixels, by dash.
        space: Occupied pixels, by dash.
        crowd: The same with the margin around it, where no other dash may end.
        core: Pixels that must be free where a short curve begins, by angle; relative to the first pixel.
        usable: Angles at which a short curve or the first long one can begin, int64; see `_usable`.
        far_ends: Where a dash ends that is anchored at 0, relative to it, int32 ``[dashes, 2]``; for the records only.
    """

    margin: int
    steps: Ints
    angles: Floats
    ink: Stamps
    space: Stamps
    crowd: Stamps
    core: Stamps
    usable: NDArray[np.int64]
    far_ends: Ints


@lru_cache(maxsize=16)
def make_shapes(settings: PathfinderSettings, margin: int) -> Shapes:
    """Draw the dashes of one margin."""
    reach = settings.dash_length + margin
    # The pixels on a circle around the origin, met once per pixel of arc. Far from 0, where rounding errors of the sine
    # vanish in the sum.
    turns = np.deg2rad(np.arange(0, 360, 360 / (2 * np.pi * reach)))
    circle = 1024 + reach * np.stack((np.sin(turns), np.cos(turns)), axis=-1)
    steps = np.unique(np.floor(circle).astype(np.int32) - 1024, axis=0)
    angles = np.arctan2(steps[:, 0], steps[:, 1])
    first = np.deg2rad(np.arange(ANGLES) - ANGLES // 2)
    # A dash is drawn from its anchor: the far end of a step points back to its pivot.
    directions = np.concatenate((_opposite(angles), first))
    ink, space = zip(*(_draw_dash(settings, margin, angle) for angle in directions), strict=True)
    # Fully occupied pixels of first dashes, cut to their reach and moved by one pixel down and right.
    middle = len(space[0]) // 2
    window = slice(middle - reach - 1, middle + reach)
    cores = _stamps([np.where(picture == 255, picture, 0)[window, window] for picture in space[len(steps) :]])
    return Shapes(
        margin=margin,
        steps=steps,
        angles=angles,
        ink=_stamps(ink),
        space=_stamps(space),
        crowd=_stamps([_dilate(np.pad(picture, margin), margin) for picture in space]),
        core=cores,
        usable=_usable(cores),
        far_ends=translate(np.zeros((len(directions), 2), np.int32), directions, settings.dash_length),
    )


def translate(start: Ints, angle: Floats, distance: float) -> Ints:
    """Move by some distance and round up: int32 ``[..., 2]`` from points ``[..., 2]`` in directions ``[...]``."""
    way = np.stack((np.sin(angle), np.cos(angle)), axis=-1) * float(distance)
    return np.ceil(start + way).astype(np.int32)


def _opposite(angles: Floats) -> Floats:
    return np.where(angles < 0, angles + np.pi, angles - np.pi)


def _draw_dash(settings: PathfinderSettings, margin: int, angle: float) -> tuple[Bytes, Bytes]:
    """Return the painted and the occupied pixels of a dash, uint8 ``[2 r + 1, 2 r + 1]`` around its anchor."""
    reach = settings.dash_length + int(np.ceil(settings.dash_thickness)) + margin
    centre = reach * _FINE
    end = translate(np.full(2, centre, dtype=np.int32), np.asarray(angle), settings.dash_length * _FINE)
    canvas = Image.new("L", (2 * centre + 1, 2 * centre + 1))
    points = [(centre, centre), (int(end[1]), int(end[0]))]
    ImageDraw.Draw(canvas).line(points, fill=255, width=round(settings.dash_thickness * _FINE))
    line = np.asarray(canvas)
    return _shrink(line, 2 * reach + 1), _shrink(_dilate(line, margin * _FINE), 2 * reach + 1)


def _dilate(picture: Bytes, radius: int) -> Bytes:
    rows, columns = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.asarray(grey_dilation(picture, footprint=rows**2 + columns**2 <= radius**2, mode="constant"))


def _shrink(canvas: Bytes, side: int) -> Bytes:
    return np.asarray(Image.fromarray(canvas).resize((side, side), Image.Resampling.LANCZOS))


def _usable(cores: Stamps) -> NDArray[np.int64]:
    """Return the angles at which a curve can begin, which are few: at 32 x 32 those that point up and to the left.

    The original looks for free places by dilating the image, with nothing outside of it. It finds none at all if the
    result is undefined anywhere, that is if some pixel, hence some corner, only reaches places outside. This determines
    how many short curves there are in an image.
    """
    down, right, up, left = cores.rows >= 0, cores.columns >= 0, cores.rows <= 0, cores.columns <= 0
    corners = (down & right, down & left, up & right, up & left)
    return np.flatnonzero(np.all([corner.any(axis=1) for corner in corners], axis=0))


def _stamps(pictures: list[Bytes] | tuple[Bytes, ...], centre: int | None = None) -> Stamps:
    found = [np.nonzero(picture) for picture in pictures]
    most = max(len(rows) for rows, _ in found)
    rows, columns = np.empty((2, len(pictures), most), dtype=np.int32)
    values = np.empty((len(pictures), most), dtype=np.uint8)
    for number, (picture, (y, x)) in enumerate(zip(pictures, found, strict=True)):
        middle = len(picture) // 2 if centre is None else centre
        # Filled up with a pixel of its own, so that painting it again changes nothing.
        pick = np.concatenate((np.arange(len(y)), np.zeros(most - len(y), dtype=np.intp)))
        rows[number], columns[number] = y[pick] - middle, x[pick] - middle
        values[number] = picture[y[pick], x[pick]]
    return Stamps(rows, columns, values)


# Laying curves.


class Uniform:
    """Random numbers in [0, 1) from raw bits, whose sequence numpy promises not to change."""

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

    @classmethod
    def empty(cls, *shape: int) -> Curves:
        """Return curves without dashes."""
        return cls(np.zeros((*shape, 2), dtype=np.int32), np.full(shape, NONE, dtype=np.int32))

    def ends(self, shapes: Shapes) -> NDArray[np.int16]:
        """Return both ends of every dash, int16 ``[T, curves, dashes, 4]``."""
        ends = np.concatenate((self.anchors, self.anchors + shapes.far_ends[self.dashes]), axis=-1)
        ends[self.dashes == NONE] = -1
        return ends.astype(np.int16)


@dataclass
class _Tips:
    """The growing ends of one curve per trial; entries of trials that got stuck are meaningless."""

    pivots: Ints
    angles: Floats
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
        frames = np.zeros((2, self.width, self.width), dtype=np.uint8)
        for frame, grown in zip(frames, (0, shapes.margin), strict=True):
            for inset, value in ((0, 255), (settings.padding + grown, 0)):
                inner = slice(self.border + inset, -self.border - inset)
                frame[inner, inner] = value
        self.cells, self.crowd = (np.tile(frame.reshape(-1), (images, 1)) for frame in frames)
        self._steps = shapes.steps[:, 0].astype(np.intp) * self.width + shapes.steps[:, 1]
        self._space, self._crowd = shapes.space.flat(self.width), shapes.crowd.flat(self.width)

    def with_rows(self, cells: Bytes, crowd: Bytes) -> _Field:
        """Return the same field with the space of other images."""
        field = _Field(self.settings, self.shapes, 0)
        field.cells, field.crowd = cells, crowd
        return field

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

    def first_dash(self, at: Ints, angle: NDArray[np.int64]) -> _Tips:
        """Return the tips of curves that begin at these pixels."""
        radians, length = np.deg2rad(angle - ANGLES // 2), self.settings.dash_length
        pivots = translate(translate(at, radians, length), _opposite(radians), length + self.shapes.margin)
        return _Tips(pivots, radians, at, (len(self.shapes.steps) + angle).astype(np.int32))

    def extend(self, rows: Places, tips: _Tips, uniform: Uniform) -> Places:
        """Lay one more dash; return the rows where that was possible."""
        shapes = self.shapes
        pivots = translate(tips.pivots[rows], tips.angles[rows], self.settings.dash_length + 2 * shapes.margin)
        weights = self.weights(rows, pivots, tips.angles[rows]).cumsum(axis=1)
        able = weights[:, -1] >= _STUCK
        rows, pivots, weights = rows[able], pivots[able], weights[able]
        steps = np.full(len(rows), NONE, dtype=np.int32)
        waiting = np.arange(len(rows))
        for _ in range(_DRAWS):
            level = uniform(len(waiting)) * weights[waiting, -1]
            drawn = (weights[waiting] <= level[:, None]).sum(axis=1).astype(np.int32)
            fits = ~self.collides(rows[waiting], pivots[waiting] + shapes.steps[drawn], drawn)
            steps[waiting[fits]] = drawn[fits]
            waiting = waiting[~fits]
        laid = steps != NONE
        rows, pivots, steps = rows[laid], pivots[laid], steps[laid]
        # Only now: a curve does not collide with its own last dash.
        self.occupy(rows, tips.anchors[rows], tips.dashes[rows])
        tips.pivots[rows], tips.angles[rows] = pivots, shapes.angles[steps]
        tips.anchors[rows], tips.dashes[rows] = pivots + shapes.steps[steps], steps
        return rows

    def grow(self, rows: Places, curves: list[_Tips], length: int, uniform: Uniform) -> tuple[Places, Curves]:
        """Extend curves to their full length, dash by dash; return the rows where that was possible, and all dashes."""
        laid = Curves.empty(len(self.cells), len(curves), length)
        for number in range(length):
            for curve, tips in enumerate(curves):
                if number:
                    rows = self.extend(rows, tips, uniform)
                laid.anchors[rows, curve, number] = tips.anchors[rows]
                laid.dashes[rows, curve, number] = tips.dashes[rows]
        return rows, laid


def _try_pairs(settings: PathfinderSettings, shapes: Shapes, trials: int, uniform: Uniform) -> tuple[_Field, Curves]:
    """Begin so many pairs of long curves and return those that can be finished."""
    field = _Field(settings, shapes, trials)
    places, counts = first_places(settings, shapes.margin)
    # A trial with another angle would fail at once, and be followed by the next one.
    usable = shapes.usable[counts[shapes.usable] > 0]
    angles = [usable[uniform.below(len(usable), trials)], uniform.below(ANGLES, trials)]
    pick = (uniform(trials) * counts[angles[0]]).astype(np.int64)
    first = places[angles[0], pick]
    around = np.deg2rad(uniform.below(360, trials))
    away = settings.seed_distance * np.stack((np.sin(around), np.cos(around)), axis=-1)
    second = np.rint(first + away).astype(np.int32)
    tips = [field.first_dash(at, angle) for at, angle in zip((first, second), angles, strict=True)]
    rows, curves = field.grow(np.arange(trials), tips, settings.contour_length, uniform)
    # Both curves can end in one pixel, as their last dashes do not see each other; then any label would be right.
    rows = rows[(tips[0].anchors[rows] != tips[1].anchors[rows]).any(axis=1)]
    # As in the original, of the two last dashes only that of the second curve is kept free of short curves.
    field.occupy(rows, tips[1].anchors[rows], tips[1].dashes[rows])
    return field.with_rows(field.cells[rows], field.crowd[rows]), Curves(curves.anchors[rows], curves.dashes[rows])


@lru_cache(maxsize=16)
def first_places(settings: PathfinderSettings, margin: int) -> tuple[Ints, NDArray[np.int64]]:
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


def _lay_short_curves(field: _Field, uniform: Uniform) -> Curves:
    settings, images = field.settings, len(field.cells)
    curves = Curves.empty(images, settings.distractors, settings.distractor_length)
    for curve in range(settings.distractors):
        waiting = np.arange(images)
        for _ in range(_SHORT_TRIES):
            draft = field.with_rows(field.cells[waiting], field.crowd[waiting])  # thrown away where a curve gets stuck
            rows, tips = _begin_short_curves(draft, uniform)
            rows, laid = draft.grow(rows, [tips], settings.distractor_length, uniform)
            draft.occupy(rows, tips.anchors[rows], tips.dashes[rows])
            done = waiting[rows]
            field.cells[done], field.crowd[done] = draft.cells[rows], draft.crowd[rows]
            curves.anchors[done, curve], curves.dashes[done, curve] = laid.anchors[rows, 0], laid.dashes[rows, 0]
            waiting = np.setdiff1d(waiting, done)
    return curves


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
        tips = field.first_dash(at, angles)
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

    def is_free(rows: Places, core: Places, picks: NDArray[np.int64]) -> NDArray[np.bool_]:
        points = np.stack((picks // size, picks % size), axis=-1).astype(np.int32)
        where = field.at(points)[..., None] + core[:, None]  # [T, picks, P]
        return np.asarray((field.cells[rows[:, None, None], where] <= _FREE).all(axis=2))

    picks = uniform.below(size * size, len(rows) * _BLIND_PICKS).reshape(len(rows), _BLIND_PICKS)
    free = is_free(rows, core, picks)
    chosen = picks[np.arange(len(rows)), free.argmax(axis=1)]
    found = np.asarray(free.any(axis=1))
    last = uniform(len(rows))  # drawn for all, so that the sequence does not depend on which images need it
    for row in np.flatnonzero(~found):
        allowed = np.flatnonzero(is_free(rows[row : row + 1], core[row : row + 1], np.arange(size * size)[None])[0])
        if len(allowed):
            found[row], chosen[row] = True, allowed[int(last[row] * len(allowed))]
    return found, np.stack((chosen // size, chosen % size), axis=-1).astype(np.int32)


# Images.


@dataclass(frozen=True)
class Pictures:
    """Images with their labels and curves. A dash is given by its two ends: row, column, row, column.

    Attributes:
        pixels: uint8 ``[n, size, size]``.
        labels: 1 if both discs are on one curve, else 0; int16 ``[n]``.
        margins: int16 ``[n]``.
        markers: Centres of the two discs, int16 ``[n, 2, 2]``.
        targets: The two long curves, int16 ``[n, 2, dashes, 4]``.
        distractors: The short ones, int16 ``[n, curves, dashes, 4]``; all -1 where a curve found no place.
    """

    pixels: Bytes
    labels: NDArray[np.int16]
    margins: NDArray[np.int16]
    markers: NDArray[np.int16]
    targets: NDArray[np.int16]
    distractors: NDArray[np.int16]


def make_pictures(settings: PathfinderSettings, count: int, seed: int) -> Pictures:
    """Return images that follow from the seed, in an order without meaning.

    Args:
        settings: Sizes and brightness.
        count: How many.
        seed: Any 64 bits.
    """
    uniform = Uniform(seed)
    labels = uniform.below(2, count).astype(np.int16)
    margins = np.array(settings.margins, dtype=np.int16)[uniform.below(len(settings.margins), count)]
    size, long, short = settings.size, settings.contour_length, settings.distractor_length
    made = Pictures(
        pixels=np.zeros((count, size, size), dtype=np.uint8),
        labels=labels,
        margins=margins,
        markers=np.zeros((count, 2, 2), dtype=np.int16),
        targets=np.zeros((count, 2, long, 4), dtype=np.int16),
        distractors=np.zeros((count, settings.distractors, short, 4), dtype=np.int16),
    )
    for margin in settings.margins:
        rows = np.flatnonzero(margins == margin)
        if not len(rows):
            continue
        shapes, missing = make_shapes(settings, margin), len(rows)
        fields: list[_Field] = []
        pairs: list[Curves] = []
        while missing > 0:
            trials = min(max(256, _CELLS // size**2), _TRIALS * missing + _TRIALS)
            field, curves = _try_pairs(settings, shapes, trials, uniform)
            fields.append(field)
            pairs.append(curves)
            missing -= len(field.cells)
        cells, crowd, anchors, dashes = (
            np.concatenate([getattr(one, name) for one in many])[: len(rows)]
            for many, name in ((fields, "cells"), (fields, "crowd"), (pairs, "anchors"), (pairs, "dashes"))
        )
        targets = Curves(anchors, dashes)
        distractors = _lay_short_curves(field.with_rows(cells, crowd), uniform)
        # The disc at a first end is on either curve; the disc at a last end is on the same curve, or on the other.
        begin = uniform.below(2, len(rows))
        end, every = np.where(labels[rows] == 1, begin, 1 - begin), np.arange(len(rows))
        markers = np.stack((anchors[every, begin, 0], anchors[every, end, -1]), axis=1).astype(np.int16)
        made.markers[rows], made.pixels[rows] = markers, _paint(settings, shapes, targets, distractors, markers)
        made.targets[rows], made.distractors[rows] = targets.ends(shapes), distractors.ends(shapes)
    return made


def _paint(
    settings: PathfinderSettings, shapes: Shapes, targets: Curves, distractors: Curves, markers: NDArray[np.int16]
) -> Bytes:
    """Return the pixels, the darkest of each image as 0 and the brightest as 255; the brightest stamp shows."""
    border = 24  # that stamps may reach into
    width = settings.size + 2 * border
    cells = np.zeros((len(markers), width**2), dtype=np.float64)

    def paint(rows: Places, anchors: Ints, stamps: Stamps, numbers: Ints, contrast: float) -> None:
        middle = (anchors[:, 0].astype(np.intp) + border) * width + anchors[:, 1] + border
        where = (rows[:, None], middle[:, None] + stamps.flat(width)[numbers])
        cells[where] = np.maximum(cells[where], stamps.values[numbers] / 255 * contrast)

    for curves, contrast in ((targets, settings.target_contrast), (distractors, settings.distractor_contrast)):
        for curve, number in np.ndindex(curves.dashes.shape[1:]):
            dashes = curves.dashes[:, curve, number]
            there = np.flatnonzero(dashes != NONE)
            paint(there, curves.anchors[there, curve, number], shapes.ink, dashes[there], contrast)
    reach = int(settings.marker_radius) + 4  # resampling spreads a disc by up to three pixels
    rows, columns = np.mgrid[: 2 * reach * _FINE, : 2 * reach * _FINE] - reach * _FINE
    disc = np.where(rows**2 + columns**2 <= (settings.marker_radius * _FINE) ** 2, 255, 0).astype(np.uint8)
    stamp = _stamps([_shrink(disc, 2 * reach)], centre=reach)
    every = np.arange(len(markers))
    for end in range(2):
        paint(every, markers[:, end].astype(np.int32), stamp, np.zeros(len(markers), np.int32), 1.0)
    inner = slice(border, border + settings.size)
    images = cells.reshape(-1, width, width)[:, inner, inner]
    low, high = (edge(axis=(1, 2), keepdims=True) for edge in (images.min, images.max))
    return np.asarray((images - low) * (255 / (high - low)) + 0.5).astype(np.uint8)


# Files.


class _Batch(NamedTuple):
    folder: Path
    settings: PathfinderSettings
    seed: int
    number: int
    size: int

    @property
    def metadata(self) -> Path:
        """The last file that is written."""
        return self.folder / "metadata" / f"{self.number}.npy"


def prepare_pathfinder(
    options: PathfinderFilesOptions, out: Path, *, workers: int, report: Report
) -> dict[str, object]:
    """Generate Pathfinder images; see `tost.data.prepare.prepare`."""
    settings = pathfinder_settings(options.resolution, options.difficulty)
    folder = out / f"pathfinder{options.resolution}" / PATHFINDER_FOLDERS[options.difficulty]
    seed = mix(options.seed, settings.size, settings.contour_length)
    batches = [
        _Batch(folder, settings, seed, first // _BATCH, min(_BATCH, options.count - first))
        for first in range(0, options.count, _BATCH)
    ]
    facts: dict[str, object] = {"images": options.count, "batches": len(batches), "folder": str(folder)}
    missing = [batch for batch in batches if not batch.metadata.is_file()]
    if not missing:
        return {**facts, "already there": True}
    share_work(_write_batch, missing, workers=workers, report=report, total=options.count, what="images")
    return facts


def _write_batch(batch: _Batch) -> None:
    images = batch.folder / "imgs" / str(batch.number)
    images.mkdir(parents=True, exist_ok=True)
    made = []
    for first in range(0, batch.size, _SEEDED):
        seed = mix(batch.seed, (batch.number * _BATCH + first) // _SEEDED)
        made.append(make_pictures(batch.settings, min(_SEEDED, batch.size - first), seed))
        for place, pixels in enumerate(made[-1].pixels, first):
            Image.fromarray(pixels).save(images / f"sample_{place}.png")
    names = ("labels", "margins", "markers", "targets", "distractors")
    records = {name: np.concatenate([getattr(one, name) for one in made]) for name in names}
    with atomic_path(batch.folder / "contours" / f"{batch.number}.npz", sync=False) as draft, draft.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **records)
    sizes = batch.settings
    lengths = f"{sizes.contour_length} {sizes.distractor_length} {sizes.dash_length} {sizes.dash_thickness}"
    with atomic_path(batch.metadata, sync=False) as draft, draft.open("w", encoding="ascii", newline="\n") as file:
        for number, (label, margin) in enumerate(zip(records["labels"], records["margins"], strict=True)):
            # The last number: contrasts of a dash to choose from.
            image = f"imgs/{batch.number} sample_{number}.png {number} {label}"
            file.write(f"{image} {sizes.continuity} {lengths} {margin} 1\n")
