# pyright: basic
"""What stands between the products of the training forward, with its gradients, compiled by numba.

Each kernel makes one pass over its rows, on one core without the interpreter lock. Not here: attention
(`swarm.engine.attention`), autograd (`swarm.engine.fused`).

Axes: T rows, M hidden, F one half of the gate and up projections, which lie side by side in `both`; c rows, V
vocabulary.
"""

from __future__ import annotations

import math

import numba
import numpy as np

FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}
"""What a kernel may do to arithmetic: not to take all numbers for finite; one that is not must reach the loss."""
_ZERO, _ONE, _HALF, _LOWEST = np.float32(0), np.float32(1), np.float32(0.5), np.float32(-1e30)
_LEAST = np.float32(-100)  # 2^-100 times a value is not subnormal, which would be slow
_LOG2E = np.float32(math.log2(math.e))
_E1, _E2, _E3, _E4, _E5, _E6, _E7 = (np.float32(math.log(2) ** i / math.factorial(i)) for i in range(1, 8))


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def norm(x_TM, gain_M, eps, out_TM):
    """out = RMSNorm(x) · gain (arXiv 1910.07467)."""
    for t in range(x_TM.shape[0]):
        x, out = x_TM[t], out_TM[t]
        r = _inverse_rms(x, eps)
        for m in range(x.shape[0]):
            out[m] = x[m] * r * gain_M[m]


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def norm_backward(x_TM, gain_M, eps, d_out_TM, d_x_TM, d_gain_M):
    """Writes the slope of `norm` to x, and adds that to the gain."""
    width = x_TM.shape[1]
    for t in range(x_TM.shape[0]):
        x, d_out, d_x = x_TM[t], d_out_TM[t], d_x_TM[t]
        r = _inverse_rms(x, eps)
        dot = _ZERO
        for m in range(width):
            d_gain_M[m] += d_out[m] * x[m] * r
            dot += d_out[m] * gain_M[m] * x[m]
        shift = dot * r * r * r / np.float32(width)
        for m in range(width):
            d_x[m] = d_out[m] * gain_M[m] * r - x[m] * shift


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def swiglu_backward(both_TF, d_out_TF, out_TF, d_both_TF):
    """out = silu(gate) · up again (arXiv 2002.05202), and its slopes to gate and up."""
    width = out_TF.shape[1]
    sigmoid, bits = np.empty(width, np.float32), np.empty(width, np.int32)
    for t in range(out_TF.shape[0]):
        gate, up, d_gate, d_up = both_TF[t, :width], both_TF[t, width:], d_both_TF[t, :width], d_both_TF[t, width:]
        d_out, out = d_out_TF[t], out_TF[t]
        _sigmoid(gate, sigmoid, bits)
        for f in range(width):
            silu = gate[f] * sigmoid[f]
            out[f] = silu * up[f]
            d_up[f] = d_out[f] * silu
            d_gate[f] = d_out[f] * up[f] * (sigmoid[f] + silu * (_ONE - sigmoid[f]))


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def swiglu(both_TF, out_TF):
    """out = silu(gate) · up."""
    width = out_TF.shape[1]
    sigmoid, bits = np.empty(width, np.float32), np.empty(width, np.int32)
    for t in range(out_TF.shape[0]):
        gate, up, out = both_TF[t, :width], both_TF[t, width:], out_TF[t]
        _sigmoid(gate, sigmoid, bits)
        for f in range(width):
            out[f] = gate[f] * sigmoid[f] * up[f]


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _inverse_rms(x_M, eps):
    total = _ZERO
    for m in range(x_M.shape[0]):
        total += x_M[m] * x_M[m]
    return _ONE / np.sqrt(total / np.float32(x_M.shape[0]) + np.float32(eps))


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def choose(z_cV, target_c, lse_c, logp_c, entropy_c):
    """Of each row of logits: log Σ e^z, the log-probability of its target, and the entropy, log Σ e^z − Σ p z."""
    vocab = z_cV.shape[1]
    e_V, bits = np.empty(vocab, np.float32), np.empty(vocab, np.int32)
    for c in range(z_cV.shape[0]):
        z = z_cV[c]
        high = greatest(z, 0, vocab)
        for v in range(vocab):
            e_V[v] = (z[v] - high) * _LOG2E
        exp2(e_V, _ZERO, bits)
        total, dot = _ZERO, _ZERO
        for v in range(vocab):
            total += e_V[v]
            dot += e_V[v] * (z[v] - high)
        log_total = np.log(total)
        lse_c[c] = high + log_total
        logp_c[c] = z[target_c[c]] - high - log_total
        entropy_c[c] = log_total - dot / total


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def choose_backward(z_cV, target_c, lse_c, entropy_c, d_logp_c, d_entropy_c, d_z_cV):
    """Slopes of `choose` to the logits: d_logp (1_target − p) − d_entropy p (log p + H)."""
    vocab = z_cV.shape[1]
    bits = np.empty(vocab, np.int32)
    for c in range(z_cV.shape[0]):
        z, p, lse = z_cV[c], d_z_cV[c], lse_c[c]
        for v in range(vocab):
            p[v] = (z[v] - lse) * _LOG2E
        exp2(p, _ZERO, bits)
        by_entropy = d_entropy_c[c]
        shift = d_logp_c[c] + by_entropy * (entropy_c[c] - lse)
        for v in range(vocab):
            p[v] = -p[v] * (shift + by_entropy * z[v])
        p[target_c[c]] += d_logp_c[c]


@numba.njit(nogil=True, cache=True, fastmath=True)
def greatest(x, first, last):
    """Of x[first:last], −1e30 where that is empty. A NaN may be passed over: sums after it are NaN still."""
    high = _LOWEST
    for c in range(first, last):
        high = max(high, x[c])
    return high


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def exp2(x, shift, bits):
    """x = 2^(x − shift) in place, relative error 1e-7, where x is not above `shift`; `bits` is int32 scratch.

    The power's whole part goes into the exponent's bits, the rest through a Taylor polynomial.
    """
    power = bits.view(np.float32)
    for f in range(x.shape[0]):
        v = x[f] - shift
        # Written so that NaN stays NaN.
        v = _LEAST if v < _LEAST else v
        k = np.int32(v - _HALF)
        bits[f] = (k + np.int32(127)) << np.int32(23)
        r = v - np.float32(k)
        x[f] = _ONE + r * (_E1 + r * (_E2 + r * (_E3 + r * (_E4 + r * (_E5 + r * (_E6 + r * _E7))))))
    for f in range(x.shape[0]):
        x[f] = x[f] * power[f]


@numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _sigmoid(x, out, bits):
    """1 / (1 + e^−x), by the side that cannot overflow."""
    for f in range(x.shape[0]):
        out[f] = -abs(x[f]) * _LOG2E
    exp2(out, _ZERO, bits)
    for f in range(x.shape[0]):
        out[f] = (_ONE if x[f] >= _ZERO else out[f]) / (_ONE + out[f])
