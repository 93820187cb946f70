"""Sends requests to the application without a server in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

TOKEN, PORT = "secret-token", 4321
HOST = f"127.0.0.1:{PORT}"


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


def send(
    app: Any,
    path: str = "",
    body: bytes | Iterable[bytes] = b"",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    token: str = TOKEN,
    address: str | None = None,
) -> Answer:
    """Send a request; `path` is what follows the token, `address` the whole path if it has none."""
    whole, _, query = f"/{token}/{path}".partition("?")
    address = whole if address is None else address
    pieces = [body] if isinstance(body, bytes) else list(body)
    given = {"host": HOST, **({"content-length": str(len(body))} if isinstance(body, bytes) else {}), **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": address,
        "raw_path": address.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "server": ("127.0.0.1", PORT),
        "client": ("127.0.0.1", 50000),
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        await asyncio.sleep(3600)  # the browser stays connected
        return {"type": "http.disconnect"}

    async def collect(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, collect))
    start = next(message for message in sent if message["type"] == "http.response.start")
    content = b"".join(message.get("body", b"") for message in sent)
    return Answer(start["status"], {k.decode().lower(): v.decode() for k, v in start["headers"]}, content)


def ask(app: Any, path: str, **content: Any) -> Answer:
    """Send JSON, as the page does."""
    return send(app, f"api/{path}", json.dumps(content).encode(), headers={"content-type": "application/json"})
