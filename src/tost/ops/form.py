"""Options of the non-causal operator, as one object that every implementation receives. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a call of `tost.tssa` may vary besides its tensors.

    Attributes:
        block_size: Consecutive features whose second moments are taken together, g; divides D. 1 is the paper's form.
        normalize: ``energy = sum_d w^2 / sum_m w_m^2``. False leaves the division out: equation 10 of the paper.
    """

    block_size: int = 1
    normalize: bool = True

    def flags(self) -> tuple[int, ...]:
        """Return the values in the order of `FLAGS`, as registered operators take them."""
        return self.block_size, self.normalize

    @classmethod
    def from_flags(cls, flags: Sequence[Any]) -> Form:
        """Return the form that `flags` came from."""
        return _from_flags(tuple(flags))


FLAGS = tuple(field.name for field in fields(Form))
"""Names of the fields, in the order of the native library and of registered operators."""


@cache
def _from_flags(flags: tuple[Any, ...]) -> Form:
    return Form(**dict(zip(FLAGS, flags, strict=True)))
