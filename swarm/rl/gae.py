# pyright: basic
"""Generalised advantage estimation on flat action tokens: the two backward passes, compiled by numba.

Only action tokens come in, so nothing that stands on an observation slot can have an influence.
A chain is a run of tokens that look at each other's values: a whole rollout, or one segment of it.
Discount and λ are given token by token. Two ends of a chain differ in one number, the value after it:

    termination   nothing follows: 0
    truncation    it was cut: V(context at the cut)

Not here: what a chain is, which discount and λ (`swarm.rl.advantages`); whitening (`swarm.rl.losses`).
The work is done on the CPU in float64 and takes longer to call than to run.
Axes: N action tokens, C chains, R rollouts.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor


def gae(
    reward_N: Tensor, value_N: Tensor, chain_N: Tensor, after_C: Tensor, discount_N: Tensor, lam_N: Tensor
) -> Tensor:
    """Advantages [N], float64: A_j = δ_j + d_j λ_j A_{j+1} with δ_j = r_j + d_j V_{j+1} − V_j.

    After a chain's last token V is `after_C` and A is 0. `chain_N` holds indices into C and never falls,
    so that a chain's tokens stand together; a chain may be empty.

    Raises ValueError on unequal lengths or such an index. Source: Schulman et al., arXiv 1506.02438,
    eq. 16; with a discount for each token it is rlax's `truncated_generalized_advantage_estimation`.
    """
    shapes = [tuple(x.shape) for x in (reward_N, value_N, chain_N, discount_N, lam_N)]
    if len(set(shapes)) > 1 or value_N.dim() != 1:
        raise ValueError(f"gae: reward, value, chain, discount, lam have shapes {shapes}, want one shape [N]")
    reward, value, after = _doubles(reward_N), _doubles(value_N), _doubles(after_C)
    out_N = np.empty(len(value))
    bad = _gae(_ints(chain_N), reward, value, after, _doubles(discount_N), _doubles(lam_N), out_N)
    if bad >= 0:
        raise ValueError(f"gae: chain_N[{bad}] = {int(chain_N[bad])}, want 0 to {len(after) - 1} and never falling")
    return torch.from_numpy(out_N).to(value_N.device)


def decay_after(weight_N: Tensor, segment_N: Tensor, rollout_N: Tensor) -> Tensor:
    """How much of what follows a rollout reaches the end of a token's segment, [N], float64.

    The product of `weight_N` from the segment's last token up to the one before the rollout's last; 1 in the
    rollout's last segment. It has one factor for each token in later segments, and of a chain over the whole
    rollout they are those that lie between: a weight w on every token gives w^{N_{>s}}.
    """
    out_N = np.empty(len(weight_N))
    _decay_after(_doubles(weight_N), _ints(segment_N), _ints(rollout_N), out_N)
    return torch.from_numpy(out_N).to(weight_N.device)


def first_out_of_order(rollout_N: Tensor, segment_N: Tensor, turn_N: Tensor, rollouts: int) -> int:
    """The first token that is not of one of so many rollouts, or at which a rollout, a segment or (within a
    rollout) a turn falls, or whose segment began in another rollout; -1 if there is none."""
    return _first_out_of_order(_ints(rollout_N), _ints(segment_N), _ints(turn_N), rollouts)


def last_of(index_N: Tensor) -> Tensor:
    """True [N] on the last token of each run of equal indices."""
    last_N = torch.ones_like(index_N, dtype=torch.bool)
    last_N[:-1] = index_N[1:] != index_N[:-1]
    return last_N


def last_of_rollout(rollout_N: Tensor) -> Tensor:
    """True [N] on each rollout's last action token."""
    return last_of(rollout_N)


def chained_gae(
    reward_N: Tensor, value_N: Tensor, bootstrap_R: Tensor, rollout_N: Tensor, gamma: float, lam: float
) -> Tensor:
    """`gae` over whole rollouts with one discount and one λ for all tokens, [N], float64."""
    discount_N = torch.full(value_N.shape, gamma, dtype=torch.float64)
    return gae(reward_N, value_N, rollout_N, bootstrap_R, discount_N, torch.full_like(discount_N, lam))


def _doubles(x: Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.detach().cpu().double().numpy())


def _ints(x: Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.cpu().long().numpy())


# A chain's end is a branch, not a weight of 0: a NaN behind it must not come through.


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _gae(chain_N, reward_N, value_N, after_C, discount_N, lam_N, out_N):
    chain, value, advantage = after_C.shape[0], 0.0, 0.0
    for j in range(out_N.shape[0] - 1, -1, -1):
        if chain_N[j] != chain or j == out_N.shape[0] - 1:
            if chain_N[j] < 0 or chain_N[j] >= after_C.shape[0] or chain_N[j] > chain:
                return j
            chain = chain_N[j]
            value, advantage = after_C[chain], 0.0
        delta = reward_N[j] + discount_N[j] * value - value_N[j]
        advantage = delta + discount_N[j] * lam_N[j] * advantage
        value = value_N[j]
        out_N[j] = advantage
    return -1


@numba.njit(nogil=True, cache=True)
def _decay_after(weight_N, segment_N, rollout_N, out_N):
    rollout, segment, product, decay = -1, -1, 1.0, 1.0
    for j in range(out_N.shape[0] - 1, -1, -1):
        if rollout_N[j] != rollout:
            rollout, segment = rollout_N[j], segment_N[j]
            product, decay = 1.0, 1.0
        else:
            product *= weight_N[j]
            if segment_N[j] != segment:
                segment, decay = segment_N[j], product
        out_N[j] = decay


@numba.njit(nogil=True, cache=True)
def _first_out_of_order(rollout_N, segment_N, turn_N, rollouts):
    rollout, segment, turn = -1, -1, -1
    for j in range(rollout_N.shape[0]):
        if rollout_N[j] < rollout or rollout_N[j] < 0 or rollout_N[j] >= rollouts or segment_N[j] < segment:
            return j
        if rollout_N[j] > rollout:
            if segment_N[j] == segment:
                return j
        elif turn_N[j] < turn:
            return j
        rollout, segment, turn = rollout_N[j], segment_N[j], turn_N[j]
    return -1
