"""Registry of the analyses. Loads no torch, so that the command line can list them at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from tost._lazy import load
from tost._plugins import Registry
from tost.errors import ConfigError

ALL = "all"
"""Stands for every analysis that applies to a model."""

Needs = Literal["", "tssa", "causal", "blocks", "class"]
"""What a model must have: TSSA layers, causal TSSA layers, TSSA layers in blocks of `tost.nn`, or a class token."""

Data = Literal["", "samples", "images", "text"]
"""What an analysis looks at: any samples, images, one text, or the weights alone (empty)."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An analysis.

    Attributes:
        name: Name on the command line.
        summary: What it shows, in one line.
        needs: What a model must have.
        data: What it looks at.
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

    def function(self) -> Callable[..., Any]:
        """Return the function, importing it if need be. It takes a model and `Samples` and returns a `Result`."""
        found: Callable[..., Any] = load(self.target) if isinstance(self.target, str) else self.target
        return found

    def accepts(self, argument: str) -> bool:
        """Return whether the function has a keyword argument, such as ``layers`` or ``control``."""
        return argument in inspect.signature(self.function()).parameters


_GROUPS = "A ToST layer sorts its tokens softly into groups, one per head, and treats each group by itself."
_BUILT_IN = (
    Analysis(
        name="coding-rate",
        summary="R, R_c, R_c^var and Delta R by layer: does every layer compress?",
        needs="blocks",
        title="Does each layer compress?",
        explanation="In theory every attention layer takes one step downhill on R_c^var: the number of nats that it "
        "takes to store the tokens, group by group. If training found what the theory predicts, the curve falls with "
        "depth, and the step within the attention is below 0. The untrained model is the control: it shows what the "
        "same layers do to tokens before they have learned anything.",
        target="tost.analysis.rates:coding_rates",
    ),
    Analysis(
        name="membership-maps",
        summary="which head each patch of an image belongs to",
        needs="tssa",
        data="images",
        title="Which group does each patch belong to?",
        explanation=f"{_GROUPS} The maps show how strongly each patch of an image belongs to each group, and which "
        "group has most of it.",
        target="tost.analysis.memberships:membership_maps",
    ),
    Analysis(
        name="text-memberships",
        summary="which head each token of a text belongs to",
        needs="tssa",
        data="text",
        title="Which group does each token belong to?",
        explanation=f"{_GROUPS} Here every token of a text from the validation set has the colour of the group that "
        "has most of it.",
        target="tost.analysis.memberships:memberships_of_text",
    ),
    Analysis(
        name="class-attention",
        summary="where the class token of an image model looks",
        needs="class",
        data="images",
        title="Where does the class token look?",
        explanation="The answer is read off one extra token that gathers information from the patches. The maps show "
        "how much it takes from each patch: bright patches decide.",
        target="tost.analysis.class_attention:class_attention_maps",
    ),
    Analysis(
        name="subspaces",
        summary="how far the subspaces of the heads are apart",
        needs="tssa",
        data="",
        title="Do the heads look at different things?",
        explanation="Every head projects the tokens onto a subspace of its own. The blocks show how much two subspaces "
        "overlap: 0 means that they have nothing in common, as the theory would have it, and 1 that they share a "
        "direction.",
        target="tost.analysis.subspaces:subspace_coherence",
    ),
    Analysis(
        name="gains",
        summary="D = 1/(1+moment): which directions a layer keeps or suppresses",
        needs="tssa",
        title="What does a layer keep, and what does it suppress?",
        explanation="From each direction of a group the operator takes away the share D = 1 / (1 + second moment). A "
        "value near 1 means that the direction is suppressed, because the group has little spread in it; a value near "
        "0 that it is kept.",
        target="tost.analysis.gains:gains_by_layer",
    ),
    Analysis(
        name="heads",
        summary="usage, temperature, effective rank and entropy of the heads",
        needs="tssa",
        title="Are all heads used?",
        explanation="The share of all tokens that each head has, how sharp its choice is (temperature), how many "
        "directions its tokens really fill (effective rank), and how undecided memberships are (entropy; 1 is a coin "
        "toss).",
        target="tost.analysis.heads:head_usage",
    ),
    Analysis(
        name="flattening",
        summary="how memberships flatten as sequences get longer",
        needs="tssa",
        title="What happens to the groups when sequences get longer?",
        explanation="Memberships come from each token's share of the sum over all tokens, and that share shrinks as "
        "tokens are added. The curves show how far memberships go flat, that is towards the same share for every head.",
        target="tost.analysis.heads:membership_flattening",
    ),
    Analysis(
        name="state-memory",
        summary="what the state of a language model remembers over time",
        needs="causal",
        title="What does the state remember?",
        explanation="While it reads, a causal ToST keeps only three sums per head, however long the text is. The "
        "curves show how much weight tokens of the past have in them, and how fast the sums settle.",
        target="tost.analysis.memory:state_memory",
    ),
)


def _adapt(name: str, found: Any) -> Analysis:
    """Return the analysis of a function of another package: as its decorator describes it, if it has one."""
    if isinstance(described := getattr(found, "_tost_analysis", None), Analysis):
        return described
    if not callable(found):
        raise ConfigError(f"{name!r} is not a function; an analysis takes a model and samples and returns a result.")
    return Analysis(name=name, summary=_first_line(found), target=found)


_ANALYSES = Registry("analysis", "tost.analyses", _adapt, ((spec.name, spec) for spec in _BUILT_IN), plural="analyses")


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
        data: What it looks at: ``"samples"``, ``"images"``, a ``"text"``, or the weights alone (empty).
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
        spec = Analysis(
            name=name,
            summary=summary or _first_line(function),
            needs=needs,
            data=data,
            title=title,
            explanation=explanation,
            target=function,
        )
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
    """Return the names of the analyses that match a shell pattern: first those of tost, in the order of the report."""
    names = _ANALYSES.names(pattern)
    built_in = [spec.name for spec in _BUILT_IN]
    return [name for name in built_in if name in names] + [name for name in names if name not in built_in]


def describe_analyses(pattern: str = "*") -> Iterator[tuple[str, str]]:
    """Yield name and summary of the analyses that match a shell pattern, without importing any."""
    for name in list_analyses(pattern):
        spec = _ANALYSES.peek(name)
        yield name, spec.summary if spec else "from an installed package"
