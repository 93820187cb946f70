"""Request guard: host, origin, token and size checks, and headers of every answer."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    # Everything the page needs comes from here; nothing in it may be a script that somebody typed.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class TooLargeError(Exception):
    """A body that did not say its size was larger than allowed."""


class Guard:
    """Refuse requests without the token, by other sites, and with too large a body; add headers to all answers.

    The token is the first part of the path. The host has to be this machine's own name, so that another site cannot
    reach the server by pointing a name of its own at it.

    Args:
        app: What is guarded.
        token: The secret in the address.
        port: Where the server listens.
        max_body: Bytes of the largest request.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int, max_body: int) -> None:
        self.app, self.token, self.max_body = app, token, max_body
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        left = self.max_body

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise TooLargeError("the request is too large.")
            return message

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            problem = self._problem(scope)
            answer = self.app if problem is None else PlainTextResponse(f"{problem[1]}\n", problem[0])
            await answer(scope, bounded, guarded)

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal; None for a request that is all right."""
        if not scope["path"].startswith("/"):  # OPTIONS *, CONNECT host:port, GET ?
            return 400, "this is no address of a page"
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host not in self.hosts:
            return 403, "this server answers at 127.0.0.1 only"
        site = headers.get("sec-fetch-site", "same-origin")
        if headers.get("origin", f"http://{host}") != f"http://{host}" or site not in ("same-origin", "none"):
            return 403, "another site may not use this server"
        token = scope["path"].split("/")[1]
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            return 403, "the address lacks the token that `tost explore` printed"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 20 or int(length) > self.max_body:
            return 413, f"the request is larger than {self.max_body:,} bytes; shorten the text or the picture"
        return None
