"""The correctness gate: a speed is shown only if what is measured agrees with its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tost._text import count
from tost.testing import relative_rms

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest relative rms error of an operator or a layer, by dtype."""

NETWORK_BOUND = 10 * BOUNDS[torch.float32]
"""The same for whole networks, which lose a digit more."""

MOST_CHECKS = 10**6


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: what was compared, how far apart it was, how far apart it may be."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; an error that is not a number is not."""
        return self.error <= self.bound

    @property
    def message(self) -> str:
        """One line for the report of failures."""
        return f"{self.name}: relative rms {self.error:.3g} exceeds {self.bound:.3g}"


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """All comparisons, and the calls that a backend declined with its reason."""

    checks: tuple[Check, ...]
    declined: dict[str, str] = field(default_factory=dict)

    def plus(self, checks: Iterable[Check]) -> GateResult:
        """Return the result with more comparisons."""
        return GateResult(checks=(*self.checks, *checks), declined=self.declined)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The comparisons that failed."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def passed(self) -> bool:
        """True when something was compared and nothing failed."""
        return bool(self.checks) and not self.failures

    @property
    def summary(self) -> str:
        """A few words for the head of a table."""
        if self.passed:
            return f"gate: {count(len(self.checks), 'check')} passed"
        return f"gate: {len(self.failures)} of {count(len(self.checks), 'check')} FAILED"

    def to_json(self) -> dict[str, object]:
        """Return what the result files keep."""
        return {
            "passed": self.passed,
            "checks": len(self.checks),
            "failures": [check.message for check in self.failures],
            "declined": self.declined,
            "bounds": {str(dtype).removeprefix("torch."): bound for dtype, bound in BOUNDS.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> GateResult:
        """Return what a result file holds: of checks that passed only their number is stored.

        Args:
            content: What `to_json` made. The first files of `tost bench train` have none, because a run whose losses
                differed wrote no file.

        Raises:
            ValueError: No gate has so many checks.
        """
        failures = [] if content is None else content["failures"]
        passed = 1 if content is None else content["checks"] - len(failures)
        if not 0 <= passed <= MOST_CHECKS:
            raise ValueError(f"{passed} checks of a gate passed")
        checks = [Check(name=message, error=math.nan, bound=0.0) for message in failures]
        return cls(
            checks=(*checks, *[Check(name="passed", error=0.0, bound=0.0)] * passed),
            declined={} if content is None else content["declined"],
        )


def compare_networks(name: str, run: Callable[[str, torch.dtype], tuple[nn.Module, Tensor]]) -> list[Check]:
    """Compare a network on its fastest operators with the same weights on the reference operators in float64.

    Args:
        name: Stands in front of the names of the checks.
        run: From a backend and a dtype to the network, with gradients, and its output.
    """
    found = []
    for backend, dtype in (("auto", torch.float32), ("reference", torch.float64)):
        torch.manual_seed(0)
        model, output = run(backend, dtype)
        # As one vector, because some gradients are zero up to rounding: a key's bias does not change a softmax.
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append({"logits": output.detach(), "gradients": torch.cat(gradients)})
    fast, slow = found
    return [
        Check(name=f"{name} {what}", error=relative_rms(fast[what], slow[what]), bound=NETWORK_BOUND) for what in fast
    ]
