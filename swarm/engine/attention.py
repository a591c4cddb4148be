# pyright: basic, reportCallIssue=false
"""Causal attention over packed documents and its gradient, compiled by numba, with the norm and rotation before it.

A document is a segment, or a tree of them: a first segment and others that each go on where it ends (`after`).
A query sees all of the first segment of its tree, and its own segment up to itself. Scores exist for a strip of
queries at a time; the backward makes them again from the logarithms of their sums (arXiv 2205.14135).
A call runs on one core without the interpreter lock. Not here: projections, autograd.

Axes: T tokens, X query, key and value heads side by side, H query heads, D head width, P positions, G segments.
Scratch is flat and padded: C places of a tree, each segment at a multiple of LANES; E is D likewise; a strip of
queries has Q rows of E, and Q rows of K scores: those of the first segment, padded, then those of its own.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from swarm.engine.tiles import LANES, ROWS, multiply_tile
from swarm.engine.training_kernels import FAST, exp2, greatest

STRIP = 32
"""Queries whose scores exist at once: 32 rows of 600 keys, twice, stay in the second cache level."""

_ZERO, _ONE = np.float32(0), np.float32(1)
_LOG2E, _LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2))


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def attend(qkv_TXD, gain_2D, eps, cos_PD, sin_PD, start_G, length_G, after_G, wanted_T, out_THD, log_TH):
    """Fills `out` and `log`, the base-2 logarithms of the sums of weights, in every strip that has a wanted token."""
    heads, width = out_THD.shape[1], out_THD.shape[2]
    kv_heads, wide = (qkv_TXD.shape[1] - heads) // 2, _up(out_THD.shape[2], LANES)
    scale = _LOG2E / np.sqrt(np.float32(width))
    q_QE, o_QE = np.zeros(STRIP * wide, np.float32), np.empty(STRIP * wide, np.float32)
    place_G, first = np.zeros(len(start_G), np.int64), 0
    while first < len(start_G):
        last, places, stride = _tree(first, length_G, after_G, place_G)
        s_QK, bits_K = np.empty(STRIP * stride, np.float32), np.empty(stride, np.int32)
        for k in range(heads, heads + kv_heads):
            k_CE, v_CE = np.zeros(places * wide, np.float32), np.zeros(places * wide, np.float32)
            for g in range(first, last):
                n, count, at = start_G[g], length_G[g], place_G[g] * wide
                p = length_G[first] if g > first else 0
                _turn(qkv_TXD, k, n, count, gain_2D[1], eps, cos_PD, sin_PD, p, _ONE, k_CE, at, wide)
                _copy(qkv_TXD, k + kv_heads, n, count, v_CE, at, wide)
            kt_DC = _transposed(k_CE, width, wide)
            for g in range(first, last):
                before, place = length_G[first] if g > first else 0, place_G[g]
                for t in range(0, length_G[g], STRIP):
                    n, rows = start_G[g] + t, min(STRIP, length_G[g] - t)
                    if not wanted_T[n : n + rows].any():
                        continue
                    for h in range((k - heads) * heads // kv_heads, (k - heads + 1) * heads // kv_heads):
                        _turn(qkv_TXD, h, n, rows, gain_2D[0], eps, cos_PD, sin_PD, before + t, scale, q_QE, 0, wide)
                        q_QE[rows * wide :] = _ZERO
                        _scores(q_QE, width, wide, kt_DC, places, before, place, t, rows, s_QK, stride)
                        _softmax(s_QK, stride, before, t, rows, bits_K, log_TH, n, h)
                        _weigh(s_QK, stride, v_CE, wide, before, place, t, rows, o_QE)
                        for r in range(rows):
                            for d in range(width):
                                out_THD[n + r, h, d] = o_QE[r * wide + d]
        first = last


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def attend_backward(
    qkv_TXD, gain_2D, eps, cos_PD, sin_PD, start_G, length_G, after_G, wanted_T,
    out_THD, log_TH, d_out_THD, d_qkv_TXD, d_gain_2D,
):  # fmt: skip
    """Fills `d_qkv`, given as zeros, and adds to `d_gain`. Tokens that are not wanted have a `d_out` of zero."""
    heads, width = out_THD.shape[1], out_THD.shape[2]
    kv_heads, wide = (qkv_TXD.shape[1] - heads) // 2, _up(out_THD.shape[2], LANES)
    scale = _LOG2E / np.sqrt(np.float32(width))
    q_QE, d_o_QE = np.zeros(STRIP * wide, np.float32), np.zeros(STRIP * wide, np.float32)
    d_q_QE = np.empty(STRIP * wide, np.float32)
    delta_Q = np.empty(STRIP, np.float32)
    place_G, first = np.zeros(len(start_G), np.int64), 0
    while first < len(start_G):
        last, places, stride = _tree(first, length_G, after_G, place_G)
        s_QK, d_s_QK = np.empty(STRIP * stride, np.float32), np.empty(STRIP * stride, np.float32)
        bits_K = np.empty(stride, np.int32)
        for k in range(heads, heads + kv_heads):
            k_CE, v_CE = np.zeros(places * wide, np.float32), np.zeros(places * wide, np.float32)
            d_k_CE, d_v_CE = np.zeros(places * wide, np.float32), np.zeros(places * wide, np.float32)
            for g in range(first, last):
                n, count, at = start_G[g], length_G[g], place_G[g] * wide
                p = length_G[first] if g > first else 0
                _turn(qkv_TXD, k, n, count, gain_2D[1], eps, cos_PD, sin_PD, p, _ONE, k_CE, at, wide)
                _copy(qkv_TXD, k + kv_heads, n, count, v_CE, at, wide)
            kt_DC, vt_DC = _transposed(k_CE, width, wide), _transposed(v_CE, width, wide)
            for g in range(first, last):
                before, place = length_G[first] if g > first else 0, place_G[g]
                for t in range(0, length_G[g], STRIP):
                    n, rows = start_G[g] + t, min(STRIP, length_G[g] - t)
                    if not wanted_T[n : n + rows].any():
                        continue
                    for h in range((k - heads) * heads // kv_heads, (k - heads + 1) * heads // kv_heads):
                        _turn(qkv_TXD, h, n, rows, gain_2D[0], eps, cos_PD, sin_PD, before + t, scale, q_QE, 0, wide)
                        _copy(d_out_THD, h, n, rows, d_o_QE, 0, wide)
                        q_QE[rows * wide :] = _ZERO
                        d_o_QE[rows * wide :] = _ZERO
                        _dots(out_THD, d_out_THD, h, n, rows, delta_Q)
                        _scores(q_QE, width, wide, kt_DC, places, before, place, t, rows, s_QK, stride)
                        _scores(d_o_QE, width, wide, vt_DC, places, before, place, t, rows, d_s_QK, stride)
                        _slopes(s_QK, d_s_QK, stride, before, t, rows, bits_K, log_TH, n, h, delta_Q)
                        _spread(s_QK, stride, d_o_QE, wide, before, place, t, rows, d_v_CE)
                        _spread(d_s_QK, stride, q_QE, wide, before, place, t, rows, d_k_CE)
                        _weigh(d_s_QK, stride, k_CE, wide, before, place, t, rows, d_q_QE)
                        _turn_back(qkv_TXD, h, n, rows, gain_2D[0], eps, cos_PD, sin_PD, before + t, scale * _LN2,
                                   d_q_QE, 0, wide, d_qkv_TXD, d_gain_2D[0])  # fmt: skip
            for g in range(first, last):
                n, count, at = start_G[g], length_G[g], place_G[g] * wide
                p = length_G[first] if g > first else 0
                # Queries were scaled by log2(e): the slope of a score is in its natural unit.
                _turn_back(qkv_TXD, k, n, count, gain_2D[1], eps, cos_PD, sin_PD, p, _LN2,
                           d_k_CE, at, wide, d_qkv_TXD, d_gain_2D[1])  # fmt: skip
                for t in range(count):
                    for d in range(width):
                        d_qkv_TXD[n + t, k + kv_heads, d] = d_v_CE[at + t * wide + d]
        first = last


@numba.njit(nogil=True, cache=True)
def _up(count, multiple):
    return (count + multiple - 1) // multiple * multiple


@numba.njit(nogil=True, cache=True)
def _tree(first, length_G, after_G, place_G):
    """Where the tree that begins at segment `first` ends, its places, and the most scores of a query; sets `place`."""
    last, places, longest = first, 0, 0
    while last < len(length_G) and (last == first or after_G[last] == first):
        place_G[last] = places
        places += _up(length_G[last], LANES)
        if last > first:
            longest = max(longest, _up(length_G[last], LANES))
        last += 1
    return last, places, _up(length_G[first], LANES) + longest


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _turn(x_TXD, x, n, rows, gain_D, eps, cos_PD, sin_PD, p, scale, out, at, wide):
    """RMSNorm, then rotary embedding in halves from position `p` on (arXiv 2104.09864), then `scale`."""
    width = x_TXD.shape[2]
    half = width // 2
    for t in range(rows):
        r = scale * _inverse_rms(x_TXD, n + t, x, eps)
        for d in range(half):
            a, b = x_TXD[n + t, x, d] * gain_D[d] * r, x_TXD[n + t, x, half + d] * gain_D[half + d] * r
            out[at + t * wide + d] = a * cos_PD[p + t, d] - b * sin_PD[p + t, d]
            out[at + t * wide + half + d] = b * cos_PD[p + t, d] + a * sin_PD[p + t, d]


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _turn_back(x_TXD, x, n, rows, gain_D, eps, cos_PD, sin_PD, p, scale, grad, at, wide, d_x_TXD, d_gain_D):
    """The gradient of `_turn`: of its input, and added to that of its gain."""
    width = x_TXD.shape[2]
    half = width // 2
    g_D = np.empty(width, np.float32)
    for t in range(rows):
        for d in range(half):
            a, b = grad[at + t * wide + d] * scale, grad[at + t * wide + half + d] * scale
            g_D[d] = a * cos_PD[p + t, d] + b * sin_PD[p + t, d]
            g_D[half + d] = b * cos_PD[p + t, d] - a * sin_PD[p + t, d]
        r = _inverse_rms(x_TXD, n + t, x, eps)
        dot = _ZERO
        for d in range(width):
            y = x_TXD[n + t, x, d] * r
            d_gain_D[d] += g_D[d] * y
            g_D[d] *= gain_D[d]
            dot += g_D[d] * y
        dot /= np.float32(width)
        for d in range(width):
            d_x_TXD[n + t, x, d] = r * (g_D[d] - x_TXD[n + t, x, d] * r * dot)


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _inverse_rms(x_TXD, n, x, eps):
    total = _ZERO
    for d in range(x_TXD.shape[2]):
        total += x_TXD[n, x, d] * x_TXD[n, x, d]
    return _ONE / np.sqrt(total / np.float32(x_TXD.shape[2]) + np.float32(eps))


@numba.njit(nogil=True, cache=True)
def _copy(x_TXD, x, n, rows, out, at, wide):
    for t in range(rows):
        for d in range(x_TXD.shape[2]):
            out[at + t * wide + d] = x_TXD[n + t, x, d]


@numba.njit(nogil=True, cache=True)
def _transposed(m_CE, width, wide):
    places = len(m_CE) // wide
    out_DC = np.empty(width * places, np.float32)
    for c in range(places):
        for d in range(width):
            out_DC[d * places + c] = m_CE[c * wide + d]
    return out_DC


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _dots(x_THD, y_THD, h, n, rows, out_Q):
    for r in range(rows):
        total = _ZERO
        for d in range(x_THD.shape[2]):
            total += x_THD[n + r, h, d] * y_THD[n + r, h, d]
        out_Q[r] = total


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _scores(q_QE, width, wide, kt_DC, places, before, place, t, rows, s_QK, stride):
    """s = q · kᵀ for what each four rows may see, and somewhat more."""
    padded = _up(before, LANES)
    for r in range(0, rows, ROWS):
        for c in range(0, before, LANES):
            multiply_tile(q_QE, r * wide, wide, 1, kt_DC, c, places, s_QK, r * stride + c, stride, width, False)
        for c in range(0, t + r + ROWS, LANES):
            out = r * stride + padded + c
            multiply_tile(q_QE, r * wide, wide, 1, kt_DC, place + c, places, s_QK, out, stride, width, False)


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _weigh(s_QK, stride, m_CE, wide, before, place, t, rows, out_QE):
    """out = s · m."""
    padded = _up(before, LANES)
    for r in range(0, rows, ROWS):
        for e in range(0, wide, LANES):
            multiply_tile(s_QK, r * stride, stride, 1, m_CE, e, wide, out_QE, r * wide + e, wide, before, False)
            own, count = r * stride + padded, t + r + ROWS
            multiply_tile(s_QK, own, stride, 1, m_CE, place * wide + e, wide, out_QE, r * wide + e, wide, count, True)


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _spread(s_QK, stride, x_QE, wide, before, place, t, rows, out_CE):
    """out += sᵀ · x, where a key gets nothing from the queries before it."""
    padded, rows = _up(before, LANES), _up(rows, ROWS)
    for e in range(0, wide, LANES):
        for c in range(0, before, ROWS):
            multiply_tile(s_QK, c, 1, stride, x_QE, e, wide, out_CE, c * wide + e, wide, rows, True)
        for c in range(0, t + rows, ROWS):
            r = max(0, c - t)
            a, out = r * stride + padded + c, (place + c) * wide + e
            multiply_tile(s_QK, a, 1, stride, x_QE, r * wide + e, wide, out_CE, out, wide, rows - r, True)


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _softmax(s_QK, stride, before, t, rows, bits_K, log_TH, n, h):
    """Scores to weights that add up to 1, in place, and the logarithms of their sums."""
    padded = _up(before, LANES)
    for r in range(rows):
        own, end = padded + t + r + 1, padded + t + _up(r + 1, ROWS)
        row_K = s_QK[r * stride : r * stride + end]
        high = max(greatest(row_K, 0, before), greatest(row_K, padded, own))
        exp2(row_K, high, bits_K)
        row_K[before:padded] = _ZERO
        row_K[own:] = _ZERO
        total = _ZERO
        for c in range(end):
            total += row_K[c]
        inverse = _ONE / total
        for c in range(end):
            row_K[c] *= inverse
        log_TH[n + r, h] = high + np.log2(total)


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _slopes(s_QK, d_s_QK, stride, before, t, rows, bits_K, log_TH, n, h, delta_Q):
    """Scores to weights p again, and the slopes of p to those of the scores: p (dp − Σ p dp)."""
    padded = _up(before, LANES)
    for r in range(rows):
        own, end, delta = padded + t + r + 1, padded + t + _up(r + 1, ROWS), delta_Q[r]
        row_K, d_row_K = s_QK[r * stride : r * stride + end], d_s_QK[r * stride : r * stride + end]
        exp2(row_K, log_TH[n + r, h], bits_K)
        row_K[before:padded] = _ZERO
        row_K[own:] = _ZERO
        for c in range(end):
            d_row_K[c] = row_K[c] * (d_row_K[c] - delta)
