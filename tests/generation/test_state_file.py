"""Saved generation state: what is read back is what was written, from its own model only, and nothing is run."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import tost
from tests.generation.models import endless, make, prompts, seeded
from tests.models.tiny import PLUS
from tost.errors import CheckpointError, StorageError
from tost.generation import Sampling, generate_with_state, load_state, save_state, state_file
from tost.generation.state_file import _first_name, _pack, _unpack

MODEL = make(torch.float32)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "text.safetensors"


@pytest.fixture
def done():
    return generate_with_state(MODEL, prompts(5, 9), max_new_tokens=3, generator=seeded())


def rewrite(file, tensors=None, description=None):
    """Change what is in a file, as damage or malice would."""
    with safe_open(file, framework="pt") as opened:
        content = json.loads(opened.metadata()["tost"])
    save_file({**load_file(file), **(tensors or {})}, file, {"tost": json.dumps({**content, **(description or {})})})


def test_a_text_goes_on_as_if_it_had_never_been_put_aside(file):
    options = {"sampling": Sampling(temperature=0.8, repetition_penalty=1.3)}
    whole = generate_with_state(MODEL, prompts(5, 9), max_new_tokens=20, generator=seeded(), **options)
    generator = seeded()
    first = generate_with_state(MODEL, prompts(5, 9), max_new_tokens=8, generator=generator, **options)
    save_state(file, first.continuation, MODEL, generator=generator)
    again, elsewhere = torch.Generator(), make(torch.float32)
    before = load_state(file, elsewhere, generator=again)
    second = generate_with_state(elsewhere, None, max_new_tokens=12, state=before, generator=again, **options)
    assert torch.equal(torch.cat((first.tokens, second.tokens), dim=1), whole.tokens)


def test_every_tensor_comes_back(file, done):
    save_state(file, done.continuation, MODEL)
    found = load_state(file, MODEL)
    assert type(found.state) is type(done.continuation.state)
    for one, other in zip(*map(pytree.tree_leaves, (tuple(found), tuple(done.continuation))), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("lengths", [(5, 5), (5, 9)], ids=["no padding", "padding"])
@pytest.mark.parametrize(
    "options",
    [
        {"mixer": "softmax", "layer_scale": None},
        {"mixer": "softmax", "layer_scale": None, "conv_width": 3, "conv_at": "both"},
        {**PLUS, "conv_width": 3, "position": "none"},
        {**PLUS, "mixer_options": {"block_size": 1}},
    ],
    ids=["softmax", "softmax with convolutions", "gated", "gated features"],
)
def test_states_of_every_kind_come_back(file, options, lengths):
    model = make(torch.float32, **options)
    greedy = {"sampling": Sampling(temperature=0)}
    whole = generate_with_state(model, prompts(*lengths), max_new_tokens=9, **greedy)
    first = generate_with_state(model, prompts(*lengths), max_new_tokens=4, **greedy)
    save_state(file, first.continuation, model)
    second = generate_with_state(model, None, max_new_tokens=5, state=load_state(file, model), **greedy)
    assert torch.equal(torch.cat((first.tokens, second.tokens), dim=1), whole.tokens)


def test_a_state_that_grows_is_checked_too(file):
    model = make(torch.float32, mixer="softmax", layer_scale=None)
    save_state(file, generate_with_state(model, prompts(5), max_new_tokens=3).continuation, model)
    keys = load_file(file)["state.0"]
    assert keys.shape == (1, 4, 7, 4)
    for wrong in (keys[:, :, :5], keys[:, :3], keys[..., :3], keys.double(), keys[0]):
        rewrite(file, {"state.0": wrong.contiguous()})
        with pytest.raises(CheckpointError, match="not those of this model's state"):
            load_state(file, model)


def test_the_file_is_as_small_as_the_state_and_does_not_grow(file, done):
    model, sizes = endless(torch.float32), set()
    for count in (10, 200):
        save_state(file, generate_with_state(model, prompts(4), max_new_tokens=count).continuation, model)
        sizes.add(file.stat().st_size)
    assert len(sizes) == 1
    assert sizes.pop() < 4000


def test_a_folder_that_is_not_there_is_an_error_in_words(tmp_path, done):
    with pytest.raises(StorageError, match="cannot write the state to"):
        save_state(tmp_path / "missing" / "text", done.continuation, MODEL)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"embed_dim": 32}, "another model: embed_dim 16 instead of 32"),
        ({"depth": 1, "num_heads": 2}, "depth 2 instead of 1, num_heads 4 instead of 2"),
        ({"position": "none"}, "position learned instead of none"),
    ],
)
def test_another_model_is_refused(file, done, options, reason):
    save_state(file, done.continuation, MODEL)
    with pytest.raises(CheckpointError, match=reason):
        load_state(file, make(torch.float32, **options))


def test_other_weights_are_refused_and_other_implementations_are_not(file, done):
    save_state(file, done.continuation, MODEL)
    other = make(torch.float32)
    load_state(file, make(torch.float32, backend="torch", dropout=0.1))
    with torch.no_grad():
        other.blocks[1].mlp.proj_out.weight.add_(1e-3)
    with pytest.raises(CheckpointError, match="other weights of the same model"):
        load_state(file, other)


def test_a_missing_file_is_named(file):
    with pytest.raises(CheckpointError, match=f"there is no file {file}"):
        load_state(file, MODEL)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"\x08" + 7 * b"\x00" + b"{}      ", pickle.dumps(Bomb())],
    ids=["", "text", "bare", "pickle"],
)
def test_other_files_are_refused_unread(file, content):
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file.name}"):
        load_state(file, MODEL)


def test_a_truncated_file_is_refused(file, done):
    save_state(file, done.continuation, MODEL)
    whole = file.read_bytes()
    for length in (5, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            load_state(file, MODEL)


@pytest.mark.parametrize(
    ("tensors", "description", "reason"),
    [
        ({}, {"format": "other"}, "its format is other, needed is"),
        ({}, {"model": 3}, "does not say which model"),
        ({}, {"model": {}}, "another model"),
        ({"last": torch.tensor([1, 99])}, {}, "a last token is not in the vocabulary"),
        ({"last": torch.tensor([1.0, 2.0])}, {}, "not one per text"),
        ({"last": torch.tensor([1])}, {}, "not those of this model's state"),
        ({"seen": torch.zeros(2, 9, dtype=torch.uint8)}, {}, "does not fit the vocabulary"),
        ({"seen": torch.zeros(1, 2, dtype=torch.uint8)}, {}, "not one per text"),
        ({"state.0": torch.zeros(2, 3)}, {}, "not those of this model's state"),
        ({"state.9": torch.zeros(2)}, {}, "does not hold the state of a text"),
        ({"state.3": torch.zeros(2, dtype=torch.int64)}, {}, "a text has no token"),
        ({"generator": torch.zeros(3, dtype=torch.uint8)}, {}, "does not hold the state of a text"),
    ],
)
def test_a_file_that_was_tampered_with_is_refused(file, done, tensors, description, reason):
    save_state(file, done.continuation, MODEL, generator=seeded())
    rewrite(file, tensors, description)
    with pytest.raises(CheckpointError, match=reason):
        load_state(file, MODEL, generator=torch.Generator())


@given(st.integers(1, 3), st.integers(1, 40), st.integers(0, 100))
@settings(max_examples=30)
def test_flags_fit_into_bits(rows, size, seed):
    seen = torch.rand(rows, size, generator=seeded(seed)) < 0.5
    assert _pack(seen).shape == (rows, (size + 7) // 8)
    assert torch.equal(_unpack(_pack(seen), size), seen)


def model_of_the_stored_file():
    """The model that made ``regression/state_v1.safetensors``, with weights that need no random numbers."""
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "vocab_size": 32, "max_length": 24}
    model = tost.create_model("tost_lm_base", **sizes, conv_width=3).eval()
    with torch.no_grad():
        named = sorted((_first_name(name), parameter) for name, parameter in model.named_parameters())
        for index, (_, parameter) in enumerate(named):
            numbers = ((torch.arange(parameter.numel()) * 37 + index) % 101 - 50) / 500
            parameter.copy_(numbers.reshape(parameter.shape))
    return model


STORED = Path(__file__).parents[1] / "regression" / "state_v1.safetensors"


def test_a_file_of_the_first_version_still_loads_and_goes_on():
    model, generator = model_of_the_stored_file(), torch.Generator()
    continuation = load_state(STORED, model, generator=generator)
    assert continuation.last.tolist() == [29, 8]
    more = generate_with_state(model, None, max_new_tokens=6, state=continuation, generator=generator)
    assert more.tokens.tolist() == [[9, 24, 0, 3, 15, 16], [30, 9, 15, 4, 11, 8]]


def test_a_file_of_a_form_that_was_removed_is_refused(file):
    with safe_open(STORED, framework="pt") as opened:
        options = json.loads(opened.metadata()["tost"])["model"]
    assert options["forget"] is False
    shutil.copy(STORED, file)
    rewrite(file, description={"model": options | {"forget": True}})
    with pytest.raises(CheckpointError, match="forget=True: this option was removed after revision 1ae0fcd"):
        load_state(file, model_of_the_stored_file())


@pytest.mark.parametrize(
    ("version", "oldest", "message"),
    [
        (0, 0, r"written by a newer version of tost: its format is tost-continuation-1, .* up to tost-continuation-0"),
        (3, 2, r"written by an older version of tost: its format is tost-continuation-1, .* tost-continuation-2 and l"),
    ],
)
def test_files_of_other_versions_are_refused(monkeypatch, version, oldest, message):
    monkeypatch.setattr(state_file, "VERSION", version)
    monkeypatch.setattr(state_file, "OLDEST_VERSION", oldest)
    with pytest.raises(CheckpointError, match=message):
        load_state(STORED, model_of_the_stored_file())


@pytest.mark.parametrize("weights", [None, 3, ["a"], {}])
def test_a_file_that_does_not_name_its_weights_is_refused(file, done, weights):
    save_state(file, done.continuation, MODEL)
    rewrite(file, description={"weights": weights})
    with pytest.raises(CheckpointError, match="does not say which model and weights"):
        load_state(file, MODEL)


def test_a_deep_description_is_refused(file, done):
    save_state(file, done.continuation, MODEL)
    save_file(load_file(file), file, {"tost": "[" * 10**6})
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        load_state(file, MODEL)
