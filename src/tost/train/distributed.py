"""The processes of a run, on Accelerate: placement, precision, data parallel and sharded training, sums, trackers.

Processes are laid out as ``data x context``: the ranks of one context group share the tokens of the same sequences,
different groups take different sequences.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import psutil
import torch
import torch.distributed as dist
import torch.utils.deterministic as fill
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tost._machine import DeviceChoice, choose_device, fast_precision
from tost._yaml import flatten
from tost.errors import ConfigError, TostError, TrainingError
from tost.nn.mixers import TokenBatchNorm
from tost.ops import backends_on, operators
from tost.ops._numerics import statistics_dtype
from tost.parallel import ContextParallel, make_mesh
from tost.parallel._autograd import sum_over_ranks
from tost.parallel._channel import Channel
from tost.train.config import RunConfig, TrainConfig
from tost.train.config.files import read_run_document

_GROUPS: list[object] = []
"""Process groups, kept until the process ends. A data parallel model that let go of the last reference to one would
wait for the group's threads while it holds Python's lock, which these may need to end: a deadlock."""
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_UNTRIMMED = 1 << 28  # bytes that may gather before freed memory is returned
_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def resolve_precision(config: RunConfig, device: DeviceChoice = "auto", run: Path | None = None) -> RunConfig:
    """Replace ``train.precision=auto`` by what it means here.

    Args:
        config: The run.
        device: Where it computes; see `tost._machine.fast_precision`.
        run: Folder of a run that is resumed, whose precision is kept.

    Returns:
        The configuration with ``fp32``, ``bf16`` or ``fp16``.
    """
    if config.train.precision != "auto":
        return config
    stored: object = None
    if run is not None and (path := run / "config.yaml").is_file():
        train = read_run_document(path).values.get("train")
        stored = train.get("precision") if isinstance(train, dict) else None
    precision = stored if stored in _PRECISION else fast_precision(choose_device(device))
    train_config = config.train.model_copy(update={"precision": precision})
    return config.model_copy(update={"train": train_config})


class Distributed:
    """This process among those of the run.

    Args:
        accelerator: Accelerate's view of the processes.
        config: The run.

    Raises:
        ConfigError: The number of processes does not fit the batch size or the context size.
    """

    def __init__(self, accelerator: Accelerator, config: RunConfig) -> None:
        self.accelerator = accelerator
        self.size, self.rank = accelerator.num_processes, accelerator.process_index
        self._trim_above = 0
        self.is_first = self.rank == 0
        """Whether this process writes files and messages."""
        self.device: torch.device = accelerator.device
        context = config.parallel.context
        self.chunk = config.train.chunk
        if self.size % context:
            raise ConfigError(
                f"parallel.context={context} does not divide the {self.size} processes of this run; "
                f"start a multiple of {context} processes, or set parallel.context=1."
            )
        self.data_size, self.data_rank = self.size // context, self.rank // context
        share = self.data_size * config.train.accumulate
        if config.train.batch_size % share:
            raise ConfigError(
                f"train.batch_size={config.train.batch_size} cannot be dealt evenly to {self.data_size} data parallel "
                f"processes with train.accumulate={config.train.accumulate}; it must be a multiple of {share}."
            )
        self.sharded = config.parallel.strategy == "fsdp" and self.size > 1
        self.sequence: ContextParallel | None = None
        if context > 1:
            mesh = make_mesh(data=self.data_size, context=context, device_type=self.device.type)
            self.sequence = ContextParallel.from_mesh(mesh)
        # Flags stay off a GPU: reading one there would wait for all that it has to do. None: as everything else.
        self._flags = dist.new_group(backend="gloo") if self.size > 1 and self.asynchronous else None

    @classmethod
    @contextmanager
    def join(
        cls, config: RunConfig, folder: Path | None = None, *, device: DeviceChoice = "auto"
    ) -> Iterator[Distributed]:
        """Join the processes that a launcher started, or be the only one, for the duration of a ``with`` block.

        Trackers, if the run has any, write to `folder`; without one there are none.
        """
        config = resolve_precision(config, device)
        on_cpu = choose_device(device).type == "cpu"
        if config.train.deterministic and not on_cpu:
            # Without it cuBLAS is not deterministic, and torch raises at every matrix product. Read at the first one.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision=_PRECISION[config.train.precision],
            log_with=list(config.log.trackers) if config.log.trackers and folder else None,
            project_dir=None if folder is None else str(folder),
        )
        before = torch.are_deterministic_algorithms_enabled(), fill.fill_uninitialized_memory  # type: ignore[attr-defined]
        _set_deterministic(config.train.deterministic, compiled=config.train.compile)
        # A debugging aid of that mode, which would write every new tensor twice.
        fill.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if accelerator.num_processes > 1:
            _GROUPS.append(dist.group.WORLD)
        try:
            processes = cls(accelerator, config)
            if sum(processes.any(config.train.precision == name) for name in _PRECISION) > 1:
                raise ConfigError(
                    f"train.precision=auto means {config.train.precision} here, but not on every machine of this run; "
                    "set train.precision=bf16 or fp32."
                )
            yield processes
        except RuntimeError as error:
            if accelerator.num_processes == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise TrainingError(f"the connection to another process of the run was lost: {error}") from error
        finally:
            _set_deterministic(before[0], compiled=config.train.compile)
            fill.fill_uninitialized_memory = before[1]  # type: ignore[attr-defined]
            accelerator.end_training()
            # Accelerate keeps its settings for the life of the process; another run may want others.
            AcceleratorState._reset_state(reset_partial_state=True)

    @property
    def asynchronous(self) -> bool:
        """Whether the device computes while Python continues, so that reading a number waits for it."""
        return self.device.type != "cpu"

    @property
    def pin_memory(self) -> bool:
        """Whether batches go into memory that the device can copy from on its own."""
        return self.device.type == "cuda"

    @property
    def description(self) -> str:
        """How many processes of which kind, for the log."""
        device = f"{self.size} process{'es' if self.size > 1 else ''} on {self.device.type}"
        return device if self.sequence is None else f"{device}, {self.sequence.size} sharing each sequence"

    def describe_backends(self) -> str:
        """Which implementation each operator will use on this device, and why a faster one cannot be used."""
        lines = []
        for op in operators():
            statuses = backends_on(self.device.type, op)
            chosen = next((name for name, status in statuses.items() if status == "ready"), "none")
            refused = [f"{name} not: {status}" for name, status in statuses.items() if status != "ready"]
            lines.append(" ".join([f"{op} by {chosen}", *(f"({text})" for text in refused)]))
        return ", ".join(lines)

    def seed(self, seed: int) -> None:
        """Seed the generators: alike on every process, so that all build the same model."""
        random.seed(seed)
        torch.manual_seed(seed)

    def prepare(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Place and wrap, or shard, the model, and make its optimizer; batch norms then see the batches of all."""
        if self.size > 1:
            model = share_batch_norms(model, self.device)
        if self.sharded:  # by torch's own call: Accelerate's does not shard on CPUs
            mesh, wrapped = init_device_mesh(self.device.type, (self.size,)), model.to(self.device)
            for part in (*getattr(model, "blocks", ()), model):
                fully_shard(part, mesh=mesh)
        else:
            wrapped = self.accelerator.prepare_model(model)
        optimizer: torch.optim.Optimizer = self.accelerator.prepare_optimizer(make_optimizer(wrapped))
        # From here on processes draw different random numbers, for example in dropout.
        torch.manual_seed(torch.initial_seed() + self.rank)
        return wrapped, optimizer

    def reshard(self, model: nn.Module) -> None:
        """Let go of whole weights that a forward pass without a backward pass has left gathered."""
        if self.sharded:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def place(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Move a batch to this process's device: its piece of every sequence, where sequences are shared."""
        placed = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
        if self.sequence is None:
            return placed
        for name, x in placed.items():  # [B, N, ...]
            if x.dim() < 2:
                continue
            if self.chunk is not None and x.shape[1] % self.sequence.size:
                raise ConfigError(
                    f"with train.chunk, texts of {x.shape[1]} tokens cannot be shared by {self.sequence.size} "
                    "processes; make their length a multiple of that, or set parallel.context=1."
                )
            pieces = [x] if self.chunk is None else torch.split(x, self.chunk, dim=1)
            placed[name] = torch.cat([self.sequence.split(piece) for piece in pieces], dim=1)
        return placed

    @contextmanager
    def context(self) -> Iterator[None]:
        """Set the arithmetic and, where sequences are shared, let the attention know about the other processes."""
        with self.accelerator.autocast(), nullcontext() if self.sequence is None else self.sequence:
            yield

    @contextmanager
    def sync_gradients(self, model: nn.Module, now: bool) -> Iterator[None]:
        """Exchange gradients in the backward passes inside, or put it off to a later one."""
        if self.sharded:
            cast(FSDPModule, model).set_requires_gradient_sync(now)
            yield
        else:
            with nullcontext() if now else self.accelerator.no_sync(model):
                yield

    def clip(self, model: nn.Module, config: TrainConfig) -> Tensor | None:
        """Clip gradients as configured and return their norm before clipping.

        None for fp16 without clipping: its scaler skips steps whose gradients are not finite.
        """
        if self.accelerator.scaler is not None and config.clip_value is None and config.clip_norm is None:
            return None
        self.accelerator.unscale_gradients()
        if config.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if config.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), config.clip_value)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, without waiting for the device."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any process, without waiting for the device."""
        if self.size == 1:
            return flag
        raised = torch.tensor(float(flag))
        dist.all_reduce(raised, group=self._flags)
        return bool(raised > 0)

    def wait(self) -> None:
        """Wait for all processes, without naming a device: on CPUs Accelerate's barrier may name a GPU."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for all processes at the end of a ``with`` block. If the block fails on one of them, it fails on all.

        Raises:
            TrainingError: It failed elsewhere. Here, what it raised is raised.
        """
        failed: Exception | None = None
        try:
            yield
        except (TostError, OSError) as error:
            failed = error
        if self.any(failed is not None):
            raise failed or TrainingError("another process of the run has failed; its message says why")

    def memory_bytes(self) -> int:
        """Return the memory of this process: allocated tensors on a GPU, or else resident memory."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return int(psutil.Process().memory_info().rss)

    def trim_memory(self) -> None:
        """Return freed memory to the system where much has gathered, as when every batch has another length.

        glibc keeps the freed pieces of tensors, and new tensors of other sizes do not fit into them.
        """
        if _TRIM is None or self.device.type == "cuda" or self.memory_bytes() < self._trim_above:
            return
        _TRIM(0)
        self._trim_above = self.memory_bytes() * 3 // 2 + _UNTRIMMED

    def peak_memory_bytes(self) -> int:
        """The most memory of this process so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def start_trackers(self, config: RunConfig) -> None:
        """Start TensorBoard or W&B if the run asks for them; W&B stays offline unless it has a key."""
        if not config.log.trackers:
            return
        if "wandb" in config.log.trackers and not os.environ.get("WANDB_API_KEY"):
            os.environ.setdefault("WANDB_MODE", "offline")
        values = flatten(config.model_dump(mode="json"))
        shown = {key: x if isinstance(x, int | float | str | bool) else str(x) for key, x in values.items()}
        self.accelerator.init_trackers("tost", config=shown)


def _set_deterministic(on: bool, *, compiled: bool) -> None:
    """Refuse algorithms whose result may differ from run to run, or allow them again."""
    if compiled:
        torch.use_deterministic_algorithms(on)  # informs the compiler too, which takes a second to load
    else:
        torch.set_deterministic_debug_mode("error" if on else "default")


class SharedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the samples of all processes; parameters and statistics have the names of the plain one.

    torch has this as ``SyncBatchNorm``, for graphics cards only. A process of a run on CPUs uses this one.
    """

    channel: Channel

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x ``[B, C, height, width]`` by the mean and variance of each channel over all processes."""
        if not self.training:
            return super().forward(x)
        wide = x.to(statistics_dtype(x.dtype))
        count = wide.new_tensor(x.numel() // x.shape[1])
        total = sum_over_ranks(count, self.channel)
        mean = sum_over_ranks(wide.sum(dim=(0, 2, 3)), self.channel) / total
        centred = wide - mean.view(1, -1, 1, 1)
        variance = sum_over_ranks(centred.square().sum(dim=(0, 2, 3)), self.channel) / total
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        unbiased = variance.detach() * (total / (total - 1))
        self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)).to(x.dtype)


def share_batch_norms(model: nn.Module, device: torch.device) -> nn.Module:
    """Let the batch norms of a model use the samples of all processes; the other modules stay as they are.

    Args:
        model: The model, the same on every process.
        device: Where it will run.

    Returns:
        The model.
    """
    assert dist.group.WORLD is not None
    channel = Channel(dist.group.WORLD)
    for module in model.modules():
        if isinstance(module, TokenBatchNorm):
            module.share(partial(sum_over_ranks, channel=channel))
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for module in model.modules():
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats:
            module.__class__ = SharedBatchNorm2d  # the same parameters, in the same places, with another rule
            setattr(module, "channel", channel)  # noqa: B010
    return model
