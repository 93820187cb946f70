"""Load a pretrained model of transformers to learn from."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
import transformers

from tost.data._hub import asked_once
from tost.errors import CheckpointError


def load_teacher(model: str) -> tuple[Any, Any]:
    """Return a model in evaluation mode and its tokenizer. Weights are read from safetensors only.

    Args:
        model: A folder, or a name on the hub.

    Raises:
        CheckpointError: One of the two is not there or cannot be read.
    """
    with nullcontext("") if Path(model).exists() else asked_once() as reason:
        try:
            config = transformers.AutoConfig.from_pretrained(model)
            name = (getattr(config, "architectures", None) or ["AutoModel"])[0]
            kind = getattr(transformers, name, transformers.AutoModel)
            found = kind.from_pretrained(model, use_safetensors=True).eval()
            return found, transformers.AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            problem = f"there is no such folder, it is not on this machine, and {reason}" if reason else str(error)
            raise CheckpointError(f"cannot load {model}: {problem}") from error
