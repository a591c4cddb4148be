"""The public fake engine: a function chooses the ids, nothing is computed.

For tests and examples, in place of mocks. Not a model: every logprob is 0.0, and `load` only
changes the version that completions report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import trio

from swarm.types import CheckpointRef, Completion, EngineError, Finish, Sampling

Policy = Callable[[Sequence[int], Sampling], Sequence[int]]
"""Prompt ids and sampling → the ids to say. What it says is cut at the first stop id and at `max_tokens`."""


class ScriptedEngine:
    """`ScriptedEngine(lambda ids, sampling: [7, 8, STOP])`.

    `fail_at`: the calls (counted from 0) that raise EngineError. `delay`: trio seconds that each
    call takes, virtual ones under an autojump clock.
    """

    def __init__(self, policy: Policy, *, fail_at: Collection[int] = (), delay: float = 0.0, version: int = 0) -> None:
        self._policy, self._fail_at, self._delay = policy, fail_at, delay
        self.version = version
        self.calls = 0
        self.pending = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Raises EngineError at the calls named by `fail_at`."""
        call, self.calls = self.calls, self.calls + 1
        self.pending += 1
        try:
            await trio.sleep(self._delay)
        finally:
            self.pending -= 1
        if call in self._fail_at:
            raise EngineError(f"scripted failure of call {call}")
        said, finish = _cut(self._policy(ids, sampling), sampling)
        return Completion(said, (0.0,) * len(said), self.version, finish)

    async def load(self, ref: CheckpointRef) -> None:
        await trio.lowlevel.checkpoint()
        self.version = ref.version


def _cut(ids: Sequence[int], sampling: Sampling) -> tuple[tuple[int, ...], Finish]:
    for k, i in enumerate(ids[: sampling.max_tokens]):
        if i in sampling.stop:
            return tuple(ids[: k + 1]), "stop"
    return tuple(ids[: sampling.max_tokens]), "length"
