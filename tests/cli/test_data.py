"""`tost data`: prepare, ls, check."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.data.text.samples import contents, make, write_jsonl


@pytest.fixture
def source(tmp_path):
    return str(write_jsonl(tmp_path / "source.jsonl"))


def test_prepare_and_check(run, tmp_path, source):
    out = str(tmp_path / "out")
    outcome = run("data", "prepare", "text", "--out", out, "--source", source, "--workers", "1", "shard_bytes=400")
    assert outcome.code == 0
    assert outcome.out.startswith(f"{out}: name text, tokenizer bytes")
    assert "tokenizing: 0 of 25" in outcome.err
    again = run("data", "prepare", "text", f"--source={source}", "--shard-bytes", "400", "--out", out, "--json")
    assert json.loads(again.out)["already there"] is True
    outcome = run("data", "check", out)
    assert (outcome.code, outcome.out.startswith(f"{out} is whole: ")) == (0, True)
    assert json.loads(run("data", "check", out, "--json").out)["ok"] is True
    victim = tmp_path / "out" / "train-00000.bin"
    victim.write_bytes(victim.read_bytes()[:-3])
    outcome = run("data", "check", out)
    assert outcome.code == 1
    assert "train-00000.bin is cut off" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["text", "source"], "'source' is no option; write key=value or --key value"),
        (["text", "--source"], "'--source' is no option"),
        (["text", "--source", "a", "source=b"], "option source is given twice: 'a' and 'b'"),
        (["textt", "source=a"], "did you mean 'text'?"),
        (["text", "source=nowhere"], "nowhere does not exist"),
        (["text", "source=a", "shards=3"], "shards: unknown key; did you mean shard_bytes?"),
    ],
)
def test_mistakes(refuse, tmp_path, arguments, said):
    refuse(said, "data", "prepare", "--out", str(tmp_path / "out"), *arguments)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsnl", "x\n", "the ending '.jsnl' is not known; did you mean '.jsonl'?"),
        ("a.docx", "x", "If it is plain text, add format=text"),
        ("a.csv", "text\nx\n", "give the folder of save_to_disk"),
        ("a.jsonl", '{"body": "x"}\n', "line 1 has no column 'text'; its columns are: body"),
        ("a.jsonl", "", "holds no documents"),
    ],
    ids=["ending", "other file", "other format", "key", "empty"],
)
def test_a_newcomer_is_told_what_is_wrong(refuse, tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    refuse(said, "data", "prepare", "text", "--source", str(tmp_path / name), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out" / "index.json").exists()


def test_ls(run):
    names = [line.split("\t")[0] for line in run("data", "ls").out.splitlines()]
    assert {"text", "openwebtext", "wikitext2", "wikitext103", "lambada", "ptb", "shakespeare"} <= set(names)
    lines = run("data", "ls", "lambada").out.splitlines()
    assert [line.split("\t")[:2] for line in lines][-1] == ["splits", "test"]
    assert json.loads(run("data", "ls", "--json").out)["entries"][0].keys() == {"name", "summary"}
    assert run("data", "ls", "nothing").code == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_by_a_signal_it_goes_on(tmp_path, how):
    documents = [f"Document {number}: " + "many words and more of them. " * 30 for number in range(3000)]
    source = write_jsonl(tmp_path / "source.jsonl", documents)
    options = {"source": str(source), "shard_bytes": 30_000}
    expected = contents(make(tmp_path / "whole", **options).path)
    out = tmp_path / "out"
    settings = [f"{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "tost.cli", "data", "prepare", "text", "--out", str(out), "--workers", "2"]
    process = subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while len(list(out.glob("train-*.lengths"))) < 3 and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, how)
    finally:
        _, said = process.communicate(timeout=60)
    if how is signal.SIGINT and process.returncode:
        assert process.returncode == 130
        assert "the same command continues" in said
        assert "Traceback" not in said
    done = subprocess.run([*command, *settings], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert contents(out) == expected
