# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""On-policy distillation: what teachers say of the tokens that the policy sampled, as an advantage or as a loss.

Several teachers have weights, and each may be for some task domains only. Their losses are mixed, never their
probabilities. For the loss a teacher is run once a batch: its last hidden states are kept, d numbers a token,
and its logits over V made again from them, chunk by chunk, for every pass.
Not here: loading teachers, whitening. The advantage term is added after whitening, which would rescale it.
Axes: K teachers, R rollouts, N action tokens, n those of a micro-batch, M those that a teacher is for,
d hidden, V vocabulary.
Sources: sampled token, GLM-5 (section 3.5, eq. 2); full vocabulary and several teachers, DeepSeek-V4 (5.1.2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from swarm.checks import want
from swarm.folders import CheckpointError, read_json
from swarm.rl.forward import hidden_states, log_probs, packs, rows_at_once
from swarm.rl.head import Head, head_of
from swarm.rl.rows import Rows, micro_batches

_want = partial(want, "distill")
_ROWS = 1024

Form = Literal["advantage", "full"]


@dataclass(frozen=True, slots=True)
class Teacher:
    """`Teacher(Path("runs/search/policy"), weight=2.0, domains=("trails",))`: a checkpoint folder, what it counts
    for beside other teachers of the same task, and the task domains that it is for, all if empty."""

    path: Path
    weight: float = 1.0
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _want("weight", self.weight, 0 < self.weight < math.inf, "a finite number above 0")
        _want("domains", self.domains, len(set(self.domains)) == len(self.domains), "each domain once")


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """`DistillConfig((Teacher(a), Teacher(b)), form="full", coef=0.5)`; without teachers nothing is distilled.

    `form`: "advantage" adds `coef` times `sampled` to the whitened advantage; "full" adds `coef` times
    `reverse_kl` to the policy's loss.
    """

    teachers: tuple[Teacher, ...] = ()
    form: Form = "advantage"
    coef: float = 1.0

    def __post_init__(self) -> None:
        _want("form", self.form, self.form in ("advantage", "full"), "'advantage' or 'full'")
        _want("coef", self.coef, 0 < self.coef < math.inf, "a finite number above 0")


def weights_KR(teachers: Sequence[Teacher], domains_R: Sequence[str]) -> Tensor:
    """What each teacher counts for on each rollout, [K, R] float32: 1 in all, or 0 where none is for its domain."""
    rows = [[t.weight if d in t.domains or not t.domains else 0.0 for d in domains_R] for t in teachers]
    weight_KR = torch.tensor(rows, dtype=torch.float64).view(len(teachers), len(domains_R))
    total_R = weight_KR.sum(0)
    return (weight_KR / torch.where(total_R > 0, total_R, 1.0)).float()


def sampled(logp_teacher_KN: Tensor, logp_student_N: Tensor, weight_KN: Tensor) -> Tensor:
    """The advantage term [N] of the sampled tokens, without gradient: Σ_k w_k (log π_Tk − log π_S).

    −E_{a~S}[term · ∇log π_S] is the gradient of Σ_k w_k KL(π_S ‖ π_Tk) at that position. Where a weight is 0
    its teacher may have said anything, NaN too. Source: GLM-5, section 3.5, eq. 2.
    """
    gap_KN = logp_teacher_KN.detach() - logp_student_N.detach()
    return (weight_KN * torch.where(weight_KN > 0, gap_KN, 0.0)).sum(0)


def reverse_kl(logp_student_nV: Tensor, logp_teacher_KnV: Tensor, weight_Kn: Tensor) -> Tensor:
    """Σ_k w_k KL(π_S ‖ π_Tk) [n] in nats, over the whole vocabulary, differentiable in the student.

    A mixture of the losses, and so of log π_T; not a loss against mixed probabilities. Where a weight is 0
    its teacher may have said anything. Source: DeepSeek-V4, section 5.1.2.
    """
    logp_teacher_KnV = torch.where(weight_Kn[..., None] > 0, logp_teacher_KnV.detach(), 0.0)
    target_nV = (weight_Kn[..., None] * logp_teacher_KnV).sum(0)
    return _against(logp_student_nV, target_nV, weight_Kn.sum(0))


def _against(logp_student_nV: Tensor, target_nV: Tensor, weight_n: Tensor) -> Tensor:
    """Σ_v p (W log p − Σ_k w_k log π_Tk): teachers meet in one [n, V], however many they are."""
    return (logp_student_nV.exp() * (weight_n[:, None] * logp_student_nV - target_nV)).sum(-1)


# --- from hidden states -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """What is kept of one teacher's pass over a batch: d numbers a token that it is for, not V.

    `slot_N[j]` says which row of `hidden_Md` is action token j's, −1 where the teacher is not for it.
    `head` is the teacher's.
    """

    head: Head
    hidden_Md: Tensor
    slot_N: Tensor

    def logp(self, at_n: Tensor, temperature: float) -> Tensor:
        """log π_T [n, V], float32, at action tokens `at_n` of N."""
        return log_probs(self.head, self.hidden_Md[self.slot_N[at_n]], temperature)


@torch.no_grad()
def teacher_states(
    teacher: PreTrainedModel, rows: Rows, chosen_S: Tensor, micro_tokens: int, bf16: bool = False
) -> TeacherStates:
    """One pass of a teacher over the chosen rows, those of the rollouts that it is for."""
    slot_N = torch.full_like(rows.target_N, -1)
    kept = [torch.zeros(0, teacher.config.hidden_size, device=slot_N.device)]
    for micro in micro_batches(rows, chosen_S, micro_tokens, packs(teacher)):
        slot_N[micro.index_n] = sum(map(len, kept)) + torch.arange(len(micro.index_n), device=slot_N.device)
        kept.append(hidden_states(teacher, micro, bf16))
    return TeacherStates(head_of(teacher).detached(), torch.cat(kept), slot_N)


def routed_kl(
    h_nd: Tensor,
    head: Head,
    teachers: Sequence[TeacherStates],
    weight_Kn: Tensor,
    index_n: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """`reverse_kl` [n] from the student's hidden states and head, never more than `chunk` × V at once.

    `index_n` are the tokens' places in N. The backward makes each chunk again. One temperature is everybody's:
    the student is the distribution that was sampled from. Tokens without a teacher cost nothing and give 0.
    """
    out_n = torch.zeros(len(h_nd), device=h_nd.device)
    if not teachers:
        return out_n

    def part(h_cd: Tensor, weight_Kc: Tensor, at_c: Tensor, *tensors: Tensor) -> Tensor:
        logp_cV = log_probs(head.with_tensors(*tensors), h_cd, temperature)
        return _against(logp_cV, _targets(teachers, weight_Kc, at_c, temperature), weight_Kc.sum(0))

    chunk = chunk or min(_ROWS, rows_at_once(len(head.weight_Vd)))
    for pick_c in (weight_Kn.sum(0) > 0).nonzero()[:, 0].split(chunk):
        given = (h_nd[pick_c], weight_Kn[:, pick_c], index_n[pick_c], *head.tensors())
        out_n = out_n.index_put((pick_c,), checkpoint(part, *given, use_reentrant=False, preserve_rng_state=False))
    return out_n


@torch.no_grad()
def _targets(teachers: Sequence[TeacherStates], weight_Kc: Tensor, at_c: Tensor, temperature: float) -> Tensor:
    """Σ_k w_k log π_Tk [c, V], each teacher only where it counts."""
    target_cV = torch.zeros(len(at_c), len(teachers[0].head.weight_Vd), device=weight_Kc.device)
    for states, weight_c in zip(teachers, weight_Kc, strict=True):
        on = weight_c.nonzero()[:, 0]
        if len(on):
            target_cV.index_add_(0, on, weight_c[on, None] * states.logp(at_c[on], temperature))
    return target_cV


# --- before any weights are read ----------------------------------------------------------


def check_tokenizer(policy_folder: Path, teacher_folder: Path) -> None:
    """Raises CheckpointError where the same id is not the same token in both, or the vocabularies differ in size.

    Reads tokenizer.json and config.json. How text is cut into tokens is not compared: a teacher is given ids.
    """
    policy, teacher = _tokens(policy_folder), _tokens(teacher_folder)
    if policy != teacher:
        token = min(t for t in policy.keys() | teacher.keys() if policy.get(t) != teacher.get(t))
        seen, wanted = (ids.get(token, "no id") for ids in (teacher, policy))
        raise CheckpointError(
            f"distill: teacher {teacher_folder} has {seen} for token {json.dumps(token)[:60]}, "
            f"want {wanted} as the policy's tokenizer has ({policy_folder})"
        )
    size, wanted = (read_json(f / "config.json").get("vocab_size") for f in (teacher_folder, policy_folder))
    if size != wanted:
        raise CheckpointError(
            f"distill: teacher {teacher_folder} has vocab_size = {size}, want the policy's {wanted} ({policy_folder})"
        )


def _tokens(folder: Path) -> dict[str, int]:
    raw = read_json(folder / "tokenizer.json")
    try:
        vocab: Any = raw["model"]["vocab"]
        # A unigram model lists [token, score] in the order of ids.
        tokens = dict(vocab) if isinstance(vocab, dict) else {str(pair[0]): k for k, pair in enumerate(vocab)}
        return {**tokens, **{str(t["content"]): int(t["id"]) for t in raw.get("added_tokens", [])}}
    except (KeyError, TypeError, ValueError, IndexError) as e:
        raise CheckpointError(f"{folder / 'tokenizer.json'}: no vocabulary found, want model.vocab") from e
