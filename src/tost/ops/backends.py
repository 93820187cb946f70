"""The implementations of the operators, each registered once. Loads no torch.

``TOST_BACKEND``, the ``backend`` option of the models, ``tost info``, warnings and tests take their lists from
`BACKENDS`. To add a backend, write its module and add one entry.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tost._env import Variable

OPERATORS = ("causal_tssa", "gated_tssa", "tssa")
"""The operators."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An implementation of the operators.

    Its module has a function for each of its operators, ``tssa(inputs, form)``, ``causal_tssa(inputs, form)`` and
    ``gated_tssa(inputs)``. It may also
    have ``tssa_`` and ``causal_tssa_``, which leave the result in the memory of ``inputs.w``; ``unavailable()``, which
    returns reasons why the backend cannot be used on this machine; and ``unsupported(w, form)``, which returns reasons
    why it cannot be used for tokens of the dtype of w, or in a form. No reasons mean that it can. Importing the module
    must work on every machine.

    Attributes:
        name: What users pass as ``backend=``.
        module: Where the functions are.
        devices: Types of the devices it runs on; empty for all.
        automatic: Whether ``backend="auto"`` may choose it.
        operators: The operators that it implements.
    """

    name: str
    module: str
    devices: tuple[str, ...] = ()
    automatic: bool = True
    operators: tuple[str, ...] = OPERATORS

    def runs_on(self, device_type: str) -> bool:
        """Return whether it runs on devices of a type such as ``"cpu"`` or ``"cuda"``."""
        return not self.devices or device_type in self.devices


TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton kernels run on CPU tensors, in Python. Read once, as triton does."""

BACKENDS: tuple[Backend, ...] = (
    Backend(
        "triton",
        "tost.ops.triton",
        devices=("cuda", "cpu") if TRITON_INTERPRETS else ("cuda",),
        automatic=False,
        operators=("causal_tssa", "tssa"),
    ),
    Backend("native", "tost.ops.native", devices=("cpu",)),
    Backend("torch", "tost.ops.pytorch"),
    Backend("reference", "tost.ops.reference"),
)
"""The fastest first: ``backend="auto"`` takes the first that can run a call. The last one runs anywhere."""


def backend_names() -> tuple[str, ...]:
    """Return what the ``backend`` argument takes: ``"auto"`` and the name of every backend."""
    return ("auto", *(backend.name for backend in BACKENDS))


if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[backend_names()]

VARIABLE = Variable(
    name="TOST_BACKEND", values=backend_names(), default="auto", help='which implementation `backend="auto"` means'
)
