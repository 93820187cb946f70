"""The analyses of a run, with the sentences that explain them to somebody who has not read the paper. Loads torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tost.analysis import CodingRates, Result, analyse, applicable, control_of, image_bytes, why_not
from tost.errors import TostError
from tost.report.html import number
from tost.report.samples import Opened

__all__ = ["EXPLANATIONS", "Finding", "Insight", "look_into", "verdict_on_rates"]

# Maps are pixels anyway; as SVG they would be larger and no sharper.
_PIXELS = ("membership-maps", "class-attention", "text-memberships", "subspaces")
_MOST_SVG = 400_000

EXPLANATIONS: dict[str, tuple[str, str]] = {
    "coding-rate": (
        "Does each layer compress?",
        "In theory every attention layer takes one step downhill on R_c^var: the number of nats that it takes to store "
        "the tokens, group by group. If training found what the theory says, the curve falls with depth, and the step "
        "within the attention is below 0. The untrained model is the control: it shows what the same layers do to "
        "tokens before they have learned anything.",
    ),
    "membership-maps": (
        "Which group does each patch belong to?",
        "A ToST layer sorts its tokens softly into groups, one per head, and treats each group by itself. The maps "
        "show how strongly each patch of an image belongs to each group, and which group has most of it.",
    ),
    "text-memberships": (
        "Which group does each token belong to?",
        "A ToST layer sorts its tokens softly into groups, one per head, and treats each group by itself. Here every "
        "token of a text from the validation set has the colour of the group that has most of it.",
    ),
    "class-attention": (
        "Where does the class token look?",
        "The answer is read off one extra token that gathers what the patches say. The maps show how much it takes "
        "from each patch: bright patches decide.",
    ),
    "subspaces": (
        "Do the heads look at different things?",
        "Every head projects the tokens onto a subspace of its own. The blocks show how much two subspaces overlap: 0 "
        "means that they have nothing in common, as the theory would have it, and 1 that they share a direction.",
    ),
    "gains": (
        "What does a layer keep, and what does it suppress?",
        "From each direction of a group the operator takes away the share D = 1 / (1 + second moment). A value near 1 "
        "means that the direction is suppressed, because the group has little spread in it; a value near 0 that it is "
        "kept.",
    ),
    "heads": (
        "Are all heads used?",
        "The share of all tokens that each head has, how sharp its choice is (temperature), how many directions its "
        "tokens really fill (effective rank), and how undecided memberships are (entropy; 1 is a coin toss).",
    ),
    "flattening": (
        "What happens to the groups when sequences get longer?",
        "Memberships come from each token's share of the sum over all tokens, and that share shrinks as tokens are "
        "added. The curves show how far memberships go flat, that is towards the same share for every head.",
    ),
    "state-memory": (
        "What does the state remember?",
        "While it reads, a causal ToST keeps only three sums per head, however long the text is. The curves show how "
        "much weight tokens of the past have in them, and how fast the sums settle.",
    ),
}
"""By analysis: a question as its title, and what the answer means."""


@dataclass(frozen=True)
class Finding:
    """What an analysis found.

    Attributes:
        name: Its name on the command line.
        numbers: The few that sum it up.
        rows: The table behind it.
        picture: Content of an image file; empty if it could not be drawn.
        picture_kind: ``png`` or ``svg+xml``.
        verdict: What it comes to, in a sentence; empty if that is for the reader to say.
    """

    name: str
    numbers: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]] = ()
    picture: bytes = field(default=b"", repr=False)
    picture_kind: str = "png"
    verdict: str = ""


@dataclass(frozen=True)
class Insight:
    """What was seen in a run's model.

    Attributes:
        run: Name of the run.
        source: Which weights and samples were looked at, in a sentence.
        findings: One per analysis.
        notes: What was not done, and why.
    """

    run: str
    source: str = ""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def look_into(
    name: str, run: Opened, wanted: Sequence[str] | None, report: Callable[[str], None] | None = None
) -> Insight:
    """Run the analyses that apply to the model of a run.

    Args:
        name: What to call the run.
        run: Its model and samples.
        wanted: Which analyses; None for all that apply.
        report: Told about each as it ends.

    Returns:
        What was found; an analysis that fails costs a note, not the page.
    """
    say = report or (lambda line: None)
    findings: list[Finding] = []
    notes: list[str] = []
    control = _control(run.model)
    for analysis in applicable(run.model) if wanted is None else wanted:
        if reason := why_not(run.model, analysis):
            notes.append(f"{analysis}: left out, because {reason}.")
            continue
        try:
            found = analyse(analysis, run.model, run.samples, control=control)
            findings.append(_finding(found))
            say(f"{name}: {analysis}: {_short(findings[-1])}")
        except (TostError, ValueError) as error:
            notes.append(f"{analysis}: could not be done: {error}")
            say(f"{name}: {notes[-1]}")
    source = (
        f"Looked at: the weights of {run.checkpoint.name}, with up to {run.count} samples of the validation set (and "
        "as many of the training set where both are compared), spread over the set."
    )
    return Insight(name, source, tuple(findings), tuple(notes))


def _control(model: nn.Module) -> nn.Module | None:
    try:
        return control_of(model)
    except (TostError, TypeError):  # a model of another package does not say how it was built
        return None


def _finding(result: Result) -> Finding:
    verdict = verdict_on_rates(result) if isinstance(result, CodingRates) else ""
    content, kind = _draw(result)
    numbers = {key: value if isinstance(value, str) else number(value) for key, value in result.summary().items()}
    return Finding(result.name, numbers, result.rows(), content, kind, verdict)


def _draw(result: Result) -> tuple[bytes, str]:
    if result.name not in _PIXELS:
        content = image_bytes(result, "svg")
        if len(content) <= _MOST_SVG:
            return content, "svg+xml"
    return image_bytes(result, "png"), "png"


def _short(finding: Finding) -> str:
    if finding.verdict:
        return finding.verdict
    return "; ".join(f"{key} {value}" for key, value in list(finding.numbers.items())[:2])


def verdict_on_rates(rates: CodingRates) -> str:
    """Say in how many layers R_c^var falls, on the trained model and on the control, and where it does not.

    Args:
        rates: A result that has validation or training samples of a trained model.
    """
    pairs = rates.pairs()
    split = next((split for source, split in reversed(pairs) if source == "trained"), None)
    if split is None:
        return ""
    trained = rates.falls("trained", split)
    most = trained.steps > 0 and 2 * trained.over_depth > trained.steps
    sentence = (
        f"The compression measure R_c^var {'falls' if most else 'does not fall over most layers: it falls'} in "
        f"{trained.over_depth} of {trained.steps} steps from one layer to the next, and in {trained.within} of "
        f"{trained.layers} layers from in front of the attention to behind it ({split} samples)."
    )
    curve = rates.curve("trained", split, "attention")
    rises = [
        f"{a} to {b}" for a, b, up in zip(curve.layers, curve.layers[1:], curve.mean().diff() >= 0, strict=False) if up
    ]
    if rises:
        sentence += f" It rises from layer {', '.join(rises)}."
    if ("control", split) in pairs:
        control = rates.falls("control", split)
        sentence += (
            f" In an untrained model of the same form: {control.over_depth} of {control.steps} steps and "
            f"{control.within} of {control.layers} layers."
        )
    return sentence
