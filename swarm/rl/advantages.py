# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Advantages and value targets of rollouts whose context was compacted, in every form that we compare.

    chained   A runs through all segments of a rollout: compaction is a transition like any other
    copied    each segment is an episode of its own that ends with the rollout's outcome
    decayed   copied, and times what a chain would have left of it on the way back (CompactionRL)
    mean, rloo, grpo   no critic: the rollout's reward against the other rollouts of its task

Three things are kept apart. A termination is followed by nothing. A truncation is followed by the value of
the context at the cut. A compaction boundary is neither: the chained form does not see it.

Only action tokens come in. Not here: whitening (`swarm.rl.losses`), the critic, and any split into processes
or micro-batches, which must come after; a task's rollouts must be together for the forms without critic.
Axes: N action tokens in the order of rollouts, segments and ids; R rollouts; G tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from swarm.checks import want
from swarm.rl.gae import decay_after, first_out_of_order, gae, last_of

_want = partial(want, "advantage")

Form = Literal["chained", "copied", "decayed", "mean", "rloo", "grpo"]
LamUnit = Literal["token", "turn"]
Time = Literal["none", "turn", "critical_steps"]

GRPO_EPS = 1e-6
"""Added to a group's standard deviation, as verl does."""


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """`AdvantageConfig(lam=0.95, lam_unit="turn")`. The defaults give A = R − V on every token.

    `lam` is the policy's λ, `lam_critic` that of the value targets (VC-PPO, arXiv 2503.01491). With
    `lam_unit="turn"` both act at a turn's last token only and are 1 inside it.
    `lam_alpha` replaces `lam` by max(0, 1 − 1/(αL)), L the action tokens of the whole rollout, whatever the
    unit (VAPO, arXiv 2504.05118, takes α = 0.05; CompactionRL, arXiv 2607.05378, 1.5).
    `time` is what γ counts. none: action tokens; turn: turns; critical_steps: the critical steps of each
    turn. The last two discount at a turn's last token only (semi-MDP: γ^τ, τ = 0 inside a turn).
    """

    form: Form = "chained"
    gamma: float = 1.0
    lam: float = 1.0
    lam_critic: float = 1.0
    lam_unit: LamUnit = "token"
    lam_alpha: float | None = None
    time: Time = "none"

    def __post_init__(self) -> None:
        for name, choice, choices in (
            ("form", self.form, get_args(Form)),
            ("lam_unit", self.lam_unit, get_args(LamUnit)),
            ("time", self.time, get_args(Time)),
        ):
            _want(name, choice, choice in choices, f"one of {', '.join(choices)}")
        for name, x in (("gamma", self.gamma), ("lam", self.lam), ("lam_critic", self.lam_critic)):
            _want(name, x, 0 <= x <= 1, "0 to 1")
        _want("lam_alpha", self.lam_alpha, self.lam_alpha is None or 0 < self.lam_alpha < math.inf,
              "None or a finite number above 0")  # fmt: skip
        if not self.critic:
            self._want_defaults()
        _want("lam", self.lam, self.lam_alpha is None or self.lam == 1,
              f"1.0 with lam_alpha = {self.lam_alpha}, which replaces it")  # fmt: skip
        _want("time", self.time, self.time == "none" or self.gamma < 1, "'none' with gamma = 1, which discounts none")

    def _want_defaults(self) -> None:
        for name, x, default in (
            ("gamma", self.gamma, 1.0),
            ("lam", self.lam, 1.0),
            ("lam_critic", self.lam_critic, 1.0),
            ("lam_unit", self.lam_unit, "token"),
            ("lam_alpha", self.lam_alpha, None),
            ("time", self.time, "none"),
        ):
            _want(name, x, x == default, f"{default!r} with form = {self.form!r}, which has no critic")

    @property
    def critic(self) -> bool:
        """Whether the form needs values."""
        return self.form in ("chained", "copied", "decayed")


@dataclass(frozen=True, slots=True)
class Chain:
    """The action tokens of R rollouts, with what they earned and what the critic made of them.

    `reward_R` comes on a rollout's last action token. `bootstrap_R` is 0 at a termination, and the value
    of the context at the cut at a truncation. `extra_N` are rewards on tokens, such as −β·KL.
    `rollout_N` indexes R, `segment_N` counts segments through all rollouts (an index may have no tokens),
    `turn_N` counts turns in a rollout; none of them falls within a rollout. `steps_N` has on every token
    the critical steps of its turn, None without a ledger. Rollouts of one task share a `group_R`.
    """

    reward_R: Tensor
    bootstrap_R: Tensor
    extra_N: Tensor | None
    value_N: Tensor
    rollout_N: Tensor
    segment_N: Tensor
    turn_N: Tensor
    steps_N: Tensor | None
    group_R: Tensor

    def cpu(self) -> Chain:
        """The same on the CPU, without gradient."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: None if x is None else x.detach().cpu() for name, x in tensors.items()})


def advantages(chain: Chain, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """(advantage [N], target [N]), float64, on the device of the values, not whitened.

    chained: A_j = δ_j + d_j λ_j A_{j+1} over the actions of a whole rollout, so that a segment's last action
    looks at the value and the advantage of the next segment's first. With visible context as state this is the
    policy gradient of SUPO, arXiv 2510.06727, theorem 3.2, with a critic.

    copied: the same within each segment; the outcome, r + d·V(cut) on the rollout's last token, stands on
    every segment's last token, and nothing follows.

    decayed: copied, times (γλ)^{N_{>s}}, N_{>s} the rollout's action tokens in later segments
    (CompactionRL, arXiv 2607.05378). With other units it is the product of the d_j λ_j that a chain
    would have gone through on its way back over those segments: λ once a turn with `lam_unit="turn"`, γ^τ once a
    turn with `time`, the rollout's own λ with `lam_alpha`. So decayed is chained where V = 0 and there is
    no `extra_N`.

    The target is A + V of the same form with `lam_critic`, without the decay: at γ = λ_critic = 1, R.

    mean: r − mean; rloo: r − mean of the others (arXiv 2402.14740); grpo: (r − mean) / (std + 1e-6), std with
    n − 1 (arXiv 2402.03300; std as in verl and TRL). r is one number a rollout, `extra_N` added up into it;
    the advantage stands on each of its tokens, 0 in a group of one. Values are not read, targets are 0.

    Raises ValueError on unequal lengths, on indices out of order, on negative steps or none at all
    when `time="critical_steps"`, and on a bootstrap without critic.
    """
    device = chain.value_N.device
    chain = chain.cpu()
    _check(chain, config)
    if not config.critic:
        advantage_N = _against_group(chain, config.form)[chain.rollout_N]
        return advantage_N.to(device), torch.zeros_like(advantage_N, device=device)
    turn_end_N = last_of(chain.rollout_N) | last_of(chain.turn_N)
    discount_N = _discounts(chain, config, turn_end_N)
    of_lam = _estimator(chain, config.form, discount_N)
    lam_N = _per_unit(_policy_lam(chain, config), config, turn_end_N)
    advantage_N = of_lam(lam_N)
    if config.form == "decayed":
        advantage_N *= decay_after(discount_N * lam_N, chain.segment_N, chain.rollout_N)
    lam_critic_N = _per_unit(_everywhere(chain, config.lam_critic), config, turn_end_N)
    return advantage_N.to(device), (of_lam(lam_critic_N) + chain.value_N).to(device)


def groups_of_one(group_R: Tensor) -> int:
    """How many tasks have a single rollout: without a critic nothing is learnt from those."""
    return int((torch.unique(group_R, return_counts=True)[1] == 1).sum())


# --- with a critic ---------------------------------------------------------------------


def _everywhere(chain: Chain, x: float) -> Tensor:
    return torch.full(chain.value_N.shape, x, dtype=torch.float64)


def _discounts(chain: Chain, config: AdvantageConfig, turn_end_N: Tensor) -> Tensor:
    if config.time == "none":
        return _everywhere(chain, config.gamma)
    discount_N, end_L = _everywhere(chain, 1.0), turn_end_N.nonzero()[:, 0]
    discount_N[end_L] = config.gamma
    if config.time == "critical_steps" and chain.steps_N is not None:
        discount_N[end_L] **= chain.steps_N[end_L]
    return discount_N


def _policy_lam(chain: Chain, config: AdvantageConfig) -> Tensor:
    if config.lam_alpha is None:
        return _everywhere(chain, config.lam)
    length_R = torch.bincount(chain.rollout_N, minlength=len(chain.reward_R)).double()
    return (1 - 1 / (config.lam_alpha * length_R)).clamp(min=0)[chain.rollout_N]


def _per_unit(lam_N: Tensor, config: AdvantageConfig, turn_end_N: Tensor) -> Tensor:
    return lam_N if config.lam_unit == "token" else torch.where(turn_end_N, lam_N, 1.0)


def _estimator(chain: Chain, form: Form, discount_N: Tensor) -> Callable[[Tensor], Tensor]:
    """Advantages [N] as a function of λ [N], without the decay."""
    reward_N = _everywhere(chain, 0.0) if chain.extra_N is None else chain.extra_N.double()
    value_N, at_L = chain.value_N.double(), last_of(chain.rollout_N).nonzero()[:, 0]
    of_L = chain.rollout_N[at_L]
    if form == "chained":
        reward_N = reward_N.index_add(0, at_L, chain.reward_R.double()[of_L])
        return lambda lam_N: gae(reward_N, value_N, chain.rollout_N, chain.bootstrap_R, discount_N, lam_N)
    # What a rollout's last action led to: its reward, and after a cut the discounted value.
    outcome_R = chain.reward_R.double()
    outcome_R = outcome_R.index_add(0, of_L, discount_N[at_L] * chain.bootstrap_R.double()[of_L])
    at_L = last_of(chain.segment_N).nonzero()[:, 0]
    reward_N = reward_N.index_add(0, at_L, outcome_R[chain.rollout_N[at_L]])
    nothing_S = torch.zeros(int(chain.segment_N[-1]) + 1 if len(value_N) else 0)
    return lambda lam_N: gae(reward_N, value_N, chain.segment_N, nothing_S, discount_N, lam_N)


# --- without -------------------------------------------------------------------------


def _against_group(chain: Chain, form: Form) -> Tensor:
    """The advantage of each rollout, [R]."""
    return_R = chain.reward_R.double()
    if chain.extra_N is not None:
        return_R = return_R.index_add(0, chain.rollout_N, chain.extra_N.double())
    _, group_R, size_G = torch.unique(chain.group_R, return_inverse=True, return_counts=True)
    size_R = size_G[group_R]
    # From the least of the group, so that equal rewards give 0 and not a rounding error to be divided by 1e-6.
    least_G = return_R.new_full((len(size_G),), math.inf).scatter_reduce(0, group_R, return_R, "amin")
    above_R = return_R - least_G[group_R]
    above_R = above_R - _group_sum(above_R, group_R) / size_R
    others_R = (size_R - 1).clamp(min=1)
    if form == "rloo":
        # r − (Σ − r) / (n − 1) = (r − Σ/n) · n / (n − 1)
        above_R = above_R * size_R / others_R
    if form == "grpo":
        above_R = above_R / ((_group_sum(above_R**2, group_R) / others_R).sqrt() + GRPO_EPS)
    return torch.where(size_R > 1, above_R, 0.0)


def _group_sum(x_R: Tensor, group_R: Tensor) -> Tensor:
    """The sum over each rollout's group, [R]."""
    return torch.zeros_like(x_R).index_add(0, group_R, x_R)[group_R]


# --- what is refused -------------------------------------------------------------------


def _check(chain: Chain, config: AdvantageConfig) -> None:
    _same_shape("R", {"reward_R": chain.reward_R, "bootstrap_R": chain.bootstrap_R, "group_R": chain.group_R})
    per_token = {"value_N": chain.value_N, "rollout_N": chain.rollout_N, "segment_N": chain.segment_N}
    per_token["turn_N"] = chain.turn_N
    if chain.extra_N is not None:
        per_token["extra_N"] = chain.extra_N
    if chain.steps_N is not None:
        per_token["steps_N"] = chain.steps_N
    _same_shape("N", per_token)
    _check_order(chain)
    if config.time == "critical_steps":
        _want("steps_N", chain.steps_N, chain.steps_N is not None, "the ledger's critical steps of each token's turn, "
              "with time = 'critical_steps'")  # fmt: skip
        low = 0 if chain.steps_N is None or not len(chain.steps_N) else chain.steps_N.min().item()
        _want("the least of steps_N", low, low >= 0, "at least 0")
    if not config.critic and bool(chain.bootstrap_R.any()):
        high = float(chain.bootstrap_R.abs().max())
        _want("bootstrap_R", high, False, f"0 with form = {config.form!r}: leave truncated rollouts out")


def _same_shape(axis: str, tensors: dict[str, Tensor]) -> None:
    shapes = {tuple(x.shape) for x in tensors.values()}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1:
        seen = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"advantage: {seen}, want one shape [{axis}]")


def _check_order(chain: Chain) -> None:
    j = first_out_of_order(chain.rollout_N, chain.segment_N, chain.turn_N, len(chain.reward_R))
    if j < 0:
        return
    seen = [
        tuple(int(x[i]) for x in (chain.rollout_N, chain.segment_N, chain.turn_N)) for i in range(max(j - 1, 0), j + 1)
    ]
    raise ValueError(
        f"advantage: rollout_N, segment_N, turn_N at token {j} are {seen[-1]}, before it {seen[:-1]}, want rollouts "
        f"0 to {len(chain.reward_R) - 1} that never fall, segments of one rollout that never fall, "
        "and turns that never fall within a rollout"
    )
