"""How many bytes the parts of a run take, worked out from the sizes of its models alone.

Nothing is loaded and torch is not needed. What is said of the CPU follows `swarm.engine` and `swarm.rl` tensor by
tensor; what is said of vLLM and of GPUs is an estimate, and says so.
Not here: which process holds which part (`recipes.plan.command`), and how many tokens there are
(`recipes.plan.tokens`).

Bytes unless said. Axes: V vocabulary, M hidden, H query heads, K key and value heads, D head width, F feed-forward,
X = (H + 2K) D query, key and value features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

FLOAT, HALF = 4, 2
MIB, GIB = 1 << 20, 1 << 30

_HEAD_CHUNK, _LEAST_ROWS = 16 * MIB, 64
"""The learner's logits exist in chunks: of 16 MiB, and of at least 64 rows (`swarm.rl.forward`)."""
_STEP_ROWS = 2048
"""Rows of a step of the embedded engine, whose scratch memory is made for as many."""


@dataclass(frozen=True, slots=True)
class Family:
    """How the layers of an architecture are made: `norms` of width M, norms of q and k, biases of projections."""

    norms: int = 2
    qk_norm: bool = True
    qkv_bias: bool = False
    tied: bool = False


FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "qwen2": Family(qk_norm=False, qkv_bias=True),
    "llama": Family(qk_norm=False),
    "gemma3_text": Family(norms=4, tied=True),
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a config.json says: `ModelSize("qwen3", 2560, 128, 4, 4, 2, 32, 384, tied=True, width=4)`.

    `width`: bytes of a weight in the file. `sparse` layers have `experts` of `expert_ffn` in the place of `ffn`, of
    which a token goes through those `chosen`.
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool
    width: int = HALF
    biased: bool = False
    experts: int = 0
    chosen: int = 0
    expert_ffn: int = 0
    sparse: int = 0

    @property
    def qkv(self) -> int:
        """X."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def widest(self) -> int:
        """F of the widest feed-forward that a token goes through; of a sparse layer that of all its chosen experts."""
        return max(self.ffn if self.sparse < self.layers else 0, self.chosen * self.expert_ffn if self.sparse else 0)


def size_of(config: Mapping[str, Any]) -> ModelSize:
    """The size of the model that a config.json describes. Raises ValueError: a family not known, a number missing."""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r}, want one of {', '.join(FAMILIES)}")
    missing = [name for name in ("vocab_size", *_NUMBERS) if not isinstance(config.get(name), int)]
    if missing:
        raise ValueError(f"{missing[0]} = {config.get(missing[0])!r}, want a whole number")
    vocab, hidden, layers, heads, ffn = (int(config[name]) for name in ("vocab_size", *_NUMBERS))
    return ModelSize(
        family=family,
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        ffn=ffn,
        tied=bool(config.get("tie_word_embeddings", FAMILIES[family].tied)),
        width=HALF if str(config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16") else FLOAT,
        biased=bool(config.get("attention_bias", False)),
        experts=_experts(config),
        chosen=int(config.get("num_experts_per_tok") or 0),
        expert_ffn=int(config.get("moe_intermediate_size") or 0),
        sparse=_sparse(config, layers),
    )


_NUMBERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def _sparse(config: Mapping[str, Any], layers: int) -> int:
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    return sum((i + 1) % step == 0 and i not in dense for i in range(layers)) if _experts(config) else 0


def _experts(config: Mapping[str, Any]) -> int:
    """Published files have one name for it, files that transformers writes another."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


# --- counts ----------------------------------------------------------------------------


def parameters(size: ModelSize, layers: int | None = None) -> int:
    """Parameters of the model, or of its first `layers`, a tied head counted once:

    V M (twice if not tied) + M + layers · (M (X + H D) + norms + M · 3 F), a sparse layer having a router of M E and
    E experts of 3 M F' for the last term.
    """
    layers = size.layers if layers is None else min(layers, size.layers)
    sparse = min(size.sparse, layers)
    embeddings = size.vocab * size.hidden * (1 if size.tied else 2)
    return embeddings + size.hidden + layers * _outside(size) + (layers - sparse) * _dense(size) + sparse * _moe(size)


def hidden_matrices(size: ModelSize, layers: int | None = None) -> int:
    """Parameters in matrices that are neither embedding nor head: those that Muon moves."""
    layers = size.layers if layers is None else min(layers, size.layers)
    whole = parameters(size, layers) - size.vocab * size.hidden * (1 if size.tied else 2) - size.hidden
    return whole - layers * _vectors(size)


def _outside(size: ModelSize) -> int:
    return size.hidden * (size.qkv + size.heads * size.head_dim) + _vectors(size)


def _vectors(size: ModelSize) -> int:
    family = FAMILIES[size.family]
    biases = size.qkv if size.biased or family.qkv_bias else 0
    return family.norms * size.hidden + 2 * size.head_dim * family.qk_norm + biases + size.hidden * size.biased


def _dense(size: ModelSize) -> int:
    return 3 * size.hidden * size.ffn


def _moe(size: ModelSize) -> int:
    return size.experts * (size.hidden + 3 * size.hidden * size.expert_ffn)


# --- what is trained -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trained:
    """Of a network's parameters those that an optimizer moves, `width` bytes each; `matrices` of them would be Muon's.

    `frozen`: the other parameters have no gradient. `ranks`: the ranks of all adapters, added up.
    """

    parameters: int
    matrices: int
    width: int
    frozen: bool = False
    ranks: int = 0


def whole(size: ModelSize) -> Trained:
    """Everything is trained."""
    return Trained(parameters(size), hidden_matrices(size), size.width)


def last_layers(size: ModelSize, layers: int) -> Trained:
    """The last layers are trained, and the norm after them."""
    sparse = min(size.sparse, layers)
    matrices = layers * (_outside(size) - _vectors(size)) + sparse * _moe(size) + (layers - sparse) * _dense(size)
    return Trained(matrices + layers * _vectors(size) + size.hidden, matrices, size.width, frozen=True)


def adapters(size: ModelSize, rank: int, targets: Collection[str] = ()) -> Trained:
    """Adapters of the linear layers named, or of all of the decoder's: rank · (out + in) numbers of 4 bytes each."""
    shapes = [shape for name, shape in _linear(size) if not targets or name in targets]
    count = rank * sum(out + into for out, into in shapes)
    return Trained(count, count, FLOAT, frozen=True, ranks=rank * len(shapes))


def _linear(size: ModelSize) -> list[tuple[str, tuple[int, int]]]:
    """The linear layers that may have an adapter, by name, [out, in]; experts are no linear layers."""
    wide, narrow, hidden = size.heads * size.head_dim, size.kv_heads * size.head_dim, size.hidden
    attention = [("q_proj", (wide, hidden)), ("k_proj", (narrow, hidden)), ("v_proj", (narrow, hidden)),
                 ("o_proj", (hidden, wide))]  # fmt: skip
    dense = [("gate_proj", (size.ffn, hidden)), ("up_proj", (size.ffn, hidden)), ("down_proj", (hidden, size.ffn))]
    return attention * size.layers + dense * (size.layers - size.sparse)


# --- memory ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a process: `Memory(weights=8 * GIB, cache=16 * GIB) + Memory(program=GIB)`.

    `program`: the interpreter, its packages, what they compile, and the world; of a GPU its context.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    activations: int = 0
    program: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def kv_bytes(size: ModelSize, width: int) -> int:
    """Keys and values of one token: 2 · layers · K · D · width. Source: arXiv 2305.13245 (grouped heads)."""
    return 2 * size.layers * size.kv_heads * size.head_dim * width


def moments(moved: Trained, *, muon: bool) -> int:
    """What the optimizer keeps: AdamW two numbers a parameter, as wide as it; Muon one of 4 bytes for a matrix."""
    if not muon:
        return 2 * moved.parameters * moved.width
    return moved.matrices * FLOAT + 2 * (moved.parameters - moved.matrices) * moved.width


def embedded(size: ModelSize, cache: int, max_len: int, threads: int, *, updated: bool) -> Memory:
    """An embedded engine: its own copy of the weights in 4 bytes, its head laid out apart from a tied embedding.

    An engine that is `updated` has the next copy beside the one in use. Scratch of a thread and row: three of M,
    X, two of H D, three of F; then the logits of a step's sequences, of which a chunk of 2048 rows has as many.
    """
    copy = (parameters(size) + size.vocab * size.hidden * size.tied + max_len * size.head_dim) * FLOAT
    row = 3 * size.hidden + size.qkv + 2 * size.heads * size.head_dim + 3 * size.ffn
    return Memory(weights=copy * (2 if updated else 1), cache=cache, activations=threads * _STEP_ROWS * row * FLOAT)


def vllm(size: ModelSize, cache: int, batch_tokens: int, max_seqs: int, width: int, share: int = 1) -> Memory:
    """One of the `share` GPUs (or the process) of a vLLM engine; an estimate.

    Weights and cache are split evenly. A step of up to `batch_tokens` holds two residual streams, X and two of the
    widest feed-forward at a time; then logits, log-probabilities and a sorted copy, V floats a sequence each.
    """
    step = batch_tokens * (2 * size.hidden + size.qkv + 2 * size.widest) * width
    return Memory(
        weights=parameters(size) * width // share,
        cache=cache // share,
        activations=step + 3 * max_seqs * size.vocab * FLOAT,
    )


def fused_activations(size: ModelSize, tokens: int, threads: int, *, half: bool) -> int:
    """What the fused forward of a dense Qwen3 on a CPU keeps for its backward, of a micro-batch of `tokens`, at most.

    A layer keeps, per token, its input and the one of its feed-forward (2 M), X, the attention's output and its
    logarithms (H D + H), gate and up (2 F); with bf16 X and 2 F are half as wide, and the attention's output is
    there in both. Its matrices side by side are a copy (M X + 2 M F), and one more as a gradient. Beside layers
    there are 2 M, and the backward of a feed-forward adds 4 F + 2 M. The head: on each core two chunks of logits and a
    gradient (V M).
    """
    count = size.layers
    out = size.heads * size.head_dim
    narrow = size.qkv + 2 * size.ffn + (out if half else 0)
    kept = count * ((2 * size.hidden + out + size.heads) * FLOAT + narrow * (HALF if half else FLOAT))
    at_once = (4 * size.ffn + 2 * size.hidden + 2 * size.hidden) * FLOAT
    copies = 2 * count * size.hidden * (size.qkv + 2 * size.ffn) * FLOAT
    return tokens * (kept + at_once) + copies + threads * head_bytes(size)


def activations(size: ModelSize, tokens: int, moved: Trained, *, half: bool) -> int:
    """What any other forward of the learner keeps for its backward, of a micro-batch of `tokens`, at the most.

    With products of f bytes (2 in bf16 autocast, else 4), a layer keeps per token: 26 M, 18 M where its matrices are
    frozen; of H D and of K D 14, frozen 10, without autocast 20; 4 f of F; 8 H + 4 K + 8; f for each adapter and
    its rank. A sparse layer, in the place of F and w bytes wide as the file is, keeps for each chosen expert
    2 w M + 4 w F (frozen: w M + 3 w F) and 40 beside, and 4 a router's logit. Matrices that autocast narrows, or that
    adapters are merged into, are there once more in 2 bytes. Beside layers there are 2 M floats, and the backward of a
    feed-forward adds 4 F + 2 M.
    Counted from what the packed forward and transformers' own Qwen3 save (`tests/test_plan_memory.py`).
    """
    f, frozen = (HALF if half else FLOAT), moved.frozen
    heads = (size.heads + size.kv_heads) * size.head_dim * ((10 if frozen else 14) if half else 20)
    row = (18 if frozen else 26) * size.hidden + heads + 8 * size.heads + 4 * size.kv_heads + 8
    expert = size.width * ((1 if frozen else 2) * size.hidden + (3 if frozen else 4) * size.expert_ffn) + 40
    rows = size.layers * row + (size.layers - size.sparse) * 4 * f * size.ffn
    rows += size.sparse * (size.chosen * expert + 4 * size.experts) + moved.ranks * f
    at_once = (4 * size.widest + 4 * size.hidden) * FLOAT
    again = hidden_matrices(size) * HALF if half and (moved.width == FLOAT) and not size.sparse else 0
    return tokens * (rows + at_once) + again + head_bytes(size)


def head_bytes(size: ModelSize) -> int:
    """What the learner's head takes on a core or a GPU: two chunks of logits, and its gradient."""
    chunk = max(_HEAD_CHUNK, _LEAST_ROWS * size.vocab * FLOAT)
    return 2 * chunk + size.vocab * size.hidden * FLOAT


def sft_head_bytes(size: ModelSize, tokens: int) -> int:
    """A supervised step has the logits of all its tokens at once, their logarithms, and the gradients of both."""
    return 4 * tokens * size.vocab * FLOAT
