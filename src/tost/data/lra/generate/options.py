"""Long Range Arena data that `tost data prepare` generates, with its options. Loads no torch and no numpy."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from tost.data.lra.generate.pathfinder.settings import Difficulty
from tost.data.prepare import PrepareOptions
from tost.data.toy.options import ListOpsOptions


class _GeneratedOptions(PrepareOptions):
    seed: int = Field(default=0, description="another number gives other data")


class ListOpsFilesOptions(_GeneratedOptions):
    """Options of ``lra/listops``. Lengths count operators, digits and closing brackets, not parentheses."""

    name = "lra/listops"
    summary = "generated ListOps expressions, in the layout of the Long Range Arena"
    run = "tost.data.lra.generate.listops:prepare_listops"

    count: int = Field(
        default=100_000, ge=3, description="examples together; 1 in 50 is for validation, and as many for testing"
    )
    max_depth: int = Field(default=10, ge=2, le=64, description="levels of an expression")
    max_args: int = Field(default=10, ge=2, description="most arguments of one operator; the fewest are 2")
    min_length: int = Field(default=500, ge=1, description="expressions are longer than this, in tokens")
    max_length: int = Field(default=2000, ge=5, description="expressions are shorter than this, in tokens")

    @model_validator(mode="after")
    def _some_expression_fits(self) -> ListOpsFilesOptions:
        self.limits()
        return self

    def limits(self) -> ListOpsOptions:
        """Return the limits of the expressions, in the form that the generator takes."""
        keys = ("max_depth", "max_args", "min_length", "max_length")
        return ListOpsOptions(**{key: getattr(self, key) for key in keys})

    def counts(self) -> dict[str, int]:
        """Return the number of examples of each split."""
        part = max(1, self.count // 50)
        return {"train": self.count - 2 * part, "val": part, "test": part}


class PathfinderFilesOptions(_GeneratedOptions):
    """Options of ``lra/pathfinder*`` and ``lra/pathx``."""

    run = "tost.data.lra.generate.pathfinder.files:prepare_pathfinder"
    resolution: ClassVar[int]

    count: int = Field(default=200_000, ge=1, description="images")
    difficulty: Difficulty = Field(default="hard", description="how long the curves are: 6, 9 or 14 dashes")


_SUMMARY = "generated Pathfinder images, {0} x {0} pixels, in the layout of the Long Range Arena"


class _Pathfinder32(PathfinderFilesOptions):
    name, summary, resolution = "lra/pathfinder32", _SUMMARY.format(32), 32


class _Pathfinder64(PathfinderFilesOptions):
    name, summary, resolution = "lra/pathfinder64", _SUMMARY.format(64), 64


class _Pathfinder256(PathfinderFilesOptions):
    name, summary, resolution = "lra/pathfinder256", _SUMMARY.format(256), 256


class _Pathx(PathfinderFilesOptions):
    name, summary, resolution = "lra/pathx", _SUMMARY.format(128) + " (Path-X)", 128


GENERATED = (ListOpsFilesOptions, _Pathfinder32, _Pathfinder64, _Pathfinder256, _Pathx)
"""Every generator."""
