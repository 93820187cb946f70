"""What a TSSA call may vary, as one object that every implementation receives. Loads no torch.

A new option of the operator is one field of `OperatorOptions`. From there it reaches `tost.nn.Extensions`, the options
of the models and their configuration in transformers. It is written again only in `OperatorKeywords` and where it is
used: in the public functions and in the implementations. Registered operators and the native library have those in
`FLAGS`, as numbers.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypedDict


def option(default: Any, description: str, *, causal: bool | None = None, **limits: Any) -> Any:
    """Return a dataclass field that is also an option of the models.

    Args:
        default: Its default.
        description: What it does, in a few words, for the help of the models' options.
        causal: True if only causal attention has it, False if only non-causal attention has it, None if both have it.
        **limits: Limits of its values, as `pydantic.Field` takes them, such as ``ge=1``.
    """
    return field(default=default, metadata={"description": description, "causal": causal, "limits": limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """Options of the operator that are off in the paper and in the authors' code.

    Attributes:
        count_scaled: ``energy * n``, where n is the number of real tokens that the statistics are taken over. Energies
            are shares that sum to D over the tokens, so without it memberships flatten as sequences get longer, unless
            the temperature grows.
        block_size: Consecutive features whose second moments are taken together, g; divides D. A group then has a
            matrix ``S_b = sum_n pi w_b w_b^T / sum_n pi`` for each block b of its features, and
            ``y_b = -pi (I + S_b)^{-1} w_b``. With 1 only the diagonal is left, which is the paper's form.
        centered: Take moments about the mean of the group, ``mu = sum_n pi w / sum_n pi``, and shrink what a token has
            beyond it: ``S_b - mu_b mu_b^T`` in place of ``S_b`` and ``w_b - mu_b`` in place of ``w_b``.
    """

    count_scaled: bool = option(False, "multiply the energies of TSSA by the number of tokens they are taken over")
    block_size: int = option(1, "features of a head whose second moments are taken together", ge=1)
    centered: bool = option(False, "take second moments about the mean of each group, and remove it from the tokens")


class OperatorKeywords(TypedDict, total=False):
    """The fields of `OperatorOptions` as keyword arguments, for functions that pass them on."""

    count_scaled: bool
    block_size: int
    centered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(OperatorOptions):
    """Everything that a TSSA call may vary besides its tensors.

    Attributes:
        normalize: ``energy = sum_d w^2 / sum_m w_m^2``. False leaves the division out: equation 10 of the paper.
        token_decay: The decay comes from the data, one for each token and head.
        channel_decay: It does, and one for each block of features: for each channel if the block size is 1.
    """

    normalize: bool = True
    token_decay: bool = False
    channel_decay: bool = False

    @property
    def counted(self) -> bool:
        """Whether the number of tokens in a statistic is a running sum: with fixed decays it follows from positions."""
        return self.count_scaled and self.token_decay

    def num_masses(self, head_dim: int) -> int:
        """Return how many masses a head has, K: one, or one for each decay, as what fades apart is weighed apart."""
        return head_dim // self.block_size if self.channel_decay else 1

    def beyond(self, known: Container[str]) -> list[str]:
        """Return the names of what is chosen here and not among the `known` fields."""
        return [
            field.name
            for field in fields(self)
            if field.name not in known and getattr(self, field.name) != field.default
        ]

    def flags(self) -> tuple[int, ...]:
        """Return the values in the order of `FLAGS`, as registered operators take them."""
        known = (self.count_scaled, self.block_size, self.centered)  # written out, which is faster and can be traced
        return *known, self.normalize, self.token_decay, self.channel_decay

    @classmethod
    def from_flags(cls, flags: Sequence[Any]) -> Form:
        """Return the form that `flags` came from."""
        return _from_flags(tuple(flags))


@cache
def _from_flags(flags: tuple[Any, ...]) -> Form:
    return Form(**dict(zip(FLAGS, flags, strict=True)))


FLAGS = ("count_scaled", "block_size", "centered", "normalize", "token_decay", "channel_decay")
"""Names of the fields of `Form` that the native library and registered operators have, in order."""
