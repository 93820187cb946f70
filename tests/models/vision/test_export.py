"""Image models as graphs: compiled without a break, and exported for any batch size."""

import pytest
import torch

import tost
from tests.models.tiny import PLUS, make_tiny, perturb

FULL = [
    pytest.param("tost_tiny_patch16_224", {}, 224, marks=pytest.mark.slow),
    pytest.param("tost_small_patch16_224", {}, 224, marks=pytest.mark.slow),
]
SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 4, "class_depth": 1}
OURS = {**PLUS, "conv_width": 3, "feed_forward": "ista"}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "overrides", "size"),
    [
        ("tost_mini", SMALL, 12),
        pytest.param("tost_mini", {**SMALL, **OURS}, 12, marks=pytest.mark.slow),
        pytest.param("xcit_mini", SMALL, 12, marks=pytest.mark.slow),
        *FULL,
    ],
)
def test_export_with_any_batch_size(name, overrides, size):
    model = perturb(tost.create_model(name, **overrides), 0.02).eval()
    images = torch.randn(5, 3, size, size)
    expected = model(images)
    close(torch.export.export(model, (images,)).module()(images), expected)
    dynamic = torch.export.export(model, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    close(dynamic(images), expected)
    close(dynamic(images[:1]), expected[:1])


@pytest.mark.parametrize(
    ("name", "overrides", "size", "backend"),
    [
        ("tost_mini", SMALL, 12, "aot_eager"),
        pytest.param("crate_mini", {"depth": 1, "image_size": 12}, 12, "aot_eager", marks=pytest.mark.slow),
        pytest.param("tost_mini", {"depth": 2}, 32, "inductor", marks=pytest.mark.slow),
        pytest.param("tost_tiny_patch16_224", {}, 224, "inductor", marks=pytest.mark.slow),
        pytest.param("tost_small_patch16_224", {}, 224, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_model_has_no_break_and_the_same_gradients(name, overrides, size, backend):
    torch.compiler.reset()
    model = perturb(tost.create_model(name, **overrides), 0.02).eval()
    images = torch.randn(2, 3, size, size)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        logits = run(images)
        logits.square().sum().backward()
        gradients.append((logits.detach(), *(parameter.grad for parameter in model.parameters())))
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * max(1.0, expected.abs().max().item()))
    with torch.no_grad():
        close(compiled(images), model(images))


def test_export_keeps_the_native_operator():
    if tost.available_backends("tssa")["native"] != "ready":
        pytest.skip("there is no native operator here")
    program = torch.export.export(make_tiny("tost_mini").eval(), (torch.randn(1, 3, 12, 12),))
    called = {str(node.target) for node in program.graph.nodes}
    assert any(target.startswith("tost.tssa") for target in called)
