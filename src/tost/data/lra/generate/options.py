"""Which Long Range Arena data `tost data prepare` can generate, and its options. No torch and no numpy here."""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tost.data.lra.generate.pathfinder.images import Difficulty
from tost.data.toy.options import ListOpsOptions

__all__ = [
    "LRA_GENERATED",
    "Generated",
    "ListOpsFiles",
    "Pathfinder32Files",
    "Pathfinder64Files",
    "Pathfinder256Files",
    "PathfinderFiles",
    "PathxFiles",
]


class _Files(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, description="another number gives other data")


class ListOpsFiles(_Files):
    """Options of ``lra/listops``. Lengths count operators, digits and closing brackets, not parentheses."""

    count: int = Field(
        default=100_000, ge=3, description="examples together; 1 in 50 is for validation, and as many for testing"
    )
    max_depth: int = Field(default=10, ge=2, le=64, description="levels of an expression")
    max_args: int = Field(default=10, ge=2, description="most arguments of one operator; the fewest are 2")
    min_length: int = Field(default=500, ge=1, description="expressions are longer than this, in tokens")
    max_length: int = Field(default=2000, ge=5, description="expressions are shorter than this, in tokens")

    @model_validator(mode="after")
    def _some_expression_fits(self) -> ListOpsFiles:
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


class PathfinderFiles(_Files):
    """Options of ``lra/pathfinder*`` and ``lra/pathx``."""

    resolution: ClassVar[int]

    count: int = Field(default=200_000, ge=1, description="images")
    difficulty: Difficulty = Field(default="hard", description="how long the curves are: 6, 9 or 14 dashes")


class Pathfinder32Files(PathfinderFiles):
    """Options of ``lra/pathfinder32``."""

    resolution = 32


class Pathfinder64Files(PathfinderFiles):
    """Options of ``lra/pathfinder64``."""

    resolution = 64


class PathxFiles(PathfinderFiles):
    """Options of ``lra/pathx``."""

    resolution = 128


class Pathfinder256Files(PathfinderFiles):
    """Options of ``lra/pathfinder256``."""

    resolution = 256


class Generated(NamedTuple):
    """One entry for the table of preparers: its name, a line about it, its options, and what runs."""

    name: str
    summary: str
    options: type[BaseModel]
    run: str


_LISTOPS, _PATHFINDER = (
    "tost.data.lra.generate.listops:prepare_listops",
    "tost.data.lra.generate.pathfinder.files:prepare_pathfinder",
)
_IMAGES = "generated Pathfinder images, {0} x {0} pixels, in the layout of the Long Range Arena"

LRA_GENERATED: Final = (
    Generated(
        "lra/listops", "generated ListOps expressions, in the layout of the Long Range Arena", ListOpsFiles, _LISTOPS
    ),
    Generated("lra/pathfinder32", _IMAGES.format(32), Pathfinder32Files, _PATHFINDER),
    Generated("lra/pathfinder64", _IMAGES.format(64), Pathfinder64Files, _PATHFINDER),
    Generated("lra/pathfinder256", _IMAGES.format(256), Pathfinder256Files, _PATHFINDER),
    Generated("lra/pathx", _IMAGES.format(128) + " (Path-X)", PathxFiles, _PATHFINDER),
)
"""Everything that is generated."""
