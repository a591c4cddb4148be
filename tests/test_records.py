"""Rollout records: every tree comes back exactly, and a torn file loses its tail only."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.records import RecordError, read, torn_bytes, write
from swarm.types import Ledger, OpenedBy, Reward, Rollout, Segment, Span, Stage, Task, Trace

numbers = st.floats(allow_nan=False)
counts = st.integers(0, 1 << 40)
names = st.text(max_size=4)
cells = st.lists(st.tuples(names, names), max_size=2).map(tuple)
metas = st.dictionaries(names, st.none() | counts | numbers | names | st.lists(counts, max_size=2), max_size=2)
sampled = st.lists(st.tuples(counts, numbers), max_size=4).map(
    lambda pairs: Span("sampled", tuple(i for i, _ in pairs), tuple(x for _, x in pairs), 3)
)
given_spans = st.builds(Span, st.sampled_from(["prompt", "observed"]), st.lists(counts, max_size=3).map(tuple))
segments = st.builds(
    Segment,
    st.lists(sampled | given_spans, max_size=3).map(tuple),
    st.sampled_from(["start", "truncation", "compaction", "fork"]),
)
traces = st.builds(
    Trace, names, st.lists(segments, max_size=2).map(tuple), st.sampled_from(["answered", "exhausted", "error"]), names
)
stages = st.builds(Stage, counts, st.lists(counts, max_size=3).map(tuple))
ledgers = st.builds(
    Ledger, st.lists(stages, max_size=3).map(tuple), counts, counts, counts, numbers, numbers, st.just({"malformed": 1})
)
tasks = st.builds(Task, names, names, names, names, st.just(("a", "b")), cells, counts, metas)
rewards = st.none() | st.builds(Reward, st.dictionaries(names, numbers, max_size=2), st.just({"perf": 1.0}))
leaves = st.builds(Rollout, tasks, traces, ledgers, names, names, cells, st.just(()), rewards)
rollouts = st.recursive(
    leaves,
    lambda inner: st.builds(
        Rollout, tasks, traces, ledgers, names, names, cells, st.lists(inner, max_size=2).map(tuple), rewards
    ),
    max_leaves=3,
)


def rollout(name: str) -> Rollout:
    task = Task(name, "q", "s", "city", ("name",), (("Ohio",),), meta={"rows": 1})
    trace = Trace("main", (Segment((Span("prompt", (1, 2)), Span("sampled", (3,), (-0.5,), 1))),), "answered")
    return Rollout(
        task, trace, Ledger((Stage(1, (2, 3)),), counts={"ok": 1}), reward=Reward({"perf": 0.5}, {"perf": 1})
    )


TWO = (rollout("a"), rollout("b"))


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(rollouts, max_size=2))
def test_every_rollout_comes_back_exactly(tmp_path: Path, wanted: list[Rollout]) -> None:
    path = tmp_path / "r.rec"
    path.unlink(missing_ok=True)
    write(path, wanted)
    assert list(read(path)) == wanted


@pytest.mark.parametrize("by", ["truncation", "compaction"])
def test_rewritten_contexts_come_back_with_what_opened_them(tmp_path: Path, by: OpenedBy) -> None:
    copy = Segment((Span("prompt", (1, 3)), Span("sampled", (4,), (-0.25,), 2)), by)
    wanted = replace(TWO[0], trace=replace(TWO[0].trace, segments=(*TWO[0].trace.segments, copy)))
    write(tmp_path / "r.rec", [wanted])
    assert list(read(tmp_path / "r.rec")) == [wanted]


def test_writing_again_appends(tmp_path: Path) -> None:
    assert write(tmp_path / "deep" / "r.rec", TWO) == 2
    assert write(tmp_path / "deep" / "r.rec", [rollout("c")]) == 1
    assert [r.task.id for r in read(tmp_path / "deep" / "r.rec")] == ["a", "b", "c"]


def test_an_undamaged_file_has_no_torn_tail(tmp_path: Path) -> None:
    write(tmp_path / "r.rec", TWO)
    assert torn_bytes(tmp_path / "r.rec") == 0


def test_a_file_cut_anywhere_keeps_its_whole_rollouts(tmp_path: Path) -> None:
    path = tmp_path / "r.rec"
    write(path, TWO[:1])
    first = path.stat().st_size
    write(path, TWO[1:])
    data = path.read_bytes()
    for cut in (*range(0, first, 29), first - 1, first, first + 1, first + 8, len(data) - 1):
        path.write_bytes(data[:cut])
        assert list(read(path)) == list(TWO[: cut >= first])
        assert torn_bytes(path) == cut - (first if cut >= first else 10 if cut >= 10 else 0)


def test_the_next_write_cuts_a_torn_tail_off(tmp_path: Path) -> None:
    path = tmp_path / "r.rec"
    write(path, TWO)
    path.write_bytes(path.read_bytes()[:-3])
    write(path, [rollout("c")])
    assert [r.task.id for r in read(path)] == ["a", "c"]
    assert torn_bytes(path) == 0


@pytest.mark.parametrize("cut", [0, 4])
def test_a_file_torn_within_its_first_bytes_is_begun_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "r.rec"
    write(path, TWO)
    path.write_bytes(path.read_bytes()[:cut])
    write(path, TWO)
    assert tuple(read(path)) == TWO


def test_a_changed_byte_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "r.rec"
    write(path, TWO)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert tuple(read(path)) == TWO[:1]


def test_another_file_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("something else")
    with pytest.raises(RecordError, match="no rollout record, it begins with b'something '"):
        list(read(path))
    with pytest.raises(RecordError, match="no rollout record"):
        write(path, TWO)
    assert path.read_text() == "something else"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot read rollouts: No such file"):
        list(read(tmp_path / "none.rec"))


def test_a_disk_that_is_full_keeps_the_earlier_rollouts(tmp_path: Path) -> None:
    path = tmp_path / "r.rec"
    write(path, TWO)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(RecordError, match="cannot write rollouts: .*; earlier ones are intact"):
            write(path, TWO)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert tuple(read(path)) == TWO
