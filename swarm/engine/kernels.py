# pyright: basic
"""The embedded engine's inner loops, compiled by numba: everything between two matrix products.

Each kernel runs on one core without the interpreter lock; the engine gets parallelism by giving
each thread sequences of its own. Not here: matrix products, scheduling, anything with a gradient.

Keys and values live in blocks of BLOCK tokens, `kv[block, kv_head, 0]` keys as (D, BLOCK) so that
scores of a block need no horizontal sum, `kv[block, kv_head, 1]` values as (BLOCK, D).

Axes: N rows (tokens of this step), S sequences, H query heads, K key heads, D head width, B blocks.
"""

from __future__ import annotations

import math

import numba
import numpy as np

BLOCK = 32
"""Tokens of a cache block: a key block of head width 32 is 4 KB, so a pair stays in the first cache level."""

_LOG2E, _LN2_HI, _LN2_LO = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
_C5, _C6, _C7 = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)
_ONE, _ZERO, _LOWEST = np.float32(1), np.float32(0), np.float32(-1e30)
_LEAST = np.float32(-87)


# No reassociation here: it would undo the two-part ln 2.
@numba.njit(nogil=True, cache=True, fastmath={"contract"}, inline="always")
def _exp_into(x, n, bits, power):
    """x[:n] = exp(x[:n]) for x <= 0, relative error 2e-7, vectorised; `power` is `bits` seen as float32."""
    for t in range(n):
        v = max(x[t], _LEAST)
        k = math.floor(v * _LOG2E + np.float32(0.5))
        bits[t] = (np.int32(k) + np.int32(127)) << np.int32(23)
        r = (v - k * _LN2_HI) - k * _LN2_LO
        x[t] = _ONE + r * (_ONE + r * (_C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7))))))
    for t in range(n):
        x[t] = x[t] * power[t]


@numba.njit(nogil=True, cache=True, fastmath=True)
def add_norm(x_NM, delta_NM, gain_M, eps, out_NM):
    """x += delta, then out = RMSNorm(x) * gain (arXiv 1910.07467)."""
    width = x_NM.shape[1]
    for n in range(x_NM.shape[0]):
        total = _ZERO
        for m in range(width):
            v = x_NM[n, m] + delta_NM[n, m]
            x_NM[n, m] = v
            total += v * v
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for m in range(width):
            out_NM[n, m] = x_NM[n, m] * scale * gain_M[m]


@numba.njit(nogil=True, cache=True, fastmath=True)
def swiglu(both_NF, out_NF, bits, scratch):
    """out = silu(gate) * up, where `both` holds gate and up side by side; scratch and bits are one row long."""
    width = out_NF.shape[1]
    power = bits.view(np.float32)
    for n in range(out_NF.shape[0]):
        for f in range(width):
            scratch[f] = -abs(both_NF[n, f])
        _exp_into(scratch, width, bits, power)
        for f in range(width):
            g, e = both_NF[n, f], scratch[f]
            # 1 / (1 + exp(-|g|)) on the side that cannot overflow.
            sig = (_ONE if g >= _ZERO else e) / (_ONE + e)
            out_NF[n, f] = g * sig * both_NF[n, width + f]


@numba.njit(nogil=True, cache=True, fastmath=True, inline="always")
def _norm_rotate(src, gain_D, eps, cos_D, sin_D, scale, out_D):
    width = gain_D.shape[0]
    half = width // 2
    total = _ZERO
    for d in range(width):
        total += src[d] * src[d]
    r = scale / np.sqrt(total / np.float32(width) + eps)
    for d in range(half):
        a, b = src[d] * r * gain_D[d], src[half + d] * r * gain_D[half + d]
        out_D[d] = a * cos_D[d] - b * sin_D[d]
        out_D[half + d] = b * cos_D[d] + a * sin_D[d]


@numba.njit(nogil=True, cache=True, fastmath=True)
def place(qkv_NC, q_gain_D, k_gain_D, eps, cos_PD, sin_PD, table_SB, first_S, position_S, q_NHD, kv):
    """Norms and rotates queries and keys; queries (scaled by 1/sqrt(D)) go to `q_NHD`, keys and values into the cache.

    Rows first_S[s] .. first_S[s + 1] belong to sequence s, the first of them at position position_S[s].
    """
    heads, width = q_NHD.shape[1], q_NHD.shape[2]
    kv_heads = kv.shape[1]
    scale = _ONE / np.sqrt(np.float32(width))
    key_D = np.empty(width, np.float32)
    for s in range(position_S.shape[0]):
        for n in range(first_S[s], first_S[s + 1]):
            p = position_S[s] + n - first_S[s]
            block, t = table_SB[s, p // BLOCK], p % BLOCK
            row = qkv_NC[n]
            for h in range(heads):
                src = row[h * width : (h + 1) * width]
                _norm_rotate(src, q_gain_D, eps, cos_PD[p], sin_PD[p], scale, q_NHD[n, h])
            for h in range(kv_heads):
                k0 = (heads + h) * width
                _norm_rotate(row[k0 : k0 + width], k_gain_D, eps, cos_PD[p], sin_PD[p], _ONE, key_D)
                v0 = k0 + kv_heads * width
                keys, values = kv[block, h, 0], kv[block, h, 1]
                for d in range(width):
                    keys[d * BLOCK + t] = key_D[d]
                    values[t * width + d] = row[v0 + d]


@numba.njit(nogil=True, cache=True, fastmath=True)
def attend(q_NHD, kv, table_SB, first_S, position_S, out_NHD):
    """Causal attention of each sequence's rows over its own blocks, with a running softmax (arXiv 2205.14135)."""
    heads, width = q_NHD.shape[1], q_NHD.shape[2]
    kv_heads = kv.shape[1]
    group = heads // kv_heads
    most = 1
    for s in range(position_S.shape[0]):
        most = max(most, first_S[s + 1] - first_S[s])
    top = np.empty((most, group), np.float32)
    total = np.empty((most, group), np.float32)
    score = np.empty(BLOCK, np.float32)
    bits = np.empty(BLOCK, np.int32)
    power = bits.view(np.float32)
    for s in range(position_S.shape[0]):
        n0, rows, p0 = first_S[s], first_S[s + 1] - first_S[s], position_S[s]
        for h in range(kv_heads):
            for r in range(rows):
                for g in range(group):
                    top[r, g], total[r, g] = _LOWEST, _ZERO
                    out_NHD[n0 + r, h * group + g, :] = _ZERO
            for b in range((p0 + rows - 1) // BLOCK + 1):
                keys, values = kv[table_SB[s, b], h, 0], kv[table_SB[s, b], h, 1]
                for r in range(max(0, b * BLOCK - p0), rows):
                    seen = min(BLOCK, p0 + r + 1 - b * BLOCK)
                    for g in range(group):
                        _block(
                            q_NHD[n0 + r, h * group + g], keys, values, seen, width, score, bits, power,
                            top, total, r, g, out_NHD[n0 + r, h * group + g],
                        )  # fmt: skip
            for r in range(rows):
                for g in range(group):
                    inverse = _ONE / total[r, g]
                    for d in range(width):
                        out_NHD[n0 + r, h * group + g, d] *= inverse


@numba.njit(nogil=True, cache=True, fastmath=True, inline="always")
def _block(q_D, keys, values, seen, width, score, bits, power, top, total, r, g, out_D):
    """One query against one block: updates the running maximum, the sum and the weighted values."""
    for t in range(BLOCK):
        score[t] = _ZERO
    for d in range(0, width, 4):
        a, b, c, e = q_D[d], q_D[d + 1], q_D[d + 2], q_D[d + 3]
        k = d * BLOCK
        for t in range(BLOCK):
            score[t] += (
                a * keys[k + t] + b * keys[k + BLOCK + t] + c * keys[k + 2 * BLOCK + t] + e * keys[k + 3 * BLOCK + t]
            )
    high = top[r, g]
    for t in range(seen):
        high = max(high, score[t])
    for t in range(BLOCK):
        score[t] = score[t] - high if t < seen else _LEAST
    _exp_into(score, BLOCK, bits, power)
    mass = _ZERO
    for t in range(BLOCK):
        score[t] = score[t] if t < seen else _ZERO
        mass += score[t]
    fade = np.exp(max(top[r, g] - high, _LEAST))
    top[r, g] = high
    total[r, g] = total[r, g] * fade + mass
    for d in range(width):
        out_D[d] *= fade
    for t in range(0, BLOCK, 4):
        a, b, c, e = score[t], score[t + 1], score[t + 2], score[t + 3]
        v = t * width
        for d in range(width):
            out_D[d] += (
                a * values[v + d] + b * values[v + width + d] + c * values[v + 2 * width + d]
                + e * values[v + 3 * width + d]
            )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _uniform(seed, position):
    """A uniform in [0, 1) from a counter: two rounds of splitmix64 over (seed, position)."""
    z = np.uint64(seed)
    for salt in (np.uint64(0x9E3779B97F4A7C15), np.uint64(position) * np.uint64(0xD1B54A32D192ED03)):
        z = z + salt + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@numba.njit(nogil=True, cache=True)
def sample(logits_SV, temperature_S, top_p_S, seed_S, position_S, id_S, logp_S):
    """One token a row by inverse CDF, and its log-probability in nats; a row that is not finite gives id -1.

    Log-softmax after temperature, renormalised when top_p < 1; temperature 0 takes the best at T = 1's logprob.
    """
    vocab = logits_SV.shape[1]
    p_V = np.empty(vocab, np.float32)
    bits = np.empty(vocab, np.int32)
    power = bits.view(np.float32)
    for s in range(logits_SV.shape[0]):
        row = logits_SV[s]
        best = 0
        for v in range(vocab):
            if row[v] > row[best]:
                best = v
        high = row[best]
        inverse = np.float32(1.0 / temperature_S[s]) if temperature_S[s] > 0 else _ONE
        for v in range(vocab):
            p_V[v] = (row[v] - high) * inverse
        _exp_into(p_V, vocab, bits, power)
        mass = 0.0
        for v in range(vocab):
            mass += p_V[v]
        if not (mass >= 1.0 and mass < 1e30 and abs(high) < 1e30):
            id_S[s] = -1
            continue
        token = best
        if temperature_S[s] > 0:
            if top_p_S[s] < 1.0:
                mass = _keep_top(p_V, mass, top_p_S[s])
            token = _inverse_cdf(p_V, _uniform(seed_S[s], position_S[s]) * mass)
        id_S[s] = token
        logp_S[s] = (row[token] - high) * inverse - math.log(mass)


@numba.njit(nogil=True, cache=True)
def _keep_top(p_V, mass, top_p):
    """Zeroes all but the smallest set of largest weights that holds `top_p` of the mass; returns what is left."""
    order = np.argsort(-p_V)
    kept = 0.0
    for k in range(order.shape[0]):
        if kept >= top_p * mass:
            p_V[order[k]] = _ZERO
        else:
            kept += p_V[order[k]]
    return kept


@numba.njit(nogil=True, cache=True)
def _inverse_cdf(p_V, target):
    run, last = 0.0, 0
    for v in range(p_V.shape[0]):
        if p_V[v] > 0:
            run += p_V[v]
            last = v
            if run > target:
                return v
    return last


def sampled(
    logits_SV: np.ndarray, temperature_S: np.ndarray, top_p_S: np.ndarray, seed_S: np.ndarray, position_S: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ids (S,) and log-probabilities (S,) of one token a row; see `sample`."""
    id_S, logp_S = np.zeros(len(logits_SV), np.int64), np.zeros(len(logits_SV), np.float64)
    sample(logits_SV, temperature_S, top_p_S, seed_S, position_S, id_S, logp_S)
    return id_S, logp_S
