"""Rollouts on disk: append-only files, one an iteration, from which every rollout tree comes back exactly.

    SWARMREC2 ─ (length, crc32, zstd(msgpack(rollout))) ─ (length, crc32, …) ─ …      integers little-endian

The first rollout of a file is the dictionary of the others: they share tools, prompts and pages, which then cost
nothing, and each is still read alone. In SWARMREC1, which is read and appended to as well, each stands for itself.
What a crash leaves torn at the end is not read, is counted, and is cut off by the next write.
Not here: metrics, and running a rollout again (`swarm.replay`).
"""

from __future__ import annotations

import errno
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from io import FileIO
from itertools import accumulate
from pathlib import Path
from struct import Struct
from typing import overload

import msgspec
import zstandard

from swarm.types import Rollout

SUFFIX = ".rollouts"
FOLDER = "rollouts"
_PLAIN = b"SWARMREC1\n"
_SHARED = b"SWARMREC2\n"
_HEAD = Struct("<II")
_LARGEST = 1 << 30
_LEVEL = 3


class RecordError(ValueError):
    """A record file that cannot be read or written; the message is one line for the user."""


def write(path: Path, rollouts: Iterable[Rollout]) -> int:
    """Appends rollouts and flushes them to the disk; returns how many.

    Mappings and sequences in `Task.meta` and call arguments come back as dicts and lists, whatever they were.
    Raises RecordError if `path` is another kind of file or the disk refuses: the file is then as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        exists = path.exists()
        file = RecordFile(path) if exists else None
        whole = file.whole if file is not None else 0
        with path.open("r+b" if exists else "xb", buffering=0) as f:
            f.truncate(whole)
            f.seek(whole)
            try:
                count = _append(f, file if whole else None, rollouts)
                os.fsync(f.fileno())
            except OSError:
                f.truncate(whole)
                raise
    except OSError as e:
        raise RecordError(f"{path}: cannot write rollouts: {e.strerror or e}; earlier ones are intact") from e
    return count


def read(path: Path) -> Iterator[Rollout]:
    """The rollouts of a file in order, up to a torn tail if it has one.

    Raises RecordError if it is missing, no record file, or holds a whole frame that is no rollout.
    """
    file = RecordFile(path)
    for k in range(len(file)):
        yield file[k]


def torn_bytes(path: Path) -> int:
    """How many bytes at the end belong to no whole frame: 0 for an undamaged file."""
    return RecordFile(path).torn


class RecordFile:
    """One file, of which only the heads of its frames were read: `RecordFile(path)[17]`.

    `whole`: bytes up to the last whole frame; `torn`: those behind. Raises RecordError as `read` does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as f:
                self._magic = f.read(len(_SHARED))
                size = os.fstat(f.fileno()).st_size
                self._offsets = array("Q", _heads(f.fileno(), size))
                whole = self._verified(f.fileno())
        except OSError as e:
            raise RecordError(f"{path}: cannot read rollouts: {e.strerror or e}") from e
        if not (_PLAIN.startswith(self._magic) or _SHARED.startswith(self._magic)):
            raise RecordError(f"{path}: no rollout record, it begins with {self._magic!r}")
        self.whole = whole
        self.torn = size - whole

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, k: int) -> Rollout:
        """Raises RecordError where the frame is damaged, or no rollout."""
        try:
            return _decoder.decode(self.unpacked(k))
        except (msgspec.DecodeError, zstandard.ZstdError) as e:
            raise RecordError(f"{self.path}: record {k} is no rollout of this version: {e}") from e

    def unpacked(self, k: int) -> bytes:
        """The msgpack of a rollout, for those who want less of it. Raises RecordError, ZstdError."""
        shares = self._dictionary if k and self.shared else None
        return zstandard.ZstdDecompressor(dict_data=shares).decompress(self._payload(k))

    @property
    def shared(self) -> bool:
        """Whether its first rollout is the dictionary of the others."""
        return self._magic == _SHARED

    def compressor(self) -> zstandard.ZstdCompressor:
        """For what is appended to a file that holds something."""
        return _compressor(self._dictionary if self.shared else None)

    @cached_property
    def _dictionary(self) -> zstandard.ZstdCompressionDict:
        return _dictionary(zstandard.ZstdDecompressor().decompress(self._payload(0)))

    def _payload(self, k: int) -> bytes:
        with self.path.open("rb", buffering=0) as f:
            payload = _frame(f.fileno(), self._offsets[k])
        if payload is None:
            raise RecordError(f"{self.path}: record {k} is damaged, its checksum is another; want a copy of the file")
        return payload

    def _verified(self, fd: int) -> int:
        """Drops frames from the end that are not whole, and returns where the last whole one ends."""
        while self._offsets:
            last = self._offsets[-1]
            payload = _frame(fd, last)
            if payload is not None:
                return last + _HEAD.size + len(payload)
            self._offsets.pop()
        return len(self._magic) if len(self._magic) == len(_SHARED) else 0


class Records(Sequence[Rollout]):
    """The rollouts of a run, a folder of record files or one file, as a sequence that reads what it is asked for.

    `Records(Path("runs/wide_search"))[-1]`; a slice is a view. `torn` has a line for each file with a torn tail.
    Opening reads the heads of frames only, some hundred thousand a second. Raises RecordError where there are none.
    """

    def __init__(self, path: Path) -> None:
        self._files = [RecordFile(p) for p in _paths(path)]
        self._ends = list(accumulate(map(len, self._files)))
        self._at = range(self._ends[-1])

    @property
    def files(self) -> list[Path]:
        return [f.path for f in self._files]

    @property
    def torn(self) -> list[str]:
        return [
            f"{f.path}: the last {f.torn} bytes are torn, the rollout that was being written is lost"
            for f in self._files
            if f.torn
        ]

    def origin(self, k: int) -> tuple[Path, int]:
        """The file of a rollout, and its place in it."""
        at = self._at[k]
        n = bisect_right(self._ends, at)
        return self._files[n].path, at - (self._ends[n] - len(self._files[n]))

    def within(self, path: Path) -> Records:
        """The view of those in one of the files."""
        n = self.files.index(path)
        return self._view(range(self._ends[n] - len(self._files[n]), self._ends[n]))

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> Rollout | Records:
        if isinstance(index, slice):
            return self._view(self._at[index])
        at = self._at[index]
        n = bisect_right(self._ends, at)
        return self._files[n][at - (self._ends[n] - len(self._files[n]))]

    def _view(self, at: range) -> Records:
        view = object.__new__(Records)
        view._files, view._ends, view._at = self._files, self._ends, at
        return view


_decoder = msgspec.msgpack.Decoder(Rollout)
_encoder = msgspec.msgpack.Encoder()


def _paths(path: Path) -> list[Path]:
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    found = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else [path]
    if not found:
        raise RecordError(f"{path}: no rollouts here, want a run, a folder with files *{SUFFIX}, or one of them")
    return found


def _append(f: FileIO, file: RecordFile | None, rollouts: Iterable[Rollout]) -> int:
    """`file`: what is there already, unless it is nothing."""
    compressor = file.compressor() if file is not None and len(file) else None
    shared = file is None or file.shared
    count = 0
    _write_all(f, _SHARED if file is None else b"")
    for rollout in rollouts:
        data = _encoder.encode(rollout)
        payload = (compressor or _compressor(None)).compress(data)
        compressor = compressor or _compressor(_dictionary(data) if shared else None)
        _write_all(f, _HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
        count += 1
    return count


def _dictionary(data: bytes) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(data, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _compressor(shares: zstandard.ZstdCompressionDict | None) -> zstandard.ZstdCompressor:
    if shares is not None:
        shares.precompute_compress(level=_LEVEL)  # pyright: ignore[reportUnknownMemberType]
    return zstandard.ZstdCompressor(level=_LEVEL, dict_data=shares)


def _write_all(f: FileIO, data: bytes) -> None:
    """Unbuffered: nothing is left over that would fail again when the file is closed."""
    if f.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _heads(fd: int, size: int) -> Iterator[int]:
    """Where frames begin that could be whole."""
    at = len(_SHARED)
    while at + _HEAD.size <= size:
        length, _ = _HEAD.unpack(os.pread(fd, _HEAD.size, at))
        end = at + _HEAD.size + length
        if not 0 < length <= _LARGEST or end > size:
            return
        yield at
        at = end


def _frame(fd: int, at: int) -> bytes | None:
    """The payload of a frame, or None where it is not what was written."""
    head = os.pread(fd, _HEAD.size, at)
    length, crc = _HEAD.unpack(head)
    payload = os.pread(fd, length, at + _HEAD.size)
    return payload if 0 < length == len(payload) and zlib.crc32(payload) == crc else None
