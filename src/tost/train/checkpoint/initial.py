"""Weights that a run starts from: those of another run, a converted model, or a file of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from tost._io import sha256_of
from tost.errors import CheckpointError
from tost.models.renamed import current_names
from tost.train.checkpoint.files import WEIGHTS, differing, load_tensors, resolve_checkpoint, shapes_of

HEAD = "head."
"""Where the tensors of a model's last layer are; the only ones that another number of classes changes."""

Head = Literal["same", "fit", "new"]
"""The head that a model gets: that of the source; a new one if the source has other classes; a new one."""

PICKLES = (".pth", ".pt", ".t7", ".bin", ".ckpt", ".pkl")
SHOWN = 40


@dataclass(frozen=True)
class InitialWeights:
    """Where the first weights of a run came from.

    Attributes:
        path: The file.
        sha256: Its content, in hexadecimal.
        loaded: Number of tensors that were taken over.
        fresh: Tensors that kept their random values: those of the head, if it is new.
    """

    path: str
    sha256: str
    loaded: int
    fresh: tuple[str, ...]

    def __str__(self) -> str:
        fresh = f"; new: {', '.join(self.fresh)}" if self.fresh else ""
        return f"started from {self.path}: {self.loaded} tensors{fresh}"


def load_initial(model: nn.Module, source: str, report: Callable[[str], None], *, head: Head = "fit") -> InitialWeights:
    """Fill a model with weights for a run to start from.

    Everything must fit; a head that is new keeps its random values.

    Args:
        model: The model, whole and on the CPU.
        source: A run folder (its newest checkpoint), a checkpoint folder, the folder of a converted model, or a
            ``.safetensors`` file.
        report: Gets one line for each damaged checkpoint that is passed over.
        head: Which head the model shall have; see `Head`.

    Raises:
        CheckpointError: There are no weights, or they belong to another model; the message lists what differs.
    """
    path = _find(Path(source), report)
    fresh = load_weights(model, load_tensors(path), source, head=head)
    return InitialWeights(str(path), sha256_of(path), len(model.state_dict()) - len(fresh), fresh)


def load_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], source: str, *, head: Head = "same"
) -> tuple[str, ...]:
    """Copy tensors into a model, all or none.

    Args:
        model: The model.
        tensors: By name.
        source: What to call them in messages.
        head: Which head the model shall have; see `Head`.

    Returns:
        The names of the tensors that kept their values.

    Raises:
        CheckpointError: Names or shapes differ.
    """
    here = shapes_of(model.state_dict())
    tensors = current_names(tensors, here)
    there = shapes_of(tensors)
    fresh = tuple(name for name in here if _stays(name, here[name], there.get(name), head))
    # A source without a head may belong to a model that has one, and the other way round.
    spared = {*fresh, *(name for name in there if head != "same" and name.startswith(HEAD) and name not in here)}
    if wrong := [name for name in differing(here, there) if name not in spared]:
        lines = [f"{source} belongs to another model: {len(wrong)} of {len(here)} tensors differ; nothing was loaded"]
        for name in wrong[:SHOWN]:
            lines.append(f"{name}: {there.get(name, 'missing')} there, {here.get(name, 'unknown')} here")
        lines += [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise CheckpointError("\n  ".join([*lines, "choose model.name and its options as they were there"]))
    model.load_state_dict({name: tensors[name] for name in here if name not in fresh}, strict=False)
    return fresh


def _find(path: Path, report: Callable[[str], None]) -> Path:
    """Return the file of tensors that a user means by a path."""
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle, which is never opened here, because reading one runs code from it. Convert it once "
            "with `tost convert` and give the folder that it writes."
        )
    if path.is_file():
        return path
    if not path.exists():
        raise CheckpointError(
            f"there is no {path}; train.init_from takes a run folder, a checkpoint folder, the folder of a converted "
            "model, or a .safetensors file."
        )
    is_run = (path / "checkpoints").is_dir() or (path / "manifest.json").is_file()
    folder = resolve_checkpoint(path, report, [WEIGHTS]) if is_run else path
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    raise CheckpointError(
        f"{path} holds no weights; needed are a run folder (with checkpoints/ in it), or a folder with {WEIGHTS}."
    )


def _stays(name: str, here: tuple[int, ...], there: tuple[int, ...] | None, head: Head) -> bool:
    """Tell whether a tensor keeps its values: in a head that is new, or of other classes, which are its first axis."""
    if head == "same" or not name.startswith(HEAD):
        return False
    return head == "new" or there is None or (here != there and here[1:] == there[1:])
