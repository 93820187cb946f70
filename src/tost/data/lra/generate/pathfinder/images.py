"""Pathfinder: two long dashed curves among short ones, two discs, and the question whether they mark one curve.

The settings are those with which the Long Range Arena made its images. `pathfinder_shapes` draws single dashes,
`pathfinder_grow` lays curves, `pathfinder_prepare` writes the files. Coordinates are (row, column).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["CONTOUR_LENGTHS", "FOLDERS", "RESOLUTIONS", "Difficulty", "PathfinderSettings", "pathfinder_settings"]

Difficulty = Literal["easy", "intermediate", "hard"]

CONTOUR_LENGTHS: Final[dict[str, int]] = {"easy": 6, "intermediate": 9, "hard": 14}
"""Dashes of each of the two long curves."""

FOLDERS: Final[dict[str, str]] = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
"""Folder of each difficulty in the official release."""


@dataclass(frozen=True, kw_only=True)
class PathfinderSettings:
    """How images are drawn. Lengths are in pixels.

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
        contour_length: Dashes of each long curve.
        padding: Pixels along the borders that dashes keep free.
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
    contour_length: int = CONTOUR_LENGTHS["hard"]
    padding: int = 1

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


RESOLUTIONS: Final[dict[int, PathfinderSettings]] = {
    32: PathfinderSettings(
        size=32,
        seed_distance=7,
        marker_radius=1.5,
        dash_length=2,
        dash_thickness=0.5,
        margins=(1,),
        continuity=1.0,
        distractor_total=20,
        target_contrast=1.5,
        distractor_contrast=2.0,
    ),
    64: PathfinderSettings(
        size=64,
        seed_distance=12,
        marker_radius=2.5,
        dash_length=5,
        dash_thickness=1.0,
        margins=(1,),
        continuity=1.8,
        distractor_total=22,
        target_contrast=0.8,
        distractor_contrast=0.8,
    ),
    128: PathfinderSettings(
        size=128,
        seed_distance=20,
        marker_radius=3.0,
        dash_length=5,
        dash_thickness=1.5,
        margins=(2, 3),
        continuity=1.8,
        distractor_total=35,
        target_contrast=0.9,
        distractor_contrast=0.9,
    ),
    256: PathfinderSettings(
        size=256,
        seed_distance=27,
        marker_radius=5.0,
        dash_length=5,
        dash_thickness=2.0,
        margins=(3,),
        continuity=1.8,
        distractor_total=30,
        target_contrast=1.0,
        distractor_contrast=1.0,
        padding=22,
    ),
}
"""The settings of each resolution, at the hard level."""


def pathfinder_settings(resolution: int, difficulty: Difficulty = "hard") -> PathfinderSettings:
    """Return the settings of the official release.

    Args:
        resolution: Height and width of an image: 32, 64, 128 (Path-X) or 256.
        difficulty: How long the curves are.
    """
    hard = RESOLUTIONS[resolution]
    return PathfinderSettings(**(vars(hard) | {"contour_length": CONTOUR_LENGTHS[difficulty]}))
