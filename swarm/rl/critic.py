# pyright: reportUnknownMemberType=false
"""The critic: a network of its own that starts as a copy of the policy, or a head on the policy's own trunk.

The value of an action is read where its log-probability is: at the position before it, so that
a token never sees its own value change. Not here: targets and losses. Axes: n action tokens, d hidden.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from swarm.checks import want
from swarm.rl.forward import hidden_states
from swarm.rl.head import layers_of
from swarm.rl.rows import MicroBatch

_want = partial(want, "critic")

Trunk = Literal["own", "shared"]


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """`CriticConfig()`, or `CriticConfig(trunk="shared", layers=None, coef=0.1)`.

    `trunk`: a network of its own, which takes over `layers` of the policy's, all if None; or a head on the
    policy's last hidden state, where there are no layers to choose. The first `warmup_updates` updates train
    the critic alone, `warmup_epochs` passes each, and of a shared trunk the head alone, since to move the trunk
    is to move the policy. Later it makes `epochs` passes an update; on a shared trunk the pass is the policy's
    and the value loss is added to its loss times `coef`, which a critic of its own has no use for.
    `value_clip` bounds how far a value may move in one update.
    """

    trunk: Trunk = "own"
    layers: int | None = 2
    epochs: int = 1
    warmup_updates: int = 2
    warmup_epochs: int = 2
    value_clip: float | None = None
    coef: float = 0.5

    def __post_init__(self) -> None:
        _want("trunk", self.trunk, self.trunk in ("own", "shared"), "'own' or 'shared'")
        for name, x in (("epochs", self.epochs), ("warmup_epochs", self.warmup_epochs)):
            _want(name, x, x >= 1, "at least 1")
        _want("layers", self.layers, self.layers is None or self.layers >= 1, "None or at least 1")
        _want("warmup_updates", self.warmup_updates, self.warmup_updates >= 0, "at least 0")
        clip = self.value_clip
        _want("value_clip", clip, clip is None or 0 < clip < math.inf, "None or a finite number above 0")
        _want("coef", self.coef, 0 < self.coef < math.inf, "a finite number above 0")
        if self.trunk == "shared":
            _want(
                "layers", self.layers, self.layers is None, "None with trunk = 'shared', whose layers are the policy's"
            )
            _want("epochs", self.epochs, self.epochs == 1, "1 with trunk = 'shared', where the pass is the policy's")


class ValueHead(nn.Linear):
    """V from a last hidden state: `ValueHead(model.config.hidden_size).values(h_nd)`.

    It starts at zero, so that V is 0 everywhere before the first step.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, h_nd: Tensor) -> Tensor:
        """V [n], float32. Detach `h_nd` to train the head alone."""
        return self(h_nd.float())[:, 0]


class Critic(nn.Module):
    """V(context) by a network of its own. `layers`: how many of the policy's it takes over, all if None.

    All of it is trained, so it is made from a policy of which nothing is frozen yet.
    """

    def __init__(self, policy: PreTrainedModel, layers: int | None = None) -> None:
        super().__init__()
        self.trunk = deepcopy(policy)
        self.trunk.zero_grad()
        if layers is not None:
            name, kept = layers_of(self.trunk)
            setattr(self.trunk.base_model, name, kept[:layers])
            config = self.trunk.config
            config.num_hidden_layers = len(kept[:layers])
            if vars(config).get("layer_types"):
                config.layer_types = config.layer_types[:layers]
        self.head = ValueHead(policy.config.hidden_size)

    def values(self, micro: MicroBatch, bf16: bool = False) -> Tensor:
        """V [n], float32, before each action of the micro-batch. Independent of the sampling temperature."""
        return self.head.values(hidden_states(self.trunk, micro, bf16))
