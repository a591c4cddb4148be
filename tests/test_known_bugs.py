"""The bugs that RL trainers are known for, put in one by one, and the named check that catches each.

A row of `BUGS` says how the bug is put in and which check of `tests.known_checks` has to fail then; every check
passes on the code as it is. Not here, because there is nothing to get wrong: replayed routing of experts (the
models are dense, no router chooses), and ties in the top-k of sparse attention (attention is over all keys).
Two real processes are in test_rl_processes; here two threads stand for them.
Axes: N action tokens, P slots of actions and observations, T tokens of a pack, n read positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _pytest.mark.structures import ParameterSet
from msgspec import structs
from torch import Tensor

import swarm.loop
from swarm.engine import kernels
from swarm.rl import batch, critic, forward, learner, losses, ppo, rows, signals, stepper
from swarm.rl.advantages import AdvantageConfig, Chain
from swarm.rl.gae import gae, last_of
from swarm.rl.rows import MicroBatch
from swarm.rl.signals import Signals
from swarm.types import Completion, Rollout, Segment, Span
from tests import known_checks as checks
from tests.swarm_cases import chat

Wrong = Callable[[pytest.MonkeyPatch], None]
"""Puts a bug in, for the length of a test."""


# --- losses and processes -----------------------------------------------------------------


def divides_by_the_micro_batch(m: pytest.MonkeyPatch) -> None:
    m.setattr(learner, "mean_over", lambda x_N, count: x_N.mean())


def takes_a_mean_of_the_means_of_rows(m: pytest.MonkeyPatch) -> None:
    # Each row of the five rollouts, seven in all, is its own micro-batch.
    m.setattr(learner, "mean_over", lambda x_N, count: x_N.mean() / 7)


def leaves_rejected_tokens_out_of_the_divisor(m: pytest.MonkeyPatch) -> None:
    m.setattr(learner, "mean_over", lambda x_N, count: x_N.sum() / (count * (x_N != 0).double().mean()))


def counts_the_tokens_of_one_process(m: pytest.MonkeyPatch) -> None:
    real = learner.Learner._sum
    m.setattr(learner.Learner, "_sum", lambda self, x: real(self, x) if x.is_floating_point() else x)


def averages_gradients_over_processes(m: pytest.MonkeyPatch) -> None:
    real = stepper.total
    m.setattr(stepper, "total", lambda accelerator, x: real(accelerator, x) / accelerator.num_processes)


def whitens_in_each_process(m: pytest.MonkeyPatch) -> None:
    m.setattr(signals, "whiten", lambda x_N, reduce: losses.whiten(x_N))


def whitens_in_one_pass(m: pytest.MonkeyPatch) -> None:
    m.setattr(losses, "whiten", lambda x_N: (x_N - x_N.mean()) / ((x_N**2).mean() - x_N.mean() ** 2 + 1e-8).sqrt())


def schedules_the_first_group_alone(m: pytest.MonkeyPatch) -> None:
    class Stuck(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if key != "lr":
                super().__setitem__(key, value)

    def build(*args: Any) -> list[torch.optim.Optimizer]:
        optimizers = real(*args)
        for o in optimizers:
            o.param_groups[1:] = [Stuck(g) for g in o.param_groups[1:]]
        return optimizers

    real = stepper.build
    m.setattr(stepper, "build", build)


def takes_two_corrections(m: pytest.MonkeyPatch) -> None:
    m.setattr(ppo, "refuse_double", lambda *_: None)


# --- the forward ----------------------------------------------------------------------------


def forwards(m: pytest.MonkeyPatch, wrong: Callable[..., Tensor]) -> None:
    for module in (signals, learner, critic):
        m.setattr(module, "hidden_states", wrong)


def packs(m: pytest.MonkeyPatch, wrong: Callable[[MicroBatch], MicroBatch]) -> None:
    real = rows._gathered
    m.setattr(rows, "_gathered", lambda *args: wrong(real(*args)))


def reads_one_position_late(m: pytest.MonkeyPatch) -> None:
    packs(m, lambda micro: replace(micro, read_n=(micro.read_n + 1).clamp(max=len(micro.ids_T) - 1)))


def scores_the_token_before(m: pytest.MonkeyPatch) -> None:
    packs(m, lambda micro: replace(micro, target_n=micro.ids_T[micro.read_n]))


def pads_on_the_left(m: pytest.MonkeyPatch) -> None:
    """Three pad tokens before each document, which nobody masks."""

    def padded(micro: MicroBatch) -> MicroBatch:
        root_G = torch.tensor([a < 0 for a in micro.after])
        shift_T = (3 * root_G.cumsum(0)).repeat_interleave(torch.tensor(micro.lengths))
        ids_T = torch.zeros(len(shift_T) + 3 * int(root_G.sum()), dtype=torch.long)
        ids_T[torch.arange(len(shift_T)) + shift_T] = micro.ids_T
        lengths = tuple(n + 3 * (a < 0) for n, a in zip(micro.lengths, micro.after, strict=True))
        return replace(micro, ids_T=ids_T, lengths=lengths, read_n=micro.read_n + shift_T[micro.read_n])

    packs(m, padded)


def plain(leaks: bool = False, restarts: bool = True) -> Callable[..., Tensor]:
    """transformers' forward with a mask and positions for packed documents; with both right it gives what ours does."""

    def hidden(model: Any, micro: MicroBatch, half: bool = False) -> Tensor:
        lengths_G, after_G = torch.tensor(micro.lengths), torch.tensor(micro.after)
        segment_T = torch.arange(len(lengths_G)).repeat_interleave(lengths_G)
        start_T = (lengths_G.cumsum(0) - lengths_G)[segment_T]
        depth_T = torch.where(after_G[segment_T] < 0, 0, lengths_G[after_G[segment_T]])
        at_T = torch.arange(len(segment_T))
        sees_TT = segment_T[:, None] == segment_T
        sees_TT |= after_G[segment_T][:, None] == segment_T
        mask_TT = torch.where((sees_TT | leaks) & (at_T[:, None] >= at_T), 0.0, -torch.inf)
        position_T = at_T - start_T + depth_T if restarts else at_T
        h = model.model(micro.ids_T[None], attention_mask=mask_TT[None, None], position_ids=position_T[None])
        return h.last_hidden_state[0, micro.read_n]

    return hidden


def leaks_between_documents(m: pytest.MonkeyPatch) -> None:
    forwards(m, plain(leaks=True))


def counts_positions_through_the_pack(m: pytest.MonkeyPatch) -> None:
    forwards(m, plain(restarts=False))


def leaves_dropout_on(m: pytest.MonkeyPatch) -> None:
    real = forward.hidden_states
    forwards(m, lambda *args: F.dropout(real(*args), 0.1))


def rounds_as_the_batch_grows(m: pytest.MonkeyPatch) -> None:
    """Another kernel, with half the digits, where there is more than one document."""
    real = forward.hidden_states

    def hidden(model: Any, micro: MicroBatch, *args: Any) -> Tensor:
        h_nd = real(model, micro, *args)
        return h_nd.bfloat16().float() if len(micro.lengths) > 1 else h_nd

    forwards(m, hidden)


def makes_logits_in_bf16(m: pytest.MonkeyPatch) -> None:
    m.setattr(
        forward,
        "_logits",
        lambda h_cd, head_Vd, bias_V, form: (form.factor * h_cd.bfloat16() @ head_Vd.bfloat16().t()).float(),
    )


def divides_log_probabilities_by_the_temperature(m: pytest.MonkeyPatch) -> None:
    def divided(
        model: Any, h_nd: Tensor, target_n: Tensor, temperature: float, **options: Any
    ) -> tuple[Tensor, Tensor]:
        logp_n, entropy_n = forward.log_chosen(model, h_nd, target_n, 1.0, **options)
        return logp_n / temperature, entropy_n

    for module in (signals, learner):
        m.setattr(module, "log_chosen", divided)


def forgets_the_temperature(m: pytest.MonkeyPatch) -> None:
    for module in (signals, learner):
        m.setattr(
            module, "log_chosen", lambda model, h, t, temperature, **more: forward.log_chosen(model, h, t, **more)
        )


def divides_values_by_the_temperature(m: pytest.MonkeyPatch) -> None:
    real = learner.Learner._values
    m.setattr(learner.Learner, "_values", lambda self, micro: real(self, micro) / self.config.temperature)


def samples_from_the_top(m: pytest.MonkeyPatch) -> None:
    """The sampler keeps 0.9 of the mass and renormalises, the learner does not know."""
    real = kernels.sampled
    m.setattr(kernels, "sampled", lambda z, t, p, seed, at: real(z, t, np.full_like(p, 0.9), seed, at))


# --- ids and masks ----------------------------------------------------------------------------


def collects(m: pytest.MonkeyPatch, wrong: Callable[[Segment], Segment]) -> None:
    def of(r: Rollout) -> Rollout:
        return replace(r, trace=replace(r.trace, segments=tuple(map(wrong, r.trace.segments))))

    real = batch.collect
    m.setattr(batch, "collect", lambda rollouts: real([of(r) for r in rollouts]))


def masks_the_end_of_a_turn(m: pytest.MonkeyPatch) -> None:
    """The stop token is 0, which pads too."""

    def without(span: Span) -> tuple[Span, ...]:
        if span.kind != "sampled" or span.ids[-1] != 0:
            return (span,)
        return structs.replace(span, ids=span.ids[:-1], logprobs=span.logprobs[:-1]), Span("observed", span.ids[-1:])

    collects(m, lambda s: Segment(tuple(x for span in s.spans for x in without(span)), s.opened_by))


def tokenizes_again(m: pytest.MonkeyPatch) -> None:
    def again(state: Any, c: Completion, prompt_tokens: int) -> Any:
        ids = tuple(chat().encode(chat().decode(c.ids[:-1]))) + c.ids[-1:]
        return real(state, replace(c, ids=ids, logprobs=(0.0,) * len(ids)), prompt_tokens)

    real = swarm.loop._said
    m.setattr(swarm.loop, "_said", again)


def trains_the_copied_summary(m: pytest.MonkeyPatch) -> None:
    def opened(harness: Any, state: Any, shown: Any, by: Any, **options: Any) -> Any:
        state = real(harness, state, shown, by, **options)
        if not shown:
            return state
        ids, copy = state.segment.spans[0].ids, shown[0].ids
        at = next(k for k in range(len(ids)) if ids[k : k + len(copy)] == copy)
        end = at + len(copy)
        spans = Span("prompt", ids[:at]), Span("sampled", copy, (0.0,) * len(copy)), Span("prompt", ids[end:])
        return structs.replace(state, segment=Segment(spans, by))

    real = swarm.loop._opened
    m.setattr(swarm.loop, "_opened", opened)


# --- rewards and advantages -----------------------------------------------------------------


def chains(m: pytest.MonkeyPatch, wrong: Callable[[Chain, batch.Batch], Chain]) -> None:
    real = signals._chain
    m.setattr(signals, "_chain", lambda b, *args: wrong(real(b, *args), b))


def loses_a_reward_after_an_observation(m: pytest.MonkeyPatch) -> None:
    """The reward is put on the last token of a rollout, and what is not an action is masked."""

    def lost(chain: Chain, b: batch.Batch) -> Chain:
        last_N = last_of(chain.rollout_N)
        acts_R = b.rows.position_N[last_N] == b.rows.length_S[chain.segment_N[last_N]] - 1
        return replace(chain, reward_R=chain.reward_R * acts_R)

    chains(m, lost)


def ends_where_it_was_cut(m: pytest.MonkeyPatch) -> None:
    chains(m, lambda chain, _: replace(chain, bootstrap_R=torch.zeros_like(chain.bootstrap_R)))


def goes_on_where_it_ended(m: pytest.MonkeyPatch) -> None:
    chains(m, lambda chain, _: replace(chain, bootstrap_R=chain.value_N[last_of(chain.rollout_N)]))


def over_slots(junk: float) -> Wrong:
    """Advantages over actions and observations: one slot after each turn, whose value is junk."""

    def estimated(chain: Chain, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
        ends_N = last_of(chain.turn_N) | last_of(chain.rollout_N)
        at_N = torch.arange(len(ends_N)) + ends_N.cumsum(0) - ends_N.long()
        slots = len(ends_N) + int(ends_N.sum())
        value_P, reward_P, rollout_P = torch.full((slots,), junk), torch.zeros(slots), torch.zeros(slots).long()
        value_P[at_N], rollout_P[at_N] = chain.value_N, chain.rollout_N
        rollout_P[at_N[ends_N] + 1] = chain.rollout_N[ends_N]
        reward_P[at_N[last_of(chain.rollout_N)]] = chain.reward_R
        lam_P = torch.full((slots,), config.lam)
        a_P = gae(reward_P, value_P, rollout_P, chain.bootstrap_R, torch.ones(slots), lam_P)
        return a_P[at_N], a_P[at_N] + chain.value_N

    def put_in(m: pytest.MonkeyPatch) -> None:
        m.setattr(signals, "advantages", estimated)

    put_in.__name__ = f"estimates_over_slots_of_{junk}"
    return put_in


def whitens_the_teachers_away(m: pytest.MonkeyPatch) -> None:
    def whitened(*args: Any) -> Signals:
        s = real(*args)
        return replace(s, advantage_N=losses.whiten(s.advantage_N).float())

    real = learner.signals_of
    m.setattr(learner, "signals_of", whitened)


BUGS: list[tuple[Wrong, Callable[[], None]]] = [
    (divides_by_the_micro_batch, checks.check_the_gradient_is_that_of_one_mean_over_all_tokens),
    (takes_a_mean_of_the_means_of_rows, checks.check_the_gradient_is_that_of_one_mean_over_all_tokens),
    (leaves_rejected_tokens_out_of_the_divisor, checks.check_rejected_tokens_count_in_the_divisor),
    (counts_the_tokens_of_one_process, checks.check_two_processes_make_the_step_of_one),
    (averages_gradients_over_processes, checks.check_two_processes_make_the_step_of_one),
    (whitens_in_each_process, checks.check_two_processes_make_the_step_of_one),
    (whitens_in_one_pass, checks.check_whitening_keeps_a_small_variance_beside_a_large_mean),
    (schedules_the_first_group_alone, checks.check_every_group_of_parameters_follows_the_schedule),
    (takes_two_corrections, checks.check_two_corrections_of_one_mismatch_are_refused),
    (reads_one_position_late, checks.check_log_probabilities_are_those_of_transformers_row_by_row),
    (reads_one_position_late, checks.check_a_value_does_not_see_its_own_token),
    (scores_the_token_before, checks.check_log_probabilities_are_those_of_transformers_row_by_row),
    (pads_on_the_left, checks.check_log_probabilities_are_those_of_transformers_row_by_row),
    (leaks_between_documents, checks.check_a_document_does_not_see_its_neighbours),
    (counts_positions_through_the_pack, checks.check_log_probabilities_are_those_of_transformers_row_by_row),
    (leaves_dropout_on, checks.check_the_first_ratio_is_one),
    (rounds_as_the_batch_grows, checks.check_log_probabilities_do_not_depend_on_the_batch),
    (makes_logits_in_bf16, checks.check_the_heads_products_are_as_exact_as_float32),
    (divides_log_probabilities_by_the_temperature, checks.check_log_probabilities_are_those_of_transformers_row_by_row),
    (forgets_the_temperature, checks.check_the_first_ratio_is_one),
    (divides_values_by_the_temperature, checks.check_values_do_not_depend_on_the_temperature),
    (samples_from_the_top, checks.check_the_mean_ratio_to_the_engines_samples_is_one),
    (masks_the_end_of_a_turn, checks.check_every_sampled_token_is_an_action_with_its_logprob),
    (tokenizes_again, checks.check_trained_ids_are_those_that_the_engine_sampled),
    (trains_the_copied_summary, checks.check_a_summary_is_trained_once),
    (loses_a_reward_after_an_observation, checks.check_the_reward_reaches_every_action),
    (ends_where_it_was_cut, checks.check_a_cut_is_followed_by_the_critics_value_and_an_end_by_nothing),
    (goes_on_where_it_ended, checks.check_a_cut_is_followed_by_the_critics_value_and_an_end_by_nothing),
    (over_slots(0.0), checks.check_a_perfect_critic_leaves_no_advantage_whatever_was_observed),
    (over_slots(float("nan")), checks.check_a_perfect_critic_leaves_no_advantage_whatever_was_observed),
    (whitens_the_teachers_away, checks.check_the_term_of_a_teacher_keeps_its_scale),
]
LONG = (
    checks.check_the_gradient_is_that_of_one_mean_over_all_tokens,
    checks.check_rejected_tokens_count_in_the_divisor,
    checks.check_two_processes_make_the_step_of_one,
)


def rows_of(table: Iterable[tuple[Callable[..., None], ...]]) -> list[ParameterSet]:
    """The rows of a table of functions that ends in checks, named by them, the long ones marked."""
    return [
        pytest.param(
            *row,
            id="-".join(f.__name__.removeprefix("check_") for f in row),
            marks=[pytest.mark.slow] if row[-1] in LONG else [],
        )
        for row in table
    ]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes seconds on a fresh machine; no test pays for it."""
    checks.check_the_mean_ratio_to_the_engines_samples_is_one()


@pytest.mark.parametrize("check", rows_of((check,) for check in dict.fromkeys(check for _, check in BUGS)))
def test_a_check_passes_on_the_code_as_it_is(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(("wrong", "check"), rows_of(BUGS))
def test_a_check_catches_its_bug(wrong: Wrong, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def test_a_plain_forward_in_the_place_of_ours_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that it is the leak, or the positions, that the checks see.
    forwards(monkeypatch, plain())
    checks.check_log_probabilities_are_those_of_transformers_row_by_row()
    checks.check_a_document_does_not_see_its_neighbours()
