"""What a batch asked of an engine, as programs: the same calls, in an order that respects who waits for whom."""

from __future__ import annotations

from benchmarks.programs import Call, Program, program_of, run_inline
from swarm.types import Ledger, Rollout, Segment, Span, Stage, Task, Trace

TASK = Task("t", "q", "s", "d", ("a",), ())


def said(*ids: int, version: int = 0) -> Span:
    return Span("sampled", ids, (0.0,) * len(ids), version)


def rollout(spans: list[Span], stages: list[Stage], children: tuple[Rollout, ...] = ()) -> Rollout:
    return Rollout(TASK, Trace("a", (Segment(tuple(spans)),), "answered"), Ledger(tuple(stages)), children=children)


def test_a_program_has_each_turns_prompt_and_length_and_the_children_that_it_started():
    child = rollout([Span("prompt", (7,)), said(8)], [Stage(1)])
    parent = rollout(
        [Span("prompt", (1, 2)), said(3), said(4, version=1), Span("observed", (5,)), said(6)],
        [Stage(1, (1, 1)), Stage(1)],
        (child, child),
    )
    program = program_of(parent)
    assert program.calls == (((1, 2), 2), ((1, 2, 3, 4, 5), 1))
    assert [len(c) for c in program.children] == [2, 0]
    assert (program.tokens, program.requests) == (5, 4)


def test_inline_a_parent_goes_on_when_its_last_child_is_done():
    leaf = Program((((9,), 1), ((9, 9), 1)), ((), ()))
    parent = Program((((1,), 2), ((2,), 3)), ((leaf, leaf), ()))
    order: list[list[tuple[int, ...]]] = []

    def step(new: list[Call]) -> list[Call]:
        order.append([tuple(c.ids) for c in new])
        return new

    assert run_inline([parent, leaf], step) == parent.tokens + leaf.tokens
    assert order == [[(1,), (9,)], [(9,), (9,), (9, 9)], [(9, 9), (9, 9)], [(2,)]]
