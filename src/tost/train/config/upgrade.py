"""Format version of run folders, and how those of older versions are read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tost._io import read_json
from tost._yaml import Document, read_document
from tost.errors import CheckpointError, ConfigError
from tost.models import model_spec
from tost.models.renamed import current_names

FORMAT = 3
"""Version of run folders and checkpoints that this code writes. It reads all up to this one; those of version 1 do not
have a number.

2: the section ``regularise`` of a configuration is ``regularize``.
3: some options of models have other names, see `tost.models.renamed`.
"""


def read_run_document(path: Path) -> Document:
    """Read a configuration file; that of a run folder may have been written by an older version.

    Raises:
        ConfigError: The file cannot be read.
        CheckpointError: The run folder was written by a newer version.
    """
    document = read_document(path)
    record = path.with_name("env.json")
    if path.name == "config.yaml" and record.is_file():
        environment = read_json(record, error=ConfigError)
        version = environment.get("format", 1) if isinstance(environment, dict) else 1
        check_format(version, str(path.parent))
        if version < 2 and "regularise" in document.values:
            document.values["regularize"] = document.values.pop("regularise")
        if version < 3 and isinstance(model := document.values.get("model"), dict):
            with suppress(ConfigError):  # a model that is not known here is reported when the configuration is checked
                known = {"name", *model_spec(str(model.get("name"))).options.model_fields}
                document.values["model"] = current_names(model, known)
    return document


def check_format(version: object, source: str) -> None:
    """Raise if a run folder or checkpoint has a format that this version does not read."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise CheckpointError(
            f"{source} has format {version!r}, which no version of tost writes; it was changed since."
        )
    if version > FORMAT:
        raise CheckpointError(
            f"{source} has format {version!r}, but this version of tost reads formats up to {FORMAT}; it was written "
            "by a newer version: update tost."
        )
