from __future__ import annotations

import pytest

from tost._io import DRAFT_PREFIX, atomic_path, read_json, remove_drafts, write_atomic, write_json
from tost.errors import CheckpointError, TostError


def test_write_creates_folders_and_leaves_no_draft(tmp_path):
    path = tmp_path / "a" / "b" / "file.txt"
    write_atomic(path, "first")
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_failed_write_keeps_the_old_content_and_leaves_no_draft(tmp_path):
    path = tmp_path / "file.txt"
    write_atomic(path, "old")

    def write_half() -> None:
        with atomic_path(path) as draft:
            draft.write_text("ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_half()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_json_round_trip_is_sorted_and_refuses_nan(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"b": 1, "a": [None, "é"]})
    assert read_json(path) == {"a": [None, "é"], "b": 1}
    assert path.read_text().index('"a"') < path.read_text().index('"b"')
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, float("nan"))
    assert read_json(path)["b"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot read"),
        (b"\xff\xfe\x00", "cannot read"),
        (b"[" * 200_000, "cannot read"),
        (b'"' + b"x" * 2000 + b'"', "larger than 1,000 bytes"),
    ],
    ids=["cut short", "not text", "deep", "large"],
)
def test_unusable_json_is_an_error_of_the_given_class(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    limit = 1000 if "larger" in message else 10**6
    with pytest.raises(CheckpointError, match=message):
        read_json(path, error=CheckpointError, max_bytes=limit)


def test_drafts_of_a_killed_process_are_removed_and_nothing_else(tmp_path):
    left = tmp_path / "below" / f"{DRAFT_PREFIX}abc"
    left.mkdir(parents=True)
    (left / "file.txt").write_text("ha")
    write_atomic(tmp_path / "below" / "file.txt", "whole")
    remove_drafts(tmp_path)
    assert sorted(entry.relative_to(tmp_path).as_posix() for entry in tmp_path.rglob("*")) == [
        "below",
        "below/file.txt",
    ]


def test_hint_ends_the_message(tmp_path):
    with pytest.raises(TostError, match=r"No such file.*; write it again"):
        read_json(tmp_path / "none.json", hint="write it again")
