"""Context parallelism within data parallelism: four processes in two groups of two, against one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.networks import B, V, gradients_of, make_inputs, make_network
from tests.parallel.ranks import run_ranks
from tost.errors import ConfigError
from tost.models import create_model
from tost.parallel import ContextParallel, make_mesh
from tost.testing import assert_close

N = 21
NAME = "language model, recomputed"


def batch() -> tuple[Tensor, Tensor]:
    """Two sequences for each of two groups, and targets."""
    ids = make_inputs(NAME, 2 * N, False, torch.float64)[0].view(2 * B, N)
    return ids, ids.roll(-1, dims=1)


def loss_sum(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).view(-1, V), targets.flatten(), reduction="sum")


def gradients(wrap: str) -> tuple[tuple[int, int], Tensor]:
    """Where this process stands, and the gradients that data parallelism leaves it with."""
    mesh = make_mesh(data=2, context=2)
    context = ContextParallel.from_mesh(mesh)
    model = make_network(NAME, torch.float64)
    if wrap == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        wrapped = fully_shard(model)
    data = mesh.get_local_rank("data")
    ids, targets = (context.split(x.chunk(2)[data]) for x in batch())
    with context:
        context.mean_loss(loss_sum(wrapped, ids, targets), ids.numel()).backward()
    if wrap == "fsdp":
        found = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    else:
        found = gradients_of(model)
    return (data, context.rank), found


def both() -> list[tuple[tuple[int, int], Tensor]]:
    return [gradients("ddp"), gradients("fsdp")]


def sharded_losses() -> tuple[str, bool]:
    """The error about `loss` beside forward, and whether both give one loss once it is registered."""
    model = fully_shard(create_model("tost_lm_base", embed_dim=8, depth=1, num_heads=2, vocab_size=V))
    ids = batch()[0]
    try:
        model.loss(ids, ids)
    except ConfigError as error:
        message = str(error)
    register_fsdp_forward_method(model, "loss")
    loss = model.loss(ids, ids, reduction="sum")
    loss.backward()
    return message, torch.equal(loss, model(ids, targets=ids))


def test_loss_of_a_sharded_model_is_refused_or_right(tmp_path):
    for message, is_equal in run_ranks(2, tmp_path, sharded_losses):
        assert "register_fsdp_forward_method" in message
        assert is_equal


def test_data_and_context_parallel_together_equal_one_process(tmp_path):
    model = make_network(NAME, torch.float64)
    ids, targets = batch()
    (loss_sum(model, ids, targets) / ids.numel()).backward()
    ranks = run_ranks(4, tmp_path, both)
    for index, wrap in enumerate(("ddp", "fsdp")):
        assert [rank[index][0] for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)], "neighbours share a sequence"
        for rank in ranks:
            assert_close(f"gradients with {wrap}", rank[index][1], gradients_of(model), 1e-10)
    assert not dist.is_initialized()
