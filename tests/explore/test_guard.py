"""What the server refuses: other sites, wrong addresses, and inputs that are too large or no inputs at all."""

from __future__ import annotations

import io
import json
import socket
import threading

import pytest
from PIL import Image

from tests.explore.client import HOST, TOKEN, ask, send
from tests.explore.test_answers import picture
from tost.errors import ConfigError
from tost.explore import image, server, text
from tost.explore.server import MAX_JSON, serve

PAGES = ["", "app.js", "style.css", "api/models"]


@pytest.mark.parametrize("path", PAGES)
def test_the_page_is_served_with_a_strict_policy(app, path):
    answer = send(app, path, method="GET")
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "ä"])
def test_without_the_token_there_is_nothing(app, path, token):
    answer = send(app, path, method="GET", token=token)
    assert answer.status == 403
    assert TOKEN.encode() not in answer.body


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://example.org"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "example.org"},
        {"host": "127.0.0.1"},
    ],
)
def test_other_sites_and_names_are_refused(app, headers):
    answer = send(app, "api/models", method="GET", headers=headers)
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


def test_the_page_itself_is_let_in(app):
    for headers in ({"origin": f"http://{HOST}"}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
        assert send(app, "api/models", method="GET", headers=headers).status == 200


@pytest.mark.parametrize(
    "path", ["../pyproject.toml", "..%2f..%2fsetup.py", "%2e%2e/server.py", "/etc/passwd", "server.py"]
)
def test_no_other_file_is_served(app, path):
    assert send(app, path, method="GET").status == 404


@pytest.mark.parametrize(("method", "path"), [("OPTIONS", "*"), ("GET", ""), ("CONNECT", "127.0.0.1:1")])
def test_what_is_no_path_is_refused(app, method, path):
    assert send(app, method=method, address=path).status == 400


def test_samples_are_only_those_of_the_model(app):
    for name in ("../README", "../../index.json", "", "3.png"):
        answer = send(app, f"api/sample?model=digits-tiny&name={name}", method="GET")
        assert answer.status == 400
        assert answer.json()["error"] == "there is no such sample."


def test_script_tags_are_text(app):
    text = "<script>alert(1)</script>"
    answer = ask(app, "text", model="gated", text=text)
    assert answer.headers["content-type"] == "application/json"
    assert "".join(answer.json()["tokens"]) == text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": "gated", "text": "a" * 100_000}, "100,000 characters"),
        ({"model": "gated", "text": "a" * 5000}, "5,000 tokens"),
        ({"model": "gated", "text": ""}, "the text is empty"),
        ({"model": "gated", "text": 7}, "no text"),
        ({"model": "gated"}, "no text"),
        ({"model": "digits-tiny", "text": "x"}, "reads images"),
        ({"model": "../etc", "text": "x"}, "there is no model"),
        ({"model": None, "text": "x"}, "there is no model"),
        ({"session": "0" * 16}, "not kept any more"),
    ],
)
@pytest.mark.parametrize("path", ["text", "memory", "generate"])
def test_bad_texts_are_refused_with_a_reason(app, path, content, words):
    answer = ask(app, path, **content)
    assert answer.status == 400
    assert words in answer.json()["error"]


def test_half_a_character_is_replaced(app):
    body = b'{"model": "gated", "text": "a\\ud83d"}'
    answer = send(app, "api/text", body, headers={"content-type": "application/json"})
    assert answer.json()["text"] == "a�"


def test_a_million_characters(app):
    answer = ask(app, "text", model="gated", text="a" * 1_000_000)
    assert answer.status == 400
    assert f"{MAX_JSON:,} bytes" in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", b'"x"'])
def test_what_is_no_json(app, body):
    answer = send(app, "api/text", body, headers={"content-type": "application/json"})
    assert answer.status == 400
    assert "JSON" in answer.json()["error"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": 10**400},
        {"top_p": float("inf")},
        {"count": 1e30},
        {"top_p": 0},
        {"top_p": 2},
        {"count": 1.5},
        {"seed": "x"},
    ],
)
def test_bad_options_of_sampling(app, wrong):
    answer = ask(app, "generate", **{"model": "gated", "text": "x", "count": 1, **wrong})
    assert answer.status == 400
    assert next(iter(wrong)) in answer.json()["error"]


def test_broken_images(app):
    for data in (b"", b"GIF89a", b"<svg onload='alert(1)'/>", picture(8, 8)[:60], b"\x00" * 1000):
        answer = send(app, "api/image?model=digits-tiny", data)
        assert answer.status == 400
        assert "image" in answer.json()["error"]
    assert "reads text" in send(app, "api/image?model=gated", picture(8, 8)).json()["error"]


def test_a_page_description_is_no_image(app, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    monkeypatch.setattr("subprocess.check_call", pytest.fail)
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, format="EPS")
    answer = send(app, "api/image?model=digits-tiny", file.getvalue())
    assert answer.status == 400
    assert "use PNG, JPEG" in answer.json()["error"]


def test_images_that_unpack_to_too_much(app, monkeypatch):
    monkeypatch.setattr(image, "MAX_PIXELS", 1000)
    answer = send(app, "api/image?model=digits-tiny", picture(40, 40))
    assert "40 x 40 pixels are more than 1,000" in answer.json()["error"]


@pytest.mark.parametrize("side", ["0", "-1", "4096", "9" * 30, "x", "²"])
def test_sizes_that_are_none(app, side):
    answer = send(app, f"api/image?model=digits-tiny&side={side}", picture(8, 8))
    assert answer.status == 400


def test_what_takes_too_long_is_not_waited_for(app, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(server, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(text, "look", lambda *_: ended.wait(60))
    answer = send(app, "api/text", json.dumps({"model": "gated", "text": "a"}).encode())
    ended.set()
    assert answer.status == 400
    assert "longer than 0.1 seconds; try a shorter text" in answer.json()["error"]


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} cannot be used"):
            serve({}, port=port, ready=pytest.fail)


def test_large_bodies_are_refused_unread(app):
    assert send(app, "api/image?model=digits-tiny", b"", headers={"content-length": str(10**9)}).status == 413
    assert send(app, "api/text", b"", headers={"content-length": "many"}).status == 413


def test_bodies_that_do_not_say_their_size(app):
    pieces = [b"x" * 2**20] * 9
    answer = send(app, "api/image?model=digits-tiny", pieces)
    assert answer.status == 413
    assert "too large" in json.loads(answer.body)["error"]
