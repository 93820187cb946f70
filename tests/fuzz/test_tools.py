"""The tools behind `make fuzz`: the verdict, the limits, the changes to inputs, and the account of what was done."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import struct
import zipfile
from pathlib import Path
from random import Random
from time import sleep

import pytest

from fuzz import run, worker
from fuzz.harness import Harness, Turn, memory_limit, one_of_many, problem_of, time_limit
from fuzz.mutate import mutate
from tests.data.images.files import encoded, picture
from tost.errors import ConfigError

MIB = 1 << 20


def verdict(parse) -> str:
    return problem_of(Harness(lambda data: parse(), []), b"")


def raising(error):
    def parse():
        raise error

    return parse


def test_success_and_errors_in_words_are_allowed():
    assert verdict(lambda: None) == ""
    assert verdict(raising(ConfigError("the file is empty; write something"))) == ""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError(" "), "ConfigError-without-message"),
        (KeyError("a"), "KeyError-fuzz.test_tools-parse"),
        (SystemExit(1), "SystemExit-fuzz.test_tools-parse"),
        (MemoryError(), "MemoryError-fuzz.test_tools-parse"),
    ],
)
def test_everything_else_is_a_problem(error, expected):
    assert verdict(raising(error)) == expected


def test_an_endless_loop_is_ended_even_if_the_parser_catches_everything():
    def endless():
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue

    with pytest.raises(BaseException, match=r"more than 0\.05 s"), time_limit(0.05):
        endless()


def test_memory_is_bounded():
    with memory_limit(64 * MIB):
        with pytest.raises(MemoryError):
            bytearray(512 * MIB)
        bytearray(MIB)
    bytearray(512 * MIB)


def test_the_first_byte_chooses_the_file_and_all_is_put_back(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    seen = []
    harness = one_of_many(tmp_path, ("a", "b"), lambda file: seen.append((file.name, file.read_bytes())))
    assert harness.seeds == [b"\0a", b"\1b"]
    for data in (b"\0x", b"\3y", b""):
        harness.parse(data)
    assert seen == [("a", b"x"), ("b", b"y"), ("a", b"")]
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["a", "b"]


def zip_of(files):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return stream.getvalue()


def safetensors_of(header):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


def read_safetensors(data):
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size])


def read_zip(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


FORMATS = {
    "json": (json.dumps({"a": [1, {"b": "c"}], "d": None}).encode(), json.loads),
    "gzip": (gzip.compress(b"some text\nin lines"), gzip.decompress),
    "zip": (zip_of({"x/data.pkl": b"\x80\x02}.", "x/data/0": bytes(8)}), read_zip),
    "safetensors": (safetensors_of({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}), read_safetensors),
    "png": (encoded(picture(1, 1)), None),
}


@pytest.mark.parametrize("form", FORMATS)
def test_changes_are_repeatable_and_often_get_past_checksums(form):
    seed, read = FORMATS[form]
    changed = [mutate(seed, Random(number), [b"word"]) for number in range(60)]
    assert changed == [mutate(seed, Random(number), [b"word"]) for number in range(60)]
    assert len(set(changed)) > 40
    if read is not None:
        readable = 0
        for data in changed:
            try:
                readable += read(data) != read(seed)
            except Exception:
                continue
        assert readable > 15


@pytest.mark.parametrize("seed", [b"", b"PK", b"\x1f\x8b", b"{", b"\0\0\0\0\0\0\0\0{", b"\x89PNG", b"a: 1\nb: [2]\n"])
def test_anything_can_be_changed(seed):
    assert len({mutate(seed, Random(number)) for number in range(50)}) > 5


LOG = """#2\tINITED cov: 10 ft: 10 corp: 1/1b exec/s: 0 rss: 30Mb
found: KeyError-train.state-restore
#9\tNEW    cov: 12 ft: 13 corp: 2/2b lim: 4 exec/s: 0 rss: 30Mb
found: KeyError-train.state-restore
==7== ERROR: libFuzzer: timeout after 120 seconds
#32\tDONE   cov: 12 ft: 13 corp: 2/2b lim: 4 exec/s: 3 rss: 30Mb
stat::number_of_executed_units: 33
"""


def test_a_turn_is_read_from_its_log():
    assert run.read_log("idx", LOG, 10) == run.Tally(
        "idx", inputs=31, seconds=10, coverage=12, quiet_inputs=24, problems=2
    )


def test_a_worker_that_does_not_start_is_a_problem():
    assert run.read_log("idx", "ImportError: no", 10).problems == 1


def test_what_was_done_adds_up(tmp_path):
    path = tmp_path / "fuzz.json"
    for coverage in (12, 12, 11):
        tallies = run.read_tallies(path)
        turn = run.Tally("idx", inputs=31, seconds=10, coverage=coverage, quiet_inputs=5, problems=0)
        run.add(tallies.setdefault("idx", run.Tally("idx", problems=3)), turn)
        run.write_tallies(path, tallies)
    expected = run.Tally("idx", 93, 30, coverage=12, quiet_inputs=67, quiet_seconds=20, problems=0)
    assert run.read_tallies(path)["idx"] == expected


@pytest.fixture
def places(tmp_path, monkeypatch):
    for name, folder in {"CORPUS": tmp_path / "build", "CRASHES": tmp_path / "crashes"}.items():
        monkeypatch.setattr(run, name, folder)
    return tmp_path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="turns are forks")
@pytest.mark.parametrize(
    ("end", "name"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGVTALRM), "SIGVTALRM"),
        (lambda: os._exit(0), "exit-0"),
        (lambda: os._exit(3), "exit-3"),
    ],
)
def test_the_input_that_ends_the_worker_is_kept(places, end, name):
    def ask(turn):
        def die():
            with worker.current_input(Path(turn.current)) as show:
                show(b"abc")
                os.write(1, b"#2\tINITED cov: 10 ft: 10\n")
                end()

        return worker.fork(turn, die)

    done = run.take_turn("idx", 1, 0, ask, places)
    assert (done.problems, done.coverage) == (1, 10)
    assert (places / "crashes" / "idx" / name).read_bytes() == b"abc"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="turns are forks")
def test_a_worker_that_fails_in_its_own_code_is_a_problem(places):
    def ask(turn):
        def fail():
            os.write(1, b"#2\tINITED cov: 10 ft: 10\n")
            raise OSError("the corpus cannot be written")

        return worker.fork(turn, fail)

    assert run.take_turn("idx", 1, 0, ask, places).problems == 1
    assert list((places / "crashes" / "idx").iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="turns are forks")
def test_a_turn_that_fails_is_told_in_its_log(tmp_path):
    turn = Turn("idx", 1, str(tmp_path), str(tmp_path / "log"), str(tmp_path / "current"))
    assert worker.fork(turn, raising(ImportError("no atheris"))).code == 1
    assert "no atheris" in (tmp_path / "log").read_text()
    assert run.read_log("idx", (tmp_path / "log").read_text(), 0).problems == 1


def test_time_on_the_clock_does_not_count():
    with time_limit(0.05):
        sleep(0.2)


def test_without_atheris_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert run.main([]) == 2
    assert "make fuzz" in capsys.readouterr().err
