"""ONNX files compute what the models compute, whatever the batch size."""

import onnxruntime
import pytest
import torch

import tost
from tests.models.tiny import perturb
from tost.errors import ConfigError
from tost.integrations.onnx import export_onnx, plain_operators


@pytest.mark.parametrize(
    ("name", "overrides", "size"),
    [
        ("tost_mini", {"embed_dim": 16, "depth": 1, "class_depth": 1}, (12, 9)),
        ("tost_mini", {"embed_dim": 16, "depth": 1, "class_depth": 1, "block_size": 4}, (12, 9)),
        pytest.param("xcit_mini", {"depth": 1}, 32, marks=pytest.mark.slow),
        pytest.param("crate_mini", {"depth": 1}, 32, marks=pytest.mark.slow),
        pytest.param("tost_mini", {"conv_width": 3, "gate": True, "feed_forward": "ista"}, 32, marks=pytest.mark.slow),
        pytest.param("tost_tiny_patch16_224", {}, 224, marks=pytest.mark.slow),
        pytest.param("tost_small_patch16_224", {}, 224, marks=pytest.mark.slow),
    ],
)
def test_file_computes_what_the_model_computes(tmp_path, name, overrides, size):
    torch.manual_seed(0)
    model = perturb(tost.create_model(name, **overrides), 0.02).train()
    export_onnx(model, tmp_path / "model.onnx", image_size=size)
    assert model.training
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    model.eval()
    for batch in (1, 3):
        images = torch.randn(batch, 3, *((size, size) if isinstance(size, int) else size))
        with torch.no_grad():
            expected = model(images)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-5, atol=1e-5)


class FixedBatch(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)) if x.shape[0] == 2 else x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            tost.create_model("tost_lm_base", embed_dim=32, depth=1, num_heads=2, vocab_size=64),
            "LanguageToST takes tokens",
        ),
        (tost.create_model("lra_listops", depth=1), "takes tokens"),
        (FixedBatch(3 * 4 * 4, 5), "FixedBatch cannot be exported with batches of any size"),
    ],
)
def test_what_cannot_be_exported_is_named(tmp_path, model, message):
    with pytest.raises(ConfigError, match=message):
        export_onnx(model, tmp_path / "model.onnx", image_size=4)
    assert not list(tmp_path.iterdir())


def test_plain_operators_are_switched_back():
    model = tost.create_model("tost_mini", depth=2, backend="reference").eval()
    images = torch.randn(1, 3, 12, 12)
    before = model(images)
    with plain_operators(model) as same:
        assert same is model
        assert {block.attention.backend for block in model.blocks} == {"torch"}
        torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-5)
        model.blocks[0].attention.requires_grad_(False)
    assert {block.attention.backend for block in model.blocks} == {"reference"}
    with pytest.raises(RuntimeError), plain_operators(model):
        raise RuntimeError
    assert {block.attention.backend for block in model.blocks} == {"reference"}
