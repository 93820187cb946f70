"""Names of the analyses. Loads no torch, so that the command line can list them at once."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from tost.errors import ConfigError

__all__ = ["ALL", "ANALYSES", "Analysis", "find_analysis"]

ALL = "all"
"""Stands for every analysis that fits a model."""


class Analysis(NamedTuple):
    """An analysis.

    Attributes:
        name: What it is called.
        summary: What it shows, in one line.
        needs: What a model must have: ``"tssa"`` layers, ``"causal"`` TSSA layers, or a ``"class"`` token that looks.
        data: What it looks at: ``"samples"``, ``"images"``, a ``"text"``, or nothing (``""``).
    """

    name: str
    summary: str
    needs: str
    data: str


_LIST = (
    Analysis("coding-rate", "R, R_c, R_c^var and Delta R by layer: does every layer compress?", "blocks", "samples"),
    Analysis("membership-maps", "which head each patch of an image belongs to", "tssa", "images"),
    Analysis("text-memberships", "which head each token of a text belongs to", "tssa", "text"),
    Analysis("class-attention", "where the class token of an image model looks", "class", "images"),
    Analysis("subspaces", "how far the subspaces of the heads are apart", "tssa", ""),
    Analysis("gains", "D = 1/(1+moment): which directions a layer keeps or suppresses", "tssa", "samples"),
    Analysis("heads", "usage, temperature, effective rank and entropy of the heads", "tssa", "samples"),
    Analysis("flattening", "how memberships flatten as sequences get longer", "tssa", "samples"),
    Analysis("state-memory", "what the state of a language model remembers over time", "causal", "samples"),
)
ANALYSES: dict[str, Analysis] = {analysis.name: analysis for analysis in _LIST}
"""The analyses by their names."""


def find_analysis(name: str) -> Analysis:
    """Return an analysis by its name.

    Raises:
        ConfigError: There is none of that name; the message suggests one.
    """
    if name in ANALYSES:
        return ANALYSES[name]
    near = get_close_matches(name, [*ANALYSES, ALL], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"there is no analysis {name!r}; {hint}choose from {', '.join(ANALYSES)}, or {ALL}.")
