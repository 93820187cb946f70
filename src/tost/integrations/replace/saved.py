"""Load models of transformers whose attention was replaced."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

from torch import nn

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
import transformers

from tost.errors import CheckpointError
from tost.integrations.replace.run import replace_attention
from tost.nn import Extensions


def load_replaced(path: str | Path, *, dtype: Any = "auto", device_map: Any = None) -> nn.Module:
    """Load a model of transformers that was saved with ``save_pretrained`` after `replace_attention`.

    Args:
        path: The folder. Weights are read from safetensors only.
        dtype: Type of the parameters, as ``from_pretrained`` takes it; by default as they were saved.
        device_map: Where the parameters go, as ``from_pretrained`` takes it.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: The folder holds no such model, or its weights do not fit.

    Example:
        >>> import tempfile, tost, transformers
        >>> from tost.integrations.replace.saved import load_replaced
        >>> config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)
        >>> model = tost.replace_attention(transformers.GPT2LMHeadModel(config))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     type(load_replaced(folder)).__name__
        'GPT2LMHeadModel'
    """
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load {path}: {error}") from error
    calls, names = getattr(config, "tost_attention", None), getattr(config, "architectures", None)
    if not calls or not names or not hasattr(transformers, names[0]):
        raise CheckpointError(
            f"{path} does not hold a model that save_pretrained wrote after tost.replace_attention: config.json has "
            f"tost_attention={calls} and architectures={names}."
        )
    kind = getattr(transformers, names[0])

    def build(self: Any, given: Any, *args: Any, **kwargs: Any) -> None:
        plain = copy.deepcopy(given)
        del plain.tost_attention
        kind.__init__(self, plain, *args, **kwargs)
        for call in calls:
            extensions = None if call["extensions"] is None else Extensions(**call["extensions"])
            replace_attention(self, **{**call, "extensions": extensions})

    # transformers makes the model itself while it reads the weights, so the layers have to be replaced in between.
    replacing: Any = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"dtype": dtype, "device_map": device_map, "use_safetensors": True, "output_loading_info": True}
        model, info = replacing.from_pretrained(path, config=config, **options)
    wrong = {key: sorted(map(str, found)) for key, found in info.items() if found and key != "error_msgs"}
    if wrong:
        raise CheckpointError(f"the weights in {path} do not fit: {wrong}")
    model.__class__ = kind
    loaded: nn.Module = model.eval()
    return loaded
