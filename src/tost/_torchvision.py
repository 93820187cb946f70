"""Makes torchvision importable where its compiled operators do not fit the installed torch.

The registry's torchvision is built for CUDA. Beside a CPU build of torch its operators cannot be loaded, and then
``import torchvision`` fails, and timm with it: torchvision describes the shapes of two operators, ``nms`` and ``qnms``,
that were never declared. Declaring them is enough for everything that is written in Python, transforms included.

Importing this module does it, and does nothing where torchvision is healthy or absent. It comes before the first import
of timm or torchvision in a file that uses them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import torch

__all__: list[str] = []

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[torch.library.Library] = []  # a declaration lasts as long as its library


def _repair() -> None:
    if "torchvision" in sys.modules or find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        library.define(f"{name}{_SCHEMA}")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    import_module("torchvision")


_repair()
