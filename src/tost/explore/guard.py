"""Request guard: host, origin, token and size checks, and headers of every answer."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    # Everything the page needs comes from here; nothing in it may be a script that somebody typed.
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Guard:
    """Refuse requests without the token, by other sites, and with too large a body; add headers to the others.

    The token is the first part of the path. The host has to be this machine's own name, so that another site cannot
    reach the server by pointing a name of its own at it.

    Args:
        app: What is guarded.
        token: The secret in the address.
        port: Where the server listens.
        max_body: Bytes of the largest request.
    """

    def __init__(self, app: App, *, token: str, port: int, max_body: int) -> None:
        self.app, self.token, self.max_body = app, token, max_body
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            problem = self._problem(scope)
            if problem is not None:
                await _refuse(send, *problem)
            else:
                await self.app(scope, _Bounded(receive, self.max_body), _with_headers(send))

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal; None for a request that is all right."""
        if not scope["path"].startswith("/"):  # OPTIONS *, CONNECT host:port, GET ?
            return 400, "this is no address of a page"
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if host not in self.hosts:
            return 403, "this server answers at 127.0.0.1 only"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return 403, "another site may not use this server"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return 403, "another site may not use this server"
        token = scope["path"].split("/")[1]
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return 403, "the address lacks the token that `tost explore` printed"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.max_body:
            return 413, f"the request is larger than {self.max_body:,} bytes; shorten the text or the picture"
        return None


class TooLargeError(Exception):
    """A body that did not say its size was larger than allowed."""


class _Bounded:
    """Receives a body, and stops at its limit."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self.receive, self.left = receive, limit

    async def __call__(self) -> Message:
        message = await self.receive()
        self.left -= len(message.get("body", b""))
        if self.left < 0:
            raise TooLargeError("the request is too large.")
        return message


def _with_headers(send: Send) -> Send:
    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [(name, value) for name, value in message.get("headers", []) if name.lower() not in HEADERS]
            message = {**message, "headers": [*kept, *HEADERS.items()]}
        await send(message)

    return add


async def _refuse(send: Send, status: int, reason: str) -> None:
    content = f"{reason}\n".encode()
    kind = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*kind, *HEADERS.items()]})
    await send({"type": "http.response.body", "body": content})
