"""Capture tokens, statistics and the residual stream of each layer while a model runs.

Layers are found by class, so that models of this package, of timm and of transformers all work. Shapes:
x [B, N, C] (batch, tokens, width), w [B, N, H, D] with C = H * D, pi [B, N, H], mask [B, N].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tost.errors import ConfigError
from tost.nn import Block, CausalTSSAttention, GatedTSSAttention, TSSAttention
from tost.nn.block import with_neighbours
from tost.objective import spectral_sum
from tost.ops import causal_membership, gated_tssa, membership
from tost.ops._blocks import in_blocks, matrices, products, shrink
from tost.ops._inputs import GatedInputs, relative_gates
from tost.ops._numerics import MASS_FLOOR, num_tokens, statistics_dtype, zero_padding
from tost.ops._scan import linear_recurrence, prefix_sums

Place = Literal["tokens", "input", "attention", "output"]
"""Places of capture: the projected tokens, and the residual stream before the block, after its attention and after the
block."""

Batch = Tensor | Mapping[str, Any]
"""A tensor for the model; ``{"inputs": x, "mask": m}``; or what a transformers model takes, ``{"input_ids": ids}``."""


@dataclass(frozen=True)
class Statistics:
    """The statistics that a layer applies to its tokens: ``y_b = -weight (I + S_b)^{-1} (w_b - mean_b)``.

    Layers of the paper and those in blocks have memberships, ``weight = pi`` and ``mean = 0``. Gated layers have none:
    ``weight = 1``, mean and covariance S of each block belong to a window that gates set. There the share of a head in
    the coding-rate gain of a token takes the place of the membership.

    Attributes:
        w: Projected tokens, 0 for padding, ``[B, N, H, D]``, float32 or better.
        mask: Real tokens, bool ``[B, N]``; None if all are.
        block_size: Features in a block, g.
        is_causal: Whether tokens meet those before them only.
        pi: Memberships, ``[B, N, H]``, 0 for padding; None in gated layers.
        write: Write gates, ``[B, N, H, D / g]``; None in layers without gates.
    """

    w: Tensor
    mask: Tensor | None
    block_size: int
    is_causal: bool
    pi: Tensor | None = None
    write: Tensor | None = None

    @cached_property
    def gates(self) -> Tensor | None:
        """Share of each token in its window when it is written, ``[B, N, H, D / g]``; None without gates."""
        return None if self.write is None else relative_gates(GatedInputs(self.w, self.write, self.mask), None)[0]

    @cached_property
    def mean(self) -> Tensor | None:
        """Means of the windows up to each token, ``[B, N, H, D]``; None without gates."""
        if self.gates is None:
            return None
        each = self.gates.repeat_interleave(self.block_size, dim=-1)
        return _recurrence(1 - each, each * self.w)

    @cached_property
    def moments(self) -> Tensor:
        """S as packed products, ``[B, N, H, D(g+1)/2]``, or ``[B, 1, H, D(g+1)/2]`` if all tokens share them."""
        g = self.block_size
        if self.gates is None:
            assert self.pi is not None
            mass = self.pi.unsqueeze(-1)
            total = prefix_sums if self.is_causal else _sum_of_tokens
            return total(mass * products(self.w, g)) / (total(mass) + MASS_FLOOR)
        each = torch.cat([self.gates.repeat_interleave(g - k, dim=-1) for k in range(g)], dim=-1)
        return _recurrence(1 - each, (1 - each) * each * products(self.error(), g))

    def blocks(self) -> Tensor:
        """Return S as matrices, ``[B, N or 1, H, D / g, g, g]``."""
        return matrices(self.moments, self.w.shape[-1], self.block_size)

    def deviation(self) -> Tensor:
        """Return ``w - mean``, ``[B, N, H, D]``; 0 for padding."""
        return self.w if self.mean is None else zero_padding(self.w - self.mean, self.mask)

    def error(self) -> Tensor:
        """Return w minus its prediction, the mean of the window before the token; w where there is no mean."""
        if self.mean is None:
            return self.w
        return zero_padding(self.w - F.pad(self.mean[:, :-1], (0, 0, 0, 0, 1, 0)), self.mask)

    def gain(self) -> Tensor:
        """Return the coding-rate gain ``1/2 sum_b log(1 + u_b^T (I + S_b)^{-1} u_b)``, u the deviation.

        It is what one more token like this adds to the coding rate of a head.

        Returns:
            ``[B, N, H]`` in nats; 0 for padding.
        """
        u = self.deviation()
        if self.write is None:
            squares = u * shrink(u, self.moments, self.block_size)
        else:  # the operator has solved the equations
            squares = -u * gated_tssa(self.w, self.write, mask=self.mask)
        return 0.5 * in_blocks(squares, self.block_size).sum(dim=-1).clamp_min(0).log1p().sum(dim=-1)

    def share(self) -> Tensor:
        """Return the share of each head in a token, ``[B, N, H]``: its membership, or its coding-rate gain over all.

        Rows add up to 1, those of padding are 0. Without any gain, as at the first token, heads have equal shares.
        """
        if self.pi is not None:
            return self.pi
        gain = self.gain()
        total = gain.sum(dim=-1, keepdim=True)
        return zero_padding(torch.where(total > 0, gain / total, 1 / gain.shape[-1]), self.mask)

    def rate(self) -> Tensor:
        """Return the compression objective R_c^var of each sequence, ``[B]``; see `tost.analysis.rates`."""
        if self.pi is None:
            every = spectral_sum(self.blocks()).sum(dim=(-2, -1))
            return 0.5 * zero_padding(every, self.mask).sum(dim=1) / num_tokens(self.w, self.mask).clamp_min(1)
        mass = self.pi.sum(dim=1)
        share = mass / mass.sum(dim=-1, keepdim=True).clamp_min(1)
        return 0.5 * (share * spectral_sum(self.blocks()[:, -1]).sum(dim=-1)).sum(dim=-1)

    def weights(self) -> Tensor:
        """Return the weight of each token in the statistics after the last one.

        Returns:
            ``[B, N, H, P]``, adding up to 1 over the tokens; P is D / g in gated layers, otherwise 1.
        """
        if self.gates is None:
            assert self.pi is not None
            return (self.pi / self.pi.sum(dim=1, keepdim=True).clamp_min(MASS_FLOOR)).unsqueeze(-1)
        kept = F.pad((1 - self.gates).flip(1).cumprod(dim=1)[:, :-1], (0, 0, 0, 0, 1, 0), value=1)
        return self.gates * kept.flip(1)


@dataclass(frozen=True)
class AttentionLayer:
    """A TSSA layer of a model.

    Attributes:
        index: Its number, from 0.
        name: The path of the attention module in the model.
        attention: The attention module.
        block: The residual block around it; None if it is part of another network.
    """

    index: int
    name: str
    attention: TSSAttention | CausalTSSAttention | GatedTSSAttention = field(repr=False)
    block: Block | None = field(repr=False)

    @property
    def is_causal(self) -> bool:
        """Whether tokens meet those before them only."""
        return not isinstance(self.attention, TSSAttention)

    @property
    def is_gated(self) -> bool:
        """Whether gated windows take the place of memberships."""
        return isinstance(self.attention, GatedTSSAttention)

    @property
    def scale(self) -> float:
        """Factor between the projection's output and the operator's tokens; 1 but for a paper form."""
        eps = None if isinstance(self.attention, GatedTSSAttention) else self.attention.paper.eps
        return 1.0 if eps is None else math.sqrt(self.attention.embed_dim) / eps

    def temperatures(self) -> Tensor:
        """Return the multiplier of each head's energy, ``[H]``; NaN in a gated layer, which has none."""
        if isinstance(self.attention, GatedTSSAttention):
            return torch.full((self.attention.num_heads,), math.nan)
        return self.attention.temperature.detach().expand(self.attention.num_heads)

    def _membership(self, w: Tensor, mask: Tensor | None) -> Tensor:
        """Return the memberships that a layer without gates gives to tokens w [B, N, H, D], ``[B, N, H]``."""
        attention = self.attention
        if isinstance(attention, CausalTSSAttention):
            return causal_membership(w, self.temperatures(), attention.bias(), mask=mask)
        assert isinstance(attention, TSSAttention)
        temperature = self.temperatures() if attention.normalize else self.temperatures() / self.scale**2
        return membership(w, temperature, mask=mask, normalize=attention.normalize)

    @torch.no_grad()
    def statistics(self, w: Tensor, x: Tensor, mask: Tensor | None = None) -> Statistics:
        """Return the statistics that the layer applies to tokens.

        Args:
            w: Projected tokens, ``[B, N, H, D]``.
            x: Input of the attention that they come from, ``[B, N, C]``; gates depend on it.
            mask: Real tokens, bool ``[B, N]``.
        """
        attention, g = self.attention, getattr(self.attention, "block_size", 1)
        w = zero_padding(w.to(statistics_dtype(w.dtype)), mask)
        if not isinstance(attention, GatedTSSAttention):
            return Statistics(w, mask, g, self.is_causal, pi=self._membership(w, mask).to(w.dtype))
        return Statistics(w, mask, g, self.is_causal, write=attention.write(x).to(w.dtype))

    def subspaces(self) -> Tensor:
        """Return the bases U_k: ``[H, C, D]``, the rows of the projection's weight by head, transposed."""
        attention = self.attention
        weight = attention.proj_in.weight.detach() * self.scale
        return weight.view(attention.num_heads, attention.head_dim, attention.embed_dim).mT

    def split(self, projected: Tensor) -> Tensor:
        """Return the projection's output ``[B, N, C]`` as the operator's tokens, ``[B, N, H, D]``."""
        w = projected.reshape(*projected.shape[:-1], self.attention.num_heads, self.attention.head_dim)
        return w if self.scale == 1.0 else w * self.scale


def _sum_of_tokens(x: Tensor) -> Tensor:
    return x.sum(dim=1, keepdim=True)


def _recurrence(factor: Tensor, value: Tensor) -> Tensor:
    """Return ``h[n] = factor[n] h[n-1] + value[n]`` for tensors ``[B, N, H, F]``, from zero."""
    start = value.new_zeros(value.shape[0], value.shape[2] * value.shape[3])
    return linear_recurrence(factor.flatten(2), value.flatten(2), start).reshape(value.shape)


@dataclass
class LayerRecord:
    """One layer in one forward pass; what was not asked for is None.

    Attributes:
        layer: Which layer.
        mask: Real tokens, bool ``[B, N]``; None if all are.
        grid: Rows and columns of the tokens, if the model passes them to its blocks.
        tokens: Projected tokens w that went into the operator, ``[B, N, H, D]``.
        x: Input of the attention, ``[B, N, C]``, recorded with the tokens.
        input: The residual stream before the block, ``[B, N, C]``.
        attention: The stream after the attention's branch.
        output: The stream after the block.
    """

    layer: AttentionLayer
    mask: Tensor | None = None
    grid: tuple[int, int] | None = None
    tokens: Tensor | None = None
    x: Tensor | None = None
    input: Tensor | None = None
    attention: Tensor | None = None
    output: Tensor | None = None

    def stream(self, place: Place) -> Tensor:
        """Return what was captured at a place."""
        found: Tensor | None = getattr(self, place)
        if found is None:
            raise ValueError(f"{place!r} was not captured; add it to `what`.")
        return found

    def statistics(self) -> Statistics:
        """Return the statistics of the captured tokens."""
        w = self.stream("tokens")
        assert self.x is not None
        return self.layer.statistics(w, self.x, self.mask)

    def share(self) -> Tensor:
        """Return the share of each head in the captured tokens, ``[B, N, H]``; see `Statistics.share`."""
        return self.statistics().share()

    def project(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the layer to other tokens z: return its attention's input, ``[B, N, C]``, and the projected tokens."""
        block = self.layer.block
        seen = z
        if block is not None:
            seen = with_neighbours(z, block.conv_block, self.mask, self.grid)
            seen = block.norm1(seen) if block.norm == "pre" else seen
            seen = with_neighbours(seen, block.conv, self.mask, self.grid)
        return seen, self.layer.split(self.layer.attention.proj_in(seen))


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Return the TSSA layers of a model, in order; none for other models.

    Args:
        model: Any module that holds `TSSAttention`, `CausalTSSAttention` or `GatedTSSAttention`.

    Example:
        >>> import tost, tost.analysis
        >>> model = tost.create_model("tost_mini")
        >>> [layer.name for layer in tost.analysis.attention_layers(model)][:2]
        ['blocks.0.attention', 'blocks.1.attention']
    """
    kinds = (TSSAttention, CausalTSSAttention, GatedTSSAttention)
    blocks = {id(block.attention): block for block in model.modules() if isinstance(block, Block)}
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    return [AttentionLayer(i, name, module, blocks.get(id(module))) for i, (name, module) in enumerate(named)]


def choose(layers: Sequence[int] | None, count: int, what: str = "TSSA layers") -> list[int]:
    """Return the numbers of the chosen layers, ascending.

    Args:
        layers: Numbers from 0, or from -1 backwards; None for all.
        count: How many there are.
        what: What to call them in a message.

    Raises:
        ConfigError: There is no such layer, or there are none at all.
    """
    if count == 0:
        raise ConfigError(f"this model has no {what}, so there is nothing to look at here.")
    if layers is None:
        return list(range(count))
    wrong = [layer for layer in layers if not -count <= layer < count]
    if wrong or not layers:
        given = ", ".join(map(str, layers)) or "none"
        raise ConfigError(f"layers {given} were asked for, but there are {count} {what}: 0 to {count - 1}.")
    return sorted({layer % count for layer in layers})


def select_layers(model: nn.Module, layers: Sequence[int] | None) -> list[AttentionLayer]:
    """Return the chosen TSSA layers of a model, in order; see `choose`."""
    every = attention_layers(model)
    return [every[index] for index in choose(layers, len(every))]


@contextmanager
def capture(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    what: Iterable[Place] = ("tokens",),
    *,
    visit: Callable[[LayerRecord], None] | None = None,
) -> Iterator[list[LayerRecord]]:
    """Record what happens in the TSSA layers of a model while it runs.

    The model's output does not change, and the hooks are removed when the block is left, also by an exception. Without
    `visit`, records stay in the list, so clear it after every batch. With `visit`, each record is passed on as soon as
    its layer has run and then dropped, so that memory holds one layer, however deep the model.

    Args:
        model: Any model with TSSA layers.
        layers: Which, by number; None for all.
        what: What to record; everything but ``"tokens"`` needs the residual blocks of this package.
        visit: Receives every record instead of the list.

    Yields:
        The records, in the order in which the layers ran.

    Raises:
        ConfigError: There are no such layers, or they do not stand in residual blocks.
        ValueError: A layer was called with a state: its statistics then depend on earlier tokens.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_mini").eval()
        >>> with torch.no_grad(), tost.analysis.capture(model, layers=[-1]) as records:
        ...     logits = model(torch.randn(2, 3, 32, 32))
        >>> records[0].share().shape
        torch.Size([2, 64, 4])
    """
    wanted = frozenset(what)
    if unknown := wanted - set(get_args(Place)):
        raise ConfigError(f"{', '.join(sorted(unknown))} cannot be captured; what takes {', '.join(get_args(Place))}.")
    chosen = select_layers(model, layers)
    if wanted - {"tokens"} and any(layer.block is None for layer in chosen):
        raise ConfigError(
            "the residual stream can be captured in blocks of this package (tost.nn.Block) only, but some attention "
            "stands elsewhere; capture 'tokens', which every TSSA layer has."
        )
    records: list[LayerRecord] = []
    with ExitStack() as hooks:
        for layer in chosen:
            for hook in _Watcher(layer, wanted, visit or records.append).attach():
                hooks.enter_context(hook)
        yield records


class _Watcher:
    """The hooks of one layer. They are off while a record is visited: the visitor may call the layer's modules."""

    def __init__(self, layer: AttentionLayer, wanted: frozenset[Place], give: Callable[[LayerRecord], None]) -> None:
        self.layer, self.wanted, self.give = layer, wanted, give
        self.record = LayerRecord(layer)
        self.called = self.busy = False

    def attach(self) -> Iterator[RemovableHandle]:
        """Attach the hooks, one after the other."""
        attention, block = self.layer.attention, self.layer.block
        yield attention.register_forward_pre_hook(self._begin_attention, with_kwargs=True)
        # A listener at the projection also keeps the operator from overwriting the tokens.
        yield attention.proj_in.register_forward_hook(self._keep_tokens)
        if block is None:
            yield attention.register_forward_hook(self._end, prepend=True)
            return
        yield block.register_forward_pre_hook(self._begin_block, with_kwargs=True)
        if block.norm == "pre":
            yield block.norm2.register_forward_pre_hook(lambda module, given: self._keep("attention", given[0]))
        else:
            yield block.norm1.register_forward_hook(lambda module, given, output: self._keep("attention", output))
        # Before the hooks of a sharded model, which give up the weights.
        yield block.register_forward_hook(self._end, prepend=True)

    def _begin_block(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self.busy:
            given = dict(zip(("x", "mask", "grid"), arguments, strict=False)) | named
            self.record = LayerRecord(self.layer, grid=given.get("grid"))
            self._keep("input", given["x"])

    def _begin_attention(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self.busy:
            if self.layer.block is None:
                self.record = LayerRecord(self.layer)
            self.called = named.get("carry") is None
            self.record.mask = named.get("mask", arguments[1] if len(arguments) > 1 else None)

    def _keep_tokens(self, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if self.busy:
            return
        if not self.called:
            raise ValueError(
                f"{self.layer.name} was called through forward_with_state, so that its statistics may depend on "
                "tokens that are not here. Call the model itself; for a transformers model pass use_cache=False."
            )
        if "tokens" in self.wanted:
            self.record.tokens = self.layer.split(output)
            self.record.x = arguments[0]

    def _keep(self, place: Place, value: Tensor) -> None:
        if not self.busy and place in self.wanted:
            setattr(self.record, place, value)

    def _end(self, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if self.busy:
            return
        self._keep("output", output)
        record, self.record, self.called = self.record, LayerRecord(self.layer), False
        self.busy = True
        try:
            self.give(record)
        finally:
            self.busy = False


def run_batch(model: nn.Module, batch: Batch) -> Any:
    """Run a model on a batch of any form, and return the model's output.

    Args:
        model: The model.
        batch: See `Batch`; other keys, such as targets, are ignored.

    Raises:
        ValueError: A batch has no input.
    """
    if isinstance(batch, Tensor):
        return model(batch)
    if "input_ids" in batch:
        named = {key: batch[key] for key in ("input_ids", "attention_mask") if batch.get(key) is not None}
        return model(**named, use_cache=False)
    if "inputs" not in batch:
        raise ValueError(f"a batch has the keys {', '.join(batch) or '(none)'}; needed is 'inputs' or 'input_ids'.")
    if packed := [key for key in ("cu_seqlens", "segment_ids") if batch.get(key) is not None]:
        raise ValueError(
            f"the batch is packed ({packed[0]}), but layers are looked at sequence by sequence; use padding, such as "
            "data.options.padding=right."
        )
    mask = batch.get("mask")
    return model(batch["inputs"]) if mask is None else model(batch["inputs"], mask=mask)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode of every module is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def observe(
    model: nn.Module,
    batches: Iterable[Batch],
    visit: Callable[[LayerRecord], None],
    *,
    layers: Sequence[int] | None = None,
    what: Iterable[Place] = ("tokens",),
) -> int:
    """Run a model over batches and pass the record of every layer and batch to a function.

    Args:
        model: Any model with TSSA layers; run in evaluation mode, which is restored.
        batches: Any number of batches; one is held at a time.
        visit: Receives the records.
        layers: Numbers of the layers; None for all.
        what: What to record; see `capture`.

    Returns:
        The number of samples.

    Raises:
        ConfigError: There are no such layers, they are not in residual blocks, or there are no batches.
    """
    samples = 0
    with capture(model, layers, what, visit=visit), at_rest(model):
        for batch in batches:
            run_batch(model, batch)
            samples += len(batch if isinstance(batch, Tensor) else batch.get("inputs", batch.get("input_ids")))
    if samples == 0:
        raise ConfigError("there are no samples to look at; give at least one batch.")
    return samples


def sum_by_layer(
    model: nn.Module,
    batches: Iterable[Batch],
    measure: Callable[[LayerRecord], Sequence[Tensor]],
    *,
    layers: Sequence[int] | None = None,
) -> tuple[list[AttentionLayer], list[Tensor], int]:
    """Run a model over batches and add up what a function measures in each layer.

    Args:
        model: Any model with TSSA layers; run in evaluation mode, which is restored.
        batches: Any number of batches; one is held at a time.
        measure: Returns tensors of one batch in one layer, of the same shapes for every batch.
        layers: Numbers of the layers; None for all.

    Returns:
        The L layers, the sums of the tensors, each ``[L, ...]``, on the CPU, and the number of samples.

    Raises:
        ConfigError: There are no such layers, or no batches.
    """
    totals: dict[int, list[Tensor]] = {}

    def visit(record: LayerRecord) -> None:
        measured = [tensor.cpu() for tensor in measure(record)]
        before = totals.get(record.layer.index)
        totals[record.layer.index] = measured if before is None else list(map(torch.add, before, measured))

    samples = observe(model, batches, visit, layers=layers)
    chosen = [layer for layer in attention_layers(model) if layer.index in totals]
    sums = zip(*(totals[layer.index] for layer in chosen), strict=True)
    return chosen, [torch.stack(tensors) for tensors in sums], samples
