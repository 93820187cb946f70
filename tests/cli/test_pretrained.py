"""The models in the box, by name on the command line."""

from __future__ import annotations

import json

import pytest
import torch

import tost
from tost.pretrained import list_pretrained


def test_they_are_listed(run):
    listed = json.loads(run("ls", "pretrained", "--json").out)
    assert [entry["name"] for entry in listed["entries"]] == list_pretrained()


def test_generate_takes_a_name(run):
    command = ("generate", "bytes-tiny", "--prompt", "def ", "--max-new-tokens", "5", "--temperature", "0", "--json")
    written = json.loads(run(*command).out)
    ids = tost.generate(
        tost.load_pretrained("bytes-tiny"), torch.tensor([list(b"def ")]), max_new_tokens=5, temperature=0
    )
    assert written["text"] == bytes(ids[0, 4:].tolist()).decode(errors="replace")


def test_a_folder_of_that_name_comes_first(refuse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes-tiny").mkdir()
    refuse("bytes-tiny", "generate", "bytes-tiny", "--prompt", "def ")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("no-such-model", "a name of `tost ls pretrained`"), ("byte-tiny", "did you mean 'bytes-tiny'?")],
)
def test_a_name_that_does_not_exist(refuse, name, hint):
    refuse(hint, "generate", name, "--prompt", "def ")
