"""A stream keeps nothing, can be interrupted, and ends where positions end."""

import gc
import itertools

import psutil
import pytest
import torch
from torch.utils import _pytree as pytree

from tests.generation.models import endless, make, prompts, seeded
from tests.models.tiny import PLUS
from tost.errors import ConfigError
from tost.generation import Sampling, decode_step, generate_with_state, prefill, state_bytes, stream_tokens
from tost.generation import stream as stream_module
from tost.generation.native import native_obstacles
from tost.testing import assert_close


@pytest.fixture
def from_here():
    """Count what is made from here on: what earlier tests left may go at any time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def alive():
    """Objects that Python keeps, tensors among them, and the memory of those."""
    gc.collect()
    # Not isinstance: some objects of torch answer it with a warning.
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return len(gc.get_objects()), len(tensors), sum(x.numel() * x.element_size() for x in tensors)


def resident():
    """Memory of this process, in bytes."""
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.usefixtures("from_here")
def test_nothing_that_is_kept_grows_with_the_text():
    stream = stream_tokens(endless(torch.float32), prompts(3, 5), generator=seeded())
    found = []
    for _ in range(3):
        for _ in itertools.islice(stream, 100):
            pass
        found.append((stream.continuation.bytes(), *alive()))
    assert found[1][0] == found[2][0]
    assert found[1][2:] == found[2][2:]
    assert found[2][1] - found[1][1] < 20
    assert stream.continuation.state.position.tolist() == [302, 304]


def check_long_text(model, count):
    """Generate `count` tokens; nothing may pile up, and the end must be that of a fresh pass over the text."""
    stream = stream_tokens(model, prompts(3), generator=seeded())
    text = torch.empty(3 + count, dtype=torch.uint8)  # kept by the test, not by the stream
    text[:3] = prompts(3)[0]
    for place, token in enumerate(itertools.islice(stream, 1000), 3):
        text[place] = token.item()
    objects, size, memory = alive(), stream.continuation.bytes(), resident()
    for place, token in enumerate(itertools.islice(stream, count - 1000), 1003):
        text[place] = token.item()
    assert stream.continuation.bytes() == size
    assert resident() - memory < 20e6
    found = alive()
    assert found[1:] == objects[1:]
    assert found[0] - objects[0] < 50
    logits, _ = decode_step(model, stream.continuation.last, stream.continuation.state)
    fresh = prefill(model, text[None, :-1].long(), chunk_size=1000)
    expected, _ = decode_step(model, text[-1:].long(), fresh)
    assert stream.continuation.state.position.tolist() == [3 + count - 1]
    assert_close("logits", logits, expected, 1e-4)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        pytest.param({}, 5000, id="plain", marks=pytest.mark.slow),
        pytest.param({**PLUS, "conv_width": 4}, 1500, id="gated"),
        pytest.param({"position": "sinusoidal"}, 1500, id="waves", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("from_here")
def test_a_long_text_takes_no_memory_and_stays_exact(options, count):
    check_long_text(endless(torch.float32, **options), count)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    bool(native_obstacles(endless(torch.float32))), reason="only the native step rounds its sums fairly"
)
@pytest.mark.usefixtures("from_here")
def test_a_million_tokens_take_no_memory_and_stay_exact():
    check_long_text(endless(torch.float32), 1_000_000)


def test_state_of_any_length_has_the_same_size():
    model = endless()
    sizes = {state_bytes(prefill(model, torch.ones(1, length, dtype=torch.int64))) for length in (1, 10, 300)}
    # Per layer: two sums of H * D numbers, one of H, and the position.
    assert sizes == {2 * 8 * (2 * 16 + 4 + 1)}


def test_positions_run_out_after_everything_that_had_one_was_given_out():
    model = make(max_length=20)
    stream = stream_tokens(model, prompts(5), sampling=Sampling(temperature=0))
    assert stream.room == 16
    given = []
    with pytest.raises(ConfigError, match=r"read 21 tokens.*max_length=20.*Begin with a shorter text.*position=none"):
        given.extend(stream)  # keeps what came before the error
    assert len(given) == 16
    assert stream.room == 0
    # Nothing is lost: the state is that of the text so far.
    text = torch.cat([prompts(5)[0], *given])
    assert stream.continuation.state.position.tolist() == [20]
    assert stream.continuation.last.tolist() == text[-1:].tolist()
    assert torch.equal(model(text[None, :20])[0, -1].argmax(), text[-1])


def test_only_rows_that_go_on_need_positions():
    model = make(max_length=20)
    long, short = prompts(15, 3)
    first = generate_with_state(model, [long], max_new_tokens=1, sampling=Sampling(temperature=0)).tokens.item()
    stream = stream_tokens(model, [long, short], sampling=Sampling(temperature=0, stop_tokens=[first]))
    assert stream.room == 6
    assert next(stream)[1] != first
    assert stream.room == 17


@pytest.mark.parametrize("where", ["_step", "choose"])
def test_an_interrupt_leaves_the_stream_where_it_was(monkeypatch, where):
    model = make()
    expected = generate_with_state(model, prompts(5), max_new_tokens=8, sampling=Sampling(temperature=0)).tokens
    stream = stream_tokens(model, prompts(5), sampling=Sampling(temperature=0))
    found = [next(stream) for _ in range(3)]

    def interrupt(*args):
        raise KeyboardInterrupt

    owner = stream if where == "_step" else stream_module
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    found += itertools.islice(stream, 2)
    rest = generate_with_state(
        model, None, max_new_tokens=3, sampling=Sampling(temperature=0), state=stream.continuation
    )
    assert torch.equal(torch.cat((torch.stack(found, dim=1), rest.tokens), dim=1), expected)


def test_a_continuation_stays_as_it_is_while_the_stream_goes_on():
    model = make()
    stream = stream_tokens(model, prompts(5, 7), generator=seeded())
    next(stream)
    kept = stream.continuation
    copy = pytree.tree_map(torch.clone, tuple(kept))
    list(itertools.islice(stream, 5))
    for now, then in zip(*map(pytree.tree_leaves, (tuple(kept), copy)), strict=True):
        assert torch.equal(now, then)
