"""From the curves of Pathfinder images to their pixels, labels and records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tost.data.lra.generate.pathfinder.grow import NONE, Curves, Uniform, lay_curves
from tost.data.lra.generate.pathfinder.settings import PathfinderSettings
from tost.data.lra.generate.pathfinder.shapes import Ints, Places, Shapes, Stamps, draw_disc


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

    pixels: NDArray[np.uint8]
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
        shapes, targets, distractors = lay_curves(settings, margin, len(rows), uniform)
        made.markers[rows] = markers = _markers(targets, labels[rows], uniform)
        made.pixels[rows] = _paint(settings, shapes, targets, distractors, markers)
        made.targets[rows], made.distractors[rows] = (_ends(shapes, curves) for curves in (targets, distractors))
    return made


def _markers(targets: Curves, labels: NDArray[np.int16], uniform: Uniform) -> NDArray[np.int16]:
    """Choose a curve for the disc at a first end; the disc at a last end is on the same curve, or on the other."""
    first = uniform.below(2, len(labels))
    last = np.where(labels == 1, first, 1 - first)
    rows = np.arange(len(labels))
    return np.stack((targets.anchors[rows, first, 0], targets.anchors[rows, last, -1]), axis=1).astype(np.int16)


def _ends(shapes: Shapes, curves: Curves) -> NDArray[np.int16]:
    far = curves.anchors + shapes.far_ends[curves.dashes]
    ends = np.concatenate((curves.anchors, far), axis=-1)
    ends[curves.dashes == NONE] = -1
    return ends.astype(np.int16)


def _paint(
    settings: PathfinderSettings, shapes: Shapes, targets: Curves, distractors: Curves, markers: NDArray[np.int16]
) -> NDArray[np.uint8]:
    canvas = _Canvas(settings.size, len(markers))
    for curves, contrast in ((targets, settings.target_contrast), (distractors, settings.distractor_contrast)):
        for curve in range(curves.dashes.shape[1]):
            for number in range(curves.dashes.shape[2]):
                dashes = curves.dashes[:, curve, number]
                there = np.flatnonzero(dashes != NONE)
                canvas.paint(there, curves.anchors[there, curve, number], shapes.ink, dashes[there], contrast)
    disc = draw_disc(settings.marker_radius)
    everywhere = np.arange(len(markers))
    for end in range(2):
        canvas.paint(everywhere, markers[:, end].astype(np.int32), disc, np.zeros(len(markers), np.int32), 1.0)
    return canvas.stretched()


class _Canvas:
    """Images with a border that stamps may reach into; the brightest stamp shows."""

    def __init__(self, size: int, images: int) -> None:
        self.size, self.border = size, 24
        self.width = size + 2 * self.border
        self.cells = np.zeros((images, self.width**2), dtype=np.float64)

    def paint(self, rows: Places, anchors: Ints, stamps: Stamps, numbers: Ints, contrast: float) -> None:
        middle = (anchors[:, 0].astype(np.intp) + self.border) * self.width + anchors[:, 1] + self.border
        where = (rows[:, None], middle[:, None] + stamps.flat(self.width)[numbers])
        self.cells[where] = np.maximum(self.cells[where], stamps.values[numbers] / 255 * contrast)

    def stretched(self) -> NDArray[np.uint8]:
        """Return the pixels, the darkest of each image as 0 and the brightest as 255."""
        inner = slice(self.border, self.border + self.size)
        images = self.cells.reshape(-1, self.width, self.width)[:, inner, inner]
        low, high = (edge(axis=(1, 2), keepdims=True) for edge in (images.min, images.max))
        return np.asarray((images - low) * (255 / (high - low)) + 0.5).astype(np.uint8)
