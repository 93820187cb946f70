"""Models on packed sequences: logits, losses, states and pieces are those of each sequence alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tost
from tests.models.tiny import PLUS, make_tiny, perturb
from tost.errors import ConfigError
from tost.testing import assert_close

LANGUAGE = [
    {},
    {"position": "none", "conv_width": 4, "conv_at": "both", "gradient_checkpointing": True},
    {**PLUS, "position": "sinusoidal"},
    {"mixer": "softmax"},
]
IDS = ["authors", "convolutions", "gated", "softmax"]
lengths_of_texts = st.lists(st.integers(1, 9), min_size=1, max_size=4)
examples = settings(max_examples=4, deadline=None)


def language_model(options):
    return perturb(make_tiny("tost_lm_base", **options).double())


def draw(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randint(11, (1, sum(lengths)), generator=g) for _ in range(2))
    return ids, targets, torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("options", LANGUAGE, ids=IDS)
@examples
@given(lengths=lengths_of_texts, seed=st.integers(0, 2**31))
def test_packed_texts_are_predicted_as_each_alone(options, lengths, seed):
    model, (ids, targets, cu_seqlens) = language_model(options), draw(lengths, seed)
    parts = [*zip(ids.split(lengths, dim=1), targets.split(lengths, dim=1), strict=True)]
    logits = model(ids, cu_seqlens=cu_seqlens)
    assert_close("logits", logits, torch.cat([model(part) for part, _ in parts], dim=1), 1e-10)
    loss = model.loss(ids, targets, cu_seqlens=cu_seqlens, reduction="sum")
    alone = sum(model.loss(part, target, reduction="sum") for part, target in parts)
    assert_close("loss", loss, alone, 1e-12)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for actual, expected in zip(*(torch.autograd.grad(x, parameters) for x in (loss, alone)), strict=True):
        assert_close("gradient", actual, expected, 1e-9)


@pytest.mark.parametrize("options", LANGUAGE[:3], ids=IDS[:3])
@examples
@given(lengths=lengths_of_texts, chunk=st.integers(1, 12))
def test_the_loss_of_packed_texts_by_pieces_is_that_of_the_whole(options, lengths, chunk):
    model, (ids, targets, cu_seqlens) = language_model(options), draw(lengths)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = model.loss(ids, targets, cu_seqlens=cu_seqlens)
    pieces = model.loss(ids, targets, cu_seqlens=cu_seqlens, chunk=chunk)
    assert_close("loss", pieces, whole, 1e-12)
    for actual, expected in zip(*(torch.autograd.grad(x, parameters) for x in (pieces, whole)), strict=True):
        assert_close("gradient", actual, expected, 1e-9)


def test_segment_ids_and_the_call_of_wrappers():
    model, ids = language_model({}), torch.randint(11, (2, 6))
    segments = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 2, 2]])
    logits = model(ids, segment_ids=segments)
    assert_close("logits", logits[1:, 3:], model(ids[1:, 3:]), 1e-12)
    total = model(ids, targets=ids, segment_ids=segments)
    assert_close("loss", total, model.loss(ids, ids, segment_ids=segments, reduction="sum"), 1e-12)


@pytest.mark.parametrize("options", [{}, {"mixer": "softmax"}, {"norm": "post", "position": "learned"}])
def test_packed_sequences_are_classified_as_each_alone(options):
    model = perturb(make_tiny("lra_listops", pooling="mean", **options).double()).eval()
    ids, lengths = torch.randint(5, (1, 17)), [3, 1, 9, 4]
    logits = model(ids, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int())
    assert_close("logits", logits, torch.cat([model(part) for part in ids.split(lengths, dim=1)]), 1e-10)


def test_pairs_are_packed_one_after_the_other():
    model = perturb(make_tiny("lra_retrieval").double()).eval()
    ids, lengths = torch.randint(5, (1, 14)), [3, 4, 5, 2]
    first, second, third, fourth = ids.split(lengths, dim=1)
    logits = model(ids, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int())
    for row, pair in enumerate([(first, second), (third, fourth)]):
        longest = max(x.shape[1] for x in pair)
        rows = [torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in pair]
        mask = torch.stack([torch.arange(longest) < x.shape[1] for x in pair])
        assert_close("logits", logits[row], model(torch.stack(rows, dim=1), mask[None])[0], 1e-10)


@pytest.mark.parametrize("options", [{}, {"global_pool": "avg"}, {"mixer": "softmax"}, {"num_classes": 0}])
def test_images_of_different_sizes_are_classified_as_each_alone(options):
    model = perturb(make_tiny("tost_tiny_patch16_224", **options).double()).eval()
    images = [torch.randn(3, *size, dtype=torch.float64) for size in [(32, 48), (16, 16), (48, 64), (32, 48)]]
    found, alone = model.forward_packed(images), torch.cat([model(image[None]) for image in images])
    assert_close("logits", found, alone, 1e-10)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = [torch.autograd.grad(y.square().sum(), weights, allow_unused=True) for y in (found, alone)]
    for got, want in zip(*gradients, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.allclose(got, want, rtol=1e-8, atol=1e-10)


def test_images_that_cannot_be_packed_are_refused():
    with pytest.raises(ConfigError, match="the grid of one image, but the batch is packed"):
        make_tiny("tost_tiny_patch16_224", conv_width=3, conv_at="values").forward_packed([torch.randn(3, 32, 32)])
    with pytest.raises(ValueError, match="0 images"):
        make_tiny("tost_tiny_patch16_224").forward_packed([])


def test_what_cannot_be_packed_is_refused():
    ids, cu_seqlens = torch.randint(11, (1, 6)), torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ConfigError, match="pooling=cls; use pooling=mean"):
        make_tiny("lra_listops", pooling="cls")(ids % 5, cu_seqlens=cu_seqlens)
    model = language_model({})
    with pytest.raises(ValueError, match="reaches position 25, but this model has 24"):
        model(torch.ones(1, 30, dtype=torch.int64), cu_seqlens=torch.tensor([0, 25, 30]))
    assert model(torch.ones(1, 30, dtype=torch.int64), cu_seqlens=torch.tensor([0, 24, 30])).shape == (1, 30, 11)
    with pytest.raises(ValueError, match=r"holds 1 sequences, but ids .* with 2 packed sequences"):
        model.forward_with_state(ids, model.forward_with_state(ids)[1], cu_seqlens=cu_seqlens)
    with pytest.raises(ConfigError, match="softmax attention grows with its text"):
        language_model({"mixer": "softmax"}).loss(ids, ids, cu_seqlens=cu_seqlens, chunk=2)


def test_a_packed_batch_cannot_be_shared_by_processes(monkeypatch):
    monkeypatch.setattr("tost.parallel.active", lambda: object())
    with pytest.raises(tost.errors.BackendError, match=r"the sequences of this rank alone.*context\.split_packing"):
        tost.nn.CausalConvolution(8)(
            torch.randn(1, 6, 8), packing=tost.Packing.from_segment_ids(torch.zeros(1, 6).long())
        )
