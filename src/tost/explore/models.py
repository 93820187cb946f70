"""The models that the page shows: loaded when they are first looked at, one analysis at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any, Literal

from torch import nn

from tost._text import did_you_mean
from tost.analysis import attention_layers, control_of
from tost.data.images.options import ImageFolderOptions, ImageOptions
from tost.errors import CheckpointError, ConfigError
from tost.generation import Tokenizer
from tost.models import model_spec
from tost.pretrained import PretrainedModel, find_pretrained, list_pretrained
from tost.recipes import load_config
from tost.train.checkpoint.files import resolve_checkpoint
from tost.train.checkpoint.model import SavedModel, build_saved, read_saved
from tost.train.tokenizer import require_tokenizer

Kind = Literal["text", "image"]
_KINDS: dict[str, Kind] = {"language_modeling": "text", "image_classification": "image"}


@dataclass
class ExploredModel:
    """A model on the page.

    Analyses put hooks into a model, so that one thread at a time may use it: hold `lock`.

    Attributes:
        name: What the page calls it.
        given: What it was opened by, as `open_models` takes it.
        source: The folder that it was read from.
        saved: Its weights and options.
        kind: Whether it reads text or images.
        pretrained: What is known of a model in the box; None for others.
        lock: Held while the model runs.
    """

    name: str
    given: str
    source: Path
    saved: SavedModel
    kind: Kind
    pretrained: PretrainedModel | None = None
    lock: RLock = field(default_factory=RLock, repr=False)

    @cached_property
    def model(self) -> nn.Module:
        """The model in evaluation mode, in float32."""
        with self.lock:
            return build_saved(self.saved, str(self.source)).float().requires_grad_(False)

    @cached_property
    def control(self) -> nn.Module:
        """An untrained model of the same form."""
        return control_of(self.model).requires_grad_(False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a language model."""
        return require_tokenizer(self.model, self.source)

    @cached_property
    def images(self) -> ImageOptions:
        """Size and normalization of the images that a classifier takes."""
        known: dict[str, Any] = {"num_classes": self.saved.options.get("num_classes") or 2, "crop": "none", "flip": 0.0}
        if self.pretrained is not None:
            about = self.pretrained.image
            return ImageFolderOptions(**known, **{key: about[key] for key in ("image_size", "mean", "std")})
        config = self.source.parents[1] / "config.yaml"
        if config.is_file():
            options = load_config(str(config)).data.data_set_options()
            if isinstance(options, ImageOptions):
                return options
        return ImageFolderOptions(**known, channels=self.saved.options.get("in_chans", 3))

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, where they are known."""
        return None if self.pretrained is None else self.pretrained.image.get("classes")

    def samples(self) -> list[Path]:
        """Return the images that come with the model."""
        return [] if self.pretrained is None else sorted((self.pretrained.folder / "samples").glob("*.png"))

    def sample(self, name: str | None) -> Path:
        """Return an image that comes with the model, by the name of its file.

        Raises:
            ConfigError: There is none of that name.
        """
        for path in self.samples():
            if path.stem == name:
                return path
        raise ConfigError("there is no such sample.")

    def describe(self) -> dict[str, Any]:
        """Return what the page has to know before the model is used."""
        return {
            "name": self.name,
            "source": self.given,
            "kind": self.kind,
            "model": self.saved.name,
            "parameters": sum(tensor.numel() for tensor in self.saved.tensors.values()),
            "groups": self.saved.options.get("mixer") in ("tssa", "tssa_plus"),
            "gated": self.saved.options.get("mixer") == "tssa_plus" and self.kind == "text",
            "samples": [path.stem for path in self.samples()],
            "description": "" if self.pretrained is None else self.pretrained.description,
        }

    def has_groups(self) -> bool:
        """Whether the model has TSSA layers."""
        return bool(attention_layers(self.model))


def open_models(sources: Sequence[str]) -> dict[str, ExploredModel]:
    """Read the models that were named.

    Args:
        sources: Run folders, checkpoints, model folders and names of pretrained models; none for all in the box.

    Returns:
        The models by name, which is the end of their path.

    Raises:
        CheckpointError: There is no such model, or it is damaged.
        ConfigError: It is neither a language model nor an image classifier.
    """
    found: dict[str, ExploredModel] = {}
    for source in sources or list_pretrained():
        one = _open(source)
        if one.name in found:
            one.name = f"{one.name} ({sum(name.startswith(one.name) for name in found) + 1})"
        found[one.name] = one
    return found


def _open(source: str) -> ExploredModel:
    path, pretrained = Path(source), None
    if not path.exists():
        if source not in list_pretrained():
            names = list_pretrained()
            raise CheckpointError(
                f"there is no {source}; {did_you_mean(source, names)}give a run folder, one of its checkpoints, a "
                f"model folder, or one of {', '.join(names)}"
            )
        pretrained = find_pretrained(source)
        pretrained.verify()
        path = pretrained.folder
    checkpoint = resolve_checkpoint(path, lambda line: None)
    saved = read_saved(checkpoint)
    tasks = model_spec(saved.name).tasks or ()
    kind = next((_KINDS[task] for task in tasks if task in _KINDS), None)
    if kind is None:
        raise ConfigError(
            f"{source} holds {saved.name}, which is neither a language model nor an image classifier; the page shows "
            "these two. `tost analyze` looks at any model."
        )
    name = source if pretrained is not None else _short_name(path)
    return ExploredModel(name, source, checkpoint, saved, kind, pretrained)


def _short_name(path: Path) -> str:
    """Return the end of a path that tells it from others: a checkpoint is named with its run."""
    parts = path.resolve().parts
    return " ".join((parts[-3], parts[-1])) if parts[-2:-1] == ("checkpoints",) else parts[-1]
