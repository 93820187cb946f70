"""Weights and activations of an ONNX graph in 8 bits, by ONNX Runtime's post-training quantization.

Products with weights are quantized; convolutions, the operator of TSSA, norms and softmax stay in float32. OpenVINO
reads the same graph and computes the products in 8 bits too.

Ranges are symmetric: with zero points, ONNX Runtime 1.31 computes fused products wrong on processors with AVX-VNNI
(compare microsoft/onnxruntime#16105 and #26324), and OpenVINO 2026.4 quantized convolutions of strided patches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tost.deploy.graphs import Graph, start
from tost.errors import ConfigError

__all__ = ["quantize"]

Calibration = Iterable[Mapping[str, Any]]
"""Inputs by name, as arrays or tensors; a mask and the state of a language model may be left out."""


def quantize(graph: Graph, source: Path, target: Path, calibration: Calibration) -> dict[str, Any]:
    """Write the quantized graph, with the ranges of activations taken from data.

    Args:
        graph: What `source` was made from.
        source: ONNX file in float32.
        target: File to write.
        calibration: Typical inputs. A few hundred samples are enough.

    Returns:
        The first batch, with everything that the graph takes.

    Raises:
        ConfigError: There is no data, or it does not fit the model.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quant_pre_process, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, feeds: Iterator[dict[str, Any]]) -> None:
            self.feeds = feeds
            self.first: dict[str, Any] = {}

        def get_next(self) -> dict[str, Any] | None:
            feed = next(self.feeds, None)
            self.first = self.first or feed or {}
            return feed

    reader, prepared = Reader(_feed(graph, batch) for batch in calibration), source.with_suffix(".prepared.onnx")
    root, before = logging.getLogger(), logging.getLogger().level
    try:
        root.setLevel(logging.ERROR)  # advice about the steps that are taken here
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared),
            str(target),
            reader,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True, "ActivationSymmetric": True},
        )
    except ConfigError:
        raise
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if reader.first else "there is no data"
        raise ConfigError(f"the model cannot be quantized on this data: {reason}") from error
    finally:
        root.setLevel(before)
        prepared.unlink(missing_ok=True)
    return reader.first


def _feed(graph: Graph, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with everything that the graph takes."""
    main = graph.inputs[0]
    if main.name not in batch:
        raise ConfigError(f"the data to quantize on has {', '.join(batch)}, but the model needs {main.name}.")
    feed = {name: np.asarray(x) for name, x in batch.items()}
    x = feed[main.name] = feed[main.name].astype(main.dtype)
    for value in graph.inputs:
        if value.name == "mask" and "mask" not in feed:
            feed["mask"] = np.ones(x.shape[: len(value.shape)], dtype=bool)
        if value.name == "at":
            feed["at"] = np.arange(x.shape[1])
    feed |= {name: tensor.numpy() for name, tensor in start(graph.inputs, x.shape[0]).items()}
    return {value.name: feed[value.name] for value in graph.inputs}
