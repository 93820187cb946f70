"""Dashes and discs as small lists of pixels, drawn once for each direction and pasted from then on.

Curves go through whole pixels, so there are few directions in which a dash can follow another one, and 360 for a first
one. Each is drawn on a canvas of twice the resolution and shrunk by Lanczos resampling, with 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy.ndimage import grey_dilation  # type: ignore[import-untyped]

from tost.data.lra.generate.pathfinder.settings import PathfinderSettings

ANGLES: Final = 360
"""Directions of a first dash, in whole degrees."""

Ints = NDArray[np.int32]
Places = NDArray[np.intp]
Floats = NDArray[np.float64]

_FINE = 2  # how much finer the canvas is


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
    values: NDArray[np.uint8]

    def flat(self, width: int) -> Places:
        """Return where pixels are relative to the anchor in an image of this width that is stored row after row."""
        return (self.rows.astype(np.intp) * width) + self.columns


@dataclass(frozen=True)
class Shapes:
    """Dashes and steps of the curves of one margin.

    Steps are the ways to go on from a pivot: to each belongs a dash that is anchored at its far end. Dashes are
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


def translate(start: Ints, angle: Floats, distance: float) -> Ints:
    """Go some distance and round up: int32 ``[..., 2]`` from points ``[..., 2]`` in directions ``[...]``."""
    way = np.stack((np.sin(angle), np.cos(angle)), axis=-1) * float(distance)
    return np.ceil(start + way).astype(np.int32)


@lru_cache(maxsize=16)
def make_shapes(settings: PathfinderSettings, margin: int) -> Shapes:
    """Draw the dashes of one margin."""
    steps, angles = _steps(settings.dash_length + margin)
    first = np.deg2rad(np.arange(ANGLES) - ANGLES // 2)
    # A dash is drawn from its anchor: the far end of a step points back to its pivot.
    directions = np.concatenate((np.where(angles < 0, angles + np.pi, angles - np.pi), first))
    drawn = [_draw_dash(settings, margin, angle) for angle in directions]
    reach = settings.dash_length + margin
    cores = _stamps([_core(space, reach) for _, space in drawn[len(steps) :]])
    return Shapes(
        margin=margin,
        steps=steps,
        angles=angles,
        ink=_stamps([ink for ink, _ in drawn]),
        space=_stamps([space for _, space in drawn]),
        crowd=_stamps([_dilate(np.pad(space, margin), margin) for _, space in drawn]),
        core=cores,
        usable=_usable(cores),
        far_ends=translate(np.zeros((len(directions), 2), np.int32), directions, settings.dash_length),
    )


def draw_disc(radius: float) -> Stamps:
    """Return a disc as one stamp, anchored at its centre."""
    reach = int(radius) + 4  # resampling spreads it by up to three pixels
    rows, columns = np.mgrid[: 2 * reach * _FINE, : 2 * reach * _FINE] - reach * _FINE
    canvas = np.where(rows**2 + columns**2 <= (radius * _FINE) ** 2, 255, 0).astype(np.uint8)
    return _stamps([_shrink(canvas, 2 * reach)], centre=reach)


def _steps(radius: int) -> tuple[Ints, Floats]:
    """Return the pixels on a circle around the origin, met once per pixel of arc, and their directions."""
    turns = np.deg2rad(np.arange(0, 360, 360 / (2 * np.pi * radius)))
    # Far from 0, where rounding errors of the sine around 0 vanish in the sum.
    origin = 1024
    circle = origin + radius * np.stack((np.sin(turns), np.cos(turns)), axis=-1)
    pixels = np.unique(np.floor(circle).astype(np.int32) - origin, axis=0)
    return pixels, np.arctan2(pixels[:, 0], pixels[:, 1])


def _draw_dash(settings: PathfinderSettings, margin: int, angle: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return what a dash paints and what it occupies, uint8 ``[2 r + 1, 2 r + 1]`` around its anchor."""
    reach = settings.dash_length + int(np.ceil(settings.dash_thickness)) + margin
    centre = reach * _FINE
    side = 2 * centre + 1
    start = np.full(2, centre, dtype=np.int32)
    end = translate(start, np.asarray(angle), settings.dash_length * _FINE)
    canvas = Image.new("L", (side, side))
    points = [(centre, centre), (int(end[1]), int(end[0]))]
    ImageDraw.Draw(canvas).line(points, fill=255, width=round(settings.dash_thickness * _FINE))
    line = np.asarray(canvas)
    return _shrink(line, 2 * reach + 1), _shrink(_dilate(line, margin * _FINE), 2 * reach + 1)


def _dilate(picture: NDArray[np.uint8], radius: int) -> NDArray[np.uint8]:
    rows, columns = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.asarray(grey_dilation(picture, footprint=rows**2 + columns**2 <= radius**2, mode="constant"))


def _shrink(canvas: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(canvas).resize((side, side), Image.Resampling.LANCZOS))


def _core(space: NDArray[np.uint8], reach: int) -> NDArray[np.uint8]:
    """Return the fully occupied pixels of a dash, cut to its reach and moved by one pixel down and right."""
    begin = len(space) // 2 - reach - 1
    window = slice(begin, begin + 2 * reach + 1)
    return np.where(space == 255, space, 0)[window, window]


def _usable(cores: Stamps) -> NDArray[np.int64]:
    """Return the angles at which a curve can begin, which are few: at 32 x 32 those that point up and to the left.

    The original looks for free places by dilating the image, with nothing outside of it. It finds none at all if the
    result is undefined anywhere, that is if some pixel, hence some corner, only reaches places outside. This determines
    how many short curves there are in an image.
    """
    down, right = cores.rows >= 0, cores.columns >= 0
    up, left = cores.rows <= 0, cores.columns <= 0
    corners = (down & right, down & left, up & right, up & left)
    return np.flatnonzero(np.all([corner.any(axis=1) for corner in corners], axis=0))


def _stamps(pictures: list[NDArray[np.uint8]], centre: int | None = None) -> Stamps:
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
