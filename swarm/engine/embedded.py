# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The embedded engine: a dense Qwen3 in this process, batching all requests of all agents continuously.

    generate ──▶ queue ──▶ admitted (a chain of cache blocks) ──▶ step, step, ... ──▶ Completion
    (any task)              one background task: let all who are ready speak, plan, forward, sample, hand out

A request joins at the next step and leaves when it is done; nobody waits for a batch to fill. Steps that are short
are taken between the turns of the agents, in their thread: handing each to another thread costs more than it gains.
What a conversation has computed stays in the block tree and is found again by its tokens.
New weights wait until the requests under way are done, so one completion has one version.
Not here: a server, several models in one engine, anything but fp32 on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np
import torch
import trio
from transformers import Qwen3ForCausalLM

from swarm.checkpoint import load_model
from swarm.engine import kernels
from swarm.engine.kv import BlockTree, Chain, Ids
from swarm.engine.qwen3 import Weights, shape_of, weights_of
from swarm.engine.ragged import FusedWeights, Stepper, block_bytes, digest, empty_cache, fuse, rows_of
from swarm.engine.requests import EngineStats, Request, sample, split
from swarm.engine.serving import Limits, check_ids, check_size
from swarm.engine.settle import settle
from swarm.engine.vector import LANES
from swarm.types import CheckpointRef, Completion, EngineError, Finish, Sampling

_BRIEF = 2_500_000_000
"""Multiplications of a step that is taken in trio's thread: some 100 ms on one core."""
_FEW_ROWS = 32
"""So many take about as long as one: the weights have to be read."""


class EmbeddedEngine:
    """`async with EmbeddedEngine(model) as engine: await engine.generate(ids, Sampling(64, stop=(2,)))`.

    `model` is a transformers Qwen3ForCausalLM; its weights are copied. `cache_bytes` bounds the keys and
    values (resident as they are used), `max_len` a context, `chunk` the rows of a step. `threads` is
    how many cores a step uses: each takes sequences of its own.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        *,
        version: int = 0,
        max_len: int = 4096,
        cache_bytes: int = 512 << 20,
        chunk: int = 2048,
        threads: int = 1,
    ) -> None:
        for name, value in (("max_len", max_len), ("chunk", chunk), ("threads", threads)):
            if value < 1:
                raise ValueError(f"embedded engine: {name} = {value}, want at least 1")
        self.shape, self.max_len, self.version = shape_of(model.config), max_len, version
        if self.shape.head_dim % LANES:
            raise ValueError(f"embedded engine: head_dim = {self.shape.head_dim}, want a multiple of {LANES}")
        self._chunk, self._threads = chunk, threads
        blocks = cache_bytes // block_bytes(self.shape)
        self._tree = BlockTree(blocks, kernels.BLOCK)
        self._cache = empty_cache(self.shape, blocks)
        self._steppers = [Stepper(self.shape, chunk) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(max(threads - 1, 1), "engine", torch.set_num_threads, (1,))
        weights = weights_of(model)
        self._parameters = sum(w.numel() for w in weights.values())
        self._shapes = {name: tuple(w.shape) for name, w in weights.items()}
        self._weights = fuse(weights, self.shape, max_len)
        self._updates: deque[tuple[FusedWeights, int, trio.Event]] = deque()
        self._wake = trio.Event()
        self._queue: deque[Request] = deque()
        self._active: list[Request] = []
        self._stats = EngineStats()
        self._nursery_context: AbstractAsyncContextManager[trio.Nursery] | None = None
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> Self:
        self._nursery_context = trio.open_nursery()
        self._nursery = await self._nursery_context.__aenter__()
        # Compiling takes seconds on a fresh machine: before any request, which may have a deadline.
        await trio.to_thread.run_sync(self._warm_up)
        self._nursery.start_soon(self._drive)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._nursery is not None
        assert self._nursery_context is not None
        self._nursery.cancel_scope.cancel()
        self._nursery = None
        try:
            # The body's own exception is not shown to the nursery, which would wrap it in a group.
            await self._nursery_context.__aexit__(None, None, None)
        finally:
            self._fail("the engine was closed")
            self._pool.shutdown()

    @property
    def stats(self) -> EngineStats:
        return replace(self._stats, active=len(self._active), queue=len(self._queue))

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Samples one turn after `ids`; ends with "length" at `max_tokens` or when the context is full.

        Raises ValueError for a prompt that does not fit or settings out of range, EngineError when
        the engine fails or is not running.
        """
        request = self._request(ids, sampling)
        if self._nursery is None:
            raise EngineError("the embedded engine is not running: use it inside `async with`")
        self._queue.append(request)
        self._wake.set()
        try:
            await request.done.wait()
        finally:
            request.dropped = True
        if request.error is not None:
            raise request.error
        assert request.completion is not None
        return request.completion

    async def load(self, ref: CheckpointRef) -> None:
        """Takes the weights of a checkpoint of the same shape; returns when they are in use.

        Raises CheckpointError for a folder that is missing, corrupt or foreign, ValueError for another shape.
        """
        model = await trio.to_thread.run_sync(load_model, ref)
        await self.update(model.state_dict(), ref.version)

    async def update(self, weights: Weights, version: int) -> None:
        """Copies weights of the same shape now; returns when they are in use, the requests under way being done.

        What was cached is forgotten. Raises ValueError when names or shapes differ.
        """
        self._check(weights)
        swapped = trio.Event()
        self._updates.append((fuse(weights, self.shape, self.max_len), version, swapped))
        self._wake.set()
        await swapped.wait()

    async def checksum(self) -> str:
        """sha256 of the weights as they are laid out for serving."""
        return await trio.to_thread.run_sync(digest, self._weights)

    def _check(self, weights: Weights) -> None:
        for name, shape in self._shapes.items():
            seen = tuple(weights[name].shape) if name in weights else "missing"
            if seen != shape:
                raise ValueError(f"new weights: {name} {seen}, want {shape}")

    def _warm_up(self) -> None:
        rows = rows_of([[0, 0]], [0], [[0]])
        with torch.inference_mode():
            logits_SV = self._steppers[0].logits(self._weights, self._cache, rows)
        one = np.ones(1)
        kernels.sampled(logits_SV, one, one, one.astype(np.uint64), one.astype(np.uint64))

    def _request(self, ids: Sequence[int], sampling: Sampling) -> Request:
        check_size(len(ids), sampling, Limits(self.max_len, self.shape.vocab))
        limit = min(len(ids) + sampling.max_tokens, self.max_len)
        room = self._tree.count * self._tree.size
        if limit > room:
            raise ValueError(f"request of up to {limit} tokens, want at most {room} (cache_bytes)")
        return Request(list(ids), len(ids), limit, sampling, perf_counter())

    @trio.lowlevel.enable_ki_protection  # an interrupt ends the program between steps, not one of them half-way
    async def _drive(self) -> None:
        """The background task: lets those who are ready speak, so that one step serves them all, and steps."""
        told = True
        while True:
            await (settle() if told else trio.lowlevel.checkpoint())
            self._release_dropped()
            if self._updates and not self._active:
                self._swap()
            if not self._updates:
                self._admit()
            if self._active:
                told = await self._step()
            else:
                self._wake, told = trio.Event(), True
                await self._wake.wait()

    async def _step(self) -> bool:
        """One step of all that are active; whether anybody was told something, who may now ask for more."""
        began = perf_counter()
        batch = self._plan()
        try:
            tokens = await self._computed(batch)
        except (EngineError, RuntimeError, MemoryError) as error:
            self._fail(f"engine step failed: {error}")
            return True
        requests, stats, before = [r for part in batch for r in part], self._stats, len(self._active)
        stats.prefilled += sum(max(0, min(r.chunk, r.prompt - r.computed)) for r in requests)
        for request, (token, logprob) in zip(requests, tokens, strict=True):
            stats.sampled += self._advance(request, token, logprob)
        self._active = [r for r in self._active if not r.done.is_set()]
        stats.steps += 1
        stats.seconds += perf_counter() - began
        return len(self._active) < before

    async def _computed(self, batch: list[list[Request]]) -> list[tuple[int, float]]:
        """What `_compute` makes of a batch; a step that takes long leaves trio's thread to the others meanwhile."""
        rows = sum(r.chunk for part in batch for r in part)
        if max(rows, _FEW_ROWS) * self._parameters <= _BRIEF:
            return self._compute(batch, torch.get_num_threads())
        return await trio.to_thread.run_sync(self._compute, batch, torch.get_num_threads())

    def _plan(self) -> list[list[Request]]:
        """Who computes how many rows in this step, split over the threads: decodes first, then prefills."""
        budget, chosen = self._chunk, list[Request]()
        for request in sorted(self._active, key=lambda r: len(r.ids) - r.computed):
            request.chunk = min(len(request.ids) - request.computed, budget)
            budget -= request.chunk
            if request.chunk:
                chosen.append(request)
        return split(chosen, self._threads)

    def _compute(self, batch: list[list[Request]], torch_threads: int) -> list[tuple[int, float]]:
        """Each part of the batch on a core of its own.

        Products must not spread over more cores. That setting reaches beyond this thread: the
        caller's, `torch_threads`, is put back.
        """
        torch.set_num_threads(1)
        work = partial(sample, self._weights, self._cache)
        others = [self._pool.submit(work, s, p) for s, p in zip(self._steppers[1:], batch[1:], strict=False)]
        try:
            mine = work(self._steppers[0], batch[0])
            return [x for part in (mine, *(f.result() for f in others)) for x in part]
        finally:
            wait(others)
            torch.set_num_threads(torch_threads)

    def _advance(self, request: Request, token: int, logprob: float) -> bool:
        """Takes what a step computed for a request; whether that was a token of its turn."""
        assert request.chain is not None
        request.computed += request.chunk
        self._tree.file(request.chain, request.ids, request.computed)
        if request.computed < len(request.ids):
            return False
        request.ids.append(token)
        request.logprobs.append(logprob)
        if token in request.sampling.stop:
            self._finish(request, "stop")
        elif len(request.ids) >= request.limit:
            self._finish(request, "length")
        return True

    def _finish(self, request: Request, finish: Finish) -> None:
        said = tuple(request.ids[request.prompt :])
        request.completion = Completion(
            said, tuple(request.logprobs), self.version, finish, request.cached, request.queued
        )
        self._close(request)

    def _close(self, request: Request) -> None:
        if request.chain is not None:
            self._tree.close(request.chain, request.ids, request.computed)
            request.chain = None
        request.done.set()

    def _admit(self) -> None:
        """Moves requests from the queue into the batch, in order, while there is room.

        One whose next block another request is about to compute waits for it, and then shares it.
        """
        coming = {key for r in self._active if r.computed < r.prompt and (key := self._coming(r))}
        waiting = deque[Request]()
        while self._queue:
            request = self._queue.popleft()
            if request.dropped:
                continue
            key = self._tree.key(request.ids[: request.prompt - 1])
            if key in coming:
                waiting.append(request)
                continue
            chain = self._tree.open(request.ids, request.limit)
            if chain is None and not self._active:
                # What is kept for others is in the way of one that needs all the room.
                self._tree.clear()
                chain = self._tree.open(request.ids, request.limit)
            if chain is None:
                waiting.append(request)
                break
            self._start(request, chain)
            if key is not None and not request.error:
                coming.add(key)
        self._queue.extendleft(reversed(waiting))

    def _start(self, request: Request, chain: Chain) -> None:
        if chain.copy is not None:
            source, target, _ = chain.copy
            self._cache[:, target] = self._cache[:, source]
        request.chain, request.computed, request.cached = chain, chain.cached, chain.cached
        request.queued = perf_counter() - request.born
        try:  # only here is it known which ids are new: looking through a long context takes as long as a call
            check_ids(request.ids[chain.cached :], self.shape.vocab)
        except ValueError as refusal:
            request.error = refusal
            self._close(request)
            return
        self._stats.cached += chain.cached
        self._active.append(request)

    def _coming(self, request: Request) -> tuple[int, Ids] | None:
        assert request.chain is not None
        start = request.chain.shared * self._tree.size
        ids = tuple(request.ids[start : start + self._tree.size])
        return (request.chain.node, ids) if start + self._tree.size < request.prompt else None

    def _release_dropped(self) -> None:
        dropped = [r for r in self._active if r.dropped]
        for request in dropped:
            self._close(request)
        if dropped:
            self._active = [r for r in self._active if not r.dropped]

    def _swap(self) -> None:
        """Takes the newest weights, which ends the wait for older ones too."""
        while self._updates:
            self._weights, self.version, swapped = self._updates.popleft()
            swapped.set()
        self._tree.clear()

    def _fail(self, error: str) -> None:
        """Ends every request with an EngineError, and takes new weights.

        The cache may hold anything, even NaN, so it is made anew.
        """
        for request in (*self._active, *self._queue):
            request.error, request.chain = EngineError(error), None
            request.done.set()
        self._active = []
        self._queue.clear()
        self._tree.clear()
        self._cache = empty_cache(self.shape, self._tree.count)
        self._swap()
