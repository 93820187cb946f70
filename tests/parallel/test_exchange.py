"""What crosses between processes, counted three times: by us, at torch's collectives, and at the sockets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tost
from tests.parallel.ranks import run_ranks
from tost.parallel import ContextParallel, causal_tssa, tssa

B, H, D = 2, 3, 8
LENGTHS = (1_024, 65_536)
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


def count(context: ContextParallel, witness: Witness, run: Callable[[], object]) -> tuple[int, ...]:
    before = context.bytes_exchanged, context.num_collectives, witness.bytes, witness.calls, bytes_written()
    run()
    after = context.bytes_exchanged, context.num_collectives, witness.bytes, witness.calls, bytes_written()
    return tuple(b - a for a, b in zip(before, after, strict=True))


def operators() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    return {
        "tssa": tssa,
        "tssa unnormalised": lambda w, t: tssa(w, t, normalize=False),
        "causal_tssa": causal_tssa,
    }


def exchange() -> dict[tuple[str, int, torch.dtype], dict[str, tuple[int, ...]]]:
    found = {}
    with pytest.MonkeyPatch.context() as patch, ContextParallel() as context:
        witness = Witness(patch)
        for name, run in operators().items():
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                for num_tokens in LENGTHS:
                    w = torch.randn(B, num_tokens // context.size, H, D).to(dtype).requires_grad_()
                    t = torch.ones(H, requires_grad=True)
                    results: list[Tensor] = []
                    forward = count(context, witness, lambda: results.append(run(w, t)))
                    loss = results[0].sum()
                    found[name, num_tokens, dtype] = {
                        "forward": forward,
                        "backward": count(context, witness, loss.backward),
                    }
        found["layer"] = layer(context, witness)
    return found


def layer(context: ContextParallel, witness: Witness) -> tuple[int, ...]:
    """A whole attention module, forward and backward."""
    module, x = tost.CausalTSSAttention(H * D, H, LENGTHS[0]), torch.randn(B, LENGTHS[0] // context.size, H * D)
    return count(context, witness, lambda: module(x).sum().backward())


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def ranks(request, tmp_path_factory):
    return run_ranks(request.param, tmp_path_factory.mktemp("exchange"), exchange)


def expected(name: str, width: int) -> dict[str, tuple[int, int]]:
    """Bytes and collectives, forward and backward, with `width` bytes per number."""
    squares, weighted, mass, tokens = (B * H * D * width, B * H * D * width, B * H * width, B * 8)
    return {
        "tssa": {"forward": (squares + weighted + mass, 2), "backward": (squares + weighted, 2)},
        "tssa unnormalised": {"forward": (weighted + mass, 1), "backward": (weighted, 1)},
        "causal_tssa": {
            "forward": (squares + tokens + weighted + mass, 2),
            "backward": (squares + weighted + mass, 2),
        },
    }[name]


def test_bytes_are_the_formula_at_any_length(ranks):
    for rank in ranks:
        for (name, _, dtype), passes in [(key, value) for key, value in rank.items() if key != "layer"]:
            for which, wanted in expected(name, 8 if dtype == torch.float64 else 4).items():
                ours, witnessed = passes[which][:2], passes[which][2:4]
                assert ours == wanted, f"{name} {which} in {dtype}"
                assert witnessed == wanted, f"{name} {which} in {dtype}, at torch.distributed"


@pytest.mark.skipif(sys.platform != "linux", reason="needs the counters of Linux")
def test_bytes_on_the_sockets_do_not_depend_on_the_length(ranks):
    short, long = LENGTHS
    for rank in ranks:
        for name, num_tokens, dtype in [key for key in rank if key != "layer" and key[1] == short]:
            for which in ("forward", "backward"):
                written, payload = rank[name, num_tokens, dtype][which][4], rank[name, num_tokens, dtype][which][0]
                assert written == rank[name, long, dtype][which][4], f"{name} {which} in {dtype}"
                assert written >= payload, "the counter has missed the sockets"


def test_an_attention_module_exchanges_nothing_else(ranks):
    wanted = expected("causal_tssa", 4)
    bytes_, calls = (wanted["forward"][i] + wanted["backward"][i] for i in range(2))
    for rank in ranks:
        assert rank["layer"][:4] == (bytes_, calls, bytes_, calls)
