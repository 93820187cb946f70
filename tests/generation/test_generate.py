"""Texts are those of the full forward pass, in any batch, in any pieces."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.generation.models import VOCABULARY, endless, make, prompts, seeded
from tests.models.tiny import make_tiny
from tost.errors import ConfigError
from tost.generation import ENDED, Sampling, decode_step, generate_with_state
from tost.generation.sampling import choose, draw_noise

MODEL, ENDLESS = make(), endless()
DRAWN = Sampling(temperature=0.9, top_k=9, top_p=0.95, repetition_penalty=1.3)


def by_the_whole(model, row, count, sampling, generator=None):
    """Run the whole text through the model for every token, as one would without a state."""
    ids = row[None]
    for _ in range(count):
        seen = F.one_hot(ids, VOCABULARY).amax(dim=1).bool()
        noise = None if sampling.greedy else draw_noise(1, VOCABULARY, generator)
        with torch.no_grad():
            token = choose(model(ids)[:, -1], seen, sampling, noise)
        ids = torch.cat((ids, token[:, None]), dim=1)
        if token.item() in sampling.stop_tokens:
            break
    return ids[0]


@pytest.mark.parametrize("model", [MODEL, ENDLESS], ids=["positions", "endless"])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), DRAWN], ids=["greedy", "drawn"])
def test_a_text_is_that_of_the_full_forward_pass(model, sampling):
    (row,) = prompts(9)
    expected = by_the_whole(model, row, 20, sampling, seeded())
    found = tost.generate(
        model,
        row[None],
        max_new_tokens=20,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        generator=seeded(),
    )
    assert torch.equal(found[0], expected)
    assert len(set(expected.tolist())) > 3  # a text that says something


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.lists(st.integers(0, 5), max_size=4))
@settings(max_examples=15)
def test_a_text_in_pieces_is_the_text_in_one(lengths, pieces):
    rows, total = prompts(*lengths), sum(pieces) + 3
    whole = generate_with_state(ENDLESS, rows, max_new_tokens=total, sampling=DRAWN, generator=seeded())
    generator, found = seeded(), []
    ids, before = rows, None
    for count in (*pieces, 3):
        done = generate_with_state(
            ENDLESS, ids, max_new_tokens=count, sampling=DRAWN, generator=generator, state=before
        )
        ids, before = None, done.continuation
        found.append(done.tokens)
    assert torch.equal(torch.cat(found, dim=1), whole.tokens)
    assert torch.equal(before.last, whole.continuation.last)
    assert torch.equal(before.seen, whole.continuation.seen)


@given(st.lists(st.integers(1, 15), min_size=2, max_size=4), st.booleans(), st.integers(1, 20))
@settings(max_examples=15)
def test_every_row_of_a_batch_is_its_own_text(lengths, greedy, chunk_size):
    rows = prompts(*lengths)
    options = {"max_new_tokens": 12, "temperature": 0 if greedy else 0.9, "top_p": 0.9, "repetition_penalty": 1.2}
    options |= {"stop_tokens": [3, 7]}
    together = tost.generate(
        MODEL, rows, **options, generator=[seeded(index) for index in range(len(rows))], chunk_size=chunk_size
    )
    for index, row in enumerate(rows):
        alone = tost.generate(MODEL, row[None], **options, generator=[seeded(index)])
        assert torch.equal(together[index], alone[0])


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_may_stand_anywhere_and_hold_anything(side):
    rows = prompts(3, 8, 1)
    expected = tost.generate(MODEL, rows, max_new_tokens=6, temperature=0)
    before = {"left": [7, 2, 9], "right": [0, 0, 0], "both": [3, 1, 4]}[side]
    ids = torch.full((3, 10), -100)
    mask = torch.zeros(3, 10, dtype=torch.bool)
    for index, row in enumerate(rows):
        place = slice(before[index], before[index] + len(row))
        ids[index, place], mask[index, place] = row, True
    found = tost.generate(MODEL, ids, mask=mask, max_new_tokens=6, temperature=0)
    assert torch.equal(found[:, :10], ids)
    for index, row in enumerate(rows):
        assert torch.equal(found[index, 10:], expected[index][len(row) :])


def test_prompts_follow_what_came_before():
    first, second = prompts(7, 7), prompts(2, 5, seed=1)
    done = generate_with_state(MODEL, first, max_new_tokens=4, sampling=Sampling(temperature=0))
    whole = [torch.cat(parts) for parts in zip(first, done.tokens, second, strict=True)]
    expected = tost.generate(MODEL, whole, max_new_tokens=6, temperature=0)
    found = tost.generate(MODEL, second, max_new_tokens=6, temperature=0, state=done.continuation)
    for index in range(2):
        assert torch.equal(found[index], expected[index][11:])
    # A state of the model itself will do, then the caller knows which tokens it has seen.
    _, state = MODEL.forward_with_state(torch.stack(first))
    plain = tost.generate(MODEL, torch.stack(first)[:, :3], max_new_tokens=6, temperature=0, state=state)
    both = torch.cat((torch.stack(first), torch.stack(first)[:, :3]), dim=1)
    assert torch.equal(plain[:, 3:], tost.generate(MODEL, both, max_new_tokens=6, temperature=0)[:, 10:])


def test_rows_end_at_their_stop_tokens():
    rows = prompts(4, 4, 4, 4, 4, 4, seed=3)
    done = generate_with_state(
        MODEL, rows, max_new_tokens=30, sampling=Sampling(stop_tokens=[2, 5]), generator=seeded(1)
    )
    lengths = done.lengths.tolist()
    assert len(set(lengths)) > 2
    for index, length in enumerate(lengths):
        tokens = done.tokens[index].tolist()
        assert [token in (2, 5) for token in tokens[:length]] == [False] * (length - 1) + [True]
        assert set(tokens[length:]) <= {ENDED}
        assert done.continuation.last[index] == tokens[length - 1]
        assert done.continuation.state.position[index] == 4 + length - 1
    padded = tost.generate(MODEL, torch.stack(rows), max_new_tokens=30, stop_tokens=[2, 5], generator=seeded(1))
    assert padded.shape == (6, 4 + max(lengths))
    for index, length in enumerate(lengths):
        assert set(padded[index, 3 + length :].tolist()) == {done.continuation.last[index].item()}


def test_a_row_draws_the_same_numbers_whenever_the_others_end():
    rows = prompts(4, 4, 4, 4, seed=3)
    free = generate_with_state(MODEL, rows, max_new_tokens=25, generator=seeded(1)).tokens
    stopped = generate_with_state(
        MODEL, rows, max_new_tokens=25, sampling=Sampling(stop_tokens=[2, 5]), generator=seeded(1)
    )
    assert len(set(stopped.lengths.tolist())) > 2
    for index, length in enumerate(stopped.lengths.tolist()):
        assert torch.equal(stopped.tokens[index, :length], free[index, :length])


def test_rows_that_ended_at_different_times_go_on_together():
    rows = prompts(4, 9, 2, seed=3)
    stopping = Sampling(stop_tokens=[2, 5], temperature=0.8)
    done = generate_with_state(
        MODEL, rows, max_new_tokens=20, sampling=stopping, generator=[seeded(i) for i in range(3)]
    )
    assert len(set(done.lengths.tolist())) > 1
    found = generate_with_state(
        MODEL, None, max_new_tokens=5, sampling=Sampling(temperature=0), state=done.continuation
    )
    for index, row in enumerate(rows):
        text = torch.cat((row, done.tokens[index, : done.lengths[index]]))
        assert torch.equal(found.tokens[index], by_the_whole(MODEL, text, 5, Sampling(temperature=0))[len(text) :])


def test_ended_rows_cost_nothing(monkeypatch):
    sizes = []
    original = MODEL.forward_with_state

    def counted(ids, *others):
        sizes.append(len(ids))
        return original(ids, *others)

    monkeypatch.setattr(MODEL, "forward_with_state", counted)
    rows = prompts(4, 4, 4, 4, seed=3)
    done = generate_with_state(
        MODEL, rows, max_new_tokens=30, sampling=Sampling(stop_tokens=[2, 5]), generator=seeded(1)
    )
    lengths = done.lengths.tolist()
    assert sizes == [sum(length >= step for length in lengths) for step in range(1, max(lengths) + 1)]


def test_the_same_seed_gives_the_same_text_and_another_one_another():
    ids = torch.stack(prompts(6, 6))
    texts = [tost.generate(MODEL, ids, max_new_tokens=30, generator=seeded(seed)) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert not torch.equal(texts[0][0, 6:], texts[0][1, 6:])
    torch.manual_seed(5)
    first = tost.generate(MODEL, ids, max_new_tokens=10)
    torch.manual_seed(5)
    assert torch.equal(first, tost.generate(MODEL, ids, max_new_tokens=10))


def test_dropout_is_off_and_the_model_is_left_as_it_was():
    model = make(dropout=0.5)

    def last_logits():
        done = generate_with_state(model, prompts(5), max_new_tokens=10, sampling=Sampling(temperature=0))
        return decode_step(model, done.continuation.last, done.continuation.state)[0]

    expected = last_logits()
    model.train()
    model.norm.eval()
    assert torch.equal(last_logits(), expected)
    assert model.training
    assert model.blocks[0].mlp.training
    assert not model.norm.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": torch.tensor([[11]])}, "ids reach from 11 to 11, but this model has vocab_size=11"),
        ({"ids": torch.tensor([[-1]])}, "ids reach from -1"),
        ({"ids": torch.tensor([1, 2])}, r"shape \(2,\).*Use ids\[None\]"),
        ({"ids": torch.tensor([[0.5]])}, "dtype torch.float32"),
        ({"ids": torch.empty(1, 0, dtype=torch.int64)}, "prompt 0 is empty"),
        ({"ids": torch.empty(0, 3, dtype=torch.int64)}, "there is no prompt"),
        ({"ids": []}, "there is no prompt"),
        ({"ids": [torch.tensor([1]), torch.tensor([], dtype=torch.int64)]}, "prompt 1 is empty"),
        ({"ids": [torch.tensor([[1]])]}, r"prompt 0 is of shape \(1, 1\)"),
        ({"ids": [[1, 2]]}, "prompt 0 is a list"),
        ({"ids": "def"}, r"prompt 0 is a str; .*Encode text first: .*tokenizer.encode"),
        ({"ids": [torch.tensor([1])], "mask": torch.ones(1, 1, dtype=torch.bool)}, "needs no mask"),
        ({"mask": torch.ones(1, 2)}, "mask has shape .* dtype torch.float32"),
        ({"mask": torch.tensor([[False, False]])}, "prompt 0 is empty"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 64}, r"read 65 tokens, but it has learned positions for max_length=64.*at most 63 more"),
        ({"ids": torch.ones(1, 70, dtype=torch.int64)}, "max_length=64. Begin with a shorter text"),
        ({"chunk_size": 0, "ids": torch.tensor([[1, 2]])}, "chunk_size=0"),
        ({"stop_tokens": [11]}, r"stop_tokens \[11\] are not in the vocabulary"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"generator": [seeded(), seeded()]}, "2 generators, but 1 rows"),
        (
            {"state": make().forward_with_state(torch.ones(2, 3).long())[1]},
            "holds 2 sequences, but there are 1 prompts",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused_in_words(arguments, message):
    with pytest.raises(ConfigError, match=message):
        tost.generate(MODEL, **{"ids": torch.tensor([[1, 2]]), "max_new_tokens": 3, **arguments})


def test_other_models_cannot_generate():
    classifier = make_tiny("lra_listops", vocab_size=11)
    with pytest.raises(ConfigError, match="SequenceClassifier cannot generate"):
        tost.generate(classifier, torch.tensor([[1]]), max_new_tokens=1)


def test_a_continuation_needs_its_own_model_and_batch():
    done = generate_with_state(MODEL, prompts(5, 5), max_new_tokens=1)
    with pytest.raises(ConfigError, match="belongs to a model of 11 ids, but this one has 13"):
        generate_with_state(make(vocab_size=13), None, max_new_tokens=1, state=done.continuation)
    with pytest.raises(ConfigError, match="continued has 2 rows, but ids have shape"):
        generate_with_state(MODEL, prompts(3), max_new_tokens=1, state=done.continuation)
    with pytest.raises(ConfigError, match="there is no prompt; give ids"):
        generate_with_state(MODEL, None, max_new_tokens=1)
