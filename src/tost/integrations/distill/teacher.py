"""Load a pretrained model of transformers to learn from."""

from __future__ import annotations

from typing import Any

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
import transformers

from tost.errors import CheckpointError


def load_teacher(model: str) -> tuple[Any, Any]:
    """Return a model in evaluation mode and its tokenizer. Weights are read from safetensors only.

    Args:
        model: A folder, or a name on the hub.

    Raises:
        CheckpointError: One of the two is not there or cannot be read.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(model)
        name = (getattr(config, "architectures", None) or ["AutoModel"])[0]
        kind = getattr(transformers, name, transformers.AutoModel)
        found = kind.from_pretrained(model, use_safetensors=True).eval()
        return found, transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load {model}: {error}") from error
