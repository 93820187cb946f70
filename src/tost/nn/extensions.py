"""Forms of the TSSA modules: extensions that are not in the paper, and the equations of the paper. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from tost.ops.form import OperatorOptions, option


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions(OperatorOptions):
    """Extensions of the authors' attention; all are off by default. The options of the operator are among them.

    Attributes:
        gate: Multiply the operator's output by ``silu(proj_gate(x))`` before the output projection. The operator only
            shrinks a token's features, by factors that all tokens of a group share; the gate lets each token choose.
        head_norm: Divide the operator's output by its root mean square over the features of each head, with a learned
            weight per feature, in front of the gate. The size of the output then depends neither on the membership nor
            on how much a group has been shrunk.
        unit_variance: Start the first projection such that the projected tokens of normed inputs have variance 1 in
            place of the small values that weights usually start with. Second moments are compared with 1, so from
            small tokens the operator hardly acts at first.
        forget: Causal attention only: let statistics fade with every token. True has a learned rate for each head. With
            ``"head"`` and ``"channel"`` every token sets the rates from its own data, one for each head or one for each
            channel; in blocks, whose features share their moments, one for each block. Rates start with different
            half-lives; see `CausalTSSAttention.decay`.
        after_last_position: Causal attention only: the position bias of tokens after the last learned position.
            ``"error"`` refuses such sequences, ``"repeat"`` gives them the bias of the last position.
    """

    gate: bool = option(False, "gate the output of TSSA by a projection of its input")
    head_norm: bool = option(False, "divide the output of TSSA by its root mean square in each head")
    unit_variance: bool = option(False, "start with projected tokens of variance 1")
    forget: bool | Literal["head", "channel"] = option(
        False,
        "let statistics fade, at a learned rate per head (true) or at rates from the data per head or channel",
        causal=True,
    )
    after_last_position: Literal["error", "repeat"] = "error"

    def operator_options(self) -> dict[str, Any]:
        """Return the options of the operator, as keyword arguments of `tost.tssa` and `tost.causal_tssa`."""
        return {field.name: getattr(self, field.name) for field in fields(OperatorOptions)}


@dataclass(frozen=True)
class PaperForm:
    """The attention of the paper's equations, where it differs from the authors' code.

    The code frees what the equations tie: a second weight matrix in place of ``U``, and with it the step size; one
    temperature per head; no coding precision. With ``eps = sqrt(C)`` (so ``C / eps^2 = 1``) and orthonormal heads the
    module's output is minus `step_size` times the gradient of the variational compression objective.

    Attributes:
        step_size: tau. The output is multiplied by ``tau / n`` (``tau / j`` at position j of a causal sequence), n
            counting the real tokens. None leaves it out.
        eps: Coding precision; the operator becomes ``D = c / (1 + c * moment)``, ``c = C / eps^2``. None means c = 1.
        tied: Project back with the transpose of the first projection's weight.
        shared_temperature: One temperature ``1 / (2 eta)`` for all heads.
    """

    step_size: float | None = 1.0
    eps: float | None = None
    tied: bool = True
    shared_temperature: bool = True

    @classmethod
    def free(cls) -> PaperForm:
        """Return the form of the authors' code."""
        return cls(step_size=None, tied=False, shared_temperature=False)
