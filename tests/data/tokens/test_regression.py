"""Folders that an earlier version wrote still open and give the same tokens; `tests/regression/tokens` holds them.

They were made by ``tost data prepare text --source a --validation 0.3`` with the byte tokenizer, and with ``--tokenizer
chars --documents line --shard-bytes 30``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.text.samples import texts
from tost.data import DataOptions, build_data
from tost.data.prepare import check_folder
from tost.data.tokens.reader import open_tokens

FOLDERS = Path(__file__).parents[2] / "regression" / "tokens"
TEXT = ["First line of text.\nZweite Zeile: na\u00efve \u00c5ngstr\u00f6m.\n", "Three.\n"]
VERSE = "To be, or not to be\nthat is the question.\n"


def test_bytes():
    folder = open_tokens(FOLDERS / "bytes")
    assert (texts(folder), texts(folder, "validation")) == (TEXT, [VERSE])
    assert bytes(folder.split("train").tokens[:]) == "".join(TEXT).encode()
    assert folder.split("train").documents.tolist() == [0, 53, 60]
    assert (folder.split("validation").source_words, folder.end_of_text) == (10, None)
    bundle = build_data(DataOptions(name="tokens", path=str(folder.path), options={"length": 8}), seed=0)
    assert bytes(bundle.validation[1]["targets"].tolist()) == VERSE.encode()[9:17]


def test_characters_in_several_shards():
    folder = open_tokens(FOLDERS / "chars")
    lines = "".join([*TEXT, VERSE]).splitlines()
    assert sorted(texts(folder) + texts(folder, "validation")) == sorted(lines)
    assert len(folder.split("train").record.shards) == 2
    assert folder.vocab_size == len(set("".join(lines))) == 29


@pytest.mark.parametrize("name", ["bytes", "chars"])
def test_checksums(name):
    assert check_folder(FOLDERS / name)["name"] == "text"
