"""Who the subagents are: for each role a checkpoint, or several of which every spawn draws one, swapped while all runs.

    swap({"searcher": large}) ─▶ its engine is up ─▶ from the next spawn on; who runs goes on with what it began with

A role is how a subagent is run (tools, sampling, limits, system prompt), whoever plays it; the cast is who plays what.
Children say in their traces which checkpoint served them, by its sha256. Not here: engines, and when to swap.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from swarm.loop import Harness, Subagent
from swarm.seeds import derive
from swarm.types import Cast, ChatFormat, CheckpointRef, Engine, Mixture


class RosterError(ValueError):
    """A cast that cannot be played; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Player:
    """A checkpoint that is served: its engine, and the language of its tokenizer."""

    engine: Engine
    chat: ChatFormat


@dataclass(frozen=True, slots=True)
class Role:
    """How a role is run: `harness`, but for its engine and language, which are the player's.

    `system`: its own prompt, in the place of the one that the orchestrator writes. `reply_tokens`: how many of its
    answer come back at most, 0 for as many as the caller's limits say.
    """

    harness: Harness
    system: str | None = None
    reply_tokens: int = 0

    def played(self, player: Player, ref: CheckpointRef) -> Subagent:
        """The role by this checkpoint."""
        h = self.harness
        sampling = structs.replace(h.sampling, stop=player.chat.stop)
        harness = replace(h, engine=player.engine, chat=player.chat, sampling=sampling, checkpoint=ref.sha256)
        return Subagent(harness, self.system, self.reply_tokens)


class Roster:
    """`roster = Roster({"": role}, serve); await roster.swap({"": ((ref, 1.0),)})`; spawns ask `roster.subagent`.

    `serve(role, ref)` brings a checkpoint up for a role, or gives the player that is. Names without a role of their
    own are run as the role "", and cast as it unless the cast names them.
    """

    def __init__(self, roles: Mapping[str, Role], serve: Callable[[str, CheckpointRef], Awaitable[Player]]) -> None:
        if "" not in roles:
            raise RosterError(f"roster: roles {sorted(roles)}, want '' among them, for every other name")
        self._roles = dict(roles)
        self._serve = serve
        self._cast: Cast = {}
        self._played: Mapping[str, tuple[Subagent, ...]] = {}

    @property
    def cast(self) -> Cast:
        """Who plays what, from the next spawn on."""
        return self._cast

    async def swap(self, changes: Cast, *, whole: bool = False) -> None:
        """Has these roles played by others from the next spawn on; the other roles stay as they are, or, where this is
        the `whole` cast, have nobody of their own any more.

        All are up before any plays: where one cannot be served, or a mixture is none, the cast is as it was. Raises
        RosterError, or as the engines do: CheckpointError, EngineError.
        """
        for name, mixture in changes.items():
            check_mixture(name, mixture)
        played = {name: await self._players(name, mixture) for name, mixture in changes.items()}
        kept_cast, kept = ({}, {}) if whole else (self._cast, self._played)
        self._cast, self._played = {**kept_cast, **changes}, {**kept, **played}

    def subagent(self, name: str, seed: int) -> Subagent:
        """Who takes an assignment to `name`: equal seeds draw alike from equal mixtures. See `swarm.loop.Subagents`."""
        name = name if name in self._cast else ""
        if name not in self._cast:
            raise RosterError("roster: nobody plays yet, want a swap with '' first")
        mixture, played = self._cast[name], self._played[name]
        if len(played) == 1:
            return played[0]
        return random.Random(derive(seed, "checkpoint")).choices(played, [weight for _, weight in mixture])[0]

    async def _players(self, name: str, mixture: Mixture) -> tuple[Subagent, ...]:
        role = self._roles.get(name, self._roles[""])
        return tuple([role.played(await self._serve(name, ref), ref) for ref, _ in mixture])


def check_mixture(name: str, mixture: Mixture) -> None:
    """Raises RosterError for no checkpoints, one twice, or weights that are no weights."""
    seen = [ref.sha256 for ref, _ in mixture]
    if not seen:
        raise RosterError(f"roster: role {name!r} has no checkpoint, want one or more")
    if len(set(seen)) != len(seen):
        raise RosterError(f"roster: role {name!r} has one checkpoint twice, want each once, with its weight")
    for ref, weight in mixture:
        if not 0 < weight < math.inf:
            raise RosterError(f"roster: role {name!r}: weight {weight} of {ref.path}, want a finite number above 0")
