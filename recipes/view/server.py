"""The viewer over HTTP, for this machine only: a page, its data as JSON, and a stream that says when there is more.

    GET  /                         on to the page, for a browser that was there before: so links from elsewhere work
    GET  /KEY/                     the page and its files
    GET  /KEY/api/run              recipe, summary, roster
    GET  /KEY/api/metrics?from=N   lines of metrics.jsonl from the N-th on; likewise /api/rollouts
    GET  /KEY/api/rollout?id=…     one rollout; with &lane=N the transcript of one of its agents
    GET  /KEY/api/events           server-sent: how much there is, whenever that changes
    POST /KEY/api/fork             a branch from a turn, run on and recorded: the answer has its id

Whoever has not the key learns nothing; with it, the run can be read, and branches put beside it, nothing else.
The list is read beside the answers, a few milliseconds at a time. Not here: what the data is (`recipes.view.run`).
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from secrets import compare_digest, token_urlsafe
from time import perf_counter
from typing import Any, cast

import msgspec
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from recipes.view.fork import Asked, Forks
from recipes.view.index import Row
from recipes.view.run import RunView
from swarm.engine.settle import running
from swarm.records import RecordError
from swarm.types import EngineError

PAGE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
PORT = 8421
"""Where a run is shown unless another is named, or somebody has it."""
_COOKIE = "swarm-rl-view"
_ELSEWHERE = "not here; want the whole address that swarm-rl view has printed\n"
_SLICE = 0.01
_LOOK_SECONDS = 0.5
_ALIVE_SECONDS = 15.0
_SAFE = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}

_REFUSALS = (ValueError, EngineError, msgspec.DecodeError)  # ForkError, RecordGap and DebugError are ValueErrors

Endpoint = Callable[[Request], Awaitable[Response]]


class Viewer:
    """The application: `async with serving(Viewer(view, forks)) as viewer: print(viewer.address)`."""

    def __init__(self, view: RunView, forks: Forks) -> None:
        self.view, self.forks = view, forks
        self._forking = trio.Lock()
        self.address = ""
        self._key = token_urlsafe(24)
        self._files = {p.name: p.read_bytes() for p in PAGE.iterdir() if p.suffix in _TYPES}
        routes = [
            ("api/run", self._run),
            ("api/metrics", self._metrics),
            ("api/rollouts", self._rollouts),
            ("api/rollout", self._rollout),
            ("api/events", self._events),
            ("{file:path}", self._file),
        ]
        keyed = [Route(f"/{{key}}/{p}", self._guarded(e), methods=["GET"]) for p, e in routes]
        fork = Route("/{key}/api/fork", self._guarded(self._fork), methods=["POST"])
        self.app = Starlette(routes=[Route("/", self._known, methods=["GET"]), fork, *keyed])

    def at(self, address: str) -> None:
        """Says where the application is served."""
        self.address = f"{address}/{self._key}/"

    async def follow(self) -> None:
        """Reads the run folder again and again, in slices between which requests are answered."""
        while True:
            begun = perf_counter()
            for _ in self.view.refresh():
                if perf_counter() - begun > _SLICE:
                    await trio.sleep(0)
                    begun = perf_counter()
            await trio.sleep(_LOOK_SECONDS)

    async def _known(self, request: Request) -> Response:
        """The page's own part of the address, `#/rollout/…`, goes along with a redirection."""
        if not self._is_key(request.cookies.get(_COOKIE, "")):
            return PlainTextResponse(_ELSEWHERE, 404)
        return RedirectResponse(f"/{self._key}/", headers=_SAFE)

    def _is_key(self, text: str) -> bool:
        return compare_digest(text.encode(), self._key.encode())

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            if not self._is_key(request.path_params["key"]):
                return PlainTextResponse(_ELSEWHERE, 404)
            response = await endpoint(request)
            response.headers.update(_SAFE)
            return response

        return answer

    async def _file(self, request: Request) -> Response:
        name = request.path_params["file"] or "index.html"
        if name not in self._files:
            return _refused(404, f"no file {name!r}")
        response = Response(self._files[name], media_type=_TYPES[Path(name).suffix])
        response.set_cookie(_COOKIE, self._key, httponly=True, samesite="lax")
        return response

    async def _run(self, request: Request) -> Response:
        return _json({**self.view.about(), "version": self.view.version()})

    async def _metrics(self, request: Request) -> Response:
        return _json({"rows": self.view.metrics[_from(request) :]})

    async def _rollouts(self, request: Request) -> Response:
        index = self.view.index
        rows = index.rows[_from(request) :]
        return _json({"fields": Row.__struct_fields__, "generation": index.generation, "rows": rows})

    async def _rollout(self, request: Request) -> Response:
        id, lane = request.query_params.get("id", ""), request.query_params.get("lane", "")
        try:
            return _json(self.view.agent(id, int(lane)) if lane.isdecimal() else self.view.rollout(id))
        except KeyError:
            return _refused(404, f"no rollout {id!r}" + (f" with an agent {lane}" if lane else ""))
        except (RecordError, OSError) as e:
            return _refused(410, str(e))

    async def _fork(self, request: Request) -> Response:
        """One at a time, in a thread: engines take as long as they take, and the page goes on meanwhile."""
        try:
            asked = msgspec.json.decode(await request.body(), type=Asked)
            if asked.id not in self.view.index:
                return _refused(404, f"no rollout {asked.id!r}")
            async with self._forking:
                id = await trio.to_thread.run_sync(self.forks.make, asked, self.view.load(asked.id))
        except (*_REFUSALS, OSError) as e:
            return _refused(422, str(e))
        while id not in self.view.index:
            await trio.sleep(_SLICE)
        return _json({"id": id})

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self.news(), media_type="text/event-stream")

    async def news(self) -> AsyncGenerator[bytes]:
        """Events without end: one at once, one whenever there is more, and now and then a sign of life."""
        told, silent = b"", 0.0
        while True:
            version = msgspec.json.encode(self.view.version())
            if version != told or silent >= _ALIVE_SECONDS:
                yield b"data: " + version + b"\n\n"
                told, silent = version, 0.0
            await trio.sleep(_LOOK_SECONDS)
            silent += _LOOK_SECONDS


@asynccontextmanager
async def serving(viewer: Viewer, port: int | None = 0) -> AsyncGenerator[Viewer]:
    """Serves on the loopback address: 0 is any free port, None is PORT or any free one.

    Raises OSError where the port that is named cannot be had.
    """
    with _listening(port) as listening:
        viewer.at(f"http://127.0.0.1:{listening.getsockname()[1]}")
        config = Config()
        config.bind = [f"fd://{listening.detach()}"]
        config.loglevel = "ERROR"
        config.graceful_timeout = 0.1
        async with running(partial(serve, cast(Any, viewer.app), config)), running(viewer.follow):
            yield viewer


def _listening(port: int | None) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", PORT if port is None else port))
    except OSError:
        if port is not None:
            raise
        return socket.create_server(("127.0.0.1", 0))


def _from(request: Request) -> int:
    text = request.query_params.get("from", "")
    return int(text) if text.isdecimal() else 0


def _json(value: object) -> Response:
    """Infinities and NaN, which JSON has not, become null."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def _refused(status: int, message: str) -> Response:
    return Response(msgspec.json.encode({"error": message}), status, media_type="application/json")
