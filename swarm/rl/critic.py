"""The critic: a network of its own that starts as a copy of the policy, or of its first layers, with a scalar head.

The value of an action is read where its log-probability is: at the position before it, so that
a token never sees its own value change. Not here: targets and losses.
"""

from __future__ import annotations

from copy import deepcopy

from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from swarm.rl.forward import hidden_states
from swarm.rl.rows import MicroBatch


class Critic(nn.Module):
    """V(context). The head starts at zero, so that V is 0 everywhere before the first step.

    `layers`: how many of the policy's it takes over, all if None.
    """

    def __init__(self, policy: Qwen3ForCausalLM, layers: int | None = None) -> None:
        super().__init__()
        self.trunk = deepcopy(policy)
        self.trunk.zero_grad()
        if layers is not None:
            self.trunk.model.layers = self.trunk.model.layers[:layers]
            self.trunk.config.num_hidden_layers = len(self.trunk.model.layers)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, micro: MicroBatch, bf16: bool = False) -> Tensor:
        """V [n], float32, before each action of the micro-batch. Independent of the sampling temperature."""
        return self.head(hidden_states(self.trunk, micro, bf16))[:, 0]
