"""`tost generate`: text in, text out, in a terminal, a pipe or a program; mistakes in one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

import tost
from tests.models.tiny import make_tiny, perturb
from tost.cli import _generate
from tost.generation import ByteTokenizer
from tost.train.checkpoint.model import save_model

SIZES = {"embed_dim": 16, "depth": 1, "num_heads": 2}
COMMAND = [sys.executable, "-m", "tost.cli", "generate"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# Without a buffer a test reads what it asks for, and leaves the rest.
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENVIRONMENT, "bufsize": 0}


def save(folder, name="tost_lm_base", **options):
    torch.manual_seed(0)
    model = perturb(make_tiny(name, **{**SIZES, **options}))
    save_model(model, folder)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of bytes: one without end, one of 64 positions."""
    root = tmp_path_factory.mktemp("models")
    save(root / "endless", vocab_size=256, position="none")
    save(root / "short", vocab_size=256, position="learned", max_length=64)
    return root


@pytest.fixture(scope="module")
def endless(folders):
    return str(folders / "endless")


def continuation(folder, prompt, count, **options):
    """The text by the function instead of the command."""
    ids = torch.tensor([ByteTokenizer().encode(prompt)])
    text = tost.generate(tost.load_model(folder), ids, max_new_tokens=count, **options)
    return ByteTokenizer().decode(text[0, ids.shape[1] :].tolist())


def piped(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_text_on_stdout_and_numbers_on_stderr(run, endless):
    outcome = run("generate", endless, "--prompt", "def ", "--max-new-tokens", "20", "--seed", "3", "--top-k", "50")
    generator = torch.Generator().manual_seed(3)
    assert outcome.out == continuation(endless, "def ", 20, top_k=50, generator=generator) + "\n"
    assert outcome.code == 0
    assert outcome.err.startswith("20 tokens in ")
    assert re.search(r"tokens/s\); fp32 weights, \d+% of the memory bandwidth; prompt of 4 tokens in", outcome.err)
    assert outcome.err.endswith("kB; seed 3\n")


@pytest.mark.parametrize(
    ("stored", "trained", "arguments", "expected"),
    [
        (torch.float32, None, (), "fp32"),
        (torch.bfloat16, None, (), "bf16"),
        (torch.bfloat16, None, ("--weights", "int8"), "int8"),
        (torch.float32, "bf16", (), "bf16"),
        (torch.float32, "bf16", ("--weights", "fp32"), "fp32"),
        (torch.float32, "fp32", (), "fp32"),
        (torch.float32, "bf16", ("--dtype", "float32"), "fp32"),
    ],
)
def test_weights_trained_or_stored_in_bf16_are_streamed_so(
    run, tmp_path, monkeypatch, stored, trained, arguments, expected
):
    model = perturb(make_tiny("tost_lm_base", **SIZES, vocab_size=256, position="none")).to(stored)
    save_model(model, tmp_path / "model")
    monkeypatch.setattr("tost.train.checkpoint.model.trained_precision", lambda source: trained)
    options = ("--prompt", "abc", "--max-new-tokens", "12", "--temperature", "0", "--json")
    content = json.loads(run("generate", str(tmp_path / "model"), *options, *arguments).out)
    assert content["weights"] == expected
    assert 0 < content["bandwidth_share"] < 10
    ids = torch.tensor([ByteTokenizer().encode("abc")])
    exact = tost.generate(model.float(), ids, max_new_tokens=12, temperature=0, weights=expected)
    assert content["text"] == ByteTokenizer().decode(exact[0, 3:].tolist())


def test_seeds_repeat_a_text_and_a_new_one_is_shown(run, endless):
    def text(*arguments):
        return run("generate", endless, "--prompt", "a", "--max-new-tokens", "30", *arguments)

    first, second = text(), text()
    assert first.out != second.out
    seed = first.err.rpartition("seed ")[2].strip()
    assert text("--seed", seed).out == first.out


@pytest.mark.parametrize("way", ["file", "pipe", "dash"])
def test_the_prompt_comes_from_anywhere_with_its_bytes_as_they_are(run, endless, tmp_path, monkeypatch, way):
    data = "gr\u00fc\u00dfe\n".encode() + b"\xff\xfe"
    options = {"file": ["--prompt-file", str(tmp_path / "text")], "pipe": [], "dash": ["--prompt", "-"]}[way]
    (tmp_path / "text").write_bytes(data)
    piped(monkeypatch, data)
    outcome = run("generate", endless, *options, "--max-new-tokens", "9", "--temperature", "0", "--json")
    expected = continuation(endless, data.decode("utf-8", errors="surrogateescape"), 9, temperature=0)
    assert json.loads(outcome.out)["text"] == expected
    assert json.loads(outcome.out)["prompt_tokens"] == len(data)


def test_json_is_one_line_with_everything(run, endless):
    outcome = run("generate", endless, "--prompt", "abc", "--max-new-tokens", "5", "--seed", "1", "--json")
    content = json.loads(outcome.out)
    assert outcome.out.count("\n") == 1
    assert outcome.err == ""
    numbers = {"tokens", "seconds", "prompt_tokens", "prompt_seconds", "seed", "bandwidth_share"}
    assert numbers | {"text", "ended", "weights"} == set(content)
    assert (content["tokens"], content["prompt_tokens"], content["seed"], content["ended"]) == (5, 3, 1, "length")


def test_a_long_text_into_a_file_tells_how_far_it_is(run, endless, monkeypatch):
    monkeypatch.setattr(_generate, "Pace", partial(_generate.Pace, seconds=0.0))
    outcome = run("generate", endless, "--prompt", "a", "--max-new-tokens", "4")
    assert "tokens: 1 of 4 (25%), eta" in outcome.err
    assert "tokens: 4 of 4 (100%)" in outcome.err


def test_a_stop_text_ends_it_and_is_not_shown(run, endless):
    options = ["--prompt", "abc", "--max-new-tokens", "40", "--seed", "1", "--json"]
    whole = json.loads(run("generate", endless, *options).out)["text"]
    stop = whole[20:22]
    content = json.loads(run("generate", endless, *options, "--stop", stop, "--stop", "not there").out)
    assert content["text"] == whole.partition(stop)[0]
    assert content["ended"] == "stop"
    assert content["tokens"] < 40


def test_a_text_is_put_aside_and_goes_on(run, endless, tmp_path):
    file = str(tmp_path / "text.safetensors")
    options = ["--temperature", "0.9", "--repetition-penalty", "1.2", "--json"]

    def text(*arguments):
        outcome = run("generate", endless, *options, *arguments)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)["text"]

    # Letters of one byte, so that no cut falls into a character.
    whole = text("--prompt", "once", "--max-new-tokens", "30", "--seed", "5").encode("utf-8", errors="replace")
    first = text("--prompt", "once", "--max-new-tokens", "12", "--seed", "5", "--save-state", file)
    second = text("--state", file, "--max-new-tokens", "18")
    assert (first + second).replace("\ufffd", "") == whole.decode().replace("\ufffd", "")
    assert text("--state", file, "--prompt", "!", "--max-new-tokens", "18") != second


def test_more_than_the_positions_is_refused_with_what_to_do(refuse, folders):
    refuse("position=none", "generate", str(folders / "short"), "--prompt", "abc", "--max-new-tokens", "100")


def test_default_length_ends_where_positions_end(run, folders):
    outcome = run("generate", str(folders / "short"), "--prompt", "abcd", "--seed", "0")
    assert outcome.err.startswith("61 tokens in ")
    assert outcome.err.endswith("no positions are left\n")


@pytest.mark.parametrize("options", [["--dtype", "bfloat16"], ["--weights", "bf16"], ["--weights", "int8"]])
def test_arithmetic_and_weights_in_fewer_bits(run, endless, options):
    outcome = run("generate", endless, "--prompt", "ab", "--max-new-tokens", "5", "--seed", "0", *options)
    assert outcome.code == 0
    assert outcome.err.startswith("5 tokens in ")


def test_a_malicious_state_is_never_opened(refuse, endless, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (tmp_path / "state").write_bytes(pickle.dumps(Bomb()))
    refuse("a pickle is never opened", "generate", endless, "--state", str(tmp_path / "state"))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "a", "--prompt-file", "b"], "both given; keep one"),
        (["--prompt-file", "missing.txt"], "cannot read the prompt from missing.txt: No such file"),
        (["--prompt", "a", "--top-k", "0", "--top-p", "2"], "top_k=0"),
        (["--prompt", "a", "--temperature", "nan"], "temperature=nan"),
        (["--prompt", "a", "--stop", ""], "--stop is empty"),
        (["--prompt", "a", "--max-new-tokens", "-1"], "greater than or equal to 0"),
        (["--prompt", "a", "--state", "missing"], "there is no file missing"),
        (["--prompt", "a", "--save-state", "nowhere/file"], "--save-state nowhere/file cannot be written"),
        (["--prompt", "a", "--ema"], "moving average"),
        (["--prompt", "a", "--dtype", "bfloat16", "--weights", "int8"], "its parameters are not all float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_exit_2_and_say_what_to_do(refuse, endless, arguments, hint):
    refuse(hint, "generate", endless, *arguments)


def test_folders_without_a_language_model_of_bytes_are_refused(refuse, tmp_path):
    save(tmp_path / "classifier", "lra_listops", vocab_size=16)
    save(tmp_path / "words", vocab_size=300)
    for folder, hint in {
        "missing": "there is no ",
        ".": "holds no checkpoint",
        "classifier": "SequenceClassifier cannot generate",
        "words": "has 300 ids, but there is no tokenizer beside it, and bytes have 256",
    }.items():
        refuse(hint, "generate", str(tmp_path / folder), "--prompt", "a")


@pytest.mark.parametrize("stdin", ["terminal", "nothing piped"])
def test_without_a_prompt_a_text_begins_with_a_line_break(run, endless, monkeypatch, stdin):
    piped(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: stdin == "terminal")
    outcome = run("generate", endless, "--max-new-tokens", "10", "--temperature", "0")
    assert outcome.out == continuation(endless, "\n", 10, temperature=0.0) + "\n"


def test_an_interrupt_keeps_what_is_there(run, endless, tmp_path, monkeypatch):
    original, shown = _generate._write, []

    def interrupted(text):
        original(text)
        shown.append(text)
        if len(shown) == 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(_generate, "_write", interrupted)
    file = tmp_path / "text"
    outcome = run("generate", endless, "--prompt", "ab", "--seed", "0", "--save-state", str(file))
    assert outcome.code == 130
    assert outcome.out == "".join(shown)
    assert outcome.err.startswith("10 tokens in ")
    assert "interrupted" in outcome.err
    assert "Traceback" not in outcome.err
    assert run("generate", endless, "--state", str(file), "--max-new-tokens", "5").code == 0


def test_control_characters_cannot_reach_a_terminal(capsys, monkeypatch):
    _generate._write("\x1b[31m\n")
    assert capsys.readouterr().out == "\x1b[31m\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _generate._write("\x1b[31m\ta\x7f\n")
    assert capsys.readouterr().out == "\u241b[31m\ta\u2421\n"


@pytest.mark.slow
def test_a_broken_pipe_is_quiet(endless):
    command = [*COMMAND, endless, "--prompt", "a", "--max-new-tokens", "100000", "--seed", "0"]
    with subprocess.Popen(command, **PIPES) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_ctrl_c_ends_a_text_that_arrives_as_it_is_made(endless):
    command = [*COMMAND, endless, "--prompt", "a", "--max-new-tokens", "1000000", "--seed", "0"]
    # A job in the background of a shell ignores the signal, and so would its children.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **PIPES, preexec_fn=heeding) as process:
        shown = process.stdout.read(1)  # it does not wait for the end
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    (shown + rest).decode("utf-8")  # valid, to the last byte
    assert errors.decode().rstrip().endswith("interrupted")
    assert b"Traceback" not in errors
