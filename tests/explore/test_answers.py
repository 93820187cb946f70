"""What the page is told is what the analyses say."""

from __future__ import annotations

import io
import math

import pytest
import torch
from PIL import Image

import tost.analysis
from tests.explore.client import PORT, TOKEN, ask, send
from tost.errors import CheckpointError, ConfigError
from tost.explore import build_app, open_models, text
from tost.explore.text import MAX_TOKENS
from tost.generation import Sampling, state_bytes
from tost.models import create_model
from tost.train.checkpoint.model import save_model

TEXT = "def mean(values):\n    return sum(values) / len(values)\n"


def picture(width: int, height: int, **options) -> bytes:
    file = io.BytesIO()
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.numpy()).save(file, format="PNG", **options)
    return file.getvalue()


def test_the_page_shows_the_models_in_the_box():
    assert set(open_models([])) == {"bytes-tiny", "bytes-gpt-tiny", "digits-tiny"}


def test_models_are_described_before_they_are_loaded(app):
    found = {model["name"]: model for model in send(app, "api/models", method="GET").json()["models"]}
    assert {name: (model["groups"], model["gated"]) for name, model in found.items()} == {
        "paper": (True, False),
        "gated": (True, True),
        "digits-tiny": (True, False),
    }
    assert found["digits-tiny"]["kind"] == "image"
    assert len(found["digits-tiny"]["samples"]) == 10


@pytest.mark.parametrize("name", ["paper", "gated"])
def test_colors_of_a_text_are_its_shares_and_surprise(app, models, name):
    found = ask(app, "text", model=name, text=TEXT).json()
    ids, model = torch.tensor(list(TEXT.encode())), models[name].model
    expected = tost.analysis.text_memberships(model, ids, TEXT)
    assert found["tokens"] == list(TEXT)
    assert found["text"] == TEXT
    torch.testing.assert_close(torch.tensor(found["pi"]), expected.pi.float(), rtol=0, atol=1e-4)
    bits = tost.analysis.surprise(model, ids, TEXT).bits
    assert found["bits"][0] is None
    torch.testing.assert_close(torch.tensor(found["bits"][1:]).double(), bits[1:], rtol=0, atol=1e-4)


def test_surprise_is_the_loss_in_bits(models):
    ids, model = torch.tensor(list(TEXT.encode())), models["gated"].model
    found = tost.analysis.surprise(model, ids, TEXT)
    loss = torch.nn.functional.cross_entropy(model(ids[None])[0, :-1], ids[1:]).item()
    assert found.bits[1:].mean().item() == pytest.approx(loss / math.log(2), rel=1e-5)
    assert found.rows()[3]["token"] == TEXT[3]
    with pytest.raises(ValueError, match="for 3 tokens"):
        tost.analysis.surprise(model, ids, "abc")


def test_a_softmax_model_has_surprise_but_no_groups(tmp_path):
    sizes = {"embed_dim": 32, "depth": 1, "num_heads": 2, "vocab_size": 256}
    save_model(create_model("gpt2_base", **sizes), tmp_path / "gpt")
    app = build_app(open_models([str(tmp_path / "gpt")]), token=TOKEN, port=PORT)
    found = ask(app, "text", model="gpt", text=TEXT).json()
    assert found["layers"] == 0
    assert "pi" not in found
    assert found["mean_bits"] > 0


@pytest.mark.parametrize("name", ["paper", "gated"])
def test_a_token_has_gains_and_what_may_follow(app, models, name):
    whole = ask(app, "text", model=name, text=TEXT).json()
    found = ask(app, "token", model=name, text=TEXT, position=7).json()
    assert torch.tensor(found["gains"]).shape == (2, 2, 16)
    assert 0 < torch.tensor(found["gains"]).min() <= torch.tensor(found["gains"]).max() <= 1
    torch.testing.assert_close(torch.tensor(found["pi"]), torch.tensor(whole["pi"])[:, 7], rtol=0, atol=2e-4)
    assert len(found["follows"]) == 5
    assert "there is no token 999" in ask(app, "token", model=name, text=TEXT, position=999).json()["error"]
    nats, distance = (torch.tensor(found[key]) for key in ("nats", "distance"))
    if name == "paper":
        assert nats.numel() == distance.numel() == 0
        return
    torch.testing.assert_close(nats / nats.sum(1, keepdim=True), torch.tensor(found["pi"]), rtol=0, atol=1e-3)
    source = models[name]
    with torch.no_grad(), tost.analysis.capture(source.model) as records:
        source.model(torch.tensor([list(TEXT.encode())]))
    for record, each in zip(records, distance, strict=True):
        x = record.x[:, :7]
        _, state = tost.ops.gated_tssa_with_state(record.tokens[:, :7], record.layer.attention.write(x))
        token = record.tokens[0, 7]
        expected = (token - state.mean[0]).norm(dim=-1) / token.norm(dim=-1)
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["paper", "gated"])
def test_the_state_keeps_its_size(app, name):
    short, long = (ask(app, "memory", model=name, text=TEXT * n).json() for n in (1, 8))
    assert short["state_bytes"] == long["state_bytes"]
    assert long["cache_bytes"] == 8 * short["cache_bytes"]
    assert torch.tensor(long["mass"])[..., -1].allclose(torch.ones(2, 2))
    assert torch.tensor(long["half_life"]).shape == (2, 2, 8 if name == "gated" else 1)


@pytest.mark.parametrize("mixer", ["softmax", "mingru", "s4d", "linear", "gated_delta", "tssa", "tssa_plus"])
def test_the_state_is_the_one_that_the_model_returns(tmp_path, mixer):
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2, "vocab_size": 256}
    model = create_model("tost_lm_base", mixer=mixer, position="none", **sizes)
    save_model(model, tmp_path / mixer)
    app = build_app(open_models([str(tmp_path / mixer)]), token=TOKEN, port=PORT)
    found = ask(app, "memory", model=mixer, text=TEXT).json()
    _, state = model.forward_with_state(torch.tensor([list(TEXT.encode())]))
    assert found["state_bytes"] == state_bytes(state)
    assert found["cache_bytes"] == 2 * 4 * 2 * 32 * len(TEXT)
    assert found["grows"] == (mixer == "softmax")


def test_a_text_is_continued_by_one_request_at_a_time(app, models, monkeypatch):
    monkeypatch.setattr(text, "PATIENCE", 0.01)
    session = text.Session(models["gated"], list(b"def "))
    first = text.continue_text(session, Sampling(), 20, 0)
    next(first)
    with pytest.raises(ConfigError, match="continued already"):
        next(text.continue_text(session, Sampling(), 20, 0))
    with pytest.raises(ConfigError, match="continued already"):
        session.go_back(2)
    assert [len(session.ids), next(first)["id"]] == [5, session.ids[5]]
    first.close()  # as when the browser is gone
    assert session.go_back(5)


def test_generate_go_back_and_go_on(app):
    first = ask(app, "generate", model="gated", text="def ", temperature=0, count=20).lines()
    session, end = first[0]["session"], first[-1]
    written = [part["id"] for part in first[1:-1]]
    assert (len(written), end["ended"], end["resumed"]) == (20, "length", False)
    shown = ask(app, "text", session=session).json()
    assert len(shown["tokens"]) == 24
    assert ask(app, "back", session=session, position=14).json() == {"saved": True, "tokens": 14}
    again = ask(app, "generate", session=session, temperature=0, count=10).lines()
    assert [part["id"] for part in again[1:-1]] == written[10:]
    assert again[-1]["resumed"]
    assert "there is no token 99" in ask(app, "back", session=session, position=99).json()["error"]


def test_the_same_seed_writes_the_same_text(app):
    texts = [ask(app, "generate", model="gated", text="x", seed=seed, count=12).lines()[1:-1] for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_generation_stops_where_the_page_ends(app):
    found = ask(app, "generate", model="gated", text="a" * (MAX_TOKENS - 3), count=10).lines()
    assert (found[-1]["ended"], found[-1]["tokens"]) == ("room", 3)


@pytest.mark.parametrize(("width", "height"), [(32, 32), (100, 40), (9, 60)])
def test_maps_of_an_image_keep_its_proportions(app, models, width, height):
    found = send(app, "api/image?model=digits-tiny&side=48", picture(width, height)).json()
    rows, columns = torch.tensor(found["maps"]).shape[2:]
    assert max(rows, columns) == 12
    assert abs(rows / columns - height / width) * min(rows, columns) <= max(1.0, height / width)
    assert torch.tensor(found["maps"]).sum(dim=1).allclose(torch.ones(6, rows, columns), atol=1e-3)
    assert torch.tensor(found["class_attention"]).shape[1:] == (rows, columns)
    assert len(found["top"]) == 5
    assert found["picture"].startswith("data:image/png;base64,")


def test_a_sample_is_recognized(app):
    sample = send(app, "api/sample?model=digits-tiny&name=3", method="GET")
    assert sample.headers["content-type"] == "image/png"
    assert send(app, "api/image?model=digits-tiny", sample.body).json()["top"][0]["label"] == "3"


@pytest.mark.parametrize("name", ["paper", "gated", "digits-tiny"])
def test_inside_compares_with_an_untrained_model(app, models, name):
    if name != "digits-tiny":
        found = ask(app, "inside", model=name, text=TEXT).json()
        batch, model = torch.tensor([list(TEXT.encode())]), models[name].model
        rates = tost.analysis.coding_rate_by_layer(model, [batch])
        expected = rates.curve("trained", "validation", "attention").mean("variational").tolist()
        assert found["curves"][1]["values"]["variational"] == pytest.approx(expected)
    else:
        found = send(app, "api/inside?model=digits-tiny", picture(32, 32)).json()
    layers = len(found["gains"])
    assert [(curve["source"], curve["place"]) for curve in found["curves"]] == [
        (source, place) for source in ("trained", "control") for place in ("input", "attention")
    ]
    assert len(found["coherence"]["blocks"]) == len(found["usage"]) == layers
    assert "R_c^var" in found["verdict"]


def test_block_statistics_are_correlations(app):
    found = ask(app, "inside", model="gated", text=TEXT).json()
    blocks = torch.tensor(found["blocks"])
    assert blocks.shape == (2, 2, 8, 2, 2)  # layers, heads, blocks of 2 features
    torch.testing.assert_close(blocks.diagonal(dim1=-2, dim2=-1), torch.ones(2, 2, 8, 2), rtol=0, atol=1e-3)
    torch.testing.assert_close(blocks, blocks.mT)
    assert blocks.abs().max() <= 1
    assert torch.tensor(found["predicted"]).shape == (2, 2)
    assert ask(app, "inside", model="paper", text=TEXT).json()["predicted"] is None


def test_models_are_opened_by_path_and_by_name(tmp_path):
    tiny = {"embed_dim": 32, "depth": 1, "num_heads": 2, "vocab_size": 256}
    save_model(create_model("tost_lm_base", **tiny), tmp_path / "mine")
    found = open_models([str(tmp_path / "mine"), "bytes-tiny", str(tmp_path / "mine")])
    assert list(found) == ["mine", "bytes-tiny", "mine (2)"]
    save_model(create_model("tost_sequence"), tmp_path / "other")
    with pytest.raises(ConfigError, match="neither a language model nor an image classifier"):
        open_models([str(tmp_path / "other")])
    with pytest.raises(CheckpointError, match="there is no nowhere"):
        open_models(["nowhere"])
    with pytest.raises(CheckpointError, match="did you mean 'bytes-tiny'"):
        open_models(["bytes-tny"])
