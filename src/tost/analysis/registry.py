"""Registry of the analyses. Loads no torch, so that the command line can list them at once."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from tost._lazy import load
from tost._plugins import Registry
from tost.errors import ConfigError

ALL = "all"
"""Stands for every analysis that applies to a model."""

Needs = Literal["", "tssa", "causal", "blocks", "class"]
"""Requirement on a model: TSSA layers, causal ones, TSSA layers in `tost.nn` blocks, or a class token."""

Data = Literal["", "samples", "images", "text"]
"""Input of an analysis: any samples, images, one text, or the weights alone (empty)."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An analysis.

    Attributes:
        name: Name on the command line.
        summary: What it shows, in one line.
        needs: What a model must have.
        data: Its input.
        title: The question that it answers, as a heading of the report.
        explanation: How to read the answer, for readers who have not seen the paper.
        target: The function, or where it is, as ``"package.module:function"``.
    """

    name: str
    summary: str = ""
    needs: Needs = ""
    data: Data = "samples"
    title: str = ""
    explanation: str = ""
    target: Callable[..., Any] | str

    @property
    def description(self) -> str:
        """The summary, as listings call it."""
        return self.summary

    def function(self) -> Callable[..., Any]:
        """Return the function, importing it if need be. It takes a model and `Samples` and returns a `Result`."""
        return load(self.target) if isinstance(self.target, str) else self.target

    def accepts(self, argument: str) -> bool:
        """Return whether the function has a keyword argument, such as ``layers`` or ``control``."""
        return argument in inspect.signature(self.function()).parameters


_BUILT_IN = [
    Analysis(name=name, **described)
    for name, described in tomllib.loads(Path(__file__).with_name("analyses.toml").read_text("utf-8")).items()
]


def _adapt(name: str, found: Any) -> Analysis:
    """Return the analysis of a function of another package: as its decorator describes it, if it has one."""
    if isinstance(described := getattr(found, "_tost_analysis", None), Analysis):
        return described
    if not callable(found):
        raise ConfigError(f"{name!r} is not a function; an analysis takes a model and samples and returns a result.")
    return Analysis(name=name, summary=_first_line(found), target=found)


_ANALYSES = Registry("analysis", "tost.analyses", _adapt, _BUILT_IN, plural="analyses")


def register_analysis(
    name: str, *, summary: str = "", needs: Needs = "", data: Data = "samples", title: str = "", explanation: str = ""
) -> Callable[[Function], Function]:
    """Register an analysis under a name, for `tost analyze`, `tost report` and `tost.analysis.analyze`.

    The decorated function takes a model and `tost.analysis.Samples` and returns a `tost.analysis.Result`. If it has the
    keyword arguments ``layers`` and ``control``, these are the numbers of the layers that the user chose (None for all)
    and an untrained model with the same options (None if there is none).

    Args:
        name: Name on the command line.
        summary: What it shows, in one line; by default the first line of the function's docstring.
        needs: What a model must have: ``"tssa"`` layers, ``"causal"`` TSSA layers, TSSA layers in ``"blocks"`` of
            `tost.nn`, a ``"class"`` token that attends to patches, or nothing (empty).
        data: Its input: ``"samples"``, ``"images"``, a ``"text"``, or the weights alone (empty).
        title: The question that it answers, as a heading of the report; by default the summary.
        explanation: How to read the answer, for the report.

    Returns:
        The decorator, which returns the function unchanged.

    Raises:
        ConfigError: The name is taken or cannot be one, or `needs` or `data` is unknown.

    Example:
        >>> import tost
        >>> from tost.analysis import Result, attention_layers
        >>> class Temperatures(Result):
        ...     name = "temperatures"
        ...     def __init__(self, model):
        ...         self.values = [layer.temperatures().tolist() for layer in attention_layers(model)]
        ...     def summary(self):
        ...         return {"lowest": min(map(min, self.values)), "highest": max(map(max, self.values))}
        >>> @tost.register_analysis("temperatures", summary="how sharply each head chooses", needs="tssa", data="")
        ... def temperatures(model, samples):
        ...     return Temperatures(model)
        >>> tost.analysis.analyze("temperatures", tost.create_model("tost_mini"), tost.analysis.Samples()).summary()
        {'lowest': 1.0, 'highest': 1.0}
    """
    for key, value, known in (("needs", needs, get_args(Needs)), ("data", data, get_args(Data))):
        if value not in known:
            raise ConfigError(f"{key}={value!r} of the analysis {name!r} is unknown; choose from {known}.")

    def register(function: Function) -> Function:
        text = {"summary": summary or _first_line(function), "title": title, "explanation": explanation}
        spec = Analysis(name=name, needs=needs, data=data, target=function, **text)
        _ANALYSES.add(name, spec)
        function._tost_analysis = spec  # type: ignore[attr-defined]
        return function

    return register


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def find_analysis(name: str) -> Analysis:
    """Return an analysis by its name, or by ``package.module:function``.

    Raises:
        ConfigError: There is none of that name; the message suggests one.
    """
    return _ANALYSES.get(name)


def list_analyses(pattern: str = "*") -> list[str]:
    """Return the names of the analyses that match a shell pattern; the built-in ones first, in their order."""
    names = _ANALYSES.names(pattern)
    built_in = [spec.name for spec in _BUILT_IN]
    return [name for name in built_in if name in names] + [name for name in names if name not in built_in]


def describe_analyses(pattern: str = "*") -> list[dict[str, str]]:
    """Return name and description of the analyses that match a shell pattern, without importing any."""
    return [_ANALYSES.describe(name) for name in list_analyses(pattern)]
