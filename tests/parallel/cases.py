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
from tost.ops._inputs import causal_form
from tost.ops._numerics import statistics_dtype
from tost.ops.state import sum_shapes
from tost.parallel import ContextParallel

SUMS = ("squares", "weighted_squares", "mass")
# What every rank has a copy of, so that its gradient is the sum over the ranks.
REPLICATED = ("temperature", "bias", "decay", *SUMS)


@dataclass(frozen=True)
class Case:
    """One call, described by few words so that every process can make the same numbers."""

    lengths: tuple[int, ...]
    causal: bool = True
    dtype: torch.dtype = torch.float64
    mask: Literal["none", "left", "right", "random", "all"] = "none"
    bias: bool = False
    state: bool = False
    normalize: bool = True
    count_scaled: bool = False
    decay: bool | str = False
    block_size: int = 1
    centered: bool = False
    backend: str = "auto"
    packed: tuple[int, ...] = ()  # lengths of packed sequences; the batch is then one row
    shape: tuple[int, int, int] = (2, 3, 5)  # B, H, D
    seed: int = 0

    def __str__(self) -> str:
        words = ["causal" if self.causal else "plain", str(self.dtype).removeprefix("torch."), self.mask]
        words += [name for name in ("bias", "state", "count_scaled", "centered") if getattr(self, name)]
        words += [f"decay={self.decay}"] if self.decay else []
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
    (B, H, D), N = case.shape, sum(case.lengths)
    S, B = (len(case.packed), 1) if case.packed else (B, B)
    g, sums = torch.Generator().manual_seed(case.seed), statistics_dtype(case.dtype)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=g, dtype=torch.float64)

    def moments(*size: int) -> Tensor:
        return randn(*size).abs() if case.block_size == 1 else products(randn(*size), case.block_size)

    form = causal_form(
        None if not case.decay else torch.empty({True: (H,), "head": (B, N, H), "channel": (B, N, H, 1)}[case.decay]),
        **{name: getattr(case, name) for name in ("count_scaled", "block_size", "centered")},
    )
    shapes = dict(zip(SUMS, sum_shapes(S, H, D, form), strict=True))
    weighted = moments(S, H, D)
    if case.centered:  # a mean that is no larger than the moments allow
        weighted = torch.cat((weighted + 1, 0.1 * randn(S, H, D)), dim=-1)
    decay = torch.tensor([0.97, 1.0, 0.5, 0.9995])[torch.arange(H) % 4]
    if form.token_decay:
        decay = torch.rand(B, N, *shapes["mass"][1:], generator=g).pow(0.3)
    made = {
        "w": randn(B, N, H, D).to(case.dtype),
        # Energies that are scaled by the number of tokens need a temperature that is as small.
        "temperature": ((1.0 if case.normalize else 0.2) / (max(N, 1) if case.count_scaled else 1) * randn(H)).to(sums),
        "bias": (0.3 * randn(H, N + 4)).to(sums),
        "decay": decay.to(sums),
        "squares": 3 * randn(*shapes["squares"]).abs().to(sums),
        "weighted_squares": weighted.to(sums),
        "mass": 3 * randn(*shapes["mass"]).abs().to(sums),
        "position": torch.randint(0, 4, (S,), generator=g),
        "dy": randn(B, N, H, D).to(case.dtype),
        **{f"d_{name}": randn(*shape).to(sums) for name, shape in shapes.items()},
        "mask": make_mask(case.mask, B, N, g),
    }
    left_out = [name for name in ("bias", "decay") if not getattr(case, name)]
    left_out += [] if case.state else [*SUMS, "position"]
    return {name: x for name, x in made.items() if name not in left_out}


def differentiate(case: Case, inputs: dict[str, Tensor | None], context: ContextParallel | None) -> dict[str, Tensor]:
    """Outputs and gradients of one call, over the ranks of `context` or, without one, in this process alone."""
    names = [name for name in ("w", *REPLICATED) if inputs.get(name) is not None]
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
    arguments = (leaves["w"], leaves["temperature"])
    extra = {name: getattr(case, name) for name in ("count_scaled", "block_size", "centered")}
    if case.packed:
        bounds = torch.tensor((0, *accumulate(case.packed)), dtype=torch.int32)
        extra["cu_seqlens"] = bounds if context is None else context.split_packing(bounds, lengths=case.lengths)
    if not case.causal:
        extra |= {"mask": inputs["mask"], "normalize": case.normalize, "backend": case.backend}
        with context or nullcontext():
            outputs = {"y": tost.tssa(*arguments, **extra)}
    else:
        state = tost.TSSAState(*(leaves[name] for name in SUMS), inputs["position"]) if case.state else None
        extra |= {"mask": inputs["mask"], "state": state, "backend": case.backend, "decay": leaves.get("decay")}
        with context or nullcontext():
            y, after = tost.causal_tssa_with_state(*arguments, leaves.get("bias"), **extra)
        outputs = {"y": y, **after._asdict()}
    # Every rank has the returned state; a loss on it that is shared out equally is the same loss as in one process.
    share = 1 if context is None else 1 / context.size
    cotangents = {"y": inputs["dy"], **{name: inputs[f"d_{name}"] * share for name in SUMS}}
    used = [name for name in outputs if name in cotangents]
    gradients = torch.autograd.grad(
        [outputs[name] for name in used], list(leaves.values()), [cotangents[name] for name in used]
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
    for name in ("w", "dy", "mask", "decay"):
        if inputs.get(name) is not None and inputs[name].dim() > 1:
            inputs[name] = context.split(inputs[name], lengths=case.lengths)
    return differentiate(case, inputs, context)


def assemble(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole from the ranks: pieces joined, parts added, and the state, which must be the same everywhere."""
    whole: dict[str, Tensor] = {}
    for name in results[0]:
        values = [result[name] for result in results]
        if name in ("y", "dw") or (name == "ddecay" and values[0].dim() > 1):
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
                    Case(lengths, causal=False, dtype=dtype, mask=mask),
                ]
        cases += [
            Case(lengths, dtype=dtype),
            Case(lengths, dtype=dtype, backend="reference", bias=True, mask="random"),
            Case(lengths, dtype=dtype, backend="torch", bias=True, state=True),
            Case(lengths, causal=False, dtype=dtype, normalize=False, mask="random"),
        ]
        for lengths in lengths_for(size):
            cases += [
                Case(lengths, dtype=dtype, mask="random", bias=True, state=True, count_scaled=True, decay=True),
                Case(lengths, dtype=dtype, decay=True),
                Case(lengths, dtype=dtype, mask="left", state=True, decay=True, backend="torch"),
                Case(lengths, dtype=dtype, mask="random", state=True, count_scaled=True),
                Case(lengths, causal=False, dtype=dtype, mask="random", count_scaled=True),
            ]
            blocks = {"shape": (2, 3, 6), "dtype": dtype, "mask": "random"}
            cases += [
                Case(lengths, bias=True, state=True, count_scaled=True, decay=True, block_size=3, **blocks),
                Case(lengths, state=True, backend="torch", block_size=6, **blocks),
                Case(lengths, causal=False, count_scaled=True, block_size=2, **blocks),
                Case(lengths, causal=False, normalize=False, block_size=3, **blocks),
            ]
            by_tokens = blocks | {"bias": True, "state": True, "centered": True}
            cases += (
                []
                if dtype is torch.float32
                else [
                    Case(lengths, dtype=dtype, decay="head"),
                    Case(lengths, decay="channel", count_scaled=True, **blocks),
                    Case(lengths, decay="head", count_scaled=True, block_size=3, **by_tokens),
                    Case(lengths, decay="channel", block_size=2, **by_tokens),
                    Case(lengths, decay=True, **by_tokens),
                    Case(lengths, causal=False, centered=True, block_size=2, **blocks),
                    Case(lengths, causal=False, centered=True, **blocks),
                ]
            )
    cases += [Case(lengths, causal=causal, dtype=torch.bfloat16, mask="random") for causal in (True, False)]
    cases += [case for lengths in lengths_for(size) for case in packed_cases(lengths)]
    # More numbers than a chunk of the shared non-causal operator holds, and no sequence at all.
    cases += [Case((900,) * size, causal=causal, shape=(1, 8, 32)) for causal in (True, False)]
    cases += [Case((4,) * size, causal=causal, shape=(0, 2, 3)) for causal in (True, False)]
    return cases


def packed_cases(lengths: tuple[int, ...]) -> list[Case]:
    """Packed sequences that end before, at and after the ends of pieces, one of them empty, one alone."""
    N = sum(lengths)
    first = min(N, max(1, lengths[0]))
    cases: list[Case] = []
    blocks = {"block_size": 2, "shape": (1, 3, 6), "mask": "random"}
    for packed in ((first, 0, N - first), (N // 3, 1, N - N // 3 - 1), (N,)):
        if min(packed) < 0:
            continue
        cases += [
            Case(lengths, packed=packed),
            Case(lengths, packed=packed, mask="random", bias=True, state=True, count_scaled=True, decay=True),
            Case(lengths, packed=packed, backend="torch", state=True, block_size=3, shape=(1, 3, 6), mask="random"),
            Case(lengths, packed=packed, mask="random", decay="head"),
            Case(lengths, packed=packed, decay="channel", bias=True, state=True, centered=True, **blocks),
            Case(lengths, packed=packed, causal=False),
            Case(lengths, packed=packed, causal=False, mask="random", count_scaled=True, dtype=torch.float32),
            Case(lengths, packed=packed, causal=False, normalize=False, block_size=2, shape=(1, 3, 6)),
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
            packed=random_lengths(sum(lengths), pick) if pick.random() < 0.4 else (),
            causal=causal,
            dtype=pick.choice((torch.float32, torch.float64)),
            mask=pick.choice(("none", "left", "right", "random")),
            bias=causal and pick.random() < 0.5,
            state=causal and pick.random() < 0.5,
            normalize=causal or pick.random() < 0.8,
            count_scaled=pick.random() < 0.3,
            decay=causal and pick.choice((False, False, True, "head", "channel")),
            shape=(pick.randrange(1, 4), pick.randrange(1, 5), pick.randrange(1, 9)),
            seed=number,
        )
        for number in range(count)
        for causal in [pick.random() < 0.6]
        for lengths in [tuple(pick.choice((0, 1, 2, pick.randrange(3, 200))) for _ in range(size))]
    ]
