"""The processes of a run and what each of them holds, from its recipe and the sizes of its models.

    embedded, vllm   main: world, agents, engines, learner
    server           main: world, agents, learner       server 1 …: an engine each
    workers          main as before, to evaluate        worker 1 …: world, agents, engines
    learners > 1     main without a learner             learner 1 …

Not here: the formulas (`recipes.plan.memory`), and where processes find room (`recipes.plan.command`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipes.cold_start import ColdStart
from recipes.compaction.run import Compaction
from recipes.compaction.start import TrailStart
from recipes.compaction.systems import FULL
from recipes.config import Recipe, Training
from recipes.plan.machine import Node
from recipes.plan.memory import (
    FLOAT,
    GIB,
    HALF,
    MIB,
    Memory,
    ModelSize,
    Trained,
    activations,
    adapters,
    embedded,
    fused_activations,
    hidden_matrices,
    last_layers,
    moments,
    parameters,
    sft_head_bytes,
    vllm,
    whole,
)
from swarm.rl.adapt import AdaptConfig
from swarm.rl.ppo import PPOConfig

PROGRAM = 1100 * MIB
"""Interpreter, packages, compiled kernels, the world and its tasks: measured here."""
VLLM_PROGRAM = 500 * MIB
"""What vLLM adds to that on a CPU: measured here."""
LEARNER_PROGRAM = 650 * MIB
"""Interpreter and packages of a process without a world: measured here."""
CUDA_CONTEXT = 1 * GIB
"""A GPU's context with cuBLAS and NCCL, and what the allocator leaves unused; an estimate."""
CUDA_GRAPHS = 2 * GIB
"""What vLLM captures on a GPU; an estimate."""
_VLLM_TOKENS = 2048
"""Tokens of a step of vLLM, or as many as a context has, if that is more (`swarm.engine.vllm`)."""


NOTHING = Memory()


@dataclass(frozen=True, slots=True)
class Sizes:
    """The models of a run. `frozen` are served beside the policy: the subagents' and those of other roles."""

    policy: ModelSize
    frozen: tuple[ModelSize, ...] = ()
    teachers: tuple[ModelSize, ...] = ()

    @property
    def served(self) -> tuple[ModelSize, ...]:
        return (self.policy, *self.frozen)


@dataclass(frozen=True, slots=True)
class Process:
    """One process: what it takes of its node's memory (`host`) and, if it has `gpus`, of each of them (`device`).

    `cpus` are those that a Ray actor reserves; 0 for a process that shares its node's cores with others.
    """

    name: str
    parts: tuple[str, ...]
    host: Memory
    gpus: float = 0.0
    device: Memory = NOTHING
    cpus: float = 0.0


def processes_of(recipe: Training | ColdStart | TrailStart, sizes: Sizes, node: Node) -> list[Process]:
    """All processes of a run on nodes like this one, the main one first."""
    if isinstance(recipe, ColdStart | TrailStart):
        return [_fitting(recipe, sizes.policy, node)]
    placement = recipe.placement
    return [
        _main(recipe, sizes, node),
        *(_learner(recipe, sizes, node, k) for k in range(placement.learners if placement.learners > 1 else 0)),
        *(_servers(recipe, sizes, node) if recipe.engine == "server" else []),
        *(_worker(recipe, sizes, node, k) for k in range(placement.workers)),
    ]


def longest(recipe: Training) -> int:
    """Tokens of the longest context that an engine has to hold."""
    if isinstance(recipe, Recipe):
        return max(recipe.main.context, recipe.child.context)
    return FULL if isinstance(recipe, Compaction) else 0


def row_tokens(recipe: Training) -> int:
    """Tokens of the longest micro-batch: as many as it may have, or a whole row if that is longer."""
    match recipe:
        case Compaction(system="full_window"):
            row = FULL
        case Recipe() | Compaction():
            row = recipe.main.context
        case _:
            row = 0
    return max(recipe.ppo.micro_tokens, row)


def threads_on(recipe: Training | ColdStart | TrailStart, node: Node) -> int:
    """Cores that engine and learner use each: `recipes.session.threads_of`, on such a node."""
    threads = recipe.threads or node.cpus
    return max(1, threads // 2) if isinstance(recipe, Training) and recipe.ppo.max_staleness else threads


def on_ray(recipe: Training) -> bool:
    """Whether workers and learners are Ray's actors."""
    return recipe.placement.workers > 0 or bool(recipe.placement.address)


# --- processes -------------------------------------------------------------------------


def _main(recipe: Training, sizes: Sizes, node: Node) -> Process:
    """The process that the user starts; it holds the policy's weights also where others learn."""
    placement, threads = recipe.placement, threads_on(recipe, node)
    parts, host, device, gpus = ["world"], Memory(program=PROGRAM), NOTHING, 0.0
    if recipe.engine != "server":
        host, device, gpus = _engines(recipe, sizes, node, threads)
        host += Memory(program=PROGRAM)
        parts.append("engines")
    if placement.learners == 1:
        on_gpu = node.gpus > 0
        memory = learner(recipe, sizes, threads, on_gpu=on_gpu)
        parts.append("learner")
        if on_gpu:
            device += memory if device.program else memory + Memory(program=CUDA_CONTEXT)
            host += Memory(weights=_file(sizes.policy))
            gpus = max(gpus, 1.0)
        else:
            host += memory
    else:
        host += Memory(weights=_file(sizes.policy))
    if placement.workers:
        host += Memory(weights=_file(sizes.policy))  # new weights, in Ray's object store
    return Process("main", tuple(parts), host, gpus, device)


def _servers(recipe: Training, sizes: Sizes, node: Node) -> list[Process]:
    """Those of policy and subagents may be given over to each other, so each has room for the larger; then one for
    each other checkpoint."""
    served = _served(recipe, sizes)
    shared, others = served[:2], served[2:]
    count = recipe.placement.engines if len(shared) > 1 else 1
    made: list[Process] = []
    for size in (*[max(shared, key=parameters)] * count, *others):
        host, device, gpus = _one_vllm(recipe, size, node)
        host += Memory(program=LEARNER_PROGRAM)
        made.append(Process(f"server {len(made) + 1}", ("engine",), host, gpus, device))
    return made


def _worker(recipe: Training, sizes: Sizes, node: Node, k: int) -> Process:
    placement = recipe.placement
    cpus = max(1, int(placement.worker_cpus))
    on = replace(
        node, gpus=node.gpus if placement.worker_gpus else 0, gpu_memory=node.gpu_memory * bool(placement.worker_gpus)
    )
    if recipe.engine == "server":
        servers = _servers(recipe, sizes, on)
        host, device = (sum((getattr(p, of) for p in servers), NOTHING) for of in ("host", "device"))
    else:
        host, device, _ = _engines(recipe, sizes, on, cpus)
    host += Memory(program=PROGRAM)
    return Process(f"worker {k + 1}", ("world", "engines"), host, placement.worker_gpus, device, placement.worker_cpus)


def _learner(recipe: Training, sizes: Sizes, node: Node, k: int) -> Process:
    """One of several that share an update: it sums the gradients of all, in one row and a copy of it."""
    placement = recipe.placement
    on_gpu = placement.learner_gpus > 0
    memory = learner(recipe, sizes, 1 if on_gpu else threads_on(recipe, node), on_gpu=on_gpu)
    host = Memory(program=LEARNER_PROGRAM)
    if on_gpu:
        host += Memory(weights=_file(sizes.policy))
        memory += Memory(program=CUDA_CONTEXT)
    return Process(
        f"learner {k + 1}",
        ("learner",),
        host if on_gpu else host + memory,
        placement.learner_gpus,
        memory if on_gpu else NOTHING,
        1.0 if on_ray(recipe) else 0.0,
    )


def _fitting(recipe: ColdStart | TrailStart, size: ModelSize, node: Node) -> Process:
    """A supervised run: the model alone, its gradients and its optimizer."""
    moved = whole(size)
    tokens, on_gpu = recipe.sft.micro_tokens, node.gpus > 0
    act = _activations(size, tokens, moved, threads_on(recipe, node), half=recipe.sft.bf16, on_gpu=on_gpu)
    memory = Memory(
        weights=_file(size),
        gradients=moved.parameters * moved.width,
        optimizer=moments(moved, muon=recipe.sft.optimizer.kind == "muon"),
        activations=act + sft_head_bytes(size, tokens),
    )
    host = Memory(program=PROGRAM)
    if not on_gpu:
        return Process("main", ("world", "fitting"), host + memory)
    return Process("main", ("world", "fitting"), host, 1.0, memory + Memory(program=CUDA_CONTEXT))


# --- parts -----------------------------------------------------------------------------


def _engines(recipe: Training, sizes: Sizes, node: Node, threads: int) -> tuple[Memory, Memory, float]:
    """The engines that stand in one process: of the policy, and of every frozen model."""
    models = _served(recipe, sizes)
    cache, room = recipe.serving.cache_mib * MIB, longest(recipe)
    if recipe.engine == "embedded":
        each = [embedded(size, cache, room, threads, updated=k == 0) for k, size in enumerate(models)]
        return sum(each, NOTHING), NOTHING, 0.0
    hosts, devices, gpus = zip(*(_one_vllm(recipe, size, node) for size in models), strict=True)
    # Packages and the GPU's context are there once.
    return _sum_once(hosts), _sum_once(devices), max(gpus)


def _served(recipe: Training, sizes: Sizes) -> tuple[ModelSize, ...]:
    """Those that have engines: where frozen ones take turns, the largest of them stands for all."""
    if recipe.placement.subagents == "turns" and sizes.frozen:
        return (sizes.policy, max(sizes.frozen, key=parameters))
    return sizes.served


def _one_vllm(recipe: Training, size: ModelSize, node: Node) -> tuple[Memory, Memory, float]:
    """A vLLM engine: (in the node's memory, on each of its GPUs, how many GPUs)."""
    s = recipe.serving
    width = HALF if s.dtype == "bfloat16" else FLOAT
    share = s.tensor_parallel if node.gpus else 1
    tokens = max(longest(recipe), _VLLM_TOKENS)
    memory = vllm(size, s.cache_mib * MIB, tokens, s.max_seqs, width, share)
    if not node.gpus:
        return memory + Memory(program=VLLM_PROGRAM), NOTHING, 0.0
    host = Memory(weights=_file(size), program=VLLM_PROGRAM)
    return host, memory + Memory(program=CUDA_CONTEXT + CUDA_GRAPHS), float(share)


def _sum_once(memories: tuple[Memory, ...]) -> Memory:
    whole = sum(memories, NOTHING)
    return replace(whole, program=max(m.program for m in memories))


def learner(recipe: Training, sizes: Sizes, threads: int, *, on_gpu: bool) -> Memory:
    """Policy, critic, frozen models, their gradients and optimizers, and what a pass or a step needs besides.

    The critic's passes come before the policy's: of gradients and activations only the larger are there. A step of
    several learners adds up gradients in one row and a copy of it; adapters are merged into new matrices when the
    engines get them. None of these comes together with activations.
    """
    ppo, policy = recipe.ppo, sizes.policy
    moved, value = trained(policy, ppo.adapt), _critic(ppo, policy)
    muon = ppo.optimizer.kind == "muon"
    frozen = [*sizes.teachers, *([policy] if ppo.kl.coef > 0 else [])]
    added = moved.parameters * FLOAT if moved.ranks else 0
    gradients = max(x.parameters * x.width for x in (moved, value.moved))
    tokens = row_tokens(recipe)
    act = _activations(policy, tokens, moved, threads, half=ppo.bf16, on_gpu=on_gpu)
    exchanged = 2 * gradients if recipe.placement.learners > 1 else 0
    merged = hidden_matrices(policy) * policy.width if moved.ranks else 0
    return Memory(
        weights=_file(policy) + added + value.weights + sum(_file(size) for size in frozen),
        gradients=gradients,
        optimizer=moments(moved, muon=muon) + moments(value.moved, muon=muon),
        activations=max(act, exchanged, merged),
    )


def trained(size: ModelSize, config: AdaptConfig) -> Trained:
    """What of a policy is trained."""
    match config.kind:
        case "all":
            return whole(size)
        case "last_layers":
            return last_layers(size, config.layers)
        case "lora":
            return adapters(size, config.rank, config.targets)


@dataclass(frozen=True, slots=True)
class _Critic:
    """Bytes of what the critic adds to the policy, and what of it is trained."""

    weights: int
    moved: Trained


def _critic(ppo: PPOConfig, policy: ModelSize) -> _Critic:
    """A network of its own, or a head of M + 1 numbers in 4 bytes. A copied head that is not tied is never used."""
    head = policy.hidden + 1
    if ppo.critic.trunk == "shared":
        return _Critic(head * FLOAT, Trained(head, 0, FLOAT))
    count = parameters(policy, ppo.critic.layers)
    used = count - (0 if policy.tied else policy.vocab * policy.hidden)
    moved = Trained(used, hidden_matrices(policy, ppo.critic.layers), policy.width)
    return _Critic(count * policy.width + head * FLOAT, moved)


def _activations(size: ModelSize, tokens: int, moved: Trained, threads: int, *, half: bool, on_gpu: bool) -> int:
    if on_gpu or size.family != "qwen3" or size.biased or size.width != FLOAT:
        return activations(size, tokens, moved, half=half)
    # The fused forward reads merged matrices, whose gradients are as large.
    merged = 2 * hidden_matrices(size) * size.width if moved.ranks else 0
    return fused_activations(size, tokens, threads, half=half) + merged


def _file(size: ModelSize) -> int:
    """Bytes of the weights as they are on disk and in the learner."""
    return parameters(size) * size.width
