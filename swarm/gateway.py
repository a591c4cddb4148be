"""An OpenAI-compatible endpoint before an engine, through which agents that others wrote run and are recorded.

    agent ── POST /r/KEY/v1/chat/completions ─▶ Gateway ─▶ Guest (KEY) ─▶ Dialogues ─▶ engine
          ── POST /r/KEY/tools/search ───────▶             └─ tools and workspace of the rollout

A rollout is a guest with a key of its own, which cannot be guessed: in the address, or as the API key of an address
without one. Whoever has no key of a rollout under way gets a 401 and learns nothing. When its rollout closes a key is
dead, its requests are cancelled and nothing of it stays. A client that hangs up cancels what it asked for.

Not here: agents (`recipes.gateway`), and what is kept of them (`swarm.dialogue`).
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from hashlib import sha256
from secrets import token_hex, token_urlsafe
from typing import Any, cast

from hypercorn.config import Config
from hypercorn.trio import serve  # pyright: ignore[reportUnknownVariableType]
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from swarm.chat_json import signature
from swarm.engine.settle import running
from swarm.gateway_asked import Asked, Refusal, json_object, read_chat, read_text
from swarm.gateway_guest import Guest
from swarm.gateway_http import Telling, body_of, gone, no_route, refused, while_there
from swarm.gateway_said import Json
from swarm.types import Sampling

MODEL = "policy"
_LONGEST_BODY = 8 << 20
_IDLE_SECONDS = 600.0

Endpoint = Callable[[Request, Guest, Send], Awaitable[None]]
Reader = Callable[[bytes, str, Sampling], Asked]


class Gateway:
    """The guests of a server: `with gateway.opened(guest) as url: …`, where `url` is the base of all its addresses.

    `model` is the one name that clients may ask for; `longest_body` in bytes; `waiting` in seconds, between two signs
    of life in a stream.
    """

    def __init__(self, model: str = MODEL, *, longest_body: int = _LONGEST_BODY, waiting: float = 10.0) -> None:
        self.model = model
        self.address = ""
        self._longest_body, self._waiting = longest_body, waiting
        self._guests: dict[bytes, Guest] = {}
        routes = [route for prefix in ("", "/r/{key}") for route in self._routes(prefix)]
        handlers = {Refusal: refused, HTTPException: no_route, ClientDisconnect: gone}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    def __len__(self) -> int:
        return len(self._guests)

    @contextmanager
    def opened(self, guest: Guest) -> Generator[str]:
        """Lets a guest in under a new key, the last part of the address that it is given."""
        key = token_urlsafe(32)
        self._guests[_filed(key)] = guest
        try:
            yield f"{self.address}/r/{key}"
        finally:
            del self._guests[_filed(key)]
            guest.close()

    def guest(self, request: Request) -> Guest:
        """Whose key the request has. Raises Refusal, the same whatever is wrong with it."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = request.path_params.get("key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        guest = self._guests.get(_filed(key))
        if guest is None:
            raise Refusal(401, "Incorrect API key, want that of a rollout under way", code="invalid_api_key")
        return guest

    def _routes(self, prefix: str) -> Sequence[BaseRoute]:
        def route(path: str, method: str, endpoint: Endpoint) -> Route:
            return Route(prefix + path, _Endpoint(self, endpoint), methods=[method])

        return (
            route("/v1/chat/completions", "POST", partial(self._answer, read_chat, "chatcmpl-")),
            route("/v1/completions", "POST", partial(self._answer, read_text, "cmpl-")),
            route("/v1/models", "GET", self._models),
            route("/v1/models/{model}", "GET", self._models),
            route("/tools", "GET", self._tools),
            route("/tools/{tool}", "POST", self._call),
            route("/answer", "POST", self._hand_in),
        )

    async def _answer(self, read: Reader, prefix: str, request: Request, guest: Guest, send: Send) -> None:
        asked = read(await body_of(request, self._longest_body), self.model, guest.sampling)
        telling = Telling(guest, asked, prefix + token_hex(12), self.model, self._waiting)
        async with while_there(request, guest) as nursery:
            nursery.start_soon(telling.ask)
            await telling.tell(request, send)

    async def _models(self, request: Request, guest: Guest, send: Send) -> None:
        one: Json = {"id": self.model, "object": "model", "created": 0, "owned_by": "swarm-rl"}
        wanted = request.path_params.get("model", self.model)
        if wanted != self.model:
            raise Refusal(404, f"The model {wanted!r} does not exist", param="model", code="model_not_found")
        body = one if "model" in request.path_params else {"object": "list", "data": [one]}
        await JSONResponse(body)(request.scope, request.receive, send)

    async def _tools(self, request: Request, guest: Guest, send: Send) -> None:
        """The tools of the rollout, in the form in which a request takes them."""
        body = {"tools": [signature(tool.spec) for tool in guest.tools.values()]}
        await JSONResponse(body)(request.scope, request.receive, send)

    async def _call(self, request: Request, guest: Guest, send: Send) -> None:
        """Calls a tool with the arguments that are the body: its text, and the kind of error or null."""
        name, arguments = request.path_params["tool"], json_object(await body_of(request, self._longest_body))
        if name not in guest.tools:
            raise Refusal(404, f"no tool {name[:40]!r}, want one of {', '.join(guest.tools)}")
        async with while_there(request, guest):
            text, kind = await guest.call(name, arguments)
            await JSONResponse({"content": text, "error": kind or None})(request.scope, request.receive, send)

    async def _hand_in(self, request: Request, guest: Guest, send: Send) -> None:
        """Takes the agent's answer, `{"content": "…"}`: it is the last thing that its rollout waits for."""
        content = json_object(await body_of(request, self._longest_body)).get("content")
        if not isinstance(content, str):
            raise Refusal(400, "content is no text, want the answer", param="content")
        guest.hand_in(content)
        await JSONResponse({"content": content})(request.scope, request.receive, send)


class _Endpoint:
    """An ASGI app that knows whose request it is."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self._gateway, self._endpoint = gateway, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await self._endpoint(request, self._gateway.guest(request), send)


@asynccontextmanager
async def serving(gateway: Gateway, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[Gateway]:
    """Serves the gateway, on a free port unless one is named; at the end every request is cancelled.

    Raises OSError where the address cannot be had.
    """
    with socket.create_server((host, port)) as listening:
        name, number = listening.getsockname()[:2]
        gateway.address = f"http://{name}:{number}"
        config = Config()
        config.bind = [f"fd://{listening.detach()}"]
        config.loglevel = "ERROR"
        config.keep_alive_timeout = _IDLE_SECONDS
        async with running(partial(serve, cast(Any, gateway.app), config)):
            yield gateway


def _filed(key: str) -> bytes:
    """What a key is kept as: how long a look-up takes says nothing about the keys that there are."""
    return sha256(key.encode()).digest()
