"""Image models as ONNX files.

The native kernel is an operator that ONNX does not know. An exported model therefore computes TSSA in plain PyTorch
operations, which ONNX has all of; `plain_operators` arranges for it, for this exporter or any other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import nn

from tost.errors import ConfigError

__all__ = ["export_onnx", "plain_operators"]


@contextmanager
def plain_operators(model: nn.Module) -> Iterator[nn.Module]:
    """Let a model compute its operators in plain PyTorch as long as the context lasts.

    Args:
        model: Any model; modules of this package in it are switched to ``backend="torch"``, others stay as they are.

    Yields:
        The model itself.

    Example:
        >>> import torch, tost
        >>> from tost.integrations.onnx import plain_operators
        >>> model = tost.create_model("tost_mini").eval()
        >>> with plain_operators(model):
        ...     program = torch.export.export(model, (torch.randn(1, 3, 32, 32),))
    """
    switched = [module for module in model.modules() if isinstance(getattr(module, "backend", None), str)]
    before = [module.backend for module in switched]
    try:
        for module in switched:
            module.backend = "torch"  # type: ignore[assignment]
        yield model
    finally:
        for module, backend in zip(switched, before, strict=True):
            module.backend = backend


def export_onnx(
    model: nn.Module, path: str | PathLike[str], *, image_size: int | tuple[int, int], in_chans: int | None = None
) -> None:
    """Write an image model as an ONNX file, to be run with batches of any size.

    The model is written as it evaluates: without dropout, with the running statistics of its batch norms. It has the
    input ``images`` ``[batch, channels, height, width]`` and the output ``logits``. Needs the packages onnx and
    onnxscript.

    Args:
        model: An image model, of this package or of timm.
        path: File to write. It holds the weights, too, which ONNX allows for up to 2 GB.
        image_size: Size of the images, or (height, width). It is fixed in the file.
        in_chans: Channels of the images; None asks the model.

    Example:
        >>> import tost
        >>> from tost.integrations.onnx import export_onnx
        >>> model = tost.create_model("tost_tiny_patch16_224")
        >>> export_onnx(model, "tost_tiny.onnx", image_size=224)    # doctest: +SKIP

    Raises:
        ConfigError: The model takes no images, or cannot be exported for batches of any size.
    """
    if hasattr(model, "forward_with_state") or hasattr(getattr(model, "options", None), "vocab_size"):
        raise ConfigError(
            f"{type(model).__name__} takes tokens, and export_onnx writes image models; export it yourself, see "
            "plain_operators and torch.export, or generate with tost.generate."
        )
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    like = next(model.parameters())
    channels = getattr(model, "in_chans", 3) if in_chans is None else in_chans
    images = torch.zeros(2, channels, *sides, dtype=like.dtype, device=like.device)
    training = model.training
    try:
        with plain_operators(model.eval()), torch.no_grad(), warnings.catch_warnings():
            # The exporter copies its own trees in a way that it has deprecated.
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            program: Any = torch.onnx.export(
                model,
                (images,),
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
            graph = program.model.graph
            if any(isinstance(value.shape[0], int) for value in (*graph.inputs, *graph.outputs)):
                raise ValueError("it computes something else for another number of images")
            program.save(str(path), external_data=False)
    except (RuntimeError, TypeError, ValueError) as error:  # the exporter's own, all of them
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise ConfigError(f"{type(model).__name__} cannot be exported with batches of any size: {reason}") from error
    finally:
        model.train(training)
