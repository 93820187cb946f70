"""Calls of the shared operators: the inputs, what one process gives, and what a rank contributes to the same."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

import tost
from tost.ops._blocks import products
from tost.ops._numerics import statistics_dtype
from tost.ops.state import gated_shapes, sum_shapes
from tost.parallel import ContextParallel

STATES = {"tssa": (), "causal": tost.TSSAState._fields[:3], "gated": tost.GatedState._fields[:3]}
# What every rank has its tokens of; of all else it has a copy, so that a gradient is the sum over the ranks.
PIECES = ("w", "write", "mask", "dy")


@dataclass(frozen=True)
class Case:
    """One call, described by few words so that every process can make the same numbers."""

    lengths: tuple[int, ...]
    op: Literal["tssa", "causal", "gated"] = "causal"
    dtype: torch.dtype = torch.float64
    mask: Literal["none", "left", "right", "random", "all"] = "none"
    bias: bool = False
    state: bool = False
    normalize: bool = True
    block_size: int = 1
    backend: str = "auto"
    packed: tuple[int, ...] = ()  # lengths of packed sequences; the batch is then one row
    shape: tuple[int, int, int] = (2, 3, 6)  # B, H, D
    only_y: bool = False  # leave the returned state out of the loss
    seed: int = 0

    def __str__(self) -> str:
        words = [self.op, str(self.dtype).removeprefix("torch."), self.mask]
        words += [name for name in ("bias", "state", "only_y") if getattr(self, name)]
        words += [] if self.normalize else ["unnormalized"]
        words += [] if self.block_size == 1 else [f"blocks of {self.block_size}"]
        words += [] if self.backend == "auto" else [self.backend]
        words += [f"packed {'+'.join(map(str, self.packed))}"] if self.packed else []
        return "-".join((*words, "+".join(map(str, self.lengths))))


def make_mask(kind: str, B: int, N: int, g: torch.Generator) -> Tensor | None:
    index, real = torch.arange(N).expand(B, N), torch.randint(0, N + 1, (B, 1), generator=g)
    masks = {
        "none": None,
        "left": index >= real,
        "right": index < real,
        "random": torch.rand(B, N, generator=g) > 0.4,
        "all": torch.zeros(B, N, dtype=torch.bool),
    }
    return masks[kind]


def make_inputs(case: Case) -> dict[str, Tensor | None]:
    """The arguments of the whole sequence, and a cotangent for each of the results, rounded to the case's dtype."""
    (B, H, D), N, g = case.shape, sum(case.lengths), case.block_size
    S, B = (len(case.packed), 1) if case.packed else (B, B)
    generator, wide = torch.Generator().manual_seed(case.seed), statistics_dtype(case.dtype)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def rand(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    made: dict[str, Tensor | None] = {"w": randn(B, N, H, D).to(case.dtype), "dy": randn(B, N, H, D).to(case.dtype)}
    if case.op == "gated":
        write = rand(B, N, H, D // g) ** 2
        made["write"] = write.masked_fill(rand(*write.shape) < 0.05, 1).to(wide)
        before = randn(S, H, D), products(randn(S, 9, H, D), g).mean(dim=1), rand(S, H, D // g)
        shapes = gated_shapes(S, H, D, g)
    else:
        made["temperature"] = ((1.0 if case.normalize else 0.2) * randn(H)).to(wide)
        before = tuple(3 * randn(*shape).abs() for shape in sum_shapes(S, H, D))
        shapes = sum_shapes(S, H, D)
    if case.bias:
        made["bias"] = (0.3 * randn(H, N + 4)).to(wide)
    if case.state:
        made |= {name: x.to(wide) for name, x in zip(STATES[case.op], before, strict=True)}
        made["position"] = torch.randint(0, 4, (S,), generator=generator)
    cotangents = {f"d_{name}": randn(*shape).to(wide) for name, shape in zip(STATES[case.op], shapes, strict=False)}
    return made | cotangents | {"mask": make_mask(case.mask, B, N, generator)}


def differentiate(case: Case, inputs: dict[str, Tensor | None], context: ContextParallel | None) -> dict[str, Tensor]:
    """Outputs and gradients of one call, over the ranks of `context` or, without one, in this process alone."""
    names = [name for name in ("w", "write", "temperature", "bias", *STATES[case.op]) if name in inputs]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
    options = {"mask": inputs["mask"], "backend": case.backend}
    if case.packed:
        bounds = torch.tensor((0, *accumulate(case.packed)), dtype=torch.int32)
        options["cu_seqlens"] = bounds if context is None else context.split_packing(bounds, lengths=case.lengths)
    kind = tost.GatedState if case.op == "gated" else tost.TSSAState
    state = kind(*(leaves[name] for name in STATES[case.op]), inputs["position"]) if case.state else None
    with context or nullcontext():
        if case.op == "tssa":
            given = {"normalize": case.normalize, "block_size": case.block_size}
            outputs = {"y": tost.tssa(leaves["w"], leaves["temperature"], **options, **given)}
        else:
            if case.op == "gated":
                y, after = tost.gated_tssa_with_state(leaves["w"], leaves["write"], **options, state=state)
            else:
                arguments = (leaves["w"], leaves["temperature"], leaves.get("bias"))
                y, after = tost.causal_tssa_with_state(*arguments, **options, state=state)
            outputs = {"y": y, **after._asdict()}
    # Every rank has the returned state; a loss on it that is shared out equally is the same loss as in one process.
    share = 1 if context is None else 1 / context.size
    cotangents = {name: inputs[f"d_{name}"] * share for name in (() if case.only_y else STATES[case.op])}
    cotangents["y"] = inputs["dy"]
    used = [name for name in cotangents if outputs[name].requires_grad]  # a state of no tokens does not
    gradients = torch.autograd.grad(
        [outputs[name] for name in used],
        list(leaves.values()),
        [cotangents[name] for name in used],
        materialize_grads=True,
    )
    named = {f"d{name}": x for name, x in zip(names, gradients, strict=True)}
    return {name: x.detach() for name, x in outputs.items()} | named


def run_alone(case: Case) -> dict[str, Tensor]:
    return differentiate(case, make_inputs(case), None)


def run_exact(case: Case) -> dict[str, Tensor]:
    """The same numbers in float64: what one process would give if it did not round."""
    inputs = make_inputs(case).items()
    exact = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in inputs}
    return differentiate(case, exact, None)


def run_shared(case: Case, context: ContextParallel) -> dict[str, Tensor]:
    """This rank's outputs and gradients: pieces of those of tokens, parts of those of what is replicated."""
    inputs = make_inputs(case)
    pieces = {name: inputs[name] for name in PIECES if inputs.get(name) is not None}
    inputs |= {name: context.split(x, lengths=case.lengths) for name, x in pieces.items()}
    return differentiate(case, inputs, context)


def assemble(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole from the ranks: pieces joined, parts added, and the state, which must be the same everywhere."""
    whole: dict[str, Tensor] = {}
    for name in results[0]:
        values = [result[name] for result in results]
        if name in ("y", "dw", "dwrite"):
            whole[name] = torch.cat(values, dim=1)
        elif name.startswith("d"):
            whole[name] = torch.stack(values).sum(dim=0)
        else:
            assert all(torch.equal(values[0], value) for value in values), f"{name} differs between ranks"
            whole[name] = values[0]
    return whole


def lengths_for(size: int) -> list[tuple[int, ...]]:
    """Pieces of more than one chunk of the kernel, of one token, and of none."""
    return {
        1: [(150,), (1,)],
        2: [(75, 75), (149, 1), (0, 150), (70, 0)],
        3: [(50, 50, 50), (1, 130, 3), (0, 70, 0), (70, 0, 67)],
    }[size]


def cases_for(size: int) -> list[Case]:
    """Every kind of call for a group of `size`, in both precisions."""
    cases: list[Case] = []
    for dtype in (torch.float64, torch.float32):
        for lengths in lengths_for(size):
            for mask in ("none", "left", "right", "random", "all") if dtype is torch.float64 else ("random",):
                cases += [
                    Case(lengths, dtype=dtype, mask=mask, bias=True, state=True),
                    Case(lengths, "tssa", dtype=dtype, mask=mask),
                    Case(lengths, "gated", dtype=dtype, mask=mask, state=True, block_size=3),
                ]
            cases += [
                Case(lengths, "tssa", dtype=dtype, mask="random", block_size=2),
                Case(lengths, "gated", dtype=dtype),
                Case(lengths, "gated", dtype=dtype, only_y=True, backend="torch"),
                Case(lengths, dtype=dtype, only_y=True, state=True),
                Case(lengths, "gated", dtype=dtype, mask="left", state=True, block_size=6, backend="torch"),
            ]
        cases += [
            Case(lengths, dtype=dtype),
            Case(lengths, dtype=dtype, backend="reference", bias=True, mask="random"),
            Case(lengths, dtype=dtype, backend="torch", bias=True, state=True),
            Case(lengths, "tssa", dtype=dtype, normalize=False, mask="random"),
            Case(lengths, "tssa", dtype=dtype, normalize=False, mask="random", block_size=3),
            Case(lengths, "gated", dtype=dtype, backend="reference", mask="random", block_size=2),
        ]
    cases += [Case(lengths, op, dtype=torch.bfloat16, mask="random") for op in STATES]
    cases += [case for lengths in lengths_for(size) for case in packed_cases(lengths)]
    # More numbers than a chunk of the shared non-causal operator holds, and no sequence at all.
    cases += [Case((900,) * size, op, shape=(1, 8, 32)) for op in STATES]
    cases += [Case((4,) * size, op, shape=(0, 2, 3)) for op in STATES]
    return cases


def packed_cases(lengths: tuple[int, ...]) -> list[Case]:
    """Packed sequences that end before, at and after the ends of pieces, one of them empty, one alone."""
    N = sum(lengths)
    first = min(N, max(1, lengths[0]))
    cases: list[Case] = []
    for packed in ((first, 0, N - first), (N // 3, 1, N - N // 3 - 1), (N,)):
        if min(packed) < 0:
            continue
        cases += [
            Case(lengths, packed=packed),
            Case(lengths, packed=packed, mask="random", bias=True, state=True),
            Case(lengths, packed=packed, backend="torch", state=True, mask="random"),
            Case(lengths, "tssa", packed=packed),
            Case(lengths, "tssa", packed=packed, mask="random", dtype=torch.float32),
            Case(lengths, "tssa", packed=packed, normalize=False, block_size=2),
            Case(lengths, "gated", packed=packed, block_size=2),
            Case(lengths, "gated", packed=packed, mask="random", state=True, block_size=3),
            Case(lengths, "gated", packed=packed, backend="torch", state=True, mask="random", block_size=6),
        ]
    return cases


def random_lengths(total: int, pick: random.Random) -> tuple[int, ...]:
    """Lengths of sequences that fill a row of `total` tokens; some have none, one or two."""
    cuts = sorted(pick.randrange(total + 1) for _ in range(pick.randrange(1, 7)))
    cuts = sorted((*cuts, *(min(total, cuts[0] + step) for step in (0, 1, 3))))
    return tuple(end - begin for begin, end in pairwise((0, *cuts, total)))


def random_cases(size: int, count: int, seed: int) -> list[Case]:
    """Calls at random: any cut, any mask, any of the options, packed or not."""
    pick = random.Random(seed)
    return [
        Case(
            lengths=lengths,
            op=op,
            packed=random_lengths(sum(lengths), pick) if pick.random() < 0.4 else (),
            dtype=pick.choice((torch.float32, torch.float64)),
            mask=pick.choice(("none", "left", "right", "random")),
            bias=op == "causal" and pick.random() < 0.5,
            state=op != "tssa" and pick.random() < 0.5,
            only_y=pick.random() < 0.3,
            normalize=op != "tssa" or pick.random() < 0.8,
            block_size=1 if op == "causal" else g,
            shape=(pick.randrange(1, 4), pick.randrange(1, 5), g * pick.randrange(1, 5)),
            seed=number,
        )
        for number in range(count)
        for op in [pick.choice(tuple(STATES))]
        for g in [pick.choice((1, 2, 3, 8))]
        for lengths in [tuple(pick.choice((0, 1, 2, pick.randrange(3, 200))) for _ in range(size))]
    ]
