"""Rollouts of graphs over the world's tools and the policy's own tokens: what PPO learns from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import trio
from langchain_core.messages import AIMessage, HumanMessage
from transformers import Qwen3Config, Qwen3ForCausalLM

import tests.test_references as references
from orchestrator.scripted import chosen_list, split
from recipes.graphs import react, supervisor
from rewards.parl import ParlConfig, parl
from rewards.table import table_scores
from subagents.scripted import read_table
from swarm.checkpoint import weights_sha256
from swarm.engine.embedded import EmbeddedEngine
from swarm.engine.scripted import ScriptedEngine
from swarm.gather import Job, gather
from swarm.loop import Harness
from swarm.rl.batch import collect
from swarm.rl.critic import CriticConfig
from swarm.rl.learner import Learner
from swarm.rl.optim import OptimizerConfig
from swarm.rl.ppo import PPOConfig
from swarm.transcript import Transcript
from swarm.types import Budget, Rollout, Runner, Sampling, Segment, Span, ToolCall, Turn
from tests.graph_cases import Kept, leads, of_node, of_nodes, rolled, runner, timeless
from tests.swarm_cases import TASK, Echo, call, chat, harness, says
from tests.test_token_in_token_out import CASES, CHATS, Spoken, a_merge_not_taken, check


@pytest.mark.slow
async def test_over_the_world_a_graph_makes_the_native_rollout_subagents_and_table_included():
    h = references.builder().ceiling()
    native, graph = await over_the_world(h), await over_the_world(runner(react, h))
    assert native.children
    assert timeless(graph) == timeless(native)


def lead(t: Transcript) -> Turn:
    """Searches, hands over two pages each, and hands in what all have written."""
    if not t.exchanges:
        return Turn("", (ToolCall("search", {"query": "#0"}),))
    if len(t.exchanges) == 2:
        return Turn("#rows")
    doc, pages = chosen_list(t)
    return Turn("", tuple(call("hand_over", prompt=f"#0 #{doc} p{a}-{b}") for a, b in split(pages, 6)))


@pytest.mark.slow
async def test_a_supervisor_hands_the_pages_of_a_list_to_workers_and_the_table_is_whole():
    b = references.builder()
    policy = b.scripted(lambda t: lead(t) if "hand_over" in t.system else read_table(t))
    r = await over_the_world(runner(supervisor, b.single(policy)))
    assert (r.trace.status, len(r.trace.segments)) == ("answered", 1 + 6)
    assert table_scores(references.task(), r.table)["item_f1"] == 1.0
    assert r.ledger.critical_steps < sum(len(turns(s)) for s in r.trace.segments)


async def over_the_world(r: Runner) -> Rollout:
    return await r.roll(references.task(), 7, Budget(400, 1 << 20))


def turns(segment: Segment) -> list[Span]:
    return [s for s in segment.spans if s.kind == "sampled"]


# --- tokens in, tokens out -----------------------------------------------------------------


async def test_what_is_trained_is_what_was_sampled_after_the_very_ids_that_the_engine_was_given():
    h = harness(leads, steps=20)
    engine = Kept(h.engine)
    r = await rolled(supervisor, replace(h, engine=engine))
    trained: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for segment in r.trace.segments:
        ids: tuple[int, ...] = ()
        for span in segment.spans:
            if span.kind == "sampled":
                trained.append((ids, span.ids))
            ids += span.ids
    assert len(trained) == 8
    assert sorted(trained) == sorted(engine.kept)


@pytest.mark.parametrize("case", CASES)
async def test_ids_that_no_text_is_encoded_to_are_kept_and_trained(case):
    odd, own = case(CHATS[0]), CHATS[0]
    turn = own.encode_turn("", [call("echo", text="x")])
    policy = Spoken(([*odd, *turn], turn, [*a_merge_not_taken(own), own.stop[0]]))
    h = Harness(ScriptedEngine(policy), own, (Echo(),), "Work.", Sampling(1000, stop=own.stop), Budget(9, 9000))
    check(own, policy, await rolled(react, h))


async def test_a_message_of_an_assistant_that_nobody_said_is_prompt():
    def node_of(model, tools):
        async def node(state):
            shown = [HumanMessage("2+2"), AIMessage("4"), HumanMessage("1+1")]
            return {"messages": [await model.ainvoke(shown)]}

        return node

    r = await rolled(of_node(node_of), harness(says(Turn("done"))))
    (segment,) = r.trace.segments
    assert [s.kind for s in segment.spans] == ["prompt", "sampled"]


# --- PPO ---------------------------------------------------------------------------------

CONFIG = PPOConfig(critic=CriticConfig(warmup_updates=0), optimizer=OptimizerConfig(max_grad_norm=1e9), minibatches=1)
STILL = replace(CONFIG, lr=1e-12, critic_lr=1e-12)


def model() -> Qwen3ForCausalLM:
    """A random one over the tokenizer's vocabulary."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(chat().tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def twice(model, tools):
    """Two nodes at once, each of which asks, says more, and asks again."""

    def asks(word):
        async def node(state):
            messages = [*state["messages"], HumanMessage(word)]
            said = await model.bind_tools(tools).ainvoke(messages)
            return {"messages": [await model.bind_tools(tools).ainvoke([*messages, said, HumanMessage("more")])]}

        return node

    return {"a": asks("a"), "b": asks("b")}


async def learnt_from(policy: Qwen3ForCausalLM) -> list[Rollout]:
    async with EmbeddedEngine(policy, max_len=512, cache_bytes=1 << 22) as engine:
        h = Harness(engine, chat(), (Echo(),), "Work.", Sampling(9, stop=chat().stop), Budget(20, 512))
        r = runner(of_nodes(twice), h)
        rollouts = await gather([Job(r, replace(TASK, meta={"pages": 2}), k, h.budget) for k in range(4)])
    return [parl(r, k / 4, ParlConfig(), 0) for k, r in enumerate(rollouts)]


@pytest.mark.slow
def test_before_the_first_step_a_policy_that_a_graph_ran_has_ratio_one_and_no_kl():
    policy = model()
    rollouts = trio.run(learnt_from, policy)
    assert [(r.trace.status, len(r.trace.segments)) for r in rollouts] == [("answered", 2)] * 4
    batch = collect(rollouts)
    assert len(batch) == sum(len(s.ids) for r in rollouts for g in r.trace.segments for s in turns(g))
    metrics = Learner(policy, STILL).update(batch)
    assert metrics.policy is not None
    assert metrics.drift_max < 1e-5
    assert metrics.policy.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics.policy.approx_kl) < 1e-5


@pytest.mark.slow
def test_an_update_from_rollouts_of_a_graph_changes_the_policy():
    policy = model()
    before = weights_sha256(policy)
    Learner(policy, CONFIG).update(collect(trio.run(learnt_from, policy)))
    assert weights_sha256(policy) != before
