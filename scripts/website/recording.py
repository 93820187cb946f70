"""The page of `tost explore` without its server: the same page, with answers recorded while the site is built.

The page's modules are joined into one script and its requests are answered from a recording, because a browser lets a
page that is read from the disk neither load modules nor fetch files.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kept import ROOT, kept
from starlette.testclient import TestClient

from tost.explore import build_app, open_models

__all__ = ["bundle", "page", "record"]

STATIC = ROOT / "src" / "tost" / "explore" / "static"
PLAYER = Path(__file__).with_name("player.js")
TEXTS = {
    "a function": 'def mean(values):\n    """Return the arithmetic mean."""\n    return sum(values) / len(values)\n',
    "a list": 'colors = ["red", "green", "blue", "red", "green", "blue", "red", "gr',
}
TOKENS = 40
TOKEN, PORT = "recording", 1
IMPORT = re.compile(r'^import \{([^}]+)\} from "\./(\w+)\.js";\n', flags=re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:const|let|function\*?|class) ?(\w+))", flags=re.MULTILINE)


def page() -> dict[str, bytes]:
    """Return the files of the recorded page by name."""
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    module, script = '<script type="module" src="app.js"></script>', '<script defer src="{}"></script>'
    note = "Served from this machine. Nothing you type or drop leaves it."
    for part in (module, note):
        if part not in index:
            raise ValueError(f"{STATIC / 'index.html'} has no {part!r} any more; see {__file__}")
    index = index.replace(module, "\n  ".join(script.format(name) for name in ("recorded.js", "player.js", "page.js")))
    index = index.replace(note, "A recording. Run <code>tost explore</code> for texts and pictures of your own.")
    answers = kept(Path(__file__), lambda: json.dumps(record(), separators=(",", ":")))
    return {
        "index.html": index.encode(),
        "style.css": (STATIC / "style.css").read_bytes(),
        "icon.svg": (STATIC / "icon.svg").read_bytes(),
        "page.js": bundle().encode(),
        "player.js": PLAYER.read_bytes(),
        "recorded.js": f"window.TOST_RECORDED = {answers};\n".encode(),
    }


def bundle(folder: Path = STATIC, start: str = "app") -> str:
    """Return the modules of the page as one script.

    Args:
        folder: Where the modules are.
        start: The module that the page loads.

    Raises:
        ValueError: A module imports or exports in a way that is not expected here.
    """
    joined: dict[str, str] = {}

    def add(name: str) -> None:
        text = (folder / f"{name}.js").read_text(encoding="utf-8")
        for needed in IMPORT.findall(text):
            if needed[1] not in joined:
                add(needed[1])
        names = EXPORT.findall(text)
        body = EXPORT.sub("", IMPORT.sub(lambda found: f"const {{{found[1]}}} = {found[2]};\n", text))
        odd = re.search(r"^(?:import|export)\b.*", body, flags=re.MULTILINE)
        if odd:
            raise ValueError(f"{name}.js: this kind of line cannot be joined: {odd[0]}")
        wrapped = f"await (async () => {{\n{body}return {{ {', '.join(names)} }};\n}})();\n"
        joined[name] = f"const {name} = {wrapped}"

    add(start)
    return f"(async () => {{\n{''.join(joined.values())}}})();\n"


def record() -> dict[str, Any]:
    """Return the answers to everything that the recorded page can ask, by what it asks.

    A text is asked about as ``path`` with its JSON, an image as ``path?query`` with its bytes in base64.
    """
    app = build_app(open_models([]), token=TOKEN, port=PORT)
    answers: dict[str, Any] = {}
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}/{TOKEN}/api/") as client:
        models = client.get("models").json()
        answers["models"] = models
        language = [model for model in models["models"] if model["kind"] == "text"]
        _record_texts(client, language, answers)
        for model in models["models"]:
            if model["kind"] == "image":
                _record_images(client, model, answers)
    return {"answers": answers, "texts": TEXTS}


def _ask(client: TestClient, answers: dict[str, Any], path: str, content: Mapping[str, Any]) -> Any:
    answer = client.post(path, json=dict(content)).json()
    answers[f"{path} {json.dumps(content, separators=(',', ':'), sort_keys=True, ensure_ascii=False)}"] = answer
    return answer


def _record_texts(client: TestClient, models: Sequence[Mapping[str, Any]], answers: dict[str, Any]) -> None:
    for text in TEXTS.values():
        _record_views(client, models, text, answers)
        for model in models:
            about = {"model": model["name"], "text": text}
            _record_tokens(client, about, answers)
            sampling = {"temperature": 0.7, "top_p": 0.95, "count": TOKENS, "seed": 1}
            lines = [json.loads(line) for line in client.post("generate", json=about | sampling).text.splitlines()]
            key = json.dumps(about, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
            answers[f"generate {key}"] = lines
            session = {"session": lines[0]["session"]}
            _ask(client, answers, "memory", session)
            written = _record_tokens(client, session, answers)
            _record_views(client, models, written["text"], answers)  # the other views show what was generated


def _record_views(client: TestClient, models: Sequence[Mapping[str, Any]], text: str, answers: dict[str, Any]) -> None:
    for model in models:
        for path in ("text", "memory", "inside") if model["groups"] else ("text", "memory"):
            _ask(client, answers, path, {"model": model["name"], "text": text})


def _record_tokens(client: TestClient, about: Mapping[str, Any], answers: dict[str, Any]) -> Any:
    found = _ask(client, answers, "text", about)
    for position in range(len(found["tokens"])):
        answer = _ask(client, answers, "token", {**about, "position": position})
        answer["gains"] = [[[round(gain, 2) for gain in head] for head in layer] for layer in answer["gains"]]
    return found


def _record_images(client: TestClient, model: Mapping[str, Any], answers: dict[str, Any]) -> None:
    query = {"model": model["name"]}
    for name in model["samples"]:
        content = client.get("sample", params={**query, "name": name}).content
        written = base64.b64encode(content).decode()
        answers[f"sample?model={model['name']}&name={name}"] = {"base64": written}
        for path in ("image", "inside"):
            asked = client.post(
                path, params=query, content=content, headers={"content-type": "application/octet-stream"}
            )
            answers[f"{path}?model={model['name']} {written}"] = asked.json()
