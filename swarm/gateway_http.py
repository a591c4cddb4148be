"""How the gateway answers over HTTP: a request that lives as long as its client listens, whole or as a stream.

    wait for the reply ─┬─ at once ──▶ a status and a body         ─┬─▶ … [DONE]
                        └─ later ────▶ 200, ": waiting", ": waiting" ┘

An error that comes before the stream begins has its status; one that comes later is an event.
Not here: what is asked and who asks (`swarm.gateway`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Send

from swarm.gateway_asked import Asked, Refusal
from swarm.gateway_guest import Guest
from swarm.gateway_said import DONE, WAITING, Answer, Json, error, event, pieces, whole

BODY_SECONDS = 60.0
_CLIENT_GONE = 499
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Telling:
    """One answer under way, named `id`, of the model of this name; `waiting` seconds between two signs of life."""

    def __init__(self, guest: Guest, asked: Asked, id: str, model: str, waiting: float) -> None:
        self._guest, self._asked, self._id, self._model, self._waiting = guest, asked, id, model, waiting
        self._ready = trio.Event()
        self._found: Answer | Refusal | None = None

    async def ask(self) -> None:
        reply = await self._guest.reply(self._asked)
        if isinstance(reply, Refusal) or reply.completion is None:
            self._found = reply if isinstance(reply, Refusal) else None
        else:
            self._found = Answer(self._id, self._model, self._asked, reply, reply.completion)
        self._ready.set()

    async def tell(self, request: Request, send: Send) -> None:
        """All that there is to send."""
        with trio.move_on_after(self._waiting if self._asked.stream else float("inf")):
            await self._ready.wait()
        if isinstance(self._found, Refusal):
            await refused(request, self._found)(request.scope, request.receive, send)
        elif isinstance(self._found, Answer) and not self._asked.stream:
            await JSONResponse(whole(self._found, self._guest.chat))(request.scope, request.receive, send)
        else:
            await self._stream(send)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        while not self._ready.is_set():
            await _part(send, WAITING)
            with trio.move_on_after(self._waiting):
                await self._ready.wait()
        if isinstance(self._found, Answer):
            for body in pieces(self._found, self._guest.chat):
                await _part(send, event(body))
        elif self._found is not None:
            await _part(send, event(error(self._found)))
        await _part(send, DONE, more=False)


async def _part(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


@asynccontextmanager
async def while_there(request: Request, guest: Guest) -> AsyncGenerator[trio.Nursery]:
    """A nursery that is cancelled when the client hangs up, or its rollout closes; and at the end."""
    async with trio.open_nursery() as nursery:
        with guest.visit(nursery.cancel_scope):
            nursery.start_soon(_hang_up, request.receive, nursery.cancel_scope)
            yield nursery
            nursery.cancel_scope.cancel()


async def _hang_up(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def body_of(request: Request, longest: int) -> bytes:
    """Raises Refusal for one that is longer, or is not there in time; ClientDisconnect."""
    body = bytearray()
    with trio.move_on_after(BODY_SECONDS):
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > longest:
                raise Refusal(413, f"a body of more than {longest} bytes, want a shorter one")
            more = message.get("more_body", False)
        return bytes(body)
    raise Refusal(408, f"the body is not there after {BODY_SECONDS:g} s, want it sooner")


# --- what is raised where a request begins -----------------------------------------------


def refused(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    return JSONResponse(error(refusal), status_code=refusal.status)


def no_route(request: Request, found: Exception) -> Response:
    assert isinstance(found, HTTPException)
    status = found.status_code
    message = f"{request.method} on this address: {found.detail}"
    body: Json = error(Refusal(status, message))
    return JSONResponse(body, status_code=status, headers=found.headers)


def gone(request: Request, error: Exception) -> Response:
    """The client hung up before its request was whole: nobody reads this."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=_CLIENT_GONE)
