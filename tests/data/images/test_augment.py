"""Augmentation: what is drawn follows from the seed and the draw number only, and is what is asked for."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from tost.data import DataOptions, build_data, make_loader
from tost.data.images.dataset import PixelImages
from tost.data.images.transforms import EvaluationTransform, drawing_from, resized_size, training_transform

from . import files

POLICIES = {
    "pixels": {"crop": "pad", "image_size": 32},
    "pixels, resized": {"crop": "pad", "image_size": 24},
    "imagenet": {"crop": "resized", "auto_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5, "image_size": 16},
    "fine-tuning": {"crop": "resized", "auto_augment": "torchvision-rand-n2-m14", "image_size": 16},
    "jitter": {"crop": "pad", "color_jitter": 0.4, "image_size": [16, 20]},
}


def options_of(name="cifar10", **options):
    return DataOptions(name=name, path="x", options=options).data_set_options()


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """Ten images of noise."""
    root = tmp_path_factory.mktemp("cifar")
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{at}" for at in range(1, 6)), "test_batch"]:
        records = [bytes([at]) + rng.integers(0, 256, 3072, dtype=np.uint8).tobytes() for at in range(2)]
        (root / f"{name}.bin").write_bytes(b"".join(records))
    return root


def train_set(root, seed=0, **options):
    return build_data(DataOptions(name="cifar10", path=str(root), options=options), seed).train


def take(loader, steps):
    return [batch["inputs"] for batch in islice(loader, steps)]


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_draw_follows_from_seed_and_number(cifar, policy):
    train, again = train_set(cifar, **POLICIES[policy]), train_set(cifar, **POLICIES[policy])
    draws = torch.tensor([3, 13, 23, 10**9 + 3, 4])
    found = train.gather(draws)["inputs"]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert torch.equal(again.gather(draws.flip(0))["inputs"].flip(0), found)
    assert torch.equal(train[3]["inputs"], found[0])
    assert len({image.numpy().tobytes() for image in found}) == 5, "each number is a draw of its own"
    assert not torch.equal(train_set(cifar, seed=1, **POLICIES[policy]).gather(draws)["inputs"], found)
    assert train.gather(draws)["targets"].tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_global_generators_are_left_as_they_were(cifar, policy):
    train = train_set(cifar, **POLICIES[policy])
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    train.gather(torch.arange(20))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_generators_are_given_back_after_an_error():
    random.seed(5), torch.manual_seed(5)
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), drawing_from(2**64 - 1):
        assert random.random() / 0 >= 0
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("policy", ["pixels", "imagenet"])
@pytest.mark.parametrize("repeats", [1, 3])
def test_workers_processes_and_interruptions_change_nothing(cifar, policy, repeats):
    train = train_set(cifar, repeats=repeats, **POLICIES[policy])
    steps = 7  # three epochs of ten images
    whole = take(make_loader(train, batch_size=4, seed=2), steps)
    assert same(take(make_loader(train, batch_size=4, seed=2, workers=2), steps), whole)

    shares = [take(make_loader(train, batch_size=2, seed=2, rank=rank, world_size=2), steps) for rank in (0, 1)]
    for step, batch in enumerate(whole):
        parts = [share[step] for share in shares]
        # Repetitions are dealt out in turn, so that they meet on different processes.
        joined = torch.stack(parts, dim=1).flatten(0, 1) if repeats > 1 else torch.cat(parts)
        assert torch.equal(joined, batch)

    loader = make_loader(train, batch_size=4, seed=2, workers=1)
    first = take(loader, 3)
    other = make_loader(train, batch_size=4, seed=2)
    other.load_state_dict(loader.state_dict())
    assert same(first + take(other, steps - 3), whole)


def test_epochs_and_repetitions_are_drawn_anew(cifar):
    train = train_set(cifar, repeats=3, crop="resized", image_size=16)
    images = torch.cat(take(make_loader(train, batch_size=10, seed=0), 9))
    assert len({image.numpy().tobytes() for image in images}) == 90


def test_the_same_images_come_with_and_without_augmentation(cifar):
    plain, drawn = train_set(cifar, crop="none", flip=0.0), train_set(cifar)
    for first, second in zip(
        *(islice(make_loader(one, batch_size=4, seed=0), 5) for one in (plain, drawn)), strict=True
    ):
        assert torch.equal(first["targets"], second["targets"])


@settings(max_examples=25)
@given(st.integers(0, 4), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 2**63))
def test_shifts_and_mirrors_are_what_is_asked_for(padding, flip, seed):
    pixels = torch.arange(1, 3 * 6 * 7 + 1, dtype=torch.uint8).view(1, 3, 6, 7)
    choice = options_of(image_size=[6, 7], crop="pad", padding=padding, flip=flip, mean=[0.0], std=[1 / 255])
    dataset = PixelImages(pixels, torch.zeros(1, dtype=torch.int64), choice, seed=seed)
    padded = torch.nn.functional.pad(pixels[0], [padding] * 4).float()
    places = {}
    for down in range(2 * padding + 1):
        for right in range(2 * padding + 1):
            part = padded[:, down : down + 6, right : right + 7]
            places[part.contiguous().numpy().tobytes()] = (down, right, False)
            places[part.flip(-1).contiguous().numpy().tobytes()] = (down, right, True)
    count = 600
    images = dataset.gather(torch.arange(count))["inputs"].round()
    found = [places[image.contiguous().numpy().tobytes()] for image in images]
    mirrored = sum(one[2] for one in found) / count
    assert abs(mirrored - flip) < 0.1
    assert len({one[:2] for one in found}) > 0.9 * min((2 * padding + 1) ** 2, 81)


@pytest.mark.parametrize(
    ("stored", "size", "resize", "expected"),
    [
        ((500, 375), 224, "ratio", (341, 256)),
        ((375, 500), 224, "ratio", (256, 341)),
        ((375, 500), 224, 224, (224, 298)),
        ((375, 500), 224, "squash", (224, 224)),
        ((100, 100), [224, 160], "ratio", (256, 256)),
        ((100, 400), [224, 160], "ratio", (256, 1024)),
        ((400, 100), [224, 160], 300, (1200, 300)),
        ((1, 999), 8, "ratio", (9, 8991)),
    ],
)
def test_validation_sizes(stored, size, resize, expected):
    assert resized_size(stored, options_of(image_size=size, eval_resize=resize)) == expected


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (33, 33), (24, 24)])
@pytest.mark.parametrize(
    ("resize", "crop_pct", "mode"), [("ratio", 0.875, "center"), (24, 1.0, "center"), ("squash", 1.0, "squash")]
)
def test_validation_is_that_of_timm(shape, resize, crop_pct, mode):
    from timm.data import create_transform

    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8))
    choice = options_of("imagenet", image_size=24 if resize == 24 else 28, eval_resize=resize)
    size = choice.size
    theirs = create_transform((3, *size), crop_pct=crop_pct, crop_mode=mode, interpolation="bicubic")(image)
    torch.testing.assert_close(EvaluationTransform(choice)(image), theirs, atol=1e-5, rtol=0)


def test_training_is_that_of_timm():
    from timm.data import create_transform

    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 50, 3), dtype=np.uint8))
    ours = training_transform(options_of("imagenet", image_size=24, auto_augment="rand-m9-mstd0.5-inc1", erasing=0.25))
    theirs = create_transform(
        24,
        is_training=True,
        color_jitter=0.4,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        re_count=1,
    )
    compared = 0
    for seed in range(20):
        with drawing_from(seed):
            found = ours(image.copy())
        with drawing_from(seed):
            try:
                expected = theirs(image.copy())
            except ValueError:  # timm 1.0 asks Pillow 13 to keep 0 bits of a pixel
                continue
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        compared += 1
    assert compared > 10


def test_the_strongest_policy_works_with_every_pillow():
    image = Image.fromarray(np.full((8, 8, 3), 200, dtype=np.uint8))
    policy = training_transform(
        options_of(image_size=8, auto_augment="rand-m10-inc1-n1", crop="none", flip=0.0, **files.PLAIN)
    )
    found = []
    for seed in range(200):
        with drawing_from(seed):
            found.append(policy(image))
    assert any((one == 0).all() for one in found), "0 bits leave a black image"


def test_an_unknown_policy_is_refused(cifar):
    with pytest.raises(ValueError, match=r"auto_augment='rand-q7' is not a policy of timm"):
        train_set(cifar, auto_augment="rand-q7")


class CountOperations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += 1
        return function(*arguments, **(named or {}))


def test_a_batch_of_small_images_takes_as_many_operations_as_one(cifar):
    pixels = torch.randint(0, 255, (2000, 3, 32, 32), dtype=torch.uint8)
    dataset = PixelImages(pixels, torch.zeros(2000, dtype=torch.int64), options_of(), seed=0)
    counts = []
    for size in (1, 128):
        with CountOperations() as operations:
            dataset.gather(torch.arange(size) * 15)
        counts.append(operations.count)
    assert counts[1] < 2 * counts[0], "images are handled one at a time"
