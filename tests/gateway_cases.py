"""What the gateway's tests share: a gateway with guests over scripted engines, and a client that speaks plain HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import httpx

from swarm.dialogue import Dialogues
from swarm.gateway import Gateway, serving
from swarm.gateway_guest import Guest
from swarm.transcript import Transcript
from swarm.types import Budget, Engine, Sampling, Turn
from tests.swarm_cases import TASK, Echo, chat, engine

BUDGET = Budget(20, 4096, seconds=100.0)
SYSTEM = {"role": "system", "content": "Work."}
USER = {"role": "user", "content": TASK.query}
ASKED = {"model": "policy", "messages": [SYSTEM, USER]}


def guest(of: Engine, *, note: bool = False, budget: Budget = BUDGET, seed: int = 1) -> Guest:
    sampling = Sampling(512, stop=chat().stop)
    dialogues = Dialogues(of, chat(), task=TASK, seed=seed, budget=budget, sampling=sampling, note=note)
    return Guest(dialogues, [Echo()], seed)


def scripted(policy: Callable[[Transcript], Turn], **options: object) -> Guest:
    return guest(engine(policy, **options))  # type: ignore[arg-type]


@asynccontextmanager
async def visiting(g: Guest, **options: object) -> AsyncGenerator[httpx.AsyncClient]:
    """A client at the address of a gateway's only guest."""
    async with serving(Gateway(**options)) as gateway:  # type: ignore[arg-type]
        with gateway.opened(g) as url:
            async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=20) as client:
                yield client
