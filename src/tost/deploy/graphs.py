"""Models as ONNX graphs.

The native kernel is an operator that ONNX does not have. An exported model therefore computes TSSA in plain PyTorch
operations; `plain_operators` arranges for it, for this exporter or any other.

Shapes: images [B, channels, height, width], ids and mask [B, N], logits [B, K], for language models [B, T, V] at the T
tokens in `at`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tost.errors import ConfigError
from tost.generation.decode import check_causal, context_limit, evaluating
from tost.models.options import FixedSizeOptions, LanguageOptions, SequenceClassifierOptions
from tost.models.registry import model_options_of

__all__ = ["OPSETS", "Graph", "Value", "describe", "plain_operators", "write_onnx"]

OPSETS = range(18, 24)
"""Versions of the ONNX operator set that torch's exporter can write."""
LARGEST_FILE = 1_900_000_000
"""Bytes of weights up to which they are in the graph's own file, which ONNX limits to 2 GB."""

Size = tuple[int, int]
Feed = dict[str, Tensor]


@dataclass(frozen=True)
class Value:
    """An input or output of a graph.

    Attributes:
        name: Its name in the file.
        dtype: As numpy names it.
        shape: Numbers, and names for sizes that may vary.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Graph:
    """What is exported of a model.

    Attributes:
        kind: ``images``, ``sequences`` or ``language``.
        model: The model, for error messages and evaluation.
        module: Called with the inputs by position; it returns the outputs.
        inputs: In order.
        outputs: Names, in order.
        limit: Longest sequence in tokens; None for no limit.
        examples: Inputs of several sizes; tracing uses the first, and results are compared on all.
        least: Smallest value of a size that varies, where it is not 1.
    """

    kind: str
    model: nn.Module
    module: nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    limit: int | None
    examples: tuple[Feed, ...]
    least: Mapping[str, int] = field(default_factory=dict)

    def expected(self, feed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the module computes, by name."""
        with torch.no_grad(), evaluating(self.module):
            outputs = self.module(*(feed[value.name] for value in self.inputs))
        return dict(zip(self.outputs, outputs, strict=True))


@contextmanager
def plain_operators(model: nn.Module) -> Iterator[nn.Module]:
    """Let a model compute its operators in plain PyTorch as long as the context lasts.

    Args:
        model: Any model; modules of this package in it are switched to ``backend="torch"``, others stay as they are.

    Yields:
        The model itself.

    Example:
        >>> import torch, tost
        >>> from tost.deploy import plain_operators
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


def describe(model: nn.Module, image_size: int | Size | None = None) -> Graph:
    """Decide what is exported of a model.

    Args:
        model: An image model, of this package or of timm, a `SequenceClassifier`, or a causal language model. It is
            not changed.
        image_size: Size of the images, or (height, width). None leaves it open where the model takes any size, and
            otherwise takes the model's own.

    Raises:
        ConfigError: The model is none of these, does not take images of that size, or has a state that does not begin
            with zeros.
    """
    options = model_options_of(model)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes - {torch.float32}:
        raise ConfigError(f"{type(model).__name__} has weights of {_names(dtypes)}; export it after model.float().")
    language = isinstance(options, LanguageOptions) or callable(getattr(model, "forward_with_state", None))
    if image_size is not None and (language or isinstance(options, SequenceClassifierOptions)):
        raise ConfigError(
            f"image_size={image_size} is about images, and {type(model).__name__} takes none; leave it out."
        )
    if language:
        return _language(model)
    if isinstance(options, SequenceClassifierOptions):
        return _sequences(model, options)
    return _images(model, image_size)


def write_onnx(graph: Graph, path: Path, opset: int) -> None:
    """Write a graph with its weights as an ONNX file.

    Args:
        graph: What to write.
        path: The file. Weights of more than 2 GB are beside it, in ``<name>.data``.
        opset: Version of the operator set, one of `OPSETS`.

    Raises:
        ConfigError: The exporter cannot translate the model, or only with a size fixed that should vary.
    """
    if opset not in OPSETS:
        raise ConfigError(f"opset={opset} cannot be written; use one of {OPSETS[0]} to {OPSETS[-1]}.")
    example = graph.examples[0]
    sizes: dict[str, Any] = {}
    shapes = tuple(
        {
            axis: sizes.setdefault(size, torch.export.Dim(size, min=graph.least.get(size)))
            for axis, size in enumerate(value.shape)
            if isinstance(size, str)
        }
        for value in graph.inputs
    )
    # Strides of a view would become conditions on sizes.
    given = tuple(example[value.name].contiguous() for value in graph.inputs)
    try:
        with _quiet(), plain_operators(graph.module), evaluating(graph.module), torch.no_grad():
            # Traced here and not by the exporter, which would fix a size that it cannot leave open.
            program = torch.export.export(graph.module, given, dynamic_shapes=(shapes,), strict=False)
            written: Any = torch.onnx.export(
                program,
                input_names=[value.name for value in graph.inputs],
                output_names=list(graph.outputs),
                dynamo=True,
                opset_version=opset,
                verbose=False,
            )
        _name_sizes(written.model.graph, graph)
        weights = sum(x.numel() * x.element_size() for x in graph.module.state_dict().values())
        written.save(str(path), external_data=weights > LARGEST_FILE)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:  # the exporter's own
        raise ConfigError(f"{type(graph.model).__name__} cannot be exported: {_reason(error)}") from error


def _name_sizes(written: Any, graph: Graph) -> None:
    """Name the sizes that vary; a size that should vary and does not is an error."""
    for value, tensor in zip(graph.inputs, written.inputs, strict=True):
        for axis, size in enumerate(value.shape):
            if isinstance(size, str):
                if isinstance(tensor.shape[axis], int):
                    raise ValueError(f"it fixes the size {size!r} of {value.name} at {tensor.shape[axis]}")
                tensor.shape[axis] = size
    for tensor in written.outputs:
        if isinstance(tensor.shape[0], int):
            raise ValueError(f"it fixes the batch size of its output at {tensor.shape[0]}")
        tensor.shape[0] = "batch"


def _reason(error: Exception) -> str:
    """Return the line of an exporter's error that says what is wrong, of the error that caused the others."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [*filter(None, map(str.strip, str(error).splitlines()))]
    details = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return next(iter(details + lines), type(error).__name__).partition(". ")[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings and log lines of the exporter about itself off the terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for kind in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.filterwarnings("ignore", category=kind)
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


# --- The three kinds


class _Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> tuple[Tensor]:
        return (self.model(*given),)


def _images(model: nn.Module, image_size: int | Size | None) -> Graph:
    options: Any = model_options_of(model)
    config: Mapping[str, Any] = getattr(model, "default_cfg", None) or {}
    patch, own = getattr(options, "patch_size", 0), config.get("input_size", ())
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if isinstance(options, FixedSizeOptions):
        size = size or options.image_shape
    elif not patch:  # a model of timm
        if size is None and not own:
            raise ConfigError(
                f"{type(model).__name__} does not say which images it takes; give image_size, or export an image "
                "model, a sequence classifier or a language model."
            )
        size = size or tuple(own[1:])
    sized = model
    try:
        if size is not None and isinstance(options, FixedSizeOptions) and size != options.image_shape:
            sized = deepcopy(model)  # its positions are interpolated once, and not by every run
            sized.set_input_size(size)  # type: ignore[operator]
        channels = getattr(options, "in_chans", own[0] if own else 3)
        shape: tuple[int | str, ...] = ("batch", channels, *(size or ("height", "width")))
        tried = [size, size] if size else [(3 * patch, 5 * patch), (4 * patch, 2 * patch)]
        examples = [
            {"images": torch.randn(batch, channels, *sides)} for batch, sides in zip((2, 1), tried, strict=True)
        ]
        values = (Value("images", "float32", shape),)
        graph = Graph("images", model, _Classifier(sized), values, ("logits",), None, tuple(examples))
        graph.expected(examples[-1])
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        sides = f"{size[0]} x {size[1]} pixels" if size else "any size"
        raise ConfigError(f"{type(model).__name__} cannot take images of {sides}: {_reason(error)}") from error
    return graph if size else replace(graph, least={"height": 2 * patch, "width": 2 * patch})


def _sequences(model: nn.Module, options: SequenceClassifierOptions) -> Graph:
    towers: tuple[int, ...] = (2,) if options.towers == 2 else ()
    shape: tuple[int | str, ...] = ("batch", *towers, "tokens")
    ids = options.input == "tokens"
    values = Value("ids", "int64", shape) if ids else Value("values", "float32", (*shape, options.in_features or 1))

    def example(batch: int, tokens: int) -> Feed:
        sizes = (batch, *towers, tokens)
        x = torch.randint(options.vocab_size or 1, sizes) if ids else torch.rand(*sizes, options.in_features or 1)
        mask = torch.ones(sizes, dtype=torch.bool)
        mask[0, ..., tokens - tokens // 3 :] = False
        return {values.name: x, "mask": mask}

    lengths = [min(length, options.max_length) for length in (12, 31, 5)]
    examples = tuple(example(batch, length) for batch, length in zip((2, 3, 1), lengths, strict=True))
    inputs = (values, Value("mask", "bool", shape))
    return Graph("sequences", model, _Classifier(model), inputs, ("logits",), options.max_length, examples)


class _Language(nn.Module):
    """A language model as a function of tensors.

    Args:
        model: The model.
        state: A state of it, for its structure.
    """

    def __init__(self, model: nn.Module, state: Any) -> None:
        super().__init__()
        self.model = model
        self._leaves, self._tree = pytree.tree_flatten(state)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        ids, at, *state = given
        remaining = iter(state)
        # A tensor without elements says only that something is absent, such as padding.
        before = pytree.tree_unflatten(
            [
                next(remaining) if leaf.numel() else leaf.new_zeros(ids.shape[0], *leaf.shape[1:])
                for leaf in self._leaves
            ],
            self._tree,
        )
        model: Any = self.model
        if callable(getattr(model, "features_with_state", None)):
            x, after = model.features_with_state(ids, before)
            logits = model.logits(x.index_select(1, at))
        else:
            logits, after = model.forward_with_state(ids, before)
            logits = logits.index_select(1, at)
        found = pytree.tree_leaves(after)
        return logits, *(x for x, leaf in zip(found, self._leaves, strict=True) if leaf.numel())


def _language(model: nn.Module) -> Graph:
    vocabulary, limit = check_causal(model).options.vocab_size, context_limit(model)
    states = [_state_after(model, torch.randint(vocabulary, (2, length))) for length in (3, 2)]
    module = _Language(model, states[0])
    found = pytree.tree_flatten_with_path(states[0])[0]
    inputs = [Value("ids", "int64", ("batch", "tokens")), Value("at", "int64", ("wanted",))]
    names = []
    for (path, leaf), other in zip(found, pytree.tree_leaves(states[1]), strict=True):
        if leaf.numel():
            name = "".join(map(str, path)).replace("[", ".").replace("]", "").strip(".")
            shape = (
                size if size == less else "past" for size, less in zip(leaf.shape[1:], other.shape[1:], strict=True)
            )
            inputs.append(Value(f"state.{name}", str(leaf.dtype).removeprefix("torch."), ("batch", *shape)))
            names.append(f"after.{name}")
    graph = Graph("language", model, module, tuple(inputs), ("logits", *names), limit, ())
    sizes = [(2, 3, 4), (1, 0, 7), (1, 5, 1), (3, 4, 9)]  # sequences, tokens before, new tokens
    fitting = [size for size in sizes if limit is None or size[1] + size[2] <= limit]
    if not fitting:
        raise ConfigError(f"{type(model).__name__} takes {limit} tokens, which is too few to be exported; it needs 7.")
    graph = replace(graph, examples=tuple(_text(graph, vocabulary, *size) for size in fitting))
    _check_start(graph)
    return graph


def _state_after(model: Any, ids: Tensor) -> Any:
    with plain_operators(model), evaluating(model), torch.no_grad():
        return model.forward_with_state(ids)[1]


def start(inputs: Sequence[Value], batch: int) -> Feed:
    """Return the state before the first token: zeros."""
    return {
        value.name: torch.zeros(
            [batch if size == "batch" else 0 if isinstance(size, str) else size for size in value.shape],
            dtype=getattr(torch, value.dtype),
        )
        for value in inputs
        if value.name.startswith("state.")
    }


def _text(graph: Graph, vocabulary: int, batch: int, before: int, tokens: int) -> Feed:
    """Return inputs of a language model in the middle of a text."""
    ids = torch.randint(vocabulary, (batch, before + tokens))
    state = start(graph.inputs, batch)
    if before:
        leaves = pytree.tree_leaves(_state_after(graph.model, ids[:, :before]))
        state = dict(zip(state, (leaf for leaf in leaves if leaf.numel()), strict=True))
    return {"ids": ids[:, before:], "at": torch.arange(tokens)[-2:], **state}


def _check_start(graph: Graph) -> None:
    """Raise unless a state of zeros is the state before the first token."""
    feed, model = graph.examples[1], cast(Any, graph.model)
    with plain_operators(model), evaluating(model), torch.no_grad():
        expected = model.forward_with_state(feed["ids"])[0].index_select(1, feed["at"])
    if not torch.allclose(graph.expected(feed)["logits"], expected, rtol=1e-4, atol=1e-4):
        raise ConfigError(f"{type(model).__name__} cannot be exported: its state does not begin with zeros.")


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
