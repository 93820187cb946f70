"""Finding the tokenizer of a trained model, which is saved beside the weights."""

from __future__ import annotations

from pathlib import Path

from tost.data.text.tokenizers import DataTokenizer, read_tokenizer
from tost.data.tokens.reader import tokenizer_of
from tost.errors import ConfigError, StorageError
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
