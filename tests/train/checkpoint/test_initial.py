"""Weights to start from: what is accepted, what is kept fresh, what is refused and how."""

from __future__ import annotations

import pytest
import torch

import tost
from tost.errors import CheckpointError
from tost.train.checkpoint.files import save_tensors
from tost.train.checkpoint.model import load_initial, load_weights, save_model

OPTIONS = {"embed_dim": 16, "depth": 1, "num_heads": 2, "class_depth": 1}


def image_model(**options):
    return tost.create_model("tost_mini", **{**OPTIONS, "num_classes": 4, **options})


def never(line):
    raise AssertionError(line)


@pytest.fixture
def saved(tmp_path):
    """Write a model's weights, return the file and the model."""

    def write(**options):
        torch.manual_seed(0)
        model = image_model(**options)
        for buffer in model.buffers():  # batch norm statistics that differ from fresh ones
            buffer.add_(1)
        save_tensors(tmp_path / "model.safetensors", model.state_dict())
        return tmp_path / "model.safetensors", model

    return write


def test_everything_is_taken_over(saved):
    path, source = saved()
    model = image_model()
    start = load_initial(model, str(path), never)
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert (start.loaded, start.fresh) == (len(source.state_dict()), ())
    assert len(start.sha256) == 64
    assert str(start) == f"started from {path}: {start.loaded} tensors"


def test_a_folder_of_weights_works_like_its_file(saved):
    path, _ = saved()
    models = [image_model(), image_model()]
    starts = [load_initial(model, str(place), never) for model, place in zip(models, (path, path.parent), strict=True)]
    assert starts[0] == starts[1]
    assert torch.equal(models[0].cls_token, models[1].cls_token)


def test_the_folder_of_a_model_works_too_and_damage_is_noticed(tmp_path):
    source, model = image_model(), image_model()
    save_model(source, tmp_path / "mine", name="tost_mini")
    assert load_initial(model, str(tmp_path / "mine"), never).fresh == ()
    assert torch.equal(model.cls_token, source.cls_token)
    weights = tmp_path / "mine" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_initial(model, str(tmp_path / "mine"), never)


@pytest.mark.parametrize("classes", [7, 0])
def test_a_head_of_other_classes_stays_new(saved, classes):
    path, source = saved(num_classes=classes)
    model = image_model()
    before = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    start = load_initial(model, str(path), never)
    assert start.fresh == ("head.weight", "head.bias")
    assert str(start).endswith("; new: head.weight, head.bias")
    assert all(torch.equal(model.head.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(model.cls_token, source.cls_token)


def test_a_model_without_a_head_starts_from_one_with_a_head(saved):
    path, source = saved()
    model = image_model(num_classes=0)
    assert load_initial(model, str(path), never).fresh == ()
    assert torch.equal(model.norm.weight, source.norm.weight)


def test_a_new_head_is_new_whatever_the_source_has(saved):
    path, source = saved()
    model = image_model()
    before = model.head.weight.clone()
    assert load_initial(model, str(path), never, head="new").fresh == ("head.weight", "head.bias")
    assert torch.equal(model.head.weight, before)
    assert torch.equal(model.norm.weight, source.norm.weight)


def test_where_the_head_must_fit_it_is_refused(saved):
    path, _ = saved(num_classes=7)
    with pytest.raises(CheckpointError, match=r"head\.weight: \(7, 16\) there, \(4, 16\) here"):
        load_initial(image_model(), str(path), never, head="same")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"in_chans": 1},
            r"1 of \d+ tensors differ.*\n  patch_embed\.proj\.0\.0\.weight: \(8, 1, 3, 3\) there, \(8, 3",
        ),
        ({"depth": 2}, r"blocks\.1\.norm1\.weight: \(16,\) there, unknown here"),
        ({"class_depth": 2}, r"there, unknown here\n  choose model\.name and its options as they were there"),
        ({"embed_dim": 32}, r"\d+ of \d+ tensors differ; nothing was loaded.*\n  and \d+ more\n  choose"),
        ({"embed_dim": 32, "num_classes": 9}, r"cls_token: \(1, 1, 32\) there, \(1, 1, 16\) here"),
    ],
)
def test_other_models_are_refused_with_what_differs(saved, options, message):
    path, _ = saved(**options)
    model = image_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="(?s)" + message) as error:
        load_initial(model, str(path), never)
    assert "head.bias: (4,)" not in str(error.value)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_tensor_that_is_missing_is_named(saved):
    _, source = saved()
    tensors = source.state_dict()
    del tensors["cls_token"]
    with pytest.raises(CheckpointError, match=r"cls_token: missing there, \(1, 1, 16\) here"):
        load_weights(image_model(), tensors, "x", head="fit")


def test_a_head_of_another_width_is_not_a_matter_of_classes(saved):
    _, source = saved()
    tensors = {**source.state_dict(), "head.weight": torch.zeros(7, 8)}
    with pytest.raises(CheckpointError, match=r"head\.weight: \(7, 8\) there, \(4, 16\) here"):
        load_weights(image_model(), tensors, "x", head="fit")


@pytest.mark.parametrize("name", ["weights.pth", "checkpoint.pt", "net.t7"])
def test_pickles_are_refused_unread(tmp_path, name):
    (tmp_path / name).write_bytes(b"whatever")
    with pytest.raises(CheckpointError, match=r"is a pickle, which is never opened here.*`tost convert`"):
        load_initial(image_model(), str(tmp_path / name), never)


def test_a_pickle_under_another_name_is_refused_too(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"a pickle or PyTorch archive.*`tost convert`"):
        load_initial(image_model(), str(tmp_path / "weights"), never)


def test_places_without_weights_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no .*nowhere; train\.init_from takes a run folder"):
        load_initial(image_model(), str(tmp_path / "nowhere"), never)
    with pytest.raises(CheckpointError, match=r"holds no weights; needed are a run folder"):
        load_initial(image_model(), str(tmp_path), never)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_initial(image_model(), str(tmp_path), never)


def test_heads_with_a_hidden_layer_keep_what_does_not_depend_on_the_classes():
    options = {"embed_dim": 16, "depth": 1, "num_heads": 2, "max_length": 8}
    source, model = (tost.create_model("lra_image", **options, num_classes=count) for count in (3, 5))
    assert load_weights(model, source.state_dict(), "x", head="fit") == ("head.2.weight",)
    assert torch.equal(model.head[0].weight, source.head[0].weight)
