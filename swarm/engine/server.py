"""Server processes: started, watched, and gone with everything they started, however this process ends.

    async with server(folder, ServerConfig()) as running:      running.address: "unix:/tmp/…/socket"

A server listens on a socket in a folder of its own that only this user can enter: it lets its callers replace its
weights, and no port of it can be taken by another. It counts as started when it generates a token, not when it says
that it is healthy. A leash (`swarm.engine.leash`) between the two ends the server when this process is gone.

Not here: what is asked of a server (`swarm.engine.http`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import httpx
import torch
import trio

from swarm.checkpoint import ref_of
from swarm.checks import want
from swarm.engine import leash
from swarm.engine.settle import running
from swarm.engine.vllm_core import VLLMConfig
from swarm.engine.vllm_worker import EXTENSION
from swarm.types import EngineError

GENERATE = "/inference/v1/generate"
_MEMORY = Path("/dev/shm")
_LEAST_BATCH = 2048
_LOG_LINES, _LOG_CHARACTERS = 3, 400
_POLL_SECONDS = 0.25
_LEASH_SECONDS = 5.0
_CONNECT_SECONDS = 5.0
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Unless the user has set them: no compiler, nothing sent, nothing fetched, and connections that are kept."""


Process = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a vLLM server is run: `ServerConfig(VLLMConfig(max_len=8192), gpus=(0,))`.

    `gpus`: those that it sees, all when empty. It has `start_seconds` to answer, and `grace_seconds` to end by itself.
    One that dies in service is started again, up to `restarts` times.
    """

    engine: VLLMConfig = field(default_factory=VLLMConfig)
    gpus: tuple[int, ...] = ()
    start_seconds: float = 600.0
    grace_seconds: float = 5.0
    restarts: int = 3

    def __post_init__(self) -> None:
        want("server", "start_seconds", self.start_seconds, self.start_seconds > 0, "more than 0")
        want("server", "grace_seconds", self.grace_seconds, self.grace_seconds >= 0, "at least 0")
        want("server", "restarts", self.restarts, self.restarts >= 0, "at least 0")


class Server:
    """A server process. `address` is where it listens, `pid` the process that leads its group.

    One that dies after it was ready is started again, up to `restarts` times, with the weights of its checkpoint:
    `starts` tells. `died` is set as soon as it is dead. `folders` are for what is handed to it in files, the one in
    memory first; they are gone when it is.
    """

    def __init__(self, start: Callable[[Path], Process], folders: Sequence[Path], restarts: int) -> None:
        self.folders = tuple(folders)
        self.address = f"unix:{folders[-1] / 'socket'}"
        self.starts = 0
        self._start, self._restarts, self._was_ready = start, restarts, False
        self._log = folders[-1] / "log"
        self._launch()

    def _launch(self) -> None:
        Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)
        self._process = self._start(self._log)
        self._descriptor = os.pidfd_open(self._process.pid)
        self.pid = self._process.pid
        self.died = trio.Event()
        self.starts += 1

    @property
    def death(self) -> str:
        """Why it is dead, with the last lines of its log; empty while it lives."""
        if not self.died.is_set():
            return ""
        return f"the server ended with status {self._process.poll()}: {_last_lines(self._log)}"

    async def ready(self, seconds: float) -> None:
        """Waits until it generates. Raises EngineError when it dies first, or takes longer."""
        trouble = "nothing"
        async with client_of(self.address, 1) as client:
            with trio.move_on_after(seconds):
                while not self.death:
                    if not (trouble := await generates(client)):
                        self._was_ready = True
                        return
                    with trio.move_on_after(_POLL_SECONDS):
                        await self.died.wait()
        if self.death:
            raise EngineError(f"no server: {self.death}")
        raise EngineError(f"no server within {seconds:g} s: {trouble}; its log: {_last_lines(self._log)}")

    async def watch(self) -> None:
        """The background task: notices when the process is gone, and starts another. Returns when none is to be."""
        while True:
            await trio.lowlevel.wait_readable(self._descriptor)
            self.died.set()
            if not self._was_ready or self.starts > self._restarts:
                return
            self._bury()
            self._launch()

    async def end(self, seconds: float) -> None:
        """Lets go of the leash, and returns when nothing is left of the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + seconds + _LEASH_SECONDS):
            await trio.lowlevel.wait_readable(self._descriptor)
        self._bury()

    def _bury(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # those whose leash was killed
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        trio.lowlevel.notify_closing(self._descriptor)
        os.close(self._descriptor)


@asynccontextmanager
async def server(folder: Path, config: ServerConfig) -> AsyncGenerator[Server]:
    """A vLLM server of the checkpoint in `folder`, which generates.

    Raises CheckpointError for a folder that is none, EngineError for a server that does not start.
    """
    async with started(folder, config) as process:
        await process.ready(config.start_seconds)
        yield process


@asynccontextmanager
async def started(folder: Path, config: ServerConfig) -> AsyncGenerator[Server]:
    """As `server`, but it may not be ready yet, so that several start at once."""
    await trio.to_thread.run_sync(ref_of, folder)
    command = _command(folder, config.engine, on_gpu=torch.cuda.is_available())
    async with launched(command, _environment(config), config.grace_seconds, config.restarts) as process:
        yield process


@asynccontextmanager
async def launched(
    command: Callable[[Path], Sequence[str]], environment: Mapping[str, str], grace: float, restarts: int = 0
) -> AsyncGenerator[Server]:
    """Runs the command made for a socket, on a leash; at the end it has `grace` seconds before it is killed."""
    with ExitStack() as stack:
        places = [_MEMORY] * _MEMORY.is_dir() + [Path(gettempdir())]
        folders = [Path(stack.enter_context(_temporary(place))) for place in places]
        words = [str(os.getpid()), str(grace), *map(str, folders), "--", *command(folders[-1] / "socket")]

        def start(log: Path) -> Process:
            with log.open("ab") as out:
                # Not by trio's own means, which start it from a thread that ends.
                return subprocess.Popen(
                    [sys.executable, "-I", "-S", leash.__file__, *words],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    env=environment,
                    start_new_session=True,
                )

        handle = Server(start, folders, restarts)
        try:
            async with running(handle.watch):
                yield handle
        finally:
            await handle.end(grace)


def _temporary(place: Path) -> TemporaryDirectory[str]:
    """The leash may have removed it already."""
    return TemporaryDirectory(prefix="swarm-server-", dir=place, ignore_cleanup_errors=True)


def client_of(address: str, connections: int) -> httpx.AsyncClient:
    """For `unix:/path` or `http://host:port`. Only connecting has a deadline of its own."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    path = address.removeprefix("unix:")
    if path == address:
        return httpx.AsyncClient(base_url=address, limits=limits, timeout=timeout, trust_env=False)
    transport = httpx.AsyncHTTPTransport(uds=path, limits=limits)
    return httpx.AsyncClient(base_url="http://server", transport=transport, timeout=timeout, trust_env=False)


async def generates(client: httpx.AsyncClient) -> str:
    """Whether it samples a token: "" or what came instead."""
    body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False}}
    try:
        answer = await client.post(GENERATE, json=body)
    except httpx.TransportError as e:
        return f"{type(e).__name__} {e}".strip()
    return "" if answer.is_success else f"status {answer.status_code}: {answer.text[:200]}"


def _command(folder: Path, engine: VLLMConfig, *, on_gpu: bool) -> Callable[[Path], Sequence[str]]:
    """Requests with seeds of their own and prompts computed in chunks do not go together on the CPU."""
    flags: dict[str, object] = {
        "model": folder,
        "generation-config": "vllm",
        "dtype": engine.dtype,
        "max-model-len": engine.max_len,
        "max-num-seqs": engine.max_seqs,
        "max-num-batched-tokens": max(engine.max_len, _LEAST_BATCH),
        "block-size": engine.block,
        "kv-cache-memory-bytes": engine.cache_bytes,
        "tensor-parallel-size": engine.tensor_parallel,
        "distributed-executor-backend": "uni" if engine.tensor_parallel == 1 else "mp",
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": EXTENSION,
        "uvicorn-log-level": "warning",
    }
    switches = ["skip-tokenizer-init", "enable-scale-out", "enable-prompt-tokens-details", "disable-uvicorn-access-log"]
    switches += ["enable-prefix-caching" if engine.prefix_caching else "no-enable-prefix-caching"]
    switches += [] if on_gpu else ["enforce-eager", "no-enable-chunked-prefill"]
    words = [w for name, value in flags.items() for w in (f"--{name}", str(value))] + [f"--{s}" for s in switches]
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` does not start where vLLM is installed as `vllm-cpu`
    return lambda socket: [sys.executable, "-m", module, "--uds", str(socket), *words]


def _environment(config: ServerConfig) -> dict[str, str]:
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, config.gpus))} if config.gpus else {}
    fixed = {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": str(config.engine.threads)}
    return {**_ENVIRONMENT, **os.environ, **fixed, **gpus}


def _last_lines(log: Path) -> str:
    lines = [" ".join(line.split()) for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_LOG_LINES:])[-_LOG_CHARACTERS:] or "empty log"
