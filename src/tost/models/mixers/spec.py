"""The description of a token mixer. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel

from tost._lazy import load
from tost._options import Options

if TYPE_CHECKING:
    from torch import nn

Place = Literal["vision", "sequence", "language"]


class MixerSizes(NamedTuple):
    """What the arithmetic of a mixer depends on, besides its options.

    Attributes:
        embed_dim: Width of the tokens, C.
        num_heads: Number of heads, H.
        num_tokens: Length of the sequence, N.
        position_bias: Whether there is a bias per head and position.
    """

    embed_dim: int
    num_heads: int
    num_tokens: int
    position_bias: bool = False


class MixerOptions(Options):
    """Options of one kind of mixer; the names are those of its class in `tost.nn`."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the class."""
        return dict(self)


@dataclass(frozen=True, kw_only=True)
class MixerSpec:
    """A registered mixer.

    Attributes:
        name: What users call it.
        build: The class, or where it is, as ``"module:Class"``; see `register_mixer` for how it is called.
        options: Class of its options.
        places: Kinds of models that it fits.
        description: One line for listings.
        products: Returns the multiply-adds per token, projections included; None if unknown.
        statistics: Returns other operations per token, where there are enough to count.
        defaults: Defaults of its options, where they differ from those of `options`.
        official: Those of the official Long-Range Arena, where they differ from that.
        causal: The form of it that language models take, where that is another class.
    """

    name: str
    build: str | Callable[..., nn.Module]
    options: type[BaseModel] = MixerOptions
    places: tuple[Place, ...] = ("vision", "sequence")
    description: str = ""
    products: Callable[[MixerSizes, Any], int] | None = None
    statistics: Callable[[MixerSizes, Any], int] = lambda sizes, own: 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    official: Mapping[str, Any] = field(default_factory=dict)
    causal: MixerSpec | None = None

    def form(self, place: Place) -> MixerSpec | None:
        """Return the form of this mixer for a kind of models; None if there is none."""
        form = self.causal if place == "language" and self.causal is not None else self
        return form if place in form.places else None

    def validate(self, given: Mapping[str, Any], *, official: bool = False) -> BaseModel:
        """Return all options.

        Args:
            given: Options that replace the defaults.
            official: Take the defaults of the official Long-Range Arena.

        Raises:
            ValidationError: The options are not usable.
        """
        return self.options.model_validate(self.filled(given, official=official))

    def filled(self, given: Mapping[str, Any], *, official: bool = False) -> dict[str, Any]:
        """Return the given options after the defaults of this mixer, which may differ from those of `options`."""
        return {**self.defaults, **(self.official if official else {}), **given}

    def factory(self) -> Callable[..., nn.Module]:
        """Return the class."""
        return load(self.build) if isinstance(self.build, str) else self.build
