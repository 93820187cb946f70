"""The server of the page: loopback only, a random port, a token in the address. Heavy work runs in threads."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from anyio import CapacityLimiter, fail_after, to_thread
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from torch import Tensor

from tost import analysis
from tost.analysis.rates import Measure
from tost.analysis.records import Place
from tost.analysis.result import plain, rounded
from tost.errors import ConfigError, TostError
from tost.explore import image, text
from tost.explore.guard import Guard, TooLargeError
from tost.explore.models import ExploredModel
from tost.generation import Sampling

STATIC = Path(__file__).parent / "static"
WORKERS = 2
"""Analyses that run at a time; others wait."""
MAX_SECONDS = 120.0
"""Time that the page waits for one answer."""
MAX_JSON = 512 * 1024
MEASURES: tuple[Measure, ...] = ("rate", "compression", "variational")
PLACES: tuple[Place, ...] = ("input", "attention")
_SHUTDOWN = 2

Value = TypeVar("Value")


class BadRequestError(TostError, ValueError):
    """A request does not have the form that the page sends."""


class Explorer:
    """The answers to what the page asks.

    Args:
        models: What is shown, by name.
    """

    def __init__(self, models: Mapping[str, ExploredModel]) -> None:
        self.models = models
        self.sessions = text.Sessions()
        self._limiter: CapacityLimiter | None = None

    def routes(self) -> list[Route]:
        """Return every address below ``api/``."""
        answers: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "/text": lambda given: text.look(*self._ids(given)),
            "/token": lambda given: text.look_at_token(*self._ids(given), _whole(given, "position")),
            "/memory": lambda given: text.memory(*self._ids(given)),
            "/back": self._go_back,
        }
        return [
            Route("/models", self.list_models),
            Route("/sample", self.show_sample),
            Route("/generate", self.generate, methods=["POST"]),
            Route("/image", self.look_at_image, methods=["POST"]),
            Route("/inside", self.look_inside, methods=["POST"]),
            *(Route(path, self._answer(answer), methods=["POST"]) for path, answer in answers.items()),
        ]

    def _answer(self, function: Callable[[Mapping[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a function of the JSON of a request."""

        async def endpoint(request: Request) -> Response:
            return JSONResponse(await self._work(function, await _read_json(request)))

        return endpoint

    async def list_models(self, request: Request) -> Response:
        """The models, without loading them."""
        return JSONResponse({"models": [model.describe() for model in self.models.values()]})

    async def show_sample(self, request: Request) -> Response:
        """An image that comes with a model, by the name of its file."""
        source = self._model(request.query_params.get("model"))
        return FileResponse(source.sample(request.query_params.get("name")), media_type="image/png")

    async def generate(self, request: Request) -> Response:
        """Tokens as they come, a line of JSON each."""
        given = await _read_json(request)
        sampling = Sampling(temperature=_number(given, "temperature", 1.0), top_p=_number(given, "top_p", 1.0))
        count = min(max(_whole(given, "count", 200), 1), text.MAX_NEW_TOKENS)
        name = given.get("session")
        if name is None:
            source, ids = await self._work(self._ids, given)
            name = self.sessions.add(text.Session(source, ids[0].tolist()))
        seed = None if given.get("seed") is None else _whole(given, "seed") % 2**63
        tokens = text.continue_text(self.sessions.get(str(name)), sampling, count, seed)
        first = await self._work(next, tokens)  # a mistake becomes a plain answer before anything is streamed
        lines = _lines({"session": name}, first, tokens)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def look_at_image(self, request: Request) -> Response:
        """Maps of an image, which is the body of the request."""
        return JSONResponse(await self._work(image.look, *await self._image(request)))

    async def look_inside(self, request: Request) -> Response:
        """What the layers do to a text or an image."""
        is_json = request.headers.get("content-type", "").startswith("application/json")
        given = await (self._work(self._ids, await _read_json(request)) if is_json else self._image(request))
        return JSONResponse(await self._work(look_inside, *given))

    def _model(self, name: Any) -> ExploredModel:
        if not isinstance(name, str) or name not in self.models:
            raise BadRequestError(f"there is no model {str(name)[:80]!r} on this page.")
        return self.models[name]

    def _ids(self, given: Mapping[str, Any]) -> tuple[ExploredModel, Tensor]:
        """Return the model and the ids of the text that a request is about."""
        if given.get("session") is not None:
            session = self.sessions.get(str(given["session"]))
            return session.source, text.bounded(session.source, session.ids)
        content = given.get("text")
        if not isinstance(content, str):
            raise BadRequestError("the request has no text.")
        source = self._model(given.get("model"))
        return source, text.encode(source, content)

    def _go_back(self, given: Mapping[str, Any]) -> dict[str, Any]:
        session = self.sessions.get(str(given.get("session")))
        return {"saved": session.go_back(_whole(given, "position")), "tokens": len(session.ids)}

    async def _image(self, request: Request) -> tuple[ExploredModel, Tensor]:
        source = self._model(request.query_params.get("model"))
        side = request.query_params.get("side")
        if side is not None and not (side.isascii() and side.isdecimal() and 1 <= int(side[:6]) <= 1024):
            raise BadRequestError("the size is a number of pixels from 1 to 1024.")
        data = await request.body()
        return source, await self._work(image.read, source, data, None if side is None else int(side))

    async def _work(self, function: Callable[..., Value], *arguments: Any) -> Value:
        """Run a function in a thread, so that the page stays responsive; do not wait for one that takes too long."""
        if self._limiter is None:
            self._limiter = CapacityLimiter(WORKERS)
        try:
            with fail_after(MAX_SECONDS):
                return await to_thread.run_sync(function, *arguments, limiter=self._limiter, abandon_on_cancel=True)
        except TimeoutError as error:
            raise BadRequestError(
                f"this takes longer than {MAX_SECONDS:g} seconds; try a shorter text, a smaller picture or a smaller "
                "model, or `tost analyze`, which has no limit."
            ) from error


def look_inside(source: ExploredModel, inputs: Tensor) -> dict[str, Any]:
    """Return what the layers do to ids ``[1, N]`` or an image: rates against an untrained control, coherence, gains.

    Raises:
        ConfigError: The model has no TSSA layers.
    """
    if not source.has_groups():
        raise ConfigError(f"{source.name} has no TSSA layers, so that there are no groups to measure; see Compare.")
    with source.lock:
        model, places = source.model, PLACES
        rates = analysis.coding_rate_by_layer(model, [inputs], split="", places=places)
        rates += analysis.coding_rate_by_layer(source.control, [inputs], split="", source="control", places=places)
        coherence, heads = analysis.subspace_coherence(model), analysis.head_usage(model, [inputs])
        gains = analysis.gains_by_layer(model, [inputs])
    curves = [
        {"source": c.source, "place": c.place, "values": {m: plain(c.mean(m)) for m in MEASURES}} for c in rates.curves
    ]
    return {
        "curves": curves,
        "verdict": rates.verdict(),
        "coherence": {"blocks": plain(coherence.blocks), "random": coherence.random},
        "gains": plain(gains.mean),
        "blocks": rounded(gains.correlations()) if gains.moments.shape[-1] > 1 else None,
        "usage": plain(heads.usage),
        "predicted": plain(heads.predicted) if heads.predicted.any() else None,
    }


async def _lines(session: Any, first: Any, tokens: Generator[dict[str, Any]]) -> AsyncIterator[bytes]:
    with closing(tokens):
        async for item in iterate_in_threadpool(chain((session, first), tokens)):
            yield json.dumps(item).encode() + b"\n"


async def _read_json(request: Request) -> dict[str, Any]:
    body = await request.body()
    if len(body) > MAX_JSON:
        raise BadRequestError(f"the request is larger than {MAX_JSON:,} bytes; shorten the text.")
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError("the request is not JSON.") from error
    if not isinstance(given, dict):
        raise BadRequestError("the request is not a JSON object.")
    return given


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequestError(f"{key} is not a number.")
    try:
        return float(value)
    except OverflowError as error:  # JSON has whole numbers of any length
        raise BadRequestError(f"{key} is too large for a number.") from error


def _whole(given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequestError(f"{key} is not a whole number.")
    return value


async def _explain(request: Request, error: Exception) -> Response:
    """Answer a mistake with its message."""
    return JSONResponse({"error": str(error)}, status_code=413 if isinstance(error, TooLargeError) else 400)


def build_app(models: Mapping[str, ExploredModel], *, token: str, port: int) -> ASGIApp:
    """Return the page and its answers as an ASGI application.

    Args:
        models: What is shown, by name; see `open_models`.
        token: First part of every path.
        port: Where the server listens; requests for other hosts are refused.
    """
    pages = [
        Mount("/api", routes=Explorer(models).routes()),
        Mount("/", app=StaticFiles(directory=STATIC, html=True)),
    ]
    handlers = {TostError: _explain, TooLargeError: _explain}
    inner = Starlette(routes=[Mount(f"/{token}", routes=pages)], exception_handlers=handlers)
    return Guard(inner, token=token, port=port, max_body=image.MAX_BYTES)


def serve(models: Mapping[str, ExploredModel], *, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        models: What is shown, by name.
        port: Where to listen; 0 for any free port.
        ready: Receives the address once the server listens.

    Raises:
        ConfigError: The port cannot be used.
    """
    with closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}); give another one with --port, or none for a free one"
            ) from error
        listener.listen()
        port, token = listener.getsockname()[1], secrets.token_urlsafe(16)
        app = build_app(models, token=token, port=port)
        config = uvicorn.Config(
            app,
            log_level="critical",  # what is cut off by Ctrl-C is no error
            access_log=False,  # the address holds the token
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN,
        )
        ready(f"http://127.0.0.1:{port}/{token}/")
        uvicorn.Server(config).run(sockets=[listener])
