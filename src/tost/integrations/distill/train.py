"""Distillation of models of transformers: first block by block, then what comes out at the end.

In the first stage each block with replaced attention sees what the teacher's block sees and learns to return what that
returns; all blocks learn at once. In the second stage the whole model learns to return the teacher's logits, or its
hidden states and their means, where it has no logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost._progress import Pace, format_progress
from tost.errors import ConfigError, TrainingError
from tost.integrations.replace.run import find_layers
from tost.train.config import ScheduleConfig
from tost.train.schedule import learning_rate

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Progress:
    """The losses of a distillation, one per step.

    Attributes:
        layers: Of the first stage: squared error of what the blocks add to their inputs, relative to the squares of
            what the teacher's blocks add; the mean over blocks.
        outputs: Of the second stage, see `output_loss`.
    """

    layers: list[float] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)


def distill(
    teacher: nn.Module,
    student: nn.Module,
    batches: Iterator[Batch],
    *,
    layer_steps: int = 200,
    output_steps: int = 200,
    lr: float = 1e-3,
    output_lr: float = 2e-4,
    report: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> Progress:
    """Train the student to do what the teacher does; see the module.

    Args:
        teacher: The original; it is not changed.
        student: A copy of it whose attention `replace_attention` replaced; trained in place, without dropout.
        batches: What the models take, by name, such as `input_ids` and `attention_mask`; without end.
        layer_steps: Steps of the first stage.
        output_steps: Steps of the second stage.
        lr: Highest learning rate of the first stage.
        output_lr: Highest learning rate of the second stage.
        report: Receives a line now and then.
        progress: Receives the losses as they come.

    Returns:
        The losses.

    Raises:
        ConfigError: Nothing in the student is replaced, or it is not made of blocks.
        TrainingError: A loss is no longer a number.
    """
    names = _block_names(student)
    progress = Progress() if progress is None else progress
    was_training = student.training
    teacher.eval()
    student.eval()
    blocks = nn.ModuleList(student.get_submodule(name) for name in names)
    pace = Pace()
    for loss in _optimize(blocks, layer_steps, lr, lambda: _layer_loss(teacher, student, names, next(batches))):
        _note(progress.layers, loss, layer_steps, "layers", report, pace)
    pace = Pace()
    for loss in _optimize(student, output_steps, output_lr, lambda: output_loss(teacher, student, next(batches))):
        _note(progress.outputs, loss, output_steps, "outputs", report, pace)
    student.train(was_training)
    return progress


def output_loss(teacher: nn.Module, student: nn.Module, batch: Batch) -> Tensor:
    """Return how far the student's output is from the teacher's, averaged over real tokens.

    With logits it is the Kullback-Leibler divergence of the distributions; without, the relative squared error of the
    hidden states plus 1 - cosine of their means, which are the vectors of sentence encoders.
    """
    real = _real(batch)
    with torch.no_grad():
        wanted = _call(teacher, batch)
    found = _call(student, batch)
    if getattr(wanted, "logits", None) is not None and wanted.logits.dim() == 3:
        target, guess = (out.logits.float().log_softmax(-1)[real] for out in (wanted, found))
        return F.kl_div(guess, target, reduction="sum", log_target=True) / len(guess)
    x, y = found[0].float(), wanted[0].float()
    means = [(z * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True).clamp_min(1) for z in (x, y)]
    return _relative_error(x[real], y[real]) + (1 - F.cosine_similarity(*means)).mean()


@torch.no_grad()
def compare(teacher: nn.Module, student: nn.Module, batches: Iterator[Batch], count: int) -> float:
    """Return the mean of `output_loss` over `count` batches."""
    modes = student.training
    student.eval()
    found = [float(output_loss(teacher, student, next(batches))) for _ in range(count)]
    student.train(modes)
    return sum(found) / len(found)


def _block_names(student: nn.Module) -> list[str]:
    """Return the blocks that hold replaced attention: the innermost numbered modules."""
    replaced = [layer.name for layer in find_layers(student) if layer.library is None]
    if not replaced:
        raise ConfigError("nothing in the student is replaced; call tost.replace_attention on a copy of the teacher.")
    found = [re.match(r"(?:.*\.)?\d+(?=\.)", name) for name in replaced]
    if None in found:
        raise ConfigError(f"the layer {replaced[found.index(None)]} is in no numbered block; distill outputs only.")
    return [match.group() for match in found if match is not None]


def _layer_loss(teacher: nn.Module, student: nn.Module, names: list[str], batch: Batch) -> Tensor:
    seen: dict[str, tuple[Any, Any, Any]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs, out: seen.__setitem__(name, (args, kwargs, out))

    hooks = [teacher.get_submodule(name).register_forward_hook(keep(name), with_kwargs=True) for name in names]
    try:
        with torch.no_grad():
            _call(teacher, batch)
    finally:
        for hook in hooks:
            hook.remove()
    real = _real(batch)
    losses = []
    for name in names:
        args, kwargs, out = seen[name]
        x = args[0] if args else kwargs["hidden_states"]
        found = student.get_submodule(name)(*args, **kwargs)
        y, z = (_first(found) - x)[real], (_first(out) - x)[real]
        losses.append(_relative_error(y.float(), z.float()))
    return torch.stack(losses).mean()


def _optimize(module: nn.Module, steps: int, lr: float, loss_of: Callable[[], Tensor]) -> Iterator[float]:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    schedule = ScheduleConfig(name="cosine", warmup_steps=min(20, steps // 5), min_lr=lr / 20)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config=schedule, peak=lr, total=steps)
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield float(loss.detach())


def _note(losses: list[float], loss: float, steps: int, stage: str, report: Callable[[str], None], pace: Pace) -> None:
    losses.append(loss)
    if loss != loss:
        raise TrainingError(f"the loss is no number at step {len(losses)} of stage {stage}; use a smaller lr.")
    if len(losses) % max(1, steps // 10) == 0 or pace.due():
        pace.said()
        recent = losses[-max(1, steps // 10) :]
        told = format_progress(stage, len(losses), steps, pace.elapsed)
        report(f"{told}, loss {sum(recent) / len(recent):.4f}")


def _relative_error(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean() / y.square().mean().clamp_min(1e-12)


def _call(model: nn.Module, batch: Batch) -> Any:
    causal = {"use_cache": False} if getattr(model.config, "is_decoder", False) or _generates(model) else {}
    return model(**batch, **causal)


def _generates(model: Any) -> bool:
    return bool(getattr(model, "can_generate", lambda: False)())


def _real(batch: Batch) -> Tensor:
    mask = batch.get("attention_mask")
    if mask is not None:
        return mask != 0
    given = next(iter(batch.values()))
    return torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)


def _first(out: Any) -> Tensor:
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found
