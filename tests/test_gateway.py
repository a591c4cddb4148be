"""The gateway over plain HTTP: what it answers, what it refuses, and what stays when a client misbehaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import trio

from swarm.engine.scripted import ScriptedEngine
from swarm.gateway import Gateway, serving
from swarm.types import Budget, Sampling, Turn
from tests.gateway_cases import ASKED, SYSTEM, USER, guest, scripted, visiting
from tests.swarm_cases import ECHO, TASK, call, chat, engine, says

CALLS = Turn("Look.", (call("echo", text="x"), call("echo", text="y")))
TOOL = {"type": "function", "function": {"name": "echo", "description": "Echo.", "parameters": dict(ECHO.parameters)}}


async def test_a_chat_is_answered_and_recorded() -> None:
    g = scripted(says(Turn("done")))
    async with visiting(g) as client:
        r = (await client.post("/v1/chat/completions", json=ASKED)).json()
    [segment] = g.rollout("done", "answered").trace.segments
    assert r["object"] == "chat.completion"
    assert r["choices"][0]["message"] == {"role": "assistant", "content": "done", "refusal": None}
    assert r["choices"][0]["finish_reason"] == "stop"
    assert r["usage"]["prompt_tokens"] == len(segment.spans[0].ids)
    assert r["usage"]["completion_tokens"] == len(segment.spans[1].ids)
    assert list(segment.spans[0].ids) == chat().prompt("Work.", [], TASK.query)


async def test_calls_come_by_name_and_what_follows_them_goes_on_from_their_ids() -> None:
    g = scripted(says(CALLS, Turn("done")))
    async with visiting(g) as client:
        asked = {**ASKED, "tools": [TOOL]}
        first = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
        assert first["finish_reason"] == "tool_calls"
        one, two = first["message"]["tool_calls"]
        assert json.loads(one["function"]["arguments"]) == {"text": "x"}
        heard = [{"role": "tool", "content": c["function"]["arguments"], "tool_call_id": c["id"]} for c in (two, one)]
        messages = [SYSTEM, USER, first["message"], *heard]
        await client.post("/v1/chat/completions", json={**asked, "messages": messages})
    r = g.rollout("done", "answered")
    assert [[s.kind for s in segment.spans] for segment in r.trace.segments] == [
        ["prompt", "sampled", "observed", "sampled"]
    ]
    assert [s.main for s in r.ledger.stages] == [2, 1]


async def test_a_stream_has_the_reply_in_pieces() -> None:
    g = scripted(says(CALLS))
    asked = {**ASKED, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    async with visiting(g) as client:
        lines = (await client.post("/v1/chat/completions", json=asked)).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(d) for d in data[:-1]]
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert "".join(d.get("content") or "" for d in deltas) == "Look."
    parts = [c for d in deltas for c in d.get("tool_calls", [])]
    texts = ["".join(p["function"]["arguments"] for p in parts if p["index"] == k) for k in (0, 1)]
    assert [json.loads(t) for t in texts] == [{"text": "x"}, {"text": "y"}]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0


async def test_a_stream_that_waits_shows_that_it_is_alive() -> None:
    async with (
        visiting(scripted(says(Turn("done")), delay=0.05), waiting=0.01) as client,
        client.stream("POST", "/v1/chat/completions", json={**ASKED, "stream": True}) as response,
    ):
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[0] == ": waiting"
    assert lines[-1] == "data: [DONE]"


async def test_a_failure_that_comes_late_is_an_event_of_the_stream_and_an_early_one_a_status() -> None:
    for waiting, status in ((0.01, 200), (5.0, 500)):
        g = scripted(says(Turn("done")), delay=0.05, fail_at=[0])
        async with visiting(g, waiting=waiting) as client:
            response = await client.post("/v1/chat/completions", json={**ASKED, "stream": True})
        assert response.status_code == status
        assert "scripted failure of call 0" in response.text
        assert g.rollout("", "answered").trace.status == "error"


async def test_log_probabilities_are_those_of_the_recorded_ids() -> None:
    g = scripted(says(Turn("done")))
    async with visiting(g) as client:
        r = (await client.post("/v1/chat/completions", json={**ASKED, "logprobs": True})).json()
    ids = g.rollout("", "answered").trace.segments[0].spans[1].ids
    content = r["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == [chat().decode([i]) for i in ids]
    assert [c["logprob"] for c in content] == [0.0] * len(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_completion_goes_on_from_its_text(stream: bool) -> None:
    def speak(ids: Sequence[int], sampling: Sampling) -> list[int]:
        return [*chat().encode(" a time"), chat().stop[0]]

    g = guest(ScriptedEngine(speak))
    async with visiting(g) as client:
        for prompt in ("Once upon", "Once upon a time there"):
            asked = {"model": "policy", "prompt": prompt, "stream": stream, "logprobs": 1}
            r = await client.post("/v1/completions", json=asked)
    [segment] = g.rollout("", "answered").trace.segments
    assert [s.kind for s in segment.spans] == ["prompt", "sampled", "observed", "sampled"]
    if stream:
        chunks = [json.loads(line[6:]) for line in r.text.splitlines() if line.startswith("data: {")]
        assert "".join(c["choices"][0]["text"] for c in chunks) == " a time"
    else:
        assert r.json()["choices"][0]["text"] == " a time"


# --- keys ------------------------------------------------------------------------------------


async def test_a_key_is_part_of_the_address_or_the_bearer_and_dies_with_its_rollout() -> None:
    g = scripted(says(Turn("done")))
    async with serving(Gateway()) as gateway, httpx.AsyncClient(trust_env=False, verify=False) as client:
        with gateway.opened(g) as url:
            key = url.rpartition("/")[2]
            bearer = {"authorization": f"Bearer {key}"}
            by_bearer = await client.get(f"{gateway.address}/v1/models", headers=bearer)
            assert by_bearer.json()["data"][0]["id"] == "policy"
            assert (await client.get(f"{url}/v1/models/policy")).json()["id"] == "policy"
            assert len(gateway) == 1
        dead = await client.get(f"{url}/v1/models")
        assert len(gateway) == 0
    assert dead.status_code == 401


async def test_a_forged_key_learns_nothing() -> None:
    async with visiting(scripted(says(Turn("done")))) as client:
        forged = str(client.base_url).rstrip("/")[:-1]
        bodies = set[str]()
        for address in (forged, forged.rpartition("/")[0] + "/x"):
            for path in ("/v1/chat/completions", "/tools/echo", "/tools/none"):
                r = await client.post(f"{address}{path}", content=b"garbage")
                assert r.status_code == 401
                bodies.add(r.text)
        no_key = await client.get(forged.split("/r/")[0] + "/v1/models")
        assert (no_key.status_code, len(bodies | {no_key.text})) == (401, 1)
        assert no_key.json()["error"]["code"] == "invalid_api_key"


# --- refusals --------------------------------------------------------------------------------


def with_message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"n": 2}, "n", "n is 2, want 1 or none"),
        ({"temperature": 0.5}, "temperature", "want the rollout's 1.0 or none"),
        ({"max_tokens": 0}, "max_tokens", "want a number of 1 or more"),
        ({"max_tokens": True}, "max_tokens", "want a number of 1 or more"),
        ({"stop": ["x"]}, "stop", "stop: not supported here"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs is 3, want 0 or none"),
        ({"tool_choice": "required"}, "tool_choice", 'is "required", want "auto" or none'),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"seed": "x"}, "seed", 'seed is "x", want a whole number'),
        ({"stream": "yes"}, "stream", "want true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "with stream only"),
        ({"frobnicate": 1}, "frobnicate", "frobnicate: not supported here"),
        ({"messages": []}, "messages", "want one message or more"),
        ({"messages": "x"}, "messages", "want a list"),
        ({"messages": ["x"]}, "messages.0", "want an object"),
        (with_message(role="king"), "messages.0.role", "want one of system, developer, user, assistant, tool"),
        (with_message(name="Bob"), "messages.0.name", "not supported"),
        (with_message(content=[{"type": "image_url"}]), "messages.0.content.0", 'type "image_url", want text'),
        (with_message(content=7), "messages.0.content", "want text"),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, None, "the assistant's own is the last"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "want a function"),
        ({"tools": [TOOL, TOOL]}, "tools", "each once"),
    ],
)
async def test_what_is_not_supported_is_refused_by_its_name(change: dict[str, Any], param: str, words: str) -> None:
    g = scripted(says(Turn("done")))
    async with visiting(g) as client:
        r = await client.post("/v1/chat/completions", json={**ASKED, **change})
    assert r.status_code == 400
    error = r.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert g.rollout("", "answered").trace.segments == ()


@pytest.mark.parametrize(
    "change",
    [
        {"n": 1, "stop": None, "logit_bias": {}, "response_format": {"type": "text"}, "user": "me", "top_p": 1},
        {"messages": [{**USER, "name": None}, {"role": "assistant", "content": "x", "audio": None}, USER]},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Work."}]}, USER]},
        {"max_tokens": 10**6, "seed": 3, "tools": [], "tool_choice": "auto", "temperature": 1},
    ],
)
async def test_what_changes_nothing_is_accepted(change: dict[str, Any]) -> None:
    async with visiting(scripted(says(Turn("done")))) as client:
        assert (await client.post("/v1/chat/completions", json={**ASKED, **change})).status_code == 200


@pytest.mark.parametrize("body", [b"", b"garbage", b"[]", b"{}", b'{"model": NaN}', b"\xff", b"[" * 100_000])
async def test_garbage_is_refused_in_openais_shape(body: bytes) -> None:
    async with visiting(scripted(says(Turn("done")))) as client:
        r = await client.post("/v1/chat/completions", content=body)
    assert r.status_code in (400, 404)
    assert r.json()["error"]["message"]


async def test_other_models_addresses_and_methods_are_refused() -> None:
    async with visiting(scripted(says(Turn("done")))) as client:
        model = await client.post("/v1/chat/completions", json={**ASKED, "model": "gpt-x"})
        assert (model.status_code, model.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/v1/chat/completions")).status_code == 405
        assert (await client.post("/v1/embeddings", json={})).json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    async with visiting(scripted(says(Turn("done"))), longest_body=1000) as client:
        r = await client.post("/v1/chat/completions", json={**ASKED, "user": "x" * 5000})
        assert r.status_code == 413
        assert (await client.get("/v1/models")).status_code == 200


async def test_an_agent_without_steps_is_told_and_its_rollout_is_no_answer() -> None:
    g = guest(engine(says(Turn("done"))), budget=Budget(1, 4096))
    async with visiting(g) as client:
        await client.post("/v1/chat/completions", json=ASKED)
        r = await client.post("/v1/chat/completions", json=ASKED)
    assert (r.status_code, r.json()["error"]["code"]) == (400, "budget_exhausted")
    assert g.rollout("", "error", "it ended with status 1").trace.status == "truncated"


# --- tools -----------------------------------------------------------------------------------


async def test_the_tools_of_the_world_are_listed_as_a_request_takes_them() -> None:
    async with visiting(scripted(says(Turn("done")))) as client:
        assert (await client.get("/tools")).json() == {"tools": [TOOL]}


async def test_a_tools_answer_shows_handles_of_the_rollouts_workspace() -> None:
    g = scripted(says(Turn("done")))
    async with visiting(g) as client:
        for k, words in ((1, "[Doc #1](w/1) Ohio"), (2, "#1")):
            r = await client.post("/tools/echo", json={"text": "Ohio", "url": "w/1"})
            assert r.json() == {"content": words, "error": None}, k
    assert g.rollout("| #1 | #1.a |", "answered").table == (("Ohio", "OHIO"),)


async def test_a_call_that_is_refused_says_why_and_is_counted() -> None:
    g = scripted(says(Turn("done")))
    async with visiting(g) as client:
        r = await client.post("/tools/echo", json={"x": 1})
        assert r.json() == {"content": "error: echo wants text", "error": "bad_arguments"}
        assert (await client.post("/tools/none", json={})).status_code == 404
        assert (await client.post("/tools/echo", content=b"x")).status_code == 400
    assert g.rollout("", "answered").ledger.counts == {"bad_arguments": 1}


# --- clients that leave ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_what_the_engine_does_and_leaves_nothing(stream: bool) -> None:
    slow = engine(says(Turn("done")), delay=1e9)
    g = guest(slow)
    async with visiting(g, waiting=0.01) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_and_ignore, client, stream)
            await until(lambda: slow.pending == 1)
            nursery.cancel_scope.cancel()
        await until(lambda: slow.pending == 0)
        assert (await client.get("/v1/models")).status_code == 200
    r = g.rollout("", "answered")
    assert (r.trace.segments, r.ledger.stages, r.trace.status) == ((), (), "answered")


async def ask_and_ignore(client: httpx.AsyncClient, stream: bool) -> None:
    await client.post("/v1/chat/completions", json={**ASKED, "stream": stream}, timeout=None)


async def until(done: Any) -> None:
    with trio.fail_after(10):
        while not done():
            await trio.sleep(0.005)


async def test_a_rollout_that_closes_cancels_its_requests() -> None:
    slow = engine(says(Turn("done")), delay=1e9)
    g = guest(slow)
    async with visiting(g) as client, trio.open_nursery() as nursery:
        nursery.start_soon(ask_and_ignore, client, False)
        await until(lambda: slow.pending == 1)
        g.close()
        await until(lambda: slow.pending == 0)
