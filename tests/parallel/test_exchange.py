"""What crosses between processes, counted three times: by us, at torch's collectives, and at the sockets."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tost
from tests.parallel.ranks import run_ranks
from tost.parallel import ContextParallel

B, H, D, BLOCK = 2, 3, 8, 4
LENGTHS = (1_024, 65_536)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
Key = tuple[str, int, torch.dtype]  # operator, tokens of the whole sequence, dtype of the tokens
Result = TypeVar("Result")
# Everything in torch.distributed that moves tensors, and which argument is this rank's contribution.
CONTRIBUTION = {"all_reduce": 0, "all_gather": 1, "broadcast": 0}
OTHERS = (
    *("all_gather_into_tensor", "all_gather_coalesced", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "batch_isend_irecv"),
    *("send", "recv", "isend", "irecv"),
)


class Witness:
    """Stands between the package and torch.distributed and keeps its own count."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.bytes = 0, 0
        for name, index in CONTRIBUTION.items():
            patch.setattr(dist, name, self._counting(getattr(dist, name), index))
        for name in OTHERS:
            patch.setattr(dist, name, self._refusing(name))

    def _counting(self, original: Callable[..., object], index: int) -> Callable[..., object]:
        def collective(*args: object, **kwargs: object) -> object:
            tensor = args[index]
            assert isinstance(tensor, Tensor)
            self.calls += 1
            self.bytes += tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

        return collective

    @staticmethod
    def _refusing(name: str) -> Callable[..., object]:
        def refuse(*_args: object, **_kwargs: object) -> object:
            raise AssertionError(f"torch.distributed.{name} is not expected here")

        return refuse


def bytes_written() -> int:
    """Bytes that this process has handed to the kernel, sockets included; 0 where that is not known."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    return int(dict(line.split(": ") for line in counters.read_text().splitlines())["wchar"])


def count(context: ContextParallel, witness: Witness, run: Callable[[], Result]) -> tuple[Result, tuple[int, ...]]:
    """Run something; return its result and what it has added to each of the counts."""

    def counts() -> tuple[int, ...]:
        return context.bytes_exchanged, context.num_collectives, witness.bytes, witness.calls, bytes_written()

    before = counts()
    result = run()
    return result, tuple(b - a for a, b in zip(before, counts(), strict=True))


def gated(w: Tensor, t: Tensor) -> Tensor:
    return tost.gated_tssa(w, w[..., ::BLOCK].to(t.dtype).sigmoid())


OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tssa": tost.tssa,
    "tssa unnormalized": lambda w, t: tost.tssa(w, t, normalize=False),
    "tssa in blocks": lambda w, t: tost.tssa(w, t, block_size=BLOCK),
    "causal_tssa": tost.causal_tssa,
    "gated_tssa": gated,
}


def count_operator(context: ContextParallel, witness: Witness, key: Key) -> dict[str, tuple[int, ...]]:
    name, num_tokens, dtype = key
    w = torch.randn(B, num_tokens // context.size, H, D).to(dtype).requires_grad_()
    t = torch.ones(H, requires_grad=True)
    y, forward = count(context, witness, lambda: OPERATORS[name](w, t))
    _, backward = count(context, witness, y.sum().backward)
    return {"forward": forward, "backward": backward}


def count_module(context: ContextParallel, witness: Witness) -> tuple[int, ...]:
    """A whole attention module, forward and backward."""
    module, x = tost.CausalTSSAttention(H * D, H, LENGTHS[0]), torch.randn(B, LENGTHS[0] // context.size, H * D)
    return count(context, witness, lambda: module(x).sum().backward())[1]


def exchange() -> tuple[dict[Key, dict[str, tuple[int, ...]]], tuple[int, ...]]:
    keys = itertools.product(OPERATORS, LENGTHS, DTYPES)
    with pytest.MonkeyPatch.context() as patch, ContextParallel() as context:
        witness = Witness(patch)
        return {key: count_operator(context, witness, key) for key in keys}, count_module(context, witness)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids=lambda size: f"{size} ranks")
def ranks(request, tmp_path_factory):
    return run_ranks(request.param, tmp_path_factory.mktemp("exchange"), exchange)


def expected(name: str, width: int, size: int) -> dict[str, tuple[int, int]]:
    """Bytes and collectives, forward and backward, with `width` bytes per number."""
    squares, weighted, mass, tokens = (B * H * D * width, B * H * D * width, B * H * width, B * 8)
    products = weighted * (BLOCK + 1) // 2
    gated = 8 * B * H * (D + D * (BLOCK + 1) // 2 + D // BLOCK)
    return {
        "tssa": {"forward": (squares + weighted + mass, 2), "backward": (squares + weighted, 2)},
        "tssa unnormalized": {"forward": (weighted + mass, 1), "backward": (weighted, 1)},
        "tssa in blocks": {"forward": (squares + products + mass, 2), "backward": (squares + products + mass, 2)},
        "causal_tssa": {
            "forward": (squares + tokens + weighted + mass, 2),
            "backward": (squares + weighted + mass, 2),
        },
        # In float64, and the gradient of what every rank has for each of them.
        "gated_tssa": {"forward": (gated + tokens, 2), "backward": (size * gated, 1)},
    }[name]


def test_bytes_are_the_formula_at_any_length(ranks):
    for operators, _ in ranks:
        for (name, num_tokens, dtype), passes in operators.items():
            for which, wanted in expected(name, 8 if dtype == torch.float64 else 4, len(ranks)).items():
                case = f"{name} {which} with {num_tokens} tokens in {dtype}"
                assert passes[which][:2] == wanted, case
                assert passes[which][2:4] == wanted, f"{case}, at torch.distributed"


@pytest.mark.skipif(sys.platform != "linux", reason="needs the counters of Linux")
def test_bytes_on_the_sockets_do_not_depend_on_the_length(ranks):
    short, long = LENGTHS
    for operators, _ in ranks:
        for name, dtype, which in itertools.product(OPERATORS, DTYPES, ("forward", "backward")):
            payload, *_, written = operators[name, short, dtype][which]
            assert written == operators[name, long, dtype][which][-1], f"{name} {which} in {dtype}"
            assert written >= payload, "the counter has missed the sockets"


def test_an_attention_module_exchanges_nothing_else(ranks):
    wanted = expected("causal_tssa", 4, len(ranks))
    payload, calls = (wanted["forward"][i] + wanted["backward"][i] for i in range(2))
    for _, module in ranks:
        assert module[:4] == (payload, calls, payload, calls)
