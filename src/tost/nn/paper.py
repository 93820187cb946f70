"""Where the paper's equations and the authors' code differ."""

from __future__ import annotations

from dataclasses import dataclass


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
