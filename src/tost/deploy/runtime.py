"""Run an exported model. Needs numpy and onnxruntime or openvino, no torch.

Command line, for a language model of bytes: ``python runtime.py "Once upon" 200`` continues a text by the likeliest
bytes. ``python runtime.py`` lists inputs and outputs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

State = tuple[int, dict[str, Any]]  # tokens so far, and the model's arrays


class Model:
    """An exported model.

    Args:
        folder: Where ``export.json`` and the graph are.
        threads: Threads to use; 0 for the runtime's own choice.
        precision: Arithmetic of OpenVINO: ``f32`` is exact, ``bf16`` is faster on processors that have it.
    """

    def __init__(self, folder: str | Path = Path(__file__).parent, threads: int = 0, precision: str = "f32") -> None:
        self.about = json.loads((Path(folder) / "export.json").read_text())
        graph = str(Path(folder) / self.about["graph"])
        if self.about["format"] == "onnx":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
            self._run: Callable[[dict[str, Any]], list[Any]] = lambda feed: session.run(None, feed)
        else:
            import openvino

            hints = {"INFERENCE_PRECISION_HINT": precision, **({"INFERENCE_NUM_THREADS": threads} if threads else {})}
            request = openvino.Core().compile_model(graph, "CPU", hints).create_infer_request()
            self._run = lambda feed: list(request.infer(feed).values())

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        """Return the outputs for the inputs, by name. A mask may be left out where everything is real."""
        first = self.about["inputs"][0]
        if any(x["name"] == "mask" for x in self.about["inputs"]) and inputs.get("mask") is None:
            ids = np.asarray(inputs[first["name"]])
            inputs["mask"] = np.ones(ids.shape[: len(first["shape"]) - (first["name"] == "values")], bool)
        sizes: dict[str, int] = {}
        for x in self.about["inputs"]:
            array = inputs[x["name"]] = np.ascontiguousarray(inputs[x["name"]])
            fits = array.dtype == x["dtype"] and array.ndim == len(x["shape"])
            for want, size in zip(x["shape"], array.shape if fits else (), strict=False):
                least = self.about["least"].get(want, 0)
                fits &= size == (sizes.setdefault(want, size) if isinstance(want, str) else want) and size >= least
            if not fits:
                given = f"{array.dtype} {list(array.shape)}"
                raise ValueError(f"{x['name']} is {given}; it needs {x['dtype']} {x['shape']}, {self.about['least']}.")
        if self.about["kind"] == "sequences":
            self._check_length(int(inputs["mask"].sum(-1).max(initial=0)))
        outputs = self._run({x["name"]: inputs[x["name"]] for x in self.about["inputs"]})
        return dict(zip(self.about["outputs"], outputs, strict=True))

    def start(self, batch: int = 1) -> State:
        """Return the state of a language model before the first token."""
        state = [x for x in self.about["inputs"] if x["name"].startswith("state.")]
        shapes = [[{"batch": batch, "past": 0}.get(size, size) for size in x["shape"]] for x in state]
        return 0, {x["name"]: np.zeros(shape, x["dtype"]) for x, shape in zip(state, shapes, strict=True)}

    def advance(self, ids: Any, state: State, at: Any = (-1,)) -> tuple[Any, State]:
        """Read tokens [B, N]; return the logits [B, T, V] after the T of them at `at`, and the state after all."""
        seen = state[0] + np.shape(ids)[1]
        self._check_length(seen)
        at = np.asarray(at, np.int64) % np.shape(ids)[1]
        outputs = self(ids=np.asarray(ids, np.int64), at=at, **state[1])
        logits = outputs.pop("logits")
        return logits, (seen, {f"state.{name.removeprefix('after.')}": x for name, x in outputs.items()})

    def greedy(self, ids: list[int], count: int, piece: int = 512) -> Iterator[int]:
        """Continue one text by the likeliest tokens; the prompt is read in pieces."""
        state = self.start()
        for begin in range(0, len(ids), piece):
            logits, state = self.advance([ids[begin : begin + piece]], state)
        for left in reversed(range(count)):
            token = int(logits[0, -1].argmax())
            yield token
            if left:
                logits, state = self.advance([[token]], state)

    def _check_length(self, tokens: int) -> None:
        limit = self.about["limit"]
        if limit is not None and tokens > limit:
            raise ValueError(f"the sequence has {tokens} tokens, but this model has {limit} positions.")


if __name__ == "__main__":
    model = Model()
    if len(sys.argv) > 1 and model.about["kind"] == "language":
        for byte in model.greedy(list(sys.argv[1].encode()), int(sys.argv[2] if sys.argv[2:] else 200)):
            sys.stdout.buffer.write(bytes([byte]))
            sys.stdout.flush()
    else:
        print(json.dumps(model.about, indent=2))  # noqa: T201
