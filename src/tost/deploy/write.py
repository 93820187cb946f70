"""Folders with an exported model: the graph, a description, a runner and the tokenizer."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from tost._io import DRAFT_PREFIX, write_json, writing
from tost._lazy import naming_extras
from tost._machine import VERSION
from tost.data.text.tokenizers import DataTokenizer, save_tokenizer
from tost.deploy import runtime
from tost.deploy.graphs import Graph, describe, write_onnx
from tost.deploy.int8 import Calibration, quantize
from tost.errors import ConfigError
from tost.models.registry import model_options_of

__all__ = ["DESCRIPTION", "Exported", "export"]

Format = Literal["onnx", "openvino"]
DESCRIPTION = "export.json"
RUNNER = "runtime.py"
BOUNDS = {"float32": 1e-4, "int8": 0.5}
"""Largest difference from torch, relative to the largest output of at least 1; in 8 bits it excludes broken kernels."""


@dataclass(frozen=True)
class Exported:
    """A model that was written.

    Attributes:
        folder: Where it is.
        kind: ``images``, ``sequences`` or ``language``.
        format: Runtime that it is for.
        precision: ``float32`` or ``int8``.
        error: Largest difference from torch, relative to the largest output of at least 1; in 8 bits on the first batch
            of `calibration`.
        bytes: Size of the graph with its weights.
    """

    folder: Path
    kind: str
    format: str
    precision: str
    error: float
    bytes: int


def export(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    format: Format = "onnx",
    image_size: int | tuple[int, int] | None = None,
    calibration: Calibration | None = None,
    tokenizer: DataTokenizer | None = None,
    opset: int = 20,
    force: bool = False,
) -> Exported:
    """Write a model for ONNX Runtime or OpenVINO, with a runner that needs no torch.

    The model is written as it evaluates. The result is a folder with the graph (``model.onnx``, or ``model.xml`` with
    ``model.bin``), its description ``export.json``, the runner ``runtime.py``, and the tokenizer if there is one. The
    graph is run in its runtime and compared with torch before the folder gets its name.

    Image models take batches of any size; sequence classifiers take ids ``[batch, tokens]`` or values
    ``[batch, tokens, F]`` with a mask, of any length up to the model's. A language model is one graph that continues
    texts from a state: it reads a prompt, a piece of it or one token, and returns the logits at the tokens ``at`` and
    the state after all. The state of TSSA has a constant size; that of softmax attention grows.

    Args:
        model: An image model of this package or of timm, a sequence classifier, or a causal language model.
        path: Folder to write.
        format: ``onnx`` or ``openvino``.
        image_size: Size of the images, or (height, width). None leaves it open where the model takes any size, and
            otherwise takes the model's own.
        calibration: Batches of typical inputs by name, as arrays or tensors, such as ``{"images": images}``. With them
            the model is quantized to 8 bits.
        tokenizer: Tokenizer of a language model, to be written beside it.
        opset: Version of the ONNX operator set.
        force: Replace an earlier export.

    Returns:
        What was written.

    Raises:
        ConfigError: The model cannot be exported so, or something else is at `path`.
        MissingPackageError: A package of the extra ``deploy`` is missing.
        StorageError: The disk is full or cannot be written.

    Example:
        >>> import tost
        >>> model = tost.create_model("tost_tiny_patch16_224")
        >>> tost.export(model, "tost_tiny", image_size=224).precision    # doctest: +SKIP
        'float32'
    """
    if format not in get_args(Format):
        raise ConfigError(f"format={format!r} is unknown; use {' or '.join(get_args(Format))}.")
    target = Path(path)
    _check_target(target, force=force)
    graph = describe(model, image_size)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        naming_extras(),
        writing(target),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=DRAFT_PREFIX, ignore_cleanup_errors=True) as work,
    ):
        draft = Path(work) / target.name
        draft.mkdir()
        graph = _write_graph(graph, Path(work), draft, format, opset, calibration)
        about = _describe(graph, format, opset, "float32" if calibration is None else "int8")
        if tokenizer is not None:
            save_tokenizer(tokenizer, draft)
        shutil.copyfile(runtime.__file__, draft / RUNNER)
        write_json(draft / DESCRIPTION, about)
        error, bound = largest_error(graph, runtime.Model(draft)), BOUNDS[about["precision"]]
        if not error <= bound:
            raise ConfigError(
                f"{type(model).__name__} was exported, but its outputs in {format}, {about['precision']}, differ from "
                f"torch's by {error:.2g}, more than {bound:g}; nothing was written."
            )
        write_json(draft / DESCRIPTION, about | {"largest_error": error})
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    size = sum(file.stat().st_size for file in target.glob("model.*"))
    return Exported(target, graph.kind, format, about["precision"], error, size)


def largest_error(graph: Graph, served: runtime.Model) -> float:
    """Return the largest difference of a runner from torch, relative to the largest output of at least 1."""
    worst = 0.0
    for feed in graph.examples:
        found = served(**{name: x.numpy() for name, x in feed.items()})
        for name, x in graph.expected(feed).items():
            wanted = x.double().numpy()
            difference = np.abs(found[name] - wanted).max(initial=0.0) / max(1.0, np.abs(wanted).max(initial=0.0))
            worst = max(worst, float(difference)) if difference == difference else float("inf")
    return worst


def _check_target(target: Path, *, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir() or not ((target / DESCRIPTION).is_file() or not any(target.iterdir())):
        raise ConfigError(f"{target} exists, is not an exported model and was left as it is; give another place.")
    if (target / DESCRIPTION).is_file() and not force:
        raise ConfigError(f"{target} holds an exported model; add --force (force=True) to replace it.")


def _write_graph(
    graph: Graph, work: Path, draft: Path, format: Format, opset: int, calibration: Calibration | None
) -> Graph:
    """Write the files of the graph into `draft`; `work` takes what is needed on the way.

    Returns:
        The graph, with the examples on which its results are compared.
    """
    whole = work / "whole" if format == "openvino" or calibration is not None else draft
    whole.mkdir(exist_ok=True)
    source = whole / "model.onnx"
    write_onnx(graph, source, opset)
    if calibration is not None:
        target = (work if format == "openvino" else draft) / source.name
        first = quantize(graph, source, target, calibration)
        graph = replace(graph, examples=({name: torch.from_numpy(x) for name, x in first.items()},))
        source = target
    if format == "openvino":
        import openvino

        # Not openvino.convert_model, which reports its use to the makers.
        openvino.save_model(openvino.Core().read_model(str(source)), str(draft / "model.xml"), compress_to_fp16=False)
    return graph


def _describe(graph: Graph, format: Format, opset: int, precision: str) -> dict[str, Any]:
    """Return the content of ``export.json``."""
    options = model_options_of(graph.model)
    return {
        "format": format,
        "graph": "model.onnx" if format == "onnx" else "model.xml",
        "kind": graph.kind,
        "precision": precision,
        "inputs": [asdict(value) for value in graph.inputs],
        "outputs": list(graph.outputs),
        "least": dict(graph.least),
        "limit": graph.limit,
        "opset": opset,
        "model": type(graph.model).__name__,
        "options": None if options is None else options.model_dump(mode="json"),
        "tost": VERSION,
        "torch": torch.__version__,
    }
