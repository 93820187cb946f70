"""`examples/tost_in_one_file.py` equals the library: outputs, states, gradients, and weights that load both ways."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import tost
from tests.models.tiny import perturb
from tost.testing import assert_close

FILE = Path(__file__).parents[1] / "examples" / "tost_in_one_file.py"


@pytest.fixture(scope="module")
def one():
    spec = importlib.util.spec_from_file_location("tost_in_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def assert_equal_gradients(ours, theirs, inputs, bound=1e-8):
    found = []
    for model in (ours, theirs):
        logits = model(*inputs)
        logits = logits[0] if isinstance(logits, tuple) else logits
        model.zero_grad()
        logits.square().sum().backward()
        found.append((logits, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (expected, gradients), (logits, own) = found
    assert_close("logits", logits, expected, bound)
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # The gradient of a bias of keys is rounding errors alone: softmax does not see it.
        assert (own[name] - gradient).abs().max() <= bound * max(1, gradient.abs().max()), name


def test_it_is_short_and_needs_torch_only():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 250
    assert "import tost" not in text.replace("imports no tost", "")


def test_operators(one):
    w, t, bias = torch.randn(2, 9, 3, 4).double(), torch.rand(3).double(), torch.randn(3, 20).double()
    assert_close("tssa", one.tssa(w, t), tost.tssa(w, t), 1e-12)
    y, state = one.causal_tssa(w[:, :4], t, bias)
    z, state = one.causal_tssa(w[:, 4:], t, bias, state)
    expected, after = tost.causal_tssa_with_state(w, t, bias)
    assert_close("causal", torch.cat((y, z), dim=1), expected, 1e-12)
    for ours, theirs in zip(state[:3], after[:3], strict=True):
        assert_close("state", ours, theirs, 1e-12)
    assert state.position == 9


def test_language_model(one):
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 4, "vocab_size": 11, "max_length": 24}
    theirs = perturb(tost.create_model("tost_lm_base", **sizes).double())
    ours = one.LanguageModel(*sizes.values()).double()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(11, (2, 12))
    assert_equal_gradients(ours, theirs, (ids,))
    logits, state = ours(ids[:, :7])
    steps = [logits]
    for token in ids[:, 7:].split(1, dim=1):
        logits, state = ours(token, state)
        steps.append(logits)
    assert_close("pieces", torch.cat(steps, dim=1), theirs(ids), 1e-10)
    assert ours.generate(ids[:, :3], 5).shape == (2, 8)


@pytest.mark.parametrize("training", [True, False])
def test_image_classifier(one, training):
    theirs = perturb(tost.create_model("tost_mini", embed_dim=32, depth=2).double(), 0.1).train(training)
    ours = one.ImageClassifier(32, 2, 4, 4, 10).double().train(training)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert_equal_gradients(ours, theirs, (torch.randn(2, 3, 32, 24).double(),), 1e-5)  # positions are float32


def test_it_trains(one, monkeypatch, capsys):
    monkeypatch.setenv("STEPS", "50")
    torch.manual_seed(0)
    exec(compile(FILE.read_text(), str(FILE), "exec"), {"__name__": "__main__"})
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(losses) == 2
    assert losses[0] < 4
    assert losses[1] < 1.5
