"""Sixty-four rollouts at once whose clients hang up, repeat themselves, send garbage and forge keys."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any
from weakref import ref

import httpx
import pytest
import trio

from swarm.engine.scripted import ScriptedEngine
from swarm.gateway import Gateway, serving
from swarm.gateway_guest import Guest
from swarm.types import Budget, Sampling
from tests.gateway_cases import guest
from tests.swarm_cases import chat

ROLLOUTS, REQUESTS = 64, 6
DEEDS = ("go on", "go on", "again", "stream", "hang up", "hang up on a stream", "garbage", "forge")


def speak(ids: Sequence[int], sampling: Sampling) -> list[int]:
    """Says whose prompt it was asked with, and a number of its own."""
    [who] = set(re.findall(r"rollout\d+", chat().decode(ids)))
    return chat().encode_turn(f"{who} {sampling.seed % 10**6}")


class Client:
    """A client of one rollout that does what comes to its mind; `heard` are the replies that it got whole."""

    def __init__(self, k: int, http: httpx.AsyncClient, url: str) -> None:
        self.name, self.http, self.url = f"rollout{k}", http, url
        self.random = Random(k)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"I am {self.name}."}]
        self.heard: list[str] = []
        self.left = 0

    async def live(self) -> None:
        for _ in range(REQUESTS):
            await self.do(self.random.choice(DEEDS))

    async def do(self, deed: str) -> None:
        path, body = f"{self.url}/v1/chat/completions", {"model": "policy", "messages": self.messages}
        match deed:
            case "garbage":
                assert (await self.http.post(path, content=b'{"model": "policy", ')).status_code == 400
            case "forge":
                forged = self.url[:-1] + ("x" if self.url[-1] != "x" else "y")
                assert (await self.http.post(f"{forged}/v1/chat/completions", json=body)).status_code == 401
            case "hang up" | "hang up on a stream":
                self.left += 1
                with trio.move_on_after(self.random.random() * 0.02):
                    await self.http.post(path, json={**body, "stream": "stream" in deed})
            case "stream":
                text = (await self.http.post(path, json={**body, "stream": True})).text
                chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                self.hear("".join(c["choices"][0]["delta"].get("content") or "" for c in chunks), goes_on=True)
            case _:
                reply = (await self.http.post(path, json=body)).json()["choices"][0]["message"]
                self.hear(reply["content"], goes_on=deed == "go on")

    def hear(self, content: str, *, goes_on: bool) -> None:
        self.heard.append(content)
        if goes_on:
            self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning")  # a client that is cancelled
async def test_sixty_four_rollouts_are_not_mixed_up_and_nothing_is_lost_or_leaked() -> None:
    engine = ScriptedEngine(speak, delay=0.005)
    ended: list[tuple[Client, Guest]] = []

    async def one(k: int, gateway: Gateway) -> None:
        g = guest(engine, budget=Budget(1000, 8192), seed=k)
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as http:
            with gateway.opened(g) as url:
                client = Client(k, http, url)
                await client.live()
        ended.append((client, g))

    async with serving(Gateway(waiting=0.002)) as gateway:
        async with trio.open_nursery() as nursery:
            for k in range(ROLLOUTS):
                nursery.start_soon(one, k, gateway)
        assert (len(gateway), engine.pending) == (0, 0)
        assert len({content for client, _ in ended for content in client.heard}) > ROLLOUTS
        for client, g in ended:
            check(client, g)
        gone = [ref(g) for _, g in ended]
        ended.clear()
        del client, g
        with trio.fail_after(10):  # the last requests are being cancelled
            while any(r() is not None for r in gone):
                await trio.lowlevel.checkpoint()
                gc.collect()


def check(client: Client, g: Guest) -> None:
    r = g.rollout("", "answered")
    said = [s.ids for segment in r.trace.segments for s in segment.spans if s.kind == "sampled"]
    texts = [chat().parse(ids).content for ids in said]
    assert all(text.split()[0] == client.name for text in texts)
    assert len(client.heard) <= len(said) <= len(client.heard) + client.left
    assert all(texts.count(content) >= client.heard.count(content) for content in client.heard)
    assert len(r.ledger.stages) == len(said)
    for segment in r.trace.segments:
        assert set(re.findall(r"rollout\d+", chat().decode(segment.ids))) == {client.name}
