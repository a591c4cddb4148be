"""Where the parts of a run stand, and how its engines serve: settings that change how fast, never what is learnt.

    engine      embedded: in this process, dense Qwen3 in float32
                vllm: vLLM in this process, stepped between the turns of the agents
                server: vLLM servers in processes of their own, reached over HTTP
    placement   how many engines, rollout workers and learners there are

Not here: what these do (`swarm.engine`, `swarm.cluster`, `swarm.rl.group`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from swarm.checks import want

EngineKind = Literal["embedded", "vllm", "server"]

_serving = partial(want, "serving")
_placement = partial(want, "placement")


@dataclass(frozen=True, slots=True)
class Serving:
    """How one engine serves.

    `cache_mib` bounds its keys and values, `max_seqs` the requests in a batch of vLLM. `tensor_parallel` is the GPUs
    of one vLLM engine. A step or an answer that takes more than `seconds` is a failure. After each update of the
    weights a probe is sampled: log-probabilities that are more than `probe_bound` nats from the learner's stop the run.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    cache_mib: int = 1024
    max_seqs: int = 256
    prefix_caching: bool = True
    tensor_parallel: int = 1
    seconds: float = 120.0
    probe_bound: float = 0.01

    def __post_init__(self) -> None:
        _serving("dtype", self.dtype, self.dtype in ("float32", "bfloat16"), "'float32' or 'bfloat16'")
        for name in ("cache_mib", "max_seqs", "tensor_parallel"):
            _serving(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        for name in ("seconds", "probe_bound"):
            value = getattr(self, name)
            _serving(name, value, 0 < value < math.inf, "a finite number above 0")


@dataclass(frozen=True, slots=True)
class Placement:
    """How many of each part there are.

    `engines` is how many servers the run has for policy and subagents together; `balance` lets their shares follow
    the queues. `subagents`: each of several checkpoints has an engine, or they take turns on one. `workers`: rollout
    workers, each with engines of its own, as Ray actors on the cluster at `address` ("": this machine); 0 collects in
    this process. `learners`: processes that share an update, on that cluster where it has workers, else here.
    """

    engines: int = 2
    balance: bool = True
    subagents: Literal["each", "turns"] = "each"
    workers: int = 0
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    learners: int = 1
    learner_cpus: float = 1.0
    learner_gpus: float = 0.0
    address: str = ""

    def __post_init__(self) -> None:
        _placement("engines", self.engines, self.engines >= 2, "2 or more: one for the policy, one for subagents")
        _placement("subagents", self.subagents, self.subagents in ("each", "turns"), "'each' or 'turns'")
        _placement("workers", self.workers, self.workers >= 0, "0 or more")
        _placement("learners", self.learners, self.learners >= 1, "1 or more")
        for name in ("worker_cpus", "learner_cpus"):
            value = getattr(self, name)
            _placement(name, value, 0 < value < math.inf, "a finite number above 0")
        for name in ("worker_gpus", "learner_gpus"):
            value = getattr(self, name)
            _placement(name, value, 0 <= value < math.inf, "a finite number of at least 0")
