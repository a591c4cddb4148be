# pyright: basic
"""The embedded engine's inner loops, compiled by numba: everything between two matrix products.

Each kernel runs on one core without the interpreter lock; the engine gets parallelism by giving
each thread sequences of its own. Not here: matrix products, scheduling, anything with a gradient.

Keys and values live in blocks of BLOCK tokens, `kv[block, kv_head, 0]` keys as (D, BLOCK) so that
scores of a block need no horizontal sum, `kv[block, kv_head, 1]` values as (BLOCK, D).

Axes: N rows (tokens of this step), S sequences, H query heads, K key heads, D head width, B blocks, V vocabulary.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from swarm.engine.vector import BLOCK, attend_block

_ONE, _ZERO, _HALF, _LOWEST = np.float32(1), np.float32(0), np.float32(0.5), np.float32(-1e30)
_LOG2E, _LEAST = np.float32(math.log2(math.e)), np.float32(-126)
_E1, _E2, _E3, _E4, _E5, _E6, _E7 = (np.float32(math.log(2) ** i / math.factorial(i)) for i in range(1, 8))
_PIECE = 64
"""A row of probabilities is summed in pieces of so many, and searched a piece at a time."""


@numba.njit(nogil=True, cache=True, fastmath=True)
def add_norm(x_NM, delta_NM, gain_M, eps, out_NM):
    """x += delta, then out = RMSNorm(x) * gain (arXiv 1910.07467)."""
    width = x_NM.shape[1]
    for n in range(x_NM.shape[0]):
        x, delta, out = x_NM[n], delta_NM[n], out_NM[n]
        total = _ZERO
        for m in range(width):
            v = x[m] + delta[m]
            x[m] = v
            total += v * v
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for m in range(width):
            out[m] = x[m] * scale * gain_M[m]


@numba.njit(nogil=True, cache=True, fastmath=True)
def swiglu(both_NF, out_NF):
    """out = silu(gate) * up, where a row of `both` holds gate and then up (arXiv 2002.05202)."""
    width = out_NF.shape[1]
    decay, bits = np.empty(width, np.float32), np.empty(width, np.int32)
    for n in range(out_NF.shape[0]):
        gate, up, out = both_NF[n, :width], both_NF[n, width:], out_NF[n]
        for f in range(width):
            decay[f] = -abs(gate[f]) * _LOG2E
        _exp2(decay, bits)
        for f in range(width):
            # 1 / (1 + exp(-|g|)) on the side that cannot overflow.
            above = _ONE if gate[f] >= _ZERO else decay[f]
            out[f] = gate[f] * above / (_ONE + decay[f]) * up[f]


@numba.njit(nogil=True, cache=True, fastmath=True)
def place(qkv_NXD, gain_YD, eps, cos_PD, sin_PD, table_SB, first_S, position_S, q_NHD, kv):
    """Norms and rotates queries and keys; queries go to `q_NHD`, keys and values into the cache.

    X is query heads, key heads, value heads; Y the first two. Rows first_S[s] .. first_S[s + 1] belong
    to sequence s, the first of them at position position_S[s].
    """
    heads, width, kv_heads = q_NHD.shape[1], q_NHD.shape[2], kv.shape[1]
    half = width // 2
    # Plain indices all through: slices of rows cost more here than the arithmetic.
    y = np.empty(width, np.float32)
    for s in range(position_S.shape[0]):
        for n in range(first_S[s], first_S[s + 1]):
            p = position_S[s] + n - first_S[s]
            block, t = table_SB[s, p // BLOCK], p % BLOCK
            for h in range(heads + kv_heads):
                total = _ZERO
                for d in range(width):
                    total += qkv_NXD[n, h, d] * qkv_NXD[n, h, d]
                r = _ONE / np.sqrt(total / np.float32(width) + eps)
                for d in range(width):
                    y[d] = qkv_NXD[n, h, d] * r * gain_YD[h, d]
                if h < heads:
                    for d in range(half):
                        q_NHD[n, h, d] = y[d] * cos_PD[p, d] - y[half + d] * sin_PD[p, d]
                        q_NHD[n, h, half + d] = y[half + d] * cos_PD[p, d] + y[d] * sin_PD[p, d]
                else:
                    k = h - heads
                    for d in range(half):
                        kv[block, k, 0, d * BLOCK + t] = y[d] * cos_PD[p, d] - y[half + d] * sin_PD[p, d]
                        kv[block, k, 0, (half + d) * BLOCK + t] = y[half + d] * cos_PD[p, d] + y[d] * sin_PD[p, d]
                    for d in range(width):
                        kv[block, k, 1, t * width + d] = qkv_NXD[n, h + kv_heads, d]


@numba.njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def attend(q_NHD, kv, table_SB, first_S, position_S, out_NHD):
    """Causal attention of each sequence's rows over its own blocks; a block is read once for all rows and heads."""
    heads, width, kv_heads = q_NHD.shape[1], q_NHD.shape[2], kv.shape[1]
    group = heads // kv_heads
    most = 1
    for s in range(position_S.shape[0]):
        most = max(most, first_S[s + 1] - first_S[s])
    state = np.empty((most, heads, 2), np.float32)
    for s in range(position_S.shape[0]):
        n0, rows, p0 = first_S[s], first_S[s + 1] - first_S[s], position_S[s]
        state[:rows, :, 0] = _LOWEST
        state[:rows, :, 1] = _ZERO
        out_NHD[n0 : n0 + rows] = _ZERO
        for b in range((p0 + rows - 1) // BLOCK + 1):
            for k in range(kv_heads):
                keys, values = kv[table_SB[s, b], k, 0], kv[table_SB[s, b], k, 1]
                for r in range(max(0, b * BLOCK - p0), rows):
                    seen = min(BLOCK, p0 + r + 1 - b * BLOCK)
                    for h in range(k * group, (k + 1) * group):
                        q_D, out_D = q_NHD[n0 + r, h], out_NHD[n0 + r, h]
                        attend_block(q_D, keys, values, seen, out_D, state[r, h])  # pyright: ignore[reportCallIssue]
        for r in range(rows):
            for h in range(heads):
                inverse = _ONE / state[r, h, 1]
                for d in range(width):
                    out_NHD[n0 + r, h, d] *= inverse


def sampled(
    logits_SV: np.ndarray, temperature_S: np.ndarray, top_p_S: np.ndarray, seed_S: np.ndarray, position_S: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ids (S,) and log-probabilities (S,) of one token a row, the draw a function of (seed, position) alone.

    Log-softmax after temperature, renormalised when top_p < 1; temperature 0 takes the best with its
    log-probability at temperature 1. A row that is not finite gives id -1.
    """
    id_S, logp_S = np.zeros(len(logits_SV), np.int64), np.zeros(len(logits_SV), np.float64)
    _sample(logits_SV, temperature_S, top_p_S, seed_S, position_S, id_S, logp_S)
    return id_S, logp_S


@numba.njit(nogil=True, cache=True)
def _sample(logits_SV, temperature_S, top_p_S, seed_S, position_S, id_S, logp_S):
    vocab = logits_SV.shape[1]
    padded = -(-vocab // _PIECE) * _PIECE
    p_V, bits_V = np.empty(padded, np.float32), np.empty(padded, np.int32)
    piece_P = np.empty(padded // _PIECE, np.float64)
    for s in range(logits_SV.shape[0]):
        row = logits_SV[s]
        high = _greatest(row)
        inverse = np.float32(1.0 / temperature_S[s]) if temperature_S[s] > 0 else _ONE
        scale = inverse * _LOG2E
        for v in range(vocab):
            p_V[v] = (row[v] - high) * scale
        for v in range(vocab, padded):
            p_V[v] = _LOWEST
        _exp2(p_V, bits_V)
        p_V[vocab:] = _ZERO
        mass = _pieces(p_V, piece_P)
        # Written so that NaN fails it too.
        if not (mass >= 1.0 and mass < 1e30 and abs(high) < 1e30):
            id_S[s] = -1
            continue
        if temperature_S[s] == 0:
            token = np.argmax(row)
        else:
            if top_p_S[s] < 1.0:
                _keep_top(p_V, top_p_S[s] * mass)
                mass = _pieces(p_V, piece_P)
            token = _inverse_cdf(p_V, piece_P, _uniform(seed_S[s], position_S[s]) * mass)
        id_S[s] = token
        logp_S[s] = np.float64(row[token] - high) * inverse - math.log(mass)


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _exp2(x, bits):
    """x = 2^x for x <= 0, in place, relative error 1e-7; `bits` is int32 scratch of the same length."""
    power = bits.view(np.float32)
    for t in range(x.shape[0]):
        v = max(x[t], _LEAST)
        k = np.int32(v - _HALF)
        bits[t] = (k + np.int32(127)) << np.int32(23)
        r = v - np.float32(k)
        x[t] = _ONE + r * (_E1 + r * (_E2 + r * (_E3 + r * (_E4 + r * (_E5 + r * (_E6 + r * _E7))))))
    for t in range(x.shape[0]):
        x[t] = x[t] * power[t]


@numba.njit(nogil=True, cache=True, fastmath=True)
def _greatest(row):
    high = row[0]
    for v in range(row.shape[0]):
        high = max(high, row[v])
    return high


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _pieces(p_V, piece_P):
    """Sums of each piece, and the whole sum; NaN stays NaN."""
    mass = 0.0
    for k in range(piece_P.shape[0]):
        total = 0.0
        piece = p_V[k * _PIECE : (k + 1) * _PIECE]
        for v in range(_PIECE):
            total += piece[v]
        piece_P[k] = total
        mass += total
    return mass


@numba.njit(nogil=True, cache=True)
def _keep_top(p_V, wanted):
    """Zeroes all but the smallest set of the largest weights that holds the wanted mass."""
    order = np.argsort(-p_V)
    kept = 0.0
    for k in range(order.shape[0]):
        if kept >= wanted:
            p_V[order[k]] = _ZERO
        else:
            kept += p_V[order[k]]


@numba.njit(nogil=True, cache=True)
def _inverse_cdf(p_V, piece_P, target):
    """The first index at which the running sum passes the target; the last possible one if rounding hides it."""
    run, last = 0.0, 0
    for k in range(piece_P.shape[0]):
        if piece_P[k] <= 0:
            continue
        last = k
        if run + piece_P[k] > target:
            break
        run += piece_P[k]
    token = last * _PIECE
    for v in range(last * _PIECE, (last + 1) * _PIECE):
        if p_V[v] > 0:
            token = v
            run += p_V[v]
            if run > target:
                break
    return token


@numba.njit(nogil=True, cache=True)
def _uniform(seed, position):
    """A uniform in [0, 1) from a counter: two rounds of splitmix64 (Steele et al., OOPSLA 2014)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    z = np.uint64(seed)
    for salt in (golden, golden * (np.uint64(position) + np.uint64(1))):
        z = z + salt
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)
