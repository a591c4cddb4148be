"""Rollout records: every tree comes back exactly, and a torn file loses its tail only."""

import resource
import struct
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.kept import lacks
from swarm.records import SUFFIX, RecordError, Records, read, torn_bytes, write
from swarm.terms import Budget, ContextPolicy, Sampling, Setup, Terms, ToolSpec
from swarm.types import Act, Artifact, Ledger, OpenedBy, Reward, Rollout, Segment, Span, Stage, Task, ToolResult, Trace

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
artifacts = st.builds(Artifact, names, names, st.dictionaries(names, names, max_size=1), cells)
results = st.builds(ToolResult, st.lists(names | artifacts, max_size=2).map(tuple), names)
places = st.lists(st.integers(0, 9), max_size=2).map(tuple)
acts = st.builds(
    *(Act, counts, counts, numbers, st.lists(results, max_size=2).map(tuple), places, places, numbers, numbers, places)
)
budgets = st.builds(Budget, st.integers(1, 99), st.integers(1, 9999), st.floats(0.5, 1e9))
SPEC = ToolSpec("echo", "Echo.", {"type": "object", "properties": {"x": {"type": "integer"}}}, ordinary=False)
terms = st.builds(
    *(Terms, st.just((SPEC,)), st.builds(Sampling, counts, numbers, numbers, places, counts)),
    *(st.sampled_from([ContextPolicy(), ContextPolicy("compaction", 400, 1)]), st.booleans()),
)
setups = st.none() | st.builds(
    Setup, terms, counts, st.integers(0, 3), budgets, names, st.just(()) | st.tuples(st.tuples(counts, budgets))
)
traces = st.builds(
    *(Trace, names, st.lists(segments, max_size=2).map(tuple), st.sampled_from(["answered", "exhausted", "error"])),
    *(names, names, st.lists(acts, max_size=2).map(tuple), setups),
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


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_cut_at_any_byte_loses_the_last_rollout_at_most_and_says_so(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / f"cut{SUFFIX}"
    path.unlink(missing_ok=True)
    ends = [10]
    for name in "abcd":
        write(path, [rollout(name)])
        ends.append(path.stat().st_size)
    cut = data.draw(st.integers(10, ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    whole = max(k for k, end in enumerate(ends) if end <= cut)
    records = Records(path)
    assert [r.task.id for r in records] == list("abcd"[:whole])
    lost = f"{path}: the last {cut - ends[whole]} bytes are torn, the rollout that was being written is lost"
    assert records.torn == ([lost] if cut != ends[whole] else [])


def test_zeros_behind_the_last_rollout_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "r.rec"
    write(path, TWO)
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert tuple(read(path)) == TWO
    assert torn_bytes(path) == 4096


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


def test_a_changed_byte_within_a_file_is_said_of_the_rollout_that_it_is_in(tmp_path: Path) -> None:
    path = tmp_path / "r.rec"
    write(path, TWO[:1])
    first = path.stat().st_size
    write(path, [*TWO[1:], rollout("c")])
    data = bytearray(path.read_bytes())
    data[first + 9] ^= 1
    path.write_bytes(data)
    records = Records(path)
    assert [records[0].task.id, records[2].task.id] == ["a", "c"]
    with pytest.raises(RecordError, match="record 1 is damaged, its checksum is another; want a copy of the file"):
        records[1]


def test_rollouts_that_share_tools_and_pages_cost_little_beside_the_first(tmp_path: Path) -> None:
    words = " ".join(str(hash((k, "page"))) for k in range(300))
    told = [replace(rollout(f"{k}"), answer=words) for k in range(9)]
    write(tmp_path / "one.rec", told[:1])
    write(tmp_path / "nine.rec", told[:4])
    write(tmp_path / "nine.rec", told[4:])
    one, nine = ((tmp_path / name).stat().st_size for name in ("one.rec", "nine.rec"))
    assert nine < 1.5 * one
    assert list(read(tmp_path / "nine.rec")) == told


def test_a_file_of_the_first_format_is_read_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "old.rec"
    payload = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(TWO[0]))
    head = struct.pack("<II", len(payload), zlib.crc32(payload))
    path.write_bytes(b"SWARMREC1\n" + 2 * (head + payload))
    write(path, TWO)
    assert list(read(path)) == [TWO[0], TWO[0], *TWO]


def test_a_rollout_from_before_acts_were_recorded_is_read_and_says_what_it_lacks(tmp_path: Path) -> None:
    [old] = _written(tmp_path, [TWO[0]])
    assert lacks(old) == "main: its record has no setup and no results of calls, as those of the native loop have"


def _written(folder: Path, made: list[Rollout]) -> list[Rollout]:
    write(folder / "r.rec", made)
    return list(read(folder / "r.rec"))


# --- many files as one sequence ---------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with three files, of 2, 0 and 3 rollouts."""
    for k, names in enumerate(("ab", "", "cde"), 1):
        write(tmp_path / "rollouts" / f"iteration_{k:04d}{SUFFIX}", [rollout(n) for n in names])
    return tmp_path


def ids(records: Iterable[Rollout]) -> str:
    return "".join(r.task.id for r in records)


def test_the_files_of_a_run_are_one_sequence_in_their_order(run: Path) -> None:
    records = Records(run)
    assert len(records) == 5
    assert ids(records) == "abcde"
    assert records[-1].task.id == "e"
    assert ids(Records(run / "rollouts")) == "abcde"
    with pytest.raises(IndexError):
        records[5]


@pytest.mark.parametrize("cut", [slice(1, 4), slice(None, None, -1), slice(-2, None), slice(0, 5, 2), slice(9, 12)])
def test_a_slice_is_a_view_that_knows_where_its_rollouts_are(run: Path, cut: slice) -> None:
    view = Records(run)[cut]
    assert ids(view) == "abcde"[cut]
    assert ids(view[::-1]) == "abcde"[cut][::-1]


def test_a_rollout_is_found_in_its_file(run: Path) -> None:
    records = Records(run)
    last = run / "rollouts" / f"iteration_0003{SUFFIX}"
    assert [records.origin(k) for k in (1, 2, -1)] == [(records.files[0], 1), (last, 0), (last, 2)]
    assert ids(records.within(last)) == "cde"


def test_a_folder_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no rollouts here, want a run, a folder with files"):
        Records(tmp_path)


def test_what_is_not_asked_for_is_not_read(run: Path) -> None:
    records = Records(run)
    for path in records.files[2:]:
        path.write_bytes(bytes(path.stat().st_size))
    assert ids(records[:2]) == "ab"
    with pytest.raises(RecordError, match="record 0 is damaged"):
        records[2]


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
