"""Load models of transformers whose attention was replaced."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

import tost._torchvision  # noqa: F401  transformers may import torchvision, which a CPU build of torch has to be prepared for

# isort: split
import transformers

from tost._io import read_json
from tost.errors import CheckpointError, ConfigError
from tost.integrations.replace import replace_attention
from tost.integrations.replace.transformers import IMPLEMENTATION


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
        return _load(Path(path), dtype=dtype, device_map=device_map)
    except CheckpointError:
        raise
    except Exception as error:  # values of any type and size in config.json make transformers fail in any way
        raise CheckpointError(
            f"cannot load {path} as a model that save_pretrained wrote after tost.replace_attention: "
            f"{type(error).__name__}: {error}"
        ) from error


def _load(path: Path, *, dtype: Any, device_map: Any) -> nn.Module:
    config = _read_config(path)
    calls = [_read_call(call) for call in config.tost_attention]
    kind = getattr(transformers, config.architectures[0])

    def build(self: Any, given: Any, *args: Any, **kwargs: Any) -> None:
        plain = copy.deepcopy(given)
        del plain.tost_attention
        kind.__init__(self, plain, *args, **kwargs)
        for call in calls:
            replace_attention(self, **call)

    # transformers makes the model itself while it reads the weights, so the layers have to be replaced in between.
    replacing: Any = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"dtype": dtype, "device_map": device_map, "use_safetensors": True, "output_loading_info": True}
        model, info = replacing.from_pretrained(path, config=config, trust_remote_code=False, **options)
    wrong = {key: sorted(map(str, found)) for key, found in info.items() if found and key != "error_msgs"}
    if wrong:
        raise CheckpointError(f"the weights in {path} do not fit: {wrong}")
    model.__class__ = kind
    loaded: nn.Module = model.eval()
    return loaded


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a recorded replacement, perhaps of an earlier revision."""
    former = call.get("extensions")
    if former is not None:
        raise ConfigError(f"extensions={former}: removed after revision 1ae0fcd of tost; use that revision to read it.")
    return {name: value for name, value in call.items() if name != "extensions"}


def _read_config(path: Path) -> Any:
    """Return the configuration of a replaced model: no code from elsewhere, sizes no larger than its weights."""
    content = read_json(path / "config.json", error=CheckpointError)
    calls, (name, *_) = content["tost_attention"], content["architectures"]
    kind = getattr(transformers, name)
    if not calls or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"tost_attention={calls}, architectures={name}")
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    if config._attn_implementation not in (None, "eager", "sdpa", "flex_attention", IMPLEMENTATION):
        raise ValueError(f"the attention {config._attn_implementation!r} is code from elsewhere")
    tensors = numbers = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118 - not a mapping
        tensors, numbers = tensors + len(shapes), numbers + sum(map(math.prod, shapes))
    sizes = {
        "num_hidden_layers": tensors,
        "hidden_size": numbers,
        "vocab_size": numbers,
        "num_attention_heads": numbers,
    }
    for key, most in sizes.items():
        if not 0 < getattr(config, key, 1) <= most:
            raise ValueError(f"{key}={getattr(config, key)} does not fit the weights")
    return config
