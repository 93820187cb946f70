"""The YAML part of configurations: what is read, what is refused, with which words."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tost._yaml import parse_value, read_document, write_value
from tost.errors import ConfigError

VALUES = {
    "1e-3": 1e-3,
    "1E+5": 1e5,
    "1.5e-4": 1.5e-4,
    ".5": 0.5,
    "5.": 5.0,
    "-.inf": -math.inf,
    "12": 12,
    "-7": -7,
    "1_000": 1000,
    "010": 10,
    "08": 8,
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "": None,
    # YAML 1.1 would make a truth value, a number in base 60 or a date of these.
    "no": "no",
    "on": "on",
    "1:30": "1:30",
    "2001-02-03": "2001-02-03",
    "'12'": "12",
    '"a: b"': "a: b",
    "a=b": "a=b",
    "[1, 2.5, x]": [1, 2.5, "x"],
    "[]": [],
    "/some/where": "/some/where",
    "1e": "1e",
}


@pytest.mark.parametrize(("text", "value"), VALUES.items(), ids=repr)
def test_values_of_overrides(text, value):
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 1}", "'{a: 1}' is a mapping; set one key at a time"),
        ("a: b", "'a: b' is a mapping"),
        ("[1, 2", "'[1, 2' is not a YAML value"),
        ("@home", "'@home' is not a YAML value"),
        ("path # 3", "'path # 3' would lose what follows its '#'"),
        ("*alias", "an alias (*name) is not supported"),
        ("!!python/object/apply:os.getcwd []", "is not supported"),
        ("!!str [a, b]", "a list with the tag tag:yaml.org,2002:str is not supported"),
        ("!!int [3]", "a list with the tag tag:yaml.org,2002:int is not supported"),
        ("\x00", "not readable as YAML"),
        ("[" * 5000, "nested too deeply"),
        ('"\\U00110000"', "an escape names no character"),
    ],
    ids=lambda text: text[:20],
)
def test_values_that_are_refused(text, message):
    with pytest.raises(ConfigError) as error:
        parse_value(text)
    assert message in str(error.value)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(scalars | st.lists(scalars, max_size=4))
def test_written_values_read_back(value):
    text = write_value(value)
    assert "\n" not in text
    assert parse_value(text) == value


@given(scalars)
def test_other_programs_read_the_same(value):
    assert yaml.safe_load(f"key: {write_value(value)}") == {"key": value}


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """Write a file and return the message that reading it gives."""
    monkeypatch.chdir(tmp_path)

    def write_and_read(content: str | bytes) -> str:
        path = tmp_path / "my.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ConfigError) as error:
            read_document(path.relative_to(tmp_path))
        return str(error.value)

    return write_and_read


def test_lines_of_keys_are_remembered(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("# comment\na: 1\nb:\n  c: 2\n  d: {e: 3,\n    f: 4}\n")
    document = read_document(path)
    assert document.values == {"a": 1, "b": {"c": 2, "d": {"e": 3, "f": 4}}}
    assert document.lines == {"a": 2, "b": 3, "b.c": 4, "b.d": 5, "b.d.e": 5, "b.d.f": 6}


REFUSED = {
    "twice": ("a: 1\nb: 2\na: 3\n", "my.yaml:3: the key a is given twice, first on line 1; keep one"),
    "twice below": ("t:\n  a: 1\n  a: 2\n", "my.yaml:3: the key t.a is given twice, first on line 2"),
    "tab": ("a:\n\tb: 1\n", "my.yaml:2: the line is indented with a tab; YAML takes spaces only"),
    "broken": ("a: [1, 2\nb: 3\n", "my.yaml:2: expected ',' or ']'"),
    "list": ("- a\n- b\n", "my.yaml:1: the file holds a list; it needs keys such as `recipe: classification`"),
    "text": ("hello\n", "my.yaml:1: the file holds the single value 'hello'"),
    "empty": ("# nothing\n", "my.yaml: the file holds nothing"),
    "number as key": ("a: 1\n3: x\n", "my.yaml:2: a key must be a word, not the single value '3'"),
    "alias": ("a: &x {b: 1}\nc: *x\n", "my.yaml:2: an alias (*name) is not supported; write the value out"),
    "itself": ("a: &x {b: *x}\n", "my.yaml:1: an alias"),
    "object": ("a: !!python/object/apply:os.getcwd []\n", "my.yaml:1: a list with the tag"),
    "tag": ("a: !!binary aGVsbG8=\n", "my.yaml:1: the single value 'aGVsbG8=' with the tag"),
    "own tag": ("a: !thing {b: 1}\n", "my.yaml:1: a mapping with the tag !thing is not supported"),
    "two documents": ("a: 1\n---\nb: 2\n", "my.yaml:2: "),
    "not text": (b"\xff\xfe\x00", "my.yaml: not a text file in UTF-8"),
    "control characters": (b"a: \x01\n", "my.yaml: not readable as YAML"),
    "deep": ("a: " + "[" * 100_000, "my.yaml:1: nested too deeply"),
    "deep, line by line": ("- " * 5000, "my.yaml:1: nested too deeply"),
    "no character": ('a: 1\nb: "\\U00110000"\n', "my.yaml:2: an escape names no character that there is"),
    "no character at all": ('a: "\\UFFFFFFFF"\n', "my.yaml:1: an escape names no character that there is"),
    "large": ("# " + "x" * 2**20, "my.yaml: larger than 1,048,576 bytes"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_files_that_are_refused(refusal, content, message):
    found = refusal(content)
    assert found.startswith(message)
    assert len(found) < 400, "a message does not repeat a whole file"


def test_a_payload_in_a_file_is_not_executed(refusal, tmp_path):
    trace = tmp_path / "trace"
    refusal(f"a: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{trace}]]\n")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.yaml", r"none\.yaml: there is no such file; `tost ls configs` lists"),
        (".", "this is a folder; give the YAML file in it"),
        ("/dev/zero", "/dev/zero: larger than"),
    ],
)
def test_places_without_a_configuration_are_named(tmp_path, path, message):
    with pytest.raises(ConfigError, match=message):
        read_document(tmp_path / path)
