"""The settings of a training run, nested by owner. A recipe is a function that returns a `Recipe`.

Every field can be overridden on the command line (`--ppo.surrogate.clip_high 0.28`), and the run folder keeps
the whole of it. Not here: what the settings do.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from envs.world import WorldConfig
from orchestrator.tools import SpawnLimits
from recipes.cast.roles import RoleSettings, Swaps, Weights, check_swaps
from recipes.grid.judging import Judging, VerifierName, check_shares
from recipes.placement import EngineKind, Placement, Serving
from recipes.publish.rules import Publish, check_best
from rewards.parl import ParlConfig
from swarm.context import ContextPolicy
from swarm.rl.ppo import PPOConfig

SHIPPED = Path(__file__).parents[1] / "subagents" / "checkpoints" / "reader-1m"
"""The cold-started checkpoint that comes with the package; its card says how it was made."""

HarnessName = Literal["orchestrator", "single", "compaction", "truncation", "react", "supervisor", "program"]
"""How an agent can be run through which a recipe trains; `recipes.harnesses` has what they are."""


def _range(name: str, value: tuple[int, int]) -> None:
    if not 1 <= value[0] <= value[1]:
        raise ValueError(f"{name} = {value}, want 1 <= low <= high")


@dataclass(frozen=True, slots=True)
class TaskMix:
    """Which tasks are drawn, and with which budget of critical steps, both log-uniform over their range."""

    rows: tuple[int, int] = (3, 80)
    budget: tuple[int, int] = (10, 40)

    def __post_init__(self) -> None:
        _range("tasks: rows", self.rows)
        _range("tasks: budget", self.budget)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an agent: sampled tokens a turn, tokens of context, critical steps, seconds, and its temperature.

    `rewriting`: what is done before the context is full, if anything.
    """

    turn_tokens: int
    context: int
    steps: int
    seconds: float = 300.0
    temperature: float = 1.0
    rewriting: ContextPolicy = field(default_factory=ContextPolicy)

    def __post_init__(self) -> None:
        for name in ("turn_tokens", "context", "steps", "seconds", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"limits: {name} = {getattr(self, name)}, want more than 0")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The closing evaluation: `tasks` held-out tasks at the full budget `budget`, all systems; then the sweep
    of budgets on `wide_tasks` tasks of `wide_rows` rows. The short one during training has `during` tasks.
    """

    tasks: int = 200
    rows: tuple[int, int] = (3, 80)
    budget: int = 40
    wide_tasks: int = 48
    wide_rows: tuple[int, int] = (50, 80)
    sweep_swarm: tuple[int, ...] = (5, 6, 7, 8, 10, 12, 16, 24, 40)
    sweep_single: tuple[int, ...] = (8, 12, 16, 24, 40, 64, 96, 128)
    during: int = 48

    def __post_init__(self) -> None:
        for name in ("tasks", "budget", "wide_tasks", "during"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluation: {name} = {getattr(self, name)}, want 1 or more")
        _range("evaluation: rows", self.rows)
        _range("evaluation: wide_rows", self.wide_rows)


@dataclass(frozen=True, slots=True)
class Training:
    """What every PPO run has: its seed, its length, its optimizer, and where it starts.

    An iteration is `episodes` rollouts, `group` of each task. `at_once` bounds the root agents that run
    together, `threads` the cores (0: all). Every `quick_every` iterations a short evaluation is made. `engine`,
    `serving` and `placement` say where it all runs, `judging` who judges what rules cannot, `publish` which
    checkpoints are kept.
    """

    seed: int = 0
    iterations: int = 30
    episodes: int = 64
    group: int = 1
    start: Path = SHIPPED
    ppo: PPOConfig = field(default_factory=PPOConfig)
    at_once: int = 64
    threads: int = 0
    checkpoint_every: int = 1
    quick_every: int = 10
    engine: EngineKind = "embedded"
    serving: Serving = field(default_factory=Serving)
    placement: Placement = field(default_factory=Placement)
    judging: Judging = field(default_factory=Judging)
    publish: Publish = field(default_factory=Publish)
    wandb: Literal["offline", "online", "disabled"] = "offline"

    def __post_init__(self) -> None:
        for name in ("iterations", "episodes", "group", "at_once", "checkpoint_every", "quick_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe: {name} = {getattr(self, name)}, want 1 or more")
        if self.episodes % self.group:
            raise ValueError(f"recipe: episodes = {self.episodes}, want a multiple of group = {self.group}")
        if not self.ppo.advantage.critic and self.group < 2:
            form = self.ppo.advantage.form
            raise ValueError(f"recipe: group = {self.group} with ppo.advantage.form = {form!r}, want 2 or more")
        if self.engine == "embedded" and self.serving.dtype != "float32":
            raise ValueError(f"recipe: serving.dtype = {self.serving.dtype!r} with engine = 'embedded', want 'float32'")
        if self.threads < 0:
            raise ValueError(f"recipe: threads = {self.threads}, want 0 (all cores) or more")

    def check_temperature(self, main: Limits) -> None:
        """Raises ValueError where the learner would take another temperature for the sampler's than it has."""
        if main.temperature != self.ppo.temperature:
            seen = f"ppo.temperature = {self.ppo.temperature} with main.temperature = {main.temperature}"
            raise ValueError(f"recipe: {seen}, want the same: ratios are of the distribution that was sampled from")


@dataclass(frozen=True, slots=True)
class Recipe(Training):
    """A PPO run on tables. `spawn` gives the policy `create_subagent` and `assign_task`; without, it is a single agent.

    `start` is the checkpoint that it starts from, `subagent` the frozen one that it spawns. `roles` has others, by the
    names that the orchestrator gives ("" for every name that has none), each a folder or settings; `swaps` says who
    takes over at which iteration. `harnesses`: each rollout is made through one of these, drawn by weight; {} is the
    recipe's own. `program` is the command of an agent program, for the harness of that name. `verifier` scores what the
    reward calls performance.
    """

    spawn: bool = True
    subagent: Path = SHIPPED
    roles: dict[str, str | RoleSettings] = field(default_factory=dict[str, "str | RoleSettings"])
    swaps: Swaps = field(default_factory=dict[str, dict[str, Weights]])
    harnesses: dict[HarnessName, float] = field(default_factory=dict[HarnessName, float])
    program: tuple[str, ...] = ()
    verifier: VerifierName = "item_f1"
    world: WorldConfig = field(default_factory=lambda: WorldConfig(conflicts=0.1, missing=0.05))
    tasks: TaskMix = field(default_factory=TaskMix)
    main: Limits = field(default_factory=lambda: Limits(turn_tokens=256, context=8192, steps=40))
    child: Limits = field(default_factory=lambda: Limits(turn_tokens=96, context=2048, steps=32, temperature=0.3))
    spawning: SpawnLimits = field(default_factory=SpawnLimits)
    parl: ParlConfig = field(default_factory=ParlConfig)
    evaluation: Evaluation = field(default_factory=Evaluation)

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        check_best(self.publish, ("eval/item_f1", "eval/finish_rate"))
        self.check_temperature(self.main)
        check_swaps(self.swaps, self.iterations)
        check_shares("harnesses", {**self.harnesses})
        for name in self.harnesses:
            if why := self.misfit(name):
                raise ValueError(f"recipe: harnesses has {name!r}, which does not fit: {why}")
        if why := "its tasks are tables" if self.verifier == "trails" else self.judging.lacks(self.verifier):
            raise ValueError(f"recipe: verifier = {self.verifier!r} does not fit: {why}")

    @property
    def alone(self) -> HarnessName:
        """The harness of a single agent of this recipe."""
        kind = self.main.rewriting.kind
        return "single" if kind == "none" else kind

    def misfit(self, harness: str) -> str:
        """Why a harness does not fit this recipe, in a few words; nothing where it does."""
        if harness == "orchestrator" and not self.spawn:
            return "spawn = false, so that there are no subagents"
        kind = self.main.rewriting.kind
        if harness in ("compaction", "truncation") and kind != harness:
            return f"main.rewriting.kind = {kind!r}, want {harness!r}"
        if harness == "program" and not self.program:
            return "program = (), want the command of an agent program"
        if harness == "program" and shutil.which(self.program[0]) is None:
            return f"program = {shlex.join(self.program)!r}, want a command that can be run"
        return ""

    def role(self, name: str) -> RoleSettings:
        """The settings of a role; those of "" have a checkpoint always."""
        found = self.roles.get(name, RoleSettings())
        settings = RoleSettings({found: 1.0}) if isinstance(found, str) else found
        if settings.checkpoints or name:
            return settings
        return replace(settings, checkpoints={str(self.subagent): 1.0})

    def cast(self, iteration: int = 0) -> dict[str, Weights]:
        """Who takes over at an iteration, 0 being before the first; by role."""
        if iteration:
            return self.swaps.get(str(iteration), {})
        named = {name: self.role(name).checkpoints for name in self.roles if self.role(name).checkpoints}
        return {"": self.role("").checkpoints, **named}

    def players(self, iteration: int = 0) -> list[Path]:
        """The checkpoints of a cast as they are written, folders or names in the store, each once."""
        return list(dict.fromkeys(Path(folder) for weights in self.cast(iteration).values() for folder in weights))
