"""Advantages and value targets on action tokens, chained over all segments of a rollout.

Only action tokens come in, so nothing that stands on an observation slot can have an influence.
A segment's end is not an end: compaction is a transition like any other, and the last action of
a segment looks at the value of the next segment's first action. Three things are kept apart:

    termination   nothing follows: bootstrap 0
    truncation    the rollout was cut: bootstrap V(context at the cut)
    segment end   not visible here at all

Not here: whitening (`swarm.rl.losses`), and any split into processes or micro-batches, which must
come after. Axes: N action tokens, in rollout order; R rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chained_gae(
    reward_N: Tensor, value_N: Tensor, bootstrap_R: Tensor, rollout_N: Tensor, gamma: float, lam: float
) -> Tensor:
    """Advantages [N], float64: A_j = δ_j + γλ A_{j+1} with δ_j = r_j + γ V_{j+1} − V_j.

    After a rollout's last action V is `bootstrap_R` (0 at a termination) and A is 0. `rollout_N`
    holds indices into R and never falls, so that a rollout's tokens stand together.

    Raises ValueError on unequal lengths. Source: Schulman et al., arXiv 1506.02438, eq. 16; over
    concatenated segments it is the policy gradient of SUPO, arXiv 2510.06727, theorem 3.2, with a critic.
    """
    if not reward_N.shape == value_N.shape == rollout_N.shape:
        shapes = f"{tuple(reward_N.shape)}, {tuple(value_N.shape)}, {tuple(rollout_N.shape)}"
        raise ValueError(f"gae: rewards, values and rollout indices have shapes {shapes}, want one shape [N]")
    if len(value_N) == 0:
        return torch.zeros(0, dtype=torch.float64, device=value_N.device)
    value_N, last_N = value_N.double(), last_of_rollout(rollout_N)
    next_value_N = torch.where(last_N, bootstrap_R.double()[rollout_N], value_N.roll(-1))
    delta_N = reward_N.double() + gamma * next_value_N - value_N
    return discounted_suffix_sums(delta_N, (~last_N).double() * (gamma * lam))


def last_of_rollout(rollout_N: Tensor) -> Tensor:
    """True [N] on each rollout's last action token."""
    last_N = torch.ones_like(rollout_N, dtype=torch.bool)
    last_N[:-1] = rollout_N[1:] != rollout_N[:-1]
    return last_N


def discounted_suffix_sums(x_N: Tensor, decay_N: Tensor) -> Tensor:
    """y [N] with y_j = x_j + decay_j · y_{j+1}, y_{N+1} = 0. A decay of 0 starts afresh.

    By doubling: after k rounds y_j covers 2^k terms, and a window that crossed a decay of 0 is done.
    So there are log2(longest run) rounds of whole-array operations. Source: Hillis & Steele 1986.
    """
    y_N, decay_N, width = x_N.clone(), decay_N.clone(), 1
    while width < len(y_N) and bool(decay_N.any()):
        y_N[:-width] += decay_N[:-width] * y_N[width:]
        decay_N[:-width] = decay_N[:-width] * decay_N[width:]
        # A window that reaches past the end has seen the last decay; what it adds from there is nothing.
        decay_N[-width:] = 0.0
        width *= 2
    return y_N
