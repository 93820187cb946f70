"""Pathfinder: two long dashed curves among short ones, two discs, and the question whether they mark one curve.

The settings are those with which the Long Range Arena made its images. `shapes` draws single dashes, `grow` lays
curves, `paint` makes images of them, and `files` writes these. Coordinates are (row, column).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

Difficulty = Literal["easy", "intermediate", "hard"]

CONTOUR_LENGTHS: Final[dict[str, int]] = {"easy": 6, "intermediate": 9, "hard": 14}
"""Dashes of each of the two long curves."""

FOLDERS: Final[dict[str, str]] = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
"""Folder of each difficulty in the official release."""


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
    seed_distance: int
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

    def __post_init__(self) -> None:
        # Then first dashes cannot leave the image, and nothing needs to be drawn again because they did.
        assert self.dash_length + max(self.margins) + 1 <= self.seed_distance < self.size / 4
        assert self.padding >= 1

    @property
    def distractor_length(self) -> int:
        """Dashes of a short curve."""
        return self.contour_length // 3

    @property
    def distractors(self) -> int:
        """Number of short curves that are tried."""
        return self.distractor_total // self.distractor_length


_ROWS = (
    # size, seed distance, marker radius, dash length and thickness, margins, continuity, distractors, contrasts (2),
    # padding
    (32, 7, 1.5, 2, 0.5, (1,), 1.0, 20, 1.5, 2.0, 1),
    (64, 12, 2.5, 5, 1.0, (1,), 1.8, 22, 0.8, 0.8, 1),
    (128, 20, 3.0, 5, 1.5, (2, 3), 1.8, 35, 0.9, 0.9, 1),
    (256, 27, 5.0, 5, 2.0, (3,), 1.8, 30, 1.0, 1.0, 22),
)

RESOLUTIONS: Final[dict[int, PathfinderSettings]] = {row[0]: PathfinderSettings(*row) for row in _ROWS}
"""The settings of each resolution, at the hard level."""


def pathfinder_settings(resolution: int, difficulty: Difficulty = "hard") -> PathfinderSettings:
    """Return the settings of the official release.

    Args:
        resolution: Height and width of an image: 32, 64, 128 (Path-X) or 256.
        difficulty: How long the curves are.
    """
    return replace(RESOLUTIONS[resolution], contour_length=CONTOUR_LENGTHS[difficulty])
