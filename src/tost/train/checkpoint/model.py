"""A trained model by itself: its weights, what it takes to build it again, and weights that a run starts from.

A model folder holds ``model.safetensors``, ``model.json`` with the model's registered name and all its options, and the
manifest of a checkpoint, so that whatever reads the weights of a checkpoint can read those of a model folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from tost._io import read_json, sha256_of, write_json
from tost.data.text.tokenizers import RECORD_FILE, TOKENIZER_FILE
from tost.errors import CheckpointError, ConfigError, StorageError
from tost.models import create_model, model_spec
from tost.models.options import saved_options
from tost.models.registry import loaded_models, model_options_of
from tost.train.checkpoint.files import (
    AVERAGES,
    MANIFEST,
    WEIGHTS,
    check_fit,
    load_tensors,
    read_model_tensors,
    resolve_checkpoint,
    save_tensors,
    write_manifest,
)
from tost.train.config.files import read_run_document

DESCRIPTION = "model.json"
FORMAT = 1


@dataclass(frozen=True)
class SavedModel:
    """What is on the disk of a model.

    Attributes:
        name: Its registered name.
        options: All its options.
        tensors: Its state dict.
    """

    name: str
    options: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_saved(path: str | Path, *, ema: bool = False, report: Callable[[str], None] | None = None) -> SavedModel:
    """Read the weights and options of a model.

    Args:
        path: A model folder, a checkpoint folder, or a run folder for its newest checkpoint.
        ema: Take the moving averages of the weights, which a run keeps if ``train.ema_decay`` is set; what has none,
            such as the statistics of a batch norm, is taken as it is.
        report: Gets a line for each newer checkpoint that is damaged and passed over.

    Raises:
        CheckpointError: There is no such thing, it is damaged, or it has no averages.
    """
    files = (DESCRIPTION, WEIGHTS, *([AVERAGES] if ema else []))
    checkpoint = resolve_checkpoint(Path(path), report or (lambda line: None), files)
    name, options = _description(checkpoint)
    return SavedModel(name, options, read_model_tensors(checkpoint, ema=ema))


def trained_precision(path: Path) -> str | None:
    """Return ``train.precision`` of the run to which a run or checkpoint folder belongs; None for a model folder."""
    folder = path.resolve()
    config = folder / "config.yaml" if (folder / "checkpoints").is_dir() else folder.parent.parent / "config.yaml"
    if (folder / DESCRIPTION).is_file() or not config.is_file():
        return None
    train = read_run_document(config).values.get("train")
    return train.get("precision") if isinstance(train, dict) else None


def load_model(path: str | Path, *, ema: bool = False) -> nn.Module:
    """Build the model that was saved in a folder, with its weights.

    Args:
        path: A folder that `tost convert` made, a run folder (its newest checkpoint is taken), or one of its
            checkpoints.
        ema: Take the moving averages of the weights instead, if the run kept them.

    Returns:
        The model, on the CPU and in evaluation mode; call ``train()`` before training it.

    Raises:
        CheckpointError: There is no such thing, it is damaged, or its weights do not fit its options.

    Example:
        >>> import tempfile, tost
        >>> from tost.train.checkpoint.model import save_model
        >>> model = tost.create_model("tost_lm_base", embed_dim=64, depth=2, num_heads=4, vocab_size=256)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(model, folder + "/mine")
        ...     tost.load_model(folder + "/mine").options == model.options
        True
    """
    return build_saved(read_saved(path, ema=ema), str(path))


def build_saved(saved: SavedModel, source: str, changes: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the model that was read from `source`, in evaluation mode, with changes to its options."""
    try:
        with torch.device("meta"):
            options = saved_options(saved.options, model_spec(saved.name).options)
            model = create_model(saved.name, **{**options, **(changes or {})})
    except ConfigError as error:
        raise CheckpointError(f"{source} describes a model that this version cannot build: {error}") from error
    needed = model.state_dict()
    tensors = saved.tensors
    check_fit(needed, tensors, source, "the weights do not fit the options that are stored with them")
    model.load_state_dict(dict(tensors), strict=True, assign=True)
    return model.eval()


def save_model(
    model: nn.Module,
    folder: str | Path,
    *,
    name: str | None = None,
    force: bool = False,
    add: Callable[[Path], None] | None = None,
) -> None:
    """Write a model folder, whole or not at all.

    Args:
        model: A model of this package.
        folder: Where to; made if it is not there.
        name: The model's registered name; by default the nearest one with these options.
        force: Replace a model folder that is there.
        add: Writes further files into the folder, such as a tokenizer, before it gets its name.

    Raises:
        ConfigError: Something else is there already, or the folder around it is not.
        StorageError: The disk is full or cannot be written.
    """
    target = Path(folder)
    refuse_existing(target, force=force)
    options = model_options_of(model)
    if options is None:
        raise ConfigError(
            f"{type(model).__name__} has no options to build it again with; make it with tost.create_model, or give it "
            "an attribute `options`."
        )
    temporary, former = (target.with_name(f".{target.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_tensors(temporary / WEIGHTS, model.state_dict())
        described = {"name": name or nearest_name(options), "options": options.model_dump(mode="json")}
        write_json(temporary / DESCRIPTION, {"format": FORMAT, **described})
        if add is not None:
            add(temporary)
        write_manifest(temporary)
        if target.is_dir():
            target.rename(former)
        temporary.rename(target)
    except OSError as error:
        if former.is_dir() and not target.exists():
            former.rename(target)
        raise StorageError(f"cannot write the model to {target}: {error}") from error
    finally:
        for folder in (temporary, former) if target.is_dir() else (temporary,):
            shutil.rmtree(folder, ignore_errors=True)


def refuse_existing(target: Path, *, force: bool) -> None:
    """Raise if a model folder cannot be made at `target`, or if making it would destroy anything but another one."""
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"the folder {target.parent} does not exist; make it first, or give another place")
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target} exists and is not a folder, so it was left as it is; give another place")
    content = {path.name for path in target.iterdir()}
    if content and DESCRIPTION not in content:
        raise ConfigError(f"{target} is a folder with other things in it and was left as it is; give another place")
    if content and not force:
        raise ConfigError(f"{target} holds a model and was left as it is; add --force (force=True) to replace it")
    if strangers := content - {DESCRIPTION, WEIGHTS, MANIFEST, RECORD_FILE, TOKENIZER_FILE}:
        raise ConfigError(
            f"{target} holds a model, but also {', '.join(sorted(strangers))}, which would be lost; give another place"
        )


def nearest_model(kind: type[BaseModel], options: Mapping[str, Any]) -> str:
    """Return the registered model with this class of options whose defaults agree best with `options`."""

    def agreement(name: str) -> tuple[bool, int]:
        defaults = model_spec(name).defaults
        equal = sum(options.get(key) == value for key, value in defaults.items())
        return equal == len(defaults), equal

    names = [spec.name for spec in loaded_models() if spec.options is kind]
    return max(names, key=agreement)


def nearest_name(options: BaseModel) -> str:
    """Return the registered model whose defaults agree best with the options of a model."""
    return nearest_model(type(options), options.model_dump(mode="json"))


def _description(checkpoint: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the model whose checkpoint or model folder this is."""
    file = checkpoint / DESCRIPTION
    if file.is_file():
        content = read_json(file, error=CheckpointError)
        known = isinstance(content, dict) and isinstance(content.get("name"), str)
        if not known or not isinstance(content.get("options"), dict) or "name" in content["options"]:
            raise CheckpointError(f"{file} does not describe a model; it needs the keys name and options")
        if content.get("format") != FORMAT:
            raise CheckpointError(
                f"{file} has format {content.get('format')!r}, this version reads {FORMAT}; use a newer version"
            )
        return content["name"], content["options"]
    config = checkpoint.parents[1] / "config.yaml"
    if not config.is_file():
        raise CheckpointError(
            f"{checkpoint} does not lie in a run folder (there is no {config}), so its model is not known; "
            "give the run folder, or a model folder made by `tost convert`"
        )
    # A finished configuration holds every option. The rest of it is left alone: the data may not be here any more.
    model = read_run_document(config).values.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("name"), str):
        raise CheckpointError(f"{config} names no model; it needs a key model with a name")
    return model["name"], {key: value for key, value in model.items() if key != "name"}


HEAD = "head."
"""Where the tensors of a model's last layer are; the only ones that another number of classes changes."""

Head = Literal["same", "fit", "new"]
"""The head of a model: the source's; the source's unless its number of classes differs; always a new one."""

PICKLES = (".pth", ".pt", ".t7", ".bin", ".ckpt", ".pkl")


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
    path = Path(source)
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle, which is never opened here, because reading one runs code from it. Convert it once "
            "with `tost convert` and give the folder that it writes."
        )
    if not path.exists():
        raise CheckpointError(
            f"there is no {path}; train.init_from takes a run folder, a checkpoint folder, the folder of a converted "
            "model, or a .safetensors file."
        )
    if (path / "checkpoints").is_dir() or (path / MANIFEST).is_file():
        path = resolve_checkpoint(path, report, [WEIGHTS])
    path = path if path.is_file() else path / WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"{source} holds no weights; needed are a run folder (with checkpoints/ in it), or a folder with {WEIGHTS}."
        )
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
    here = model.state_dict()
    fresh = tuple(name for name in here if _stays(name, here[name], tensors.get(name), head))
    # A source without a head may belong to a model that has one, and the other way round.
    spared = {*fresh, *(name for name in tensors if head != "same" and name.startswith(HEAD) and name not in here)}
    check_fit(here, tensors, source, "choose model.name and its options as they were there", spared=spared)
    model.load_state_dict({name: tensors[name] for name in here if name not in fresh}, strict=False)
    return fresh


def _stays(name: str, here: Tensor, there: Tensor | None, head: Head) -> bool:
    """Return whether a tensor keeps its values: in a new head, or one of other classes, which are its first axis."""
    if head == "same" or not name.startswith(HEAD):
        return False
    return head == "new" or there is None or (here.shape != there.shape and here.shape[1:] == there.shape[1:])
