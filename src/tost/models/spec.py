"""The description of a registered model. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tost._lazy import load

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A registered model.

    Attributes:
        name: What users call it.
        build: The class or function that makes it, or where it is, as ``"module:Class"``.
        options: Class of its options.
        tasks: The tasks that it can be trained for; None for any.
        defaults: Its options, where they differ from the defaults of `options`.
        description: One line for listings.
        by_keyword: Whether `build` takes the options as keyword arguments, not as one object.
    """

    name: str
    build: str | Callable[..., nn.Module]
    options: type[BaseModel]
    tasks: tuple[str, ...] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    by_keyword: bool = False

    def create(self, options: BaseModel) -> nn.Module:
        """Build the model with these options."""
        build: Callable[..., nn.Module] = load(self.build) if isinstance(self.build, str) else self.build
        return build(**dict(options)) if self.by_keyword else build(options)
