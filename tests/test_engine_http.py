"""A server that is reached over HTTP: with servers that a test makes up, and with vLLM's own.

Script      what a made-up server does, call by call, in virtual time
processes   real ones that ignore SIGTERM and start others, killed hard
vLLM        one real server of a tiny model for all tests at the end, which are slow
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trio
import trio.testing
from safetensors.torch import load_file

from swarm.engine import leash
from swarm.engine.http import HttpBackend, Place, connected
from swarm.engine.pool import pool
from swarm.engine.server import Server, client_of, launched
from swarm.engine.serving import Limits, Part, Serving
from swarm.types import CheckpointRef, Completion, EngineError, Sampling
from tests.engine_cases import VOCAB, end_server, started_server, tiny

SECONDS = 10.0
TEN = Sampling(10, seed=3)


def event(ids: Sequence[int], finish: str | None = None, logprob: float = -0.5) -> str:
    content = [{"token_id": i, "logprob": logprob} for i in ids]
    choice = {"token_ids": list(ids), "finish_reason": finish, "logprobs": {"content": content}}
    return "data: " + json.dumps({"usage": None, "choices": [choice]}) + "\n\n"


def usage(cached: int) -> str:
    return (
        "data: " + json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": cached}}, "choices": []}) + "\n\n"
    )


class Stream(httpx.AsyncByteStream):
    """Texts, pauses in seconds, and errors, in order."""

    def __init__(self, *steps: str | float | Exception) -> None:
        self.steps = steps
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for step in self.steps:
            match step:
                case str():
                    yield step.encode()
                case float():
                    await trio.sleep(step)
                case _:
                    raise step

    async def aclose(self) -> None:
        self.closed = True


Answer = httpx.Response | Stream | Exception
GOOD = partial(Stream, event([4]), event([5, 6], "length"), usage(32), "data: [DONE]\n\n")


class Script:
    """A server that answers the calls in order, the last answer again and again."""

    def __init__(self, *answers: Callable[[], Answer]) -> None:
        self.answers = list(answers)
        self.asked: list[Mapping[str, Any]] = []
        self.streams: list[Stream] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.content or b"{}"))
        answer = (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Stream):
            self.streams.append(answer)
            return httpx.Response(200, stream=answer)
        return answer


@asynccontextmanager
async def backend(
    handler: Callable[[httpx.Request], Any],
    *folders: Path,
    death: Callable[[], str] = str,
    starts: Callable[[], int] = int,
) -> AsyncIterator[HttpBackend]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://a") as client:
        yield HttpBackend(client, Place("http://a", folders, death=death, starts=starts), SECONDS)


async def sampled(*answers: Callable[[], Answer]) -> Part:
    async with backend(Script(*answers)) as b:
        return await b.sample([1, 2], TEN)


def refused() -> Answer:
    return httpx.ConnectError("connection refused")


def unwell() -> Answer:
    return httpx.Response(503, text="EngineCore encountered an issue")


async def test_an_answer_is_what_was_streamed():
    part = await sampled(GOOD)
    assert part == Part((4, 5, 6), (-0.5,) * 3, "length", cached=32, seconds_queued=part.seconds_queued)


async def test_the_server_is_asked_for_these_tokens_with_this_seed():
    script = Script(GOOD)
    async with backend(script) as b:
        await b.sample([1, 2], Sampling(7, temperature=0.5, top_p=0.9, stop=(3,), seed=2**64 + 5))
    asked = script.asked[0]
    assert asked["token_ids"] == [1, 2]
    wanted = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "stop_token_ids": [3], "seed": 5, "ignore_eos": True}
    assert asked["sampling_params"].items() >= wanted.items()


async def test_the_wait_until_the_first_token_counts_as_queued(autojump_clock):
    part = await sampled(partial(Stream, 2.0, event([4]), 3.0, event([5], "stop")))
    assert part.seconds_queued == pytest.approx(2.0)


async def test_a_server_that_is_unwell_for_a_moment_is_asked_again(autojump_clock):
    assert (await sampled(unwell, refused, GOOD)).ids == (4, 5, 6)


async def test_an_answer_that_breaks_off_is_asked_for_again_from_the_start(autojump_clock):
    part = await sampled(partial(Stream, event([4]), httpx.ReadError("reset")), partial(Stream, event([4])), GOOD)
    assert part.ids == (4, 5, 6)


async def test_a_server_that_stays_unwell_is_an_error_with_its_words(autojump_clock):
    began = trio.current_time()
    with pytest.raises(EngineError, match="^http://a: status 503: EngineCore encountered an issue, tried 4 times$"):
        await sampled(unwell)
    assert trio.current_time() - began < SECONDS


async def test_a_server_that_refuses_connections_is_an_error(autojump_clock):
    with pytest.raises(EngineError, match="ConnectError connection refused, tried 4 times"):
        await sampled(refused)


async def test_a_bad_request_is_an_error_with_the_servers_words_and_not_asked_again():
    script = Script(lambda: httpx.Response(400, text='{"error": "the prompt is too long"}'))
    async with backend(script) as b:
        with pytest.raises(EngineError, match="status 400: .*the prompt is too long"):
            await b.sample([1, 2], TEN)
    assert len(script.asked) == 1


async def test_a_half_open_connection_ends_at_the_deadline(autojump_clock):
    began = trio.current_time()
    with pytest.raises(EngineError, match="no 64 tokens within 10 s"):
        await sampled(partial(Stream, float("inf")))
    assert trio.current_time() - began == pytest.approx(SECONDS)


async def test_a_trickle_ends_at_the_deadline(autojump_clock):
    trickle = [step for _ in range(500) for step in (1.0, "data: "[:1])]
    began = trio.current_time()
    with pytest.raises(EngineError, match="no 64 tokens within 10 s"):
        await sampled(partial(Stream, *trickle))
    assert trio.current_time() - began == pytest.approx(SECONDS)


async def test_a_long_answer_that_gets_on_has_all_the_time_it_takes(autojump_clock):
    steps = [step for _ in range(20) for step in (0.9 * SECONDS, event([4] * 64))]
    part = await sampled(partial(Stream, *steps, event([], "length")))
    assert len(part.ids) == 20 * 64


@pytest.mark.parametrize(
    "answer",
    [
        "data: nonsense\n\n",
        'data: {"choices": 3, "usage": null}\n\n',
        "data: [1]\n\n",
        'data: {"error": {"message": "the engine died"}}\n\n',
        event([4], "error"),
        event([4], "abort"),
        event([4]),
        "",
    ],
)
async def test_what_is_no_answer_is_an_error(answer: str, autojump_clock):
    with pytest.raises(EngineError, match="tried 4 times"):
        await sampled(partial(Stream, answer))


async def test_values_that_are_no_log_probabilities_are_an_error():
    with pytest.raises(EngineError, match="the logits are not finite"):
        await sampled(partial(Stream, event([4], "length", logprob=-9999.0)))


async def test_tokens_without_log_probabilities_are_an_error(autojump_clock):
    bare = {"usage": None, "choices": [{"token_ids": [4], "finish_reason": "stop", "logprobs": {"content": None}}]}
    with pytest.raises(EngineError, match="0 log-probabilities for 1 tokens"):
        await sampled(partial(Stream, f"data: {json.dumps(bare)}\n\n"))


async def test_nothing_is_asked_of_a_server_that_is_known_to_be_dead():
    script = Script(GOOD)
    async with backend(script, death=lambda: "the server ended with status 137") as b:
        with pytest.raises(EngineError, match="status 137"):
            await b.sample([1], TEN)
    assert script.asked == []


async def test_a_cancelled_request_closes_its_connection(autojump_clock):
    script = Script(partial(Stream, event([4]), float("inf")))
    async with backend(script) as b:
        with trio.move_on_after(1):
            await b.sample([1], TEN)
    assert [s.closed for s in script.streams] == [True]


async def test_a_request_is_answered_by_another_server_when_its_own_dies(autojump_clock):
    dying = Script(GOOD, refused)
    served = httpx.Response(200, json={"results": [{"w": "sha"}]})

    def handler(script: Script) -> Callable[[httpx.Request], Any]:
        async def answer(request: httpx.Request) -> httpx.Response:
            return await script(request) if request.url.path.endswith("generate") else served

        return answer

    alive = Script(GOOD)
    async with backend(handler(dying)) as a, backend(handler(alive)) as b:
        engines = {name: Serving(x, Limits(256, 40, SECONDS), unread, 3) for name, x in (("a", a), ("b", b))}
        async with pool(engines) as engine:
            out = [await engine.generate([k], TEN) for k in range(4)]
            assert [m.name for m in engine.serving] == ["b"]
    assert [c.ids for c in out] == [(4, 5, 6)] * 4


def unread(ref: CheckpointRef) -> Mapping[str, Any]:
    raise AssertionError(ref)


class Updating:
    """A server with a scheduler: what runs when it is paused is given up with what it has; what comes later waits."""

    def __init__(self, *, reset: bool = True) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.file = Path()
        self.reset = reset
        self.late = trio.Event()
        self.paused = trio.Event()
        self.gave_up = trio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        name = body.get("method", request.url.path)
        self.calls.append(name)
        match name:
            case "/inference/v1/generate" if body["token_ids"] == [2]:
                await self.late.wait()
                return httpx.Response(200, stream=Told(self.gave_up, event([], "abort")))
            case "/inference/v1/generate":
                return httpx.Response(200, stream=Told(self.paused, event([4]), event([5], "abort")))
            case "/pause":
                self.paused.set()
            case "/abort_requests" if self.late.is_set():
                self.gave_up.set()
            case "/abort_requests":
                self.late.set()
            case "reload_weights":
                (self.file,) = Path(body["kwargs"]["weights_path"]).glob("*")
                self.weights = load_file(self.file)
            case _:
                pass
        return httpx.Response(200, json={"success": self.reset} if name == "/reset_prefix_cache" else {"results": [1]})


class Told(httpx.AsyncByteStream):
    """The first text at once, the others when it is told to."""

    def __init__(self, when: trio.Event, *texts: str) -> None:
        self.when, self.texts = when, texts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if len(self.texts) > 1:
            yield self.texts[0].encode()
        await self.when.wait()
        yield self.texts[-1].encode()


async def test_what_runs_is_interrupted_with_what_it_has_and_what_arrives_late_with_nothing(autojump_clock):
    server = Updating()
    parts: dict[int, Part] = {}

    async def one(b: HttpBackend, k: int) -> None:
        parts[k] = await b.sample([k], TEN)

    async with backend(server) as b:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, b, 1)
            nursery.start_soon(one, b, 2)
            await trio.testing.wait_all_tasks_blocked()
            await b.interrupt()
        asked = len(server.calls)
        assert (await b.sample([3], TEN)).finish == "interrupted"
        assert len(server.calls) == asked
    assert (parts[1].ids, parts[1].logprobs, parts[1].finish) == ((4, 5), (-0.5, -0.5), "interrupted")
    assert (parts[2].ids, parts[2].finish) == ((), "interrupted")


async def test_new_weights_are_reloaded_packed_and_nothing_of_the_old_ones_kept(tmp_path):
    server = Updating()
    embedding = torch.arange(6.0).reshape(2, 3)
    weights = {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding, "model.w": torch.ones(2)}
    async with backend(server, tmp_path) as b:
        await b.replace(weights)
    assert server.calls == ["reload_weights", "swarm_pack", "/reset_prefix_cache", "/resume"]
    assert server.weights.keys() == {"model.embed_tokens.weight", "model.w"}
    assert torch.equal(server.weights["model.embed_tokens.weight"], embedding)
    assert server.file.suffix == ".safetensors"
    assert list(tmp_path.iterdir()) == []


async def test_a_prefix_cache_that_is_not_reset_is_an_error_and_the_server_stays_paused(tmp_path):
    server = Updating(reset=False)
    async with backend(server, tmp_path) as b:
        with pytest.raises(EngineError, match="the prefix cache was not reset"):
            await b.replace({"w": torch.ones(1)})
    assert "/resume" not in server.calls


async def test_a_server_that_was_started_again_samples_nothing_before_it_has_new_weights(tmp_path):
    starts = 1
    server = Updating()

    async def handler(request: httpx.Request) -> httpx.Response:
        nonlocal starts
        if request.url.path.endswith("generate"):
            starts += len(json.loads(request.content)["token_ids"]) > 1
            return httpx.Response(200, stream=GOOD())
        return await server(request)

    async with backend(handler, tmp_path, starts=lambda: starts) as b:
        await b.sample([1], TEN)
        with pytest.raises(EngineError, match="started again"):
            await b.sample([1, 2], TEN)  # while it is being answered
        with pytest.raises(EngineError, match="started again"):
            await b.sample([1], TEN)
        await b.replace({"w": torch.ones(1)})
        assert (await b.sample([1], TEN)).ids == (4, 5, 6)


async def test_keys_and_values_that_are_no_numbers_are_cleared_with_the_next_weights_and_no_later(tmp_path):
    server = Updating()

    async def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("generate"):
            return httpx.Response(200, stream=Stream(event([4], "length", logprob=-9999.0)))
        return await server(request)

    async with backend(handler, tmp_path) as b:
        with pytest.raises(EngineError, match="not finite"):
            await b.sample([1], TEN)
        await b.replace({"w": torch.ones(1)})
        await b.replace({"w": torch.ones(1)})
    assert server.calls.count("swarm_clear") == 1
    assert server.calls.index("swarm_pack") < server.calls.index("swarm_clear") < server.calls.index("/resume")


async def test_weights_without_room_for_them_are_an_error():
    async with backend(Updating()) as b:
        with pytest.raises(EngineError, match="no room in no folder"):
            await b.replace({"w": torch.ones(1)})


# --- processes -------------------------------------------------------------------------

STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    if os.fork() == 0:
        os.setsid()
    while True:
        signal.pause()
tasks = f"/proc/{child}/task/{child}/children"
while not (grandchild := open(tasks).read().split()):
    pass
print(os.getpid(), child, grandchild[0], flush=True)
while True:
    signal.pause()
"""
"""Ignores SIGTERM, and starts a child, whose own child leaves its session."""

PARENT = """
import os, subprocess, sys, signal
p = subprocess.Popen([*sys.argv[2:6], str(os.getpid()), *sys.argv[6:]], stdin=subprocess.PIPE)
if sys.argv[1] == "fork" and os.fork() == 0:
    print(p.pid, os.getpid(), flush=True)  # keeps the pipe open
    while True:
        signal.pause()
if sys.argv[1] == "plain":
    print(p.pid, flush=True)
while True:
    signal.pause()
"""
PYTHON = [sys.executable, "-I", "-S"]


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A parent, then the processes: leash, server, child, grandchild, and with "fork" one that keeps the pipe open."""
    fake = [*PYTHON, "-c", STUBBORN]
    command = [*PYTHON, "-c", PARENT, request.param, *PYTHON, leash.__file__, "0", "--", *fake]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout as out:
        lines = sorted((out.readline().split() for _ in range(2)), key=len)
        (leash_pid, *keeper), (server, child, grandchild) = lines
        yield parent, [int(p) for p in (leash_pid, server, child, grandchild, *keeper)]
        parent.kill()
        for pid in keeper:
            os.kill(int(pid), signal.SIGKILL)


def all_gone(descriptors: Sequence[int]) -> bool:
    """Within 20 s, in which a loaded machine does it; it takes milliseconds."""
    left = list(descriptors)
    while left:
        ready = select.select(left, [], [], 20)[0]
        if not ready:
            return False
        left = [d for d in left if d not in ready]
    return True


@pytest.mark.parametrize("family", ["plain", "fork"], indirect=True)
def test_nothing_is_left_when_the_parent_is_killed_hard(family: tuple[subprocess.Popen[str], list[int]]):
    parent, pids = family
    descriptors = [os.pidfd_open(pid) for pid in pids[:4]]
    parent.kill()
    assert all_gone(descriptors)
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("family", ["plain"], indirect=True)
def test_a_server_does_not_outlive_its_leash(family: tuple[subprocess.Popen[str], list[int]]):
    _, pids = family
    descriptors = [os.pidfd_open(pid) for pid in pids[:2]]
    os.kill(pids[0], signal.SIGKILL)
    assert all_gone(descriptors)
    for pid in pids[2:4]:
        os.kill(pid, signal.SIGKILL)
    for descriptor in descriptors:
        os.close(descriptor)


def test_the_leash_passes_on_how_its_command_ended():
    for code, status in (("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)):
        words = [*PYTHON, leash.__file__, str(os.getpid()), "0", "--", *PYTHON, "-c", f"import os, sys; {code}"]
        with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
            assert process.wait() == status


def test_folders_are_removed_when_the_parent_is_gone(tmp_path: Path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    words = [*PYTHON, leash.__file__, str(os.getpid()), "0", str(folder), "--", *PYTHON, "-c", STUBBORN]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.close()
        process.wait()
    assert not folder.exists()


ANSWERING = """
import http.server, os, socketserver, sys
class Handler(http.server.BaseHTTPRequestHandler):
    left = int(sys.argv[2])
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/die":
            print("ValueError: out of memory", flush=True)
            os._exit(3)
        Handler.left -= 1
        self.send_response(503 if Handler.left >= 0 else 200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *words):
        pass
    def address_string(self):
        return "unix"
print("loading", flush=True)
socketserver.UnixStreamServer(sys.argv[1], Handler).serve_forever()
"""
"""Answers 503 so many times, then as one that generates; dies when it is told to."""


def answering(unwell: int) -> Callable[[Path], Sequence[str]]:
    return lambda socket: [*PYTHON, "-c", ANSWERING, str(socket), str(unwell)]


@pytest.mark.slow
async def test_a_server_is_ready_when_it_generates_and_its_death_is_noticed():
    async with launched(answering(2), os.environ, 0.0) as process:
        await process.ready(60.0)
        assert process.death == ""
        async with client_of(process.address, 1) as client:
            with pytest.raises(httpx.TransportError):
                await client.post("/die", json={})
        with trio.fail_after(20):
            await process.died.wait()
        assert process.death == "the server ended with status 3: loading | ValueError: out of memory"
        with pytest.raises(EngineError, match="^no server: .*out of memory"):
            await process.ready(60.0)
    assert not any(folder.exists() for folder in process.folders)


@pytest.mark.slow
async def test_a_server_that_dies_in_service_is_started_again_so_often_and_no_more():
    async with launched(answering(0), os.environ, 0.0, restarts=1) as process:
        await process.ready(60.0)
        for starts in (1, 2):
            assert (process.starts, process.death) == (starts, "")
            died = process.died
            async with client_of(process.address, 1) as client:
                with pytest.raises(httpx.TransportError):
                    await client.post("/die", json={})
            with trio.fail_after(20):
                await died.wait()
            if starts == 1:
                await process.ready(60.0)
        assert process.starts == 2
        assert process.death.startswith("the server ended with status 3: ")


@pytest.mark.slow
async def test_a_server_that_never_generates_is_told_with_the_end_of_its_log():
    async with launched(answering(10**9), os.environ, 0.0) as process:
        with pytest.raises(EngineError, match="^no server within 1 s: .*its log: .*"):
            await process.ready(1.0)


LAUNCHING = """
import os, sys, trio
from swarm.engine.server import launched

async def main():
    async with launched(lambda socket: sys.argv[1:], os.environ, 0.0) as process:
        server = trio.lowlevel.FdStream(os.dup(1))
        await server.send_all(" ".join([str(process.pid), *map(str, process.folders)]).encode() + bytes([10]))
        while (log := process.folders[-1] / "log").read_text().count(" ") < 2:
            await trio.sleep(0.05)
        await server.send_all(log.read_bytes())
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.slow
def test_a_process_that_launched_a_server_and_is_killed_hard_leaves_nothing():
    command = [sys.executable, "-c", LAUNCHING, *PYTHON, "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        (leash_pid, *folders), pids = parent.stdout.readline().split(), parent.stdout.readline().split()
        descriptors = [os.pidfd_open(int(pid)) for pid in (leash_pid, *pids)]
        assert all(map(os.path.exists, folders))
        parent.kill()
        assert all_gone(descriptors)
    assert not any(map(os.path.exists, folders))
    for descriptor in descriptors:
        os.close(descriptor)


# --- vLLM ------------------------------------------------------------------------------

LIMITS = Limits(256, VOCAB, 120.0)
model = partial(tiny, head_dim=32)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Server]:
    """A real server for every test that follows."""
    process = started_server()
    yield process
    end_server()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@asynccontextmanager
async def serving(process: Server, seed: int = 1, version: int = 3) -> AsyncIterator[Serving]:
    async with connected(Place(process.address, process.folders), LIMITS) as engine:
        await engine.update(model(seed).state_dict(), version)
        yield engine


def log_policy(seed: int, prompt: Sequence[int], said: Sequence[int], temperature: float = 1.0) -> list[float]:
    """What the model itself gives the tokens."""
    with torch.no_grad():
        logits = model(seed)(torch.tensor([[*prompt, *said]])).logits[0] / temperature
    return [logits.log_softmax(-1)[len(prompt) - 1 + k, i].item() for k, i in enumerate(said)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_vllm_log_probabilities_are_the_models(vllm: Server, temperature: float):
    async with serving(vllm) as engine:
        c = await engine.generate([1, 2, 3], Sampling(60, temperature=temperature, seed=4))
    assert c.logprobs == pytest.approx(log_policy(1, [1, 2, 3], c.ids, temperature), abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_vllm_tokens_are_of_the_weights_that_they_are_said_to_be_of(vllm: Server):
    """An update under way: none of the tokens after it know anything of the weights before."""
    out: dict[int, Completion] = {}

    async def one(engine: Serving, k: int) -> None:
        out[k] = await engine.generate([k, 5, 6], Sampling(200, seed=k))

    async with serving(vllm) as engine, trio.open_nursery() as nursery:
        for k in range(6):
            nursery.start_soon(one, engine, k)
        await trio.testing.wait_all_tasks_blocked()
        await engine.generate([9], Sampling(8))  # by then all others have begun
        await engine.update(model(2).state_dict(), 4)
    seeds = {3: 1, 4: 2}
    for k, c in out.items():
        assert [span.version for span in c.spans] == [3, 4]
        said: tuple[int, ...] = ()
        for span in c.spans:
            expected = log_policy(seeds[span.version], [k, 5, 6, *said], span.ids)
            assert span.logprobs == pytest.approx(expected, abs=1e-4)
            said += span.ids


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_vllm_keeps_beginnings_and_forgets_them_with_the_weights(vllm: Server):
    prompt = [1, 2, 3, 4] * 24
    async with serving(vllm) as engine:
        first = await engine.generate(prompt, Sampling(8, seed=1))
        again = await engine.generate(prompt, Sampling(8, seed=1))
        await engine.update(model(2).state_dict(), 4)
        after = await engine.generate(prompt, Sampling(8, seed=1))
    assert (first.cached, again.cached >= 64, after.cached) == (0, True, 0)
    assert again.ids == first.ids
    assert after.logprobs == pytest.approx(log_policy(2, prompt, after.ids), abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_vllm_runs_nothing_for_requests_that_were_cancelled(vllm: Server):
    async with serving(vllm) as engine, client_of(vllm.address, 1) as client:
        async with trio.open_nursery() as nursery:
            for k in range(5):
                nursery.start_soon(engine.generate, [4, k], Sampling(240))
            await trio.testing.wait_all_tasks_blocked()
            await engine.generate([9], Sampling(2))
            before = await counted(client, "vllm:generation_tokens_total")
            nursery.cancel_scope.cancel()
        with trio.fail_after(60):
            while await unfinished(client):
                pass
        assert engine.running == 0
        after = await counted(client, "vllm:generation_tokens_total")
    assert after - before < 5 * 100  # of the 5 · 240 that were asked for


async def unfinished(client: httpx.AsyncClient) -> float:
    return await counted(client, "vllm:num_requests_running") + await counted(client, "vllm:num_requests_waiting{")


async def counted(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_vllm_served_checksum_changes_with_every_single_weight(vllm: Server):
    weights = {k: w.clone() for k, w in model(1).state_dict().items() if k != "lm_head.weight"}
    seen: set[str] = set()
    async with serving(vllm) as engine:
        start = await engine.checksum()
        for version, name in enumerate(weights):
            changed = {**weights, name: weights[name].clone()}
            changed[name].view(-1)[-1] += 0.01
            await engine.update(changed, version)
            seen.add(await engine.checksum())
        await engine.update(model(1).state_dict(), 3)
        assert await engine.checksum() == start
    assert len(seen | {start}) == len(weights) + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_vllm_logits_that_are_no_numbers_are_an_error_and_the_next_weights_mend_it(vllm: Server):
    nan = {k: torch.full_like(w, float("nan")) for k, w in model(1).state_dict().items()}
    async with serving(vllm) as engine:
        await engine.update(nan, 4)
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate([1], Sampling(4))
        await engine.update(model(1).state_dict(), 5)
        assert len((await engine.generate([1], Sampling(4))).ids) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_vllm_whose_engine_dies_is_noticed_while_the_front_end_still_answers(vllm: Server):
    """The last test: an id that no embedding has, which a `Serving` refuses, is the end of the server's engine."""
    async with serving(vllm) as engine:
        with pytest.raises(ValueError, match="prompt ids span 1 to 999"):
            await engine.generate([1, 999], Sampling(4))
        with pytest.raises(EngineError):
            await engine.backend.sample([1, 999], Sampling(4))
        with pytest.raises(EngineError):
            await engine.generate([1], Sampling(4))
