"""Options: pydantic classes for what a model, mixer, data set or task lets users choose. Loads no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

__all__ = ["Options", "options_of_signature"]


class Options(BaseModel):
    """Checked options: unknown keys are errors, and values cannot change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def options_of_signature(
    function: Callable[..., Any], *, skip: Collection[str] = (), base: type[BaseModel] = Options
) -> type[BaseModel]:
    """Make a class of options from the keyword arguments of a function or constructor.

    Args:
        function: Its annotated arguments become fields; those without a default are required.
        skip: Arguments that are passed by tost itself.
        base: Class to derive from.

    Returns:
        A class whose fields are the arguments. A function with ``**kwargs`` takes any further key.
    """
    target = function.__init__ if inspect.isclass(function) else function
    hints = get_type_hints(target)
    fields: dict[str, Any] = {}
    extra = "forbid"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif name not in skip and parameter.kind is not parameter.VAR_POSITIONAL:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), default)
    config = ConfigDict(frozen=True, extra=extra, arbitrary_types_allowed=True)  # type: ignore[typeddict-item]
    name = f"{function.__name__}Options"
    made = create_model(name, __base__=base, __doc__=inspect.getdoc(function), **fields)
    made.model_config = {**made.model_config, **config}
    made.model_rebuild(force=True)
    return made
