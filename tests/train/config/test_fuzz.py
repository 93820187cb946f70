"""Whatever is in a file or on the command line, the answer is a configuration or a `ConfigError`, never a crash."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tost._options import keys_of
from tost._yaml import write_value
from tost.errors import ConfigError
from tost.recipes import find_config, list_configs, load_config
from tost.train.config import RunConfig, dump_config

KEYS = [*keys_of(RunConfig), "model.depth", "model.vocab_size", "data.options.length", "data.options.max_depth", "x.y"]

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["none", "fp16"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
)


def answer(name: str, overrides: list[str]) -> str:
    """The message of the error; empty if the configuration is usable, in which case it can be written too."""
    try:
        config = load_config(name, overrides)
    except ConfigError as error:
        return str(error)
    assert dump_config(config)
    return ""


@settings(max_examples=200)
@given(st.sampled_from(list_configs()), st.lists(st.tuples(st.sampled_from(KEYS), scalars | values), max_size=4))
@example("demo/digits", [("model", None)])
@example("demo/digits", [("model.name", [])])
@example("demo/digits", [("data", {"name": "digits", "options": None})])
def test_overrides_never_crash(name, changes):
    message = answer(name, [f"{key}={write_value(value)}" for key, value in changes])
    assert not message or message.startswith(f"{name} cannot be used, ")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "my.yaml"


@settings(max_examples=200)
@given(st.data(), st.sampled_from(list_configs()))
def test_damaged_files_never_crash(path, data, name):
    text = find_config(name).read_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 12)))
    path.write_text(text[:start] + data.draw(st.text(max_size=4)) + text[end:], encoding="utf-8")
    message = answer(str(path), [])
    assert not message or message.startswith(str(path))


@given(st.text())
def test_any_text_is_an_answerable_override(text):
    message = answer("demo/digits", [text])
    assert message.startswith("demo/digits cannot be used, 1 problem:")
