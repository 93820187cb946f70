"""Exported models compute what the models compute, and what cannot be exported is named."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import tost
from tests.models.tiny import perturb
from tost.deploy import plain_operators
from tost.deploy.runtime import Model
from tost.errors import ConfigError, MissingPackageError
from tost.models import list_models
from tost.models.mixers import list_mixers
from tost.ops._scan import linear_recurrence

LANGUAGE = {"embed_dim": 32, "depth": 2, "num_heads": 2, "vocab_size": 64, "max_length": 64}
QUICK = {
    "image, chosen size": ("tost_mini", {"embed_dim": 16, "depth": 1, "class_depth": 1}, (12, 20), "openvino"),
    "positions of another size": ("crate_mini", {"depth": 1}, 48, "openvino"),
    "ids": ("lra_retrieval", {"depth": 1}, None, "onnx"),
    "numbers": ("tost_sequence", {"depth": 1}, None, "openvino"),
    "constant state": ("tost_lm_base", LANGUAGE, None, "onnx"),
    "growing state and convolution": ("gpt2_base", {**LANGUAGE, "conv_width": 4}, None, "openvino"),
}


def small(name, overrides):
    torch.manual_seed(0)
    return perturb(tost.create_model(name, **overrides), 0.02)


@pytest.mark.parametrize(("name", "overrides", "size", "format"), QUICK.values(), ids=QUICK.keys())
def test_runtime_computes_what_the_model_computes(tmp_path, name, overrides, size, format):
    model = small(name, overrides).train()
    done = tost.export(model, tmp_path / "out", format=format, image_size=size)
    assert model.training
    assert done.error <= 1e-4
    graph = {"onnx": {"model.onnx"}, "openvino": {"model.xml", "model.bin"}}[format]
    assert {path.name for path in tmp_path.glob("*/*")} == {"export.json", "runtime.py", *graph}
    assert not list(tmp_path.glob(".*"))
    # Sizes that tracing did not see.
    model, runner = model.eval(), Model(tmp_path / "out")
    first = runner.about["inputs"][0]
    sizes = {"batch": 4, "tokens": 17}
    shape = [sizes.get(size, size) for size in first["shape"]]
    x = torch.randint(16, shape) if first["dtype"] == "int64" else torch.rand(shape)
    with torch.no_grad(), plain_operators(model):
        expected = model(x)
    if done.kind == "language":
        found, _ = runner.advance(x.numpy(), runner.start(4), np.arange(17))
    else:
        found = runner(**{first["name"]: x.numpy()})["logits"]
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


def registered():
    """Return a small model of every kind in the registry, and every mixer."""
    same = ("_medium", "_large", "_24_", "_patch8_", "_medium", "lm_base", "gpt2_base")
    models = [(name, {"depth": 1}) for name in list_models() if not any(part in name for part in same)]
    models += [(name, LANGUAGE) for name in list_models("*_base*") if name.startswith(("tost_lm", "gpt2"))]
    models += [("tost_sequence", {"depth": 1, "mixer": mixer}) for mixer in list_mixers("sequence")]
    models += [("tost_mini", {"depth": 1, "mixer": mixer}) for mixer in list_mixers("vision")]
    return models + [
        ("tost_lm_base", {**LANGUAGE, "mixer": mixer, "position": "none"}) for mixer in list_mixers("language")
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("format", ["onnx", "openvino"])
@pytest.mark.parametrize(("name", "overrides"), registered(), ids=lambda value: str(value))
def test_every_registered_model_is_equal_or_named(tmp_path, name, overrides, format):
    model = small(name, overrides)
    try:
        assert tost.export(model, tmp_path / "out", format=format).error <= 1e-4
    except ConfigError as error:
        assert f"{type(model).__name__} cannot be exported" in str(error)  # noqa: PT017
        assert not (tmp_path / "out").exists()
        pytest.skip(str(error))


def test_a_size_left_open_takes_any_image(tmp_path):
    model = small("tost_mini", {"embed_dim": 16, "depth": 1, "class_depth": 1}).eval()
    tost.export(model, tmp_path / "out")
    runner = Model(tmp_path / "out")
    for sides in ((8, 8), (32, 20), (9, 31)):
        images = torch.rand(2, 3, *sides)
        with torch.no_grad():
            expected = model(images)
        found = torch.from_numpy(runner(images=images.numpy())["logits"])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="images is"):
        runner(images=np.zeros((1, 3, 4, 8), np.float32))


GREEDY = """
import sys, resource
sys.path.insert(0, sys.argv[1])
import runtime
model, count = runtime.Model(), int(sys.argv[2])
ids = []
for token in model.greedy([1, 2, 3], count, piece=2):
    ids.append(token)
    if len(ids) == count // 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert "torch" not in sys.modules and "tost" not in sys.modules
print(*ids, grown)
"""


@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_text_without_torch_is_that_of_generate(tmp_path, count):
    model = perturb(small("tost_lm_base", {**LANGUAGE, "position": "none", "layer_scale": None}), 0.3).eval()
    tost.export(model, tmp_path / "out")
    command = [sys.executable, "-c", GREEDY, str(tmp_path / "out"), str(count)]
    *ids, grown = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    expected = tost.generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=count, temperature=0)
    assert ids == expected[0, 3:].tolist()
    assert len(set(ids)) > 1
    assert grown < 4096  # kilobytes


class Recurrence(torch.nn.Module):
    def forward(self, factor, value, start):
        return linear_recurrence(factor, value, start)


def test_a_recurrence_is_exported_for_every_length():
    def example(batch, tokens):
        return torch.rand(batch, tokens, 3), torch.randn(batch, tokens, 3), torch.randn(batch, 3)

    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    program = torch.export.export(
        Recurrence(), example(2, 5), dynamic_shapes=(sizes, sizes, {0: sizes[0]}), strict=False
    )
    for batch, tokens in ((1, 1), (3, 2), (2, 300)):
        given = example(batch, tokens)
        torch.testing.assert_close(program.module()(*given), linear_recurrence(*given))


def test_positions_end(tmp_path):
    model = small("tost_lm_base", {**LANGUAGE, "max_length": 16}).eval()
    tost.export(model, tmp_path / "out")
    runner = Model(tmp_path / "out")
    assert len(list(runner.greedy([1] * 10, 7))) == 7
    with pytest.raises(ValueError, match="17 tokens, but this model has 16 positions"):
        list(runner.greedy([1] * 10, 8))


def test_padding_of_sequences_counts_for_nothing(tmp_path):
    model = small("lra_listops", {"depth": 1, "max_length": 20}).eval()
    tost.export(model, tmp_path / "out")
    runner = Model(tmp_path / "out")
    ids = np.ones((1, 30), np.int64)
    mask = np.arange(30)[None] < 12
    alone = runner(ids=ids[:, :12])["logits"]
    np.testing.assert_allclose(runner(ids=ids, mask=mask)["logits"], alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="30 tokens, but this model has 20 positions"):
        runner(ids=ids)


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_int8_is_close_and_smaller(tmp_path, format):
    model = small("vit_mini", {"embed_dim": 128, "depth": 2}).eval()
    images = torch.rand(16, 3, 32, 32)
    whole = tost.export(model, tmp_path / "whole", format=format)
    done = tost.export(model, tmp_path / "out", format=format, calibration=[{"images": images}])
    assert done.precision == "int8"
    assert done.bytes < 0.6 * whole.bytes
    with torch.no_grad():
        expected = model(images)
    found = torch.from_numpy(Model(tmp_path / "out")(images=images.numpy())["logits"])
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


class FixedBatch(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)) if x.shape[0] == 2 else x.sum(dim=(2, 3))


class UnknownStart(torch.nn.Module):
    """A language model whose state begins with ones."""

    def __init__(self):
        super().__init__()
        self.options = tost.create_model("tost_lm_base", **LANGUAGE, position="none").options

    def forward_with_state(self, ids, state=None):
        state = torch.ones(ids.shape[0], 1) if state is None else state
        logits = state.unsqueeze(-1) * ids.unsqueeze(-1) * torch.ones(64)
        return logits, state + ids.sum(dim=1, keepdim=True)


REFUSED = {
    "batch": (lambda: FixedBatch(48, 5), {"image_size": 4}, "FixedBatch cannot be exported"),
    "size": (lambda: tost.create_model("crate_mini", depth=1), {"image_size": 33}, "CRATE cannot take images of 33 x"),
    "no size": (lambda: torch.nn.Conv2d(3, 3, 3), {}, "Conv2d does not say which images"),
    "images": (lambda: tost.create_model("lra_text", depth=1), {"image_size": 4}, "about images"),
    "start": (UnknownStart, {}, "UnknownStart cannot be exported: its state does not begin with zeros"),
    "opset": (lambda: tost.create_model("vit_mini", depth=1), {"opset": 11}, "opset=11 .* one of 18 to 23"),
    "format": (lambda: tost.create_model("vit_mini", depth=1), {"format": "tflite"}, "use onnx or openvino"),
    "half": (lambda: tost.create_model("vit_mini", depth=1).half(), {}, "float16; export it after model.float"),
    "no data": (lambda: tost.create_model("vit_mini", depth=1), {"calibration": []}, "there is no data"),
    "data": (lambda: tost.create_model("vit_mini", depth=1), {"calibration": [{"ids": [1]}]}, "the model needs images"),
    "short": (lambda: tost.create_model("gpt2_base", **{**LANGUAGE, "max_length": 4}), {}, "takes 4 tokens"),
}


@pytest.mark.parametrize(("make", "options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_exported_is_named(tmp_path, make, options, message):
    with pytest.raises(ConfigError, match=message):
        tost.export(make(), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_only_an_export_is_replaced(tmp_path):
    model = small("vit_mini", {"depth": 1})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="is not an exported model"):
        tost.export(model, tmp_path / "other", force=True)
    tost.export(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="add --force"):
        tost.export(model, tmp_path / "out")
    tost.export(model, tmp_path / "out", format="openvino", force=True)
    assert json.loads((tmp_path / "out" / "export.json").read_text())["format"] == "openvino"
    assert not (tmp_path / "out" / "model.onnx").exists()


def test_a_missing_runtime_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingPackageError, match=r"tost-transformer\[deploy\]"):
        tost.export(small("vit_mini", {"depth": 1}), tmp_path / "out", format="openvino")


def test_plain_operators_are_switched_back():
    model = tost.create_model("tost_mini", depth=2, backend="reference").eval()
    images = torch.randn(1, 3, 12, 12)
    before = model(images)
    with plain_operators(model) as same:
        assert same is model
        assert {block.attention.backend for block in model.blocks} == {"torch"}
        torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-5)
    assert {block.attention.backend for block in model.blocks} == {"reference"}
    with pytest.raises(RuntimeError), plain_operators(model):
        raise RuntimeError
    assert {block.attention.backend for block in model.blocks} == {"reference"}
