"""Small trained models that come with the package, with their cards: list, verify and load them.

``scripts/train_pretrained.py`` trains them and writes ``weights/``: a model folder each, and an index of them. Torch is
loaded only with a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost._io import read_json, sha256_of
from tost._text import did_you_mean
from tost.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PretrainedModel", "describe_pretrained", "find_pretrained", "list_pretrained", "load_pretrained"]

WEIGHTS = Path(__file__).parent / "weights"
INDEX = "index.json"
FILE = "model.safetensors"


@dataclass(frozen=True)
class PretrainedModel:
    """What is known of a model without loading it.

    Attributes:
        name: What `load_pretrained` takes.
        description: One line.
        config: The configuration it was trained with, for `tost train`.
        parameters: How many numbers it has.
        results: What was measured on the validation set, by metric.
        image: For a classifier of images: ``image_size``, ``mean``, ``std`` and ``classes``. Empty for others.
        sha256: Hash of the file with the weights.
    """

    name: str
    description: str
    config: str
    parameters: int
    results: dict[str, float]
    image: dict[str, Any]
    sha256: str

    @property
    def folder(self) -> Path:
        """The model folder: weights, options, card."""
        return WEIGHTS / self.name

    def verify(self) -> Path:
        """Return the file with the weights after comparing its hash.

        Raises:
            CheckpointError: It is missing or was changed.
        """
        file = self.folder / FILE
        if not file.is_file() or sha256_of(file) != self.sha256:
            state = "was changed" if file.is_file() else "is missing"
            raise CheckpointError(f"{file} {state} since tost was released; install the package again.")
        return file


@cache
def _index() -> dict[str, PretrainedModel]:
    entries = read_json(WEIGHTS / INDEX)
    return {name: PretrainedModel(name=name, **entry) for name, entry in entries.items()}


def list_pretrained(pattern: str = "*") -> list[str]:
    """Return the names of the models in the box.

    Args:
        pattern: Which, with the wildcards of a shell.

    Example:
        >>> from tost.pretrained import list_pretrained
        >>> list_pretrained("bytes-*")
        ['bytes-gpt-tiny', 'bytes-tiny']
    """
    return sorted(name for name in _index() if fnmatchcase(name, pattern))


def find_pretrained(name: str) -> PretrainedModel:
    """Return the description of a shipped model.

    Raises:
        ConfigError: There is no such model.
    """
    try:
        return _index()[name]
    except KeyError:
        names = list_pretrained()
        hint = f"{did_you_mean(name, names)}there are {', '.join(names)}"
        raise ConfigError(f"there is no pretrained model {name!r}; {hint}") from None


def describe_pretrained(name: str) -> dict[str, str]:
    """Return a model as a line of `tost ls pretrained`."""
    model = find_pretrained(name)
    results = ", ".join(f"{metric} {value:.4g}" for metric, value in model.results.items())
    size = f"{model.parameters / 1e6:.2f}M"
    return {"name": name, "parameters": size, "result": results, "description": model.description}


def load_pretrained(name: str) -> nn.Module:
    """Load a small trained model that comes with the package.

    Weights are stored in half precision and computed with in float32. Their hash is compared before they are read.

    Args:
        name: ``bytes-tiny``, a causal language model over bytes that runs without end; ``bytes-gpt-tiny``, a GPT to
            compare with; ``digits-tiny``, a classifier of handwritten digits. ``tost ls pretrained`` lists them.

    Returns:
        The model, on the CPU and in evaluation mode.

    Raises:
        ConfigError: There is no such model.
        CheckpointError: Its files are not those that were released.

    Example:
        >>> import torch, tost
        >>> model = tost.load_pretrained("bytes-tiny")
        >>> prompt = torch.tensor([list(b"def main(")])
        >>> tost.generate(model, prompt, max_new_tokens=20).shape
        torch.Size([1, 29])
    """
    from tost.train.checkpoint.model import load_model  # loads torch

    found = find_pretrained(name)
    found.verify()
    return load_model(found.folder).float()
