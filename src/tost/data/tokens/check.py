"""Is a prepared folder what it was when it was written?"""

from __future__ import annotations

from pathlib import Path

from tost.data.tokens.format import FileRecord
from tost.data.tokens.reader import REMEDY, check_size, open_tokens
from tost.data.tokens.writer import hash_file
from tost.errors import StorageError

__all__ = ["check_tokens"]


def check_tokens(out: Path) -> dict[str, object]:
    """Compare every file of a folder of tokens with its checksum.

    Args:
        out: The folder.

    Returns:
        Facts about it.

    Raises:
        ConfigError: It is no such folder.
        StorageError: A file is missing or damaged; the message names it.
    """
    folder = open_tokens(out)
    files: list[FileRecord] = [] if folder.index.tokenizer.file is None else [folder.index.tokenizer.file]
    for split in folder.index.splits.values():
        files += [file for shard in split.shards for file in (shard.data, shard.lengths)]
    for record in files:
        check_size(out, record)
        if hash_file(out / record.file) != record.sha256:
            raise StorageError(
                f"{out / record.file} has the right size but not the content that was written; "
                f"{REMEDY.format(folder=out)}"
            )
    return {
        "name": folder.name,
        "files": len(files),
        "bytes": sum(record.size for record in files),
        **{f"{name} tokens": split.tokens for name, split in folder.index.splits.items()},
        "fingerprint": folder.fingerprint[:12],
    }
