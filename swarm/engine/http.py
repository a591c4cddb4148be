"""vLLM in processes of their own, reached over HTTP: token ids out, token ids and log-probabilities in.

    sample ──▶ POST generate ═══ first token … every 64 tokens … end ═══▶ Part
    interrupt    pause, and give up what arrives late: all that runs answers with what it has
    replace      weights in a file ─▶ reload, pack again, forget the prefixes (checked), resume

A request that is cancelled closes its connection, and the server drops it. What a server answers to one request it
answers to the same again, so what a connection loses is asked once more. A server that accepts requests and does not
get on with them is as dead as one that is gone: each run of tokens has a deadline.

Not here: the processes (`swarm.engine.server`), other servers to turn to (`swarm.engine.pool`), gates and versions
(`swarm.engine.serving`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import httpx
import torch
import trio
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from swarm.checkpoint import filed, load_model
from swarm.engine.server import GENERATE, Server, ServerConfig, client_of, started
from swarm.engine.serving import Limits, Part, Serving
from swarm.engine.vllm_worker import digest_of
from swarm.folders import CheckpointError, read_json
from swarm.types import CheckpointRef, EngineError, Finish, Sampling

_SEED_MASK = 2**63 - 1
_RUN = 64
"""The server tells of so many tokens at a time, after the first."""
_PAUSES = (0.0, 0.1, 0.4, 1.6)
"""Seconds before each try."""
_FLOOR = -9999.0
"""What the server says in place of a log-probability that is no number."""
_LATE_SECONDS = 0.02


@asynccontextmanager
async def http_engine(folder: Path, config: ServerConfig, version: int = 0) -> AsyncGenerator[Serving]:
    """Serves the checkpoint in `folder` in a process of its own: `async with http_engine(path, ServerConfig()) as e`.

    Raises CheckpointError for a folder that is none, EngineError for a server that does not start.
    """
    async with http_engines([folder], [config], version) as engines:
        yield engines[0]


@asynccontextmanager
async def http_engines(
    folders: Sequence[Path], configs: Sequence[ServerConfig], version: int = 0
) -> AsyncGenerator[tuple[Serving, ...]]:
    """A server process for each checkpoint, started together."""
    async with AsyncExitStack() as stack:
        jobs = list(zip(folders, configs, strict=True))
        servers = [await stack.enter_async_context(started(folder, config)) for folder, config in jobs]
        await _all_ready(servers, configs)
        engines: list[Serving] = []
        for server, (folder, config) in zip(servers, jobs, strict=True):
            limits = Limits(config.engine.max_len, _vocab(folder), config.engine.seconds)
            place = _place(server, config.engine.max_seqs + _SPARE)
            engines += [await stack.enter_async_context(connected(place, limits, version))]
        yield tuple(engines)


_SPARE = 32
"""Connections beyond the requests of a batch: the next ones wait in the server, and orders get through."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is: `Place("http://10.0.0.7:8000", (Path("/shared/weights"),))`.

    `folders`: where it finds what is written for it, the best first. `death` tells why it is gone, "" while it is not;
    `starts`, how often it was started: after each it has the weights of its checkpoint.
    """

    address: str
    folders: tuple[Path, ...]
    connections: int = 256
    death: Callable[[], str] = str
    starts: Callable[[], int] = int


@asynccontextmanager
async def connected(place: Place, limits: Limits, version: int = 0) -> AsyncGenerator[Serving]:
    """Serves with a server that is there already, and leaves it there."""
    async with client_of(place.address, place.connections) as client:
        yield Serving(HttpBackend(client, place, limits.seconds), limits, _read, version)


class HttpBackend:
    """A `Backend` that is a server. An answer that does not get on for `seconds` is a failure."""

    def __init__(self, client: httpx.AsyncClient, place: Place, seconds: float) -> None:
        self._client, self._place, self._seconds = client, place, seconds
        self._sampling = 0
        self._starts = place.starts()
        self._paused = False
        self._poisoned = False
        """The server has keys and values that are no numbers."""

    async def sample(self, ids: Sequence[int], sampling: Sampling) -> Part:
        body = _body(ids, sampling)
        born = trio.current_time()
        self._sampling += 1
        try:
            return await self._tried(partial(self._stream, body, born))
        finally:
            self._sampling -= 1

    async def interrupt(self) -> None:
        """Requests that arrive at a paused server would wait in it: they are given up, until none is left."""
        self._paused = True
        await self._order("/pause", mode="abort")
        while self._sampling:
            await self._order("/abort_requests", {})
            await trio.sleep(_LATE_SECONDS)

    async def replace(self, weights: Mapping[str, Any]) -> None:
        starts = self._place.starts()
        size = sum(w.numel() * w.element_size() for w in weights.values())
        with TemporaryDirectory(dir=_roomy(self._place.folders, size)) as folder:
            await trio.to_thread.run_sync(_write, weights, Path(folder) / "model.safetensors")
            await self._call("reload_weights", weights_path=folder)
            await self._call("swarm_pack")
        if self._poisoned:
            await self._call("swarm_clear")
            self._poisoned = False
        if (await self._order("/reset_prefix_cache")).json() != {"success": True}:
            raise EngineError("the prefix cache was not reset")
        await self._order("/resume")
        self._paused, self._starts = False, starts

    async def checksum(self) -> str:
        """Of the weights as the server's workers hold them: the packed ones, where they are packed."""
        return digest_of(cast(list[dict[str, str]], await self._call("swarm_served")))

    async def _call(self, method: str, **kwargs: str) -> list[Any]:
        """What each worker of the server returns."""
        answer = await self._order("/collective_rpc", {"method": method, "kwargs": kwargs})
        return answer.json()["results"]

    async def _order(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> httpx.Response:
        return await self._tried(partial(self._post, path, body, query))

    async def _tried(self, ask: Callable[[], Any]) -> Any:
        """Asks again where a connection fails or the server does. Raises EngineError with what it was in the end."""
        trouble = ""
        for pause in _PAUSES:
            await trio.sleep(pause)
            if dead := self._place.death():
                raise EngineError(dead)
            try:
                return await ask()
            except httpx.TransportError as e:
                trouble = f"{type(e).__name__} {e}".strip()
            except _Unwell as e:
                trouble = str(e)
        raise EngineError(self._place.death() or f"{self._place.address}: {trouble}, tried {len(_PAUSES)} times")

    async def _post(self, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str]) -> httpx.Response:
        with trio.move_on_after(self._seconds):
            answer = await self._client.post(path, json=body, params=query)
            self._check(answer.status_code, answer.text)
            return answer
        raise EngineError(f"{self._place.address}{path}: no answer within {self._seconds:g} s")

    async def _stream(self, body: Mapping[str, Any], born: float) -> Part:
        self._check_weights()
        if self._paused:
            return Part((), (), "interrupted")
        answer = _Answer()
        with trio.move_on_after(self._seconds) as scope:
            async with self._client.stream("POST", GENERATE, json=body) as response:
                if not response.is_success:
                    self._check(response.status_code, (await response.aread()).decode(errors="replace"))
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and answer.take(line[6:]):
                        now = trio.current_time()
                        scope.deadline = now + self._seconds
                        answer.queued = now - born if answer.queued < 0 else answer.queued
        if scope.cancelled_caught:
            raise EngineError(f"{self._place.address}: no {_RUN} tokens within {self._seconds:g} s")
        self._check_weights()
        self._poisoned = self._poisoned or any(x <= _FLOOR for x in answer.logprobs)
        return answer.part(interrupted=self._paused)

    def _check_weights(self) -> None:
        if self._place.starts() != self._starts:
            raise EngineError(f"{self._place.address}: started again, with the weights that it had at first")

    def _check(self, status: int, text: str) -> None:
        if 200 <= status < 300:
            return
        words = f"status {status}: {' '.join(text.split())[:300]}"
        raise _Unwell(words) if status >= 500 else EngineError(f"{self._place.address}: {words}")


class _Unwell(Exception):
    """The server failed where it might not if it is asked again."""


@dataclass(eq=False, slots=True)
class _Answer:
    """What has been streamed of one sampling. `queued`: seconds until the first token, -1 before it.

    `trouble` is kept until the end: the stream's generators close when they are read to their ends.
    """

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish: str = ""
    cached: int = 0
    queued: float = -1.0
    trouble: str = ""

    def take(self, data: str) -> bool:
        """Whether there were new tokens."""
        if data == "[DONE]":
            return False
        before = len(self.ids)
        try:
            self._add(json.loads(data))
        except (ValueError, LookupError, TypeError):
            self.trouble = self.trouble or f"an answer that cannot be read: {data[:200]}"
        return len(self.ids) > before

    def _add(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            self.trouble = f"the server gave up the request: {' '.join(str(event['error']).split())[:300]}"
            return
        if event["usage"] is not None:
            details = cast(dict[str, int | None], event["usage"]["prompt_tokens_details"] or {})
            self.cached = details.get("cached_tokens") or 0
        for choice in event["choices"]:
            self.ids += choice["token_ids"]
            self.logprobs += [float(x["logprob"]) for x in choice["logprobs"]["content"] or ()]
            self.finish = choice["finish_reason"] or self.finish

    def part(self, *, interrupted: bool) -> Part:
        """Raises EngineError for an answer without an end, or with values that are none."""
        if self.trouble:
            raise _Unwell(self.trouble)
        if len(self.logprobs) != len(self.ids):
            raise EngineError(f"{len(self.logprobs)} log-probabilities for {len(self.ids)} tokens")
        if any(x <= _FLOOR for x in self.logprobs):
            raise EngineError("the logits are not finite")
        finish: Finish | str = "interrupted" if self.finish == "abort" and interrupted else self.finish
        if finish not in ("stop", "length", "interrupted"):
            raise _Unwell(f"the answer ended with {finish or 'nothing'!r}, want 'stop' or 'length'")
        return Part(tuple(self.ids), tuple(self.logprobs), finish, self.cached, max(0.0, self.queued))  # pyright: ignore[reportArgumentType]


def _body(ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    parameters = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop),
        "seed": sampling.seed & _SEED_MASK,
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
        "stream_interval": _RUN,
    }
    options = {"include_usage": True}
    return {"token_ids": list(ids), "sampling_params": parameters, "stream": True, "stream_options": options}


def _write(weights: Mapping[str, Any], file: Path) -> None:
    """Tensors that lie in one place are written once: a head that is the embedding comes after it, and is left out."""
    places: set[tuple[int, tuple[int, ...]]] = set()
    chosen: dict[str, torch.Tensor] = {}
    for name, w in sorted(weights.items(), reverse=True):
        place = (w.data_ptr(), tuple(w.shape))
        if place not in places:
            places.add(place)
            chosen[name] = w.detach().to("cpu").contiguous()
    save_file(chosen, file, {"format": "pt"})


def _roomy(folders: Sequence[Path], size: int) -> Path:
    """The first that has room for `size` bytes and some. Raises EngineError where none has."""
    for folder in folders:
        if shutil.disk_usage(folder).free > size * 1.1:
            return folder
    raise EngineError(f"weights of {size >> 20} MiB: no room in {', '.join(map(str, folders)) or 'no folder'}")


def _read(ref: CheckpointRef) -> Mapping[str, Any]:
    return filed(load_model(ref))


def _vocab(folder: Path) -> int:
    """Raises CheckpointError where the configuration does not say. A model that also sees has one for its text."""
    raw = read_json(folder / "config.json")
    size = raw.get("text_config", raw).get("vocab_size")
    if not isinstance(size, int):
        raise CheckpointError(f"{folder}: config.json has vocab_size {size!r}, want a whole number")
    return size


def _place(server: Server, connections: int) -> Place:
    return Place(server.address, server.folders, connections, lambda: server.death, lambda: server.starts)


async def _all_ready(servers: Sequence[Server], configs: Sequence[ServerConfig]) -> None:
    """Raises EngineError for the first that does not start."""
    troubles: list[EngineError] = []

    async def one(server: Server, seconds: float) -> None:
        try:
            await server.ready(seconds)
        except EngineError as e:
            troubles.append(e)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for server, config in zip(servers, configs, strict=True):
            nursery.start_soon(one, server, config.start_seconds)
    if troubles:
        raise troubles[0]
