"""Finding the tokenizer of a trained model, which is saved beside the weights."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from tost.data.text.tokenizers import DataTokenizer, read_tokenizer
from tost.data.tokens.reader import tokenizer_of
from tost.errors import ConfigError, StorageError
from tost.generation import ByteTokenizer, Tokenizer
from tost.generation.decode import check_causal
from tost.train.config import load_config


def find_tokenizer(path: Path) -> DataTokenizer | None:
    """Return the tokenizer of a trained model.

    Args:
        path: A run folder, one of its checkpoints, or a model folder.

    Returns:
        The one that was saved there; for a run without one, that of its data, if the data still exists. None if there
        is neither.

    Raises:
        ConfigError: It is damaged.
    """
    run = path.resolve()
    if run.parent.name == "checkpoints":
        run = run.parents[1]
    found = read_tokenizer(run)
    if found is not None or not (run / "config.yaml").is_file():
        return found
    try:
        return tokenizer_of(load_config(str(run / "config.yaml")).data)
    except (ConfigError, StorageError):
        return None


def require_tokenizer(model: nn.Module, source: Path) -> Tokenizer:
    """Return the tokenizer of a language model.

    Args:
        model: The model.
        source: Where it was read from: a run folder, one of its checkpoints, or a model folder.

    Raises:
        ConfigError: The model is something else, or its tokenizer is not known.
    """
    size = check_causal(model).options.vocab_size
    if (found := find_tokenizer(source)) is not None:
        if found.vocab_size > size:
            raise ConfigError(
                f"the tokenizer beside {source} has {found.vocab_size} ids, but the model has {size}; it is not the "
                "one that the model was trained with"
            )
        return found
    if size != ByteTokenizer.vocab_size:
        raise ConfigError(
            f"the model in {source} has {size} ids, but there is no tokenizer beside it, and bytes have "
            f"{ByteTokenizer.vocab_size}; call `tost.generate` from Python with the tokenizer that it was trained with"
        )
    return ByteTokenizer()
