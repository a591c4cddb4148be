"""Rollouts on disk: append-only files, one an iteration, from which every rollout tree comes back exactly.

    SWARMREC1 ─ (length, crc32, zstd(msgpack(rollout))) ─ (length, crc32, …) ─ …      integers little-endian

What a crash leaves torn at the end is not read, is counted, and is cut off by the next write.
Not here: metrics, and replaying a rollout.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from struct import Struct

import msgspec
import zstandard

from swarm.types import Rollout

_MAGIC = b"SWARMREC1\n"
_HEAD = Struct("<II")
_LARGEST = 1 << 30


class RecordError(ValueError):
    """A record file that cannot be read or written; the message is one line for the user."""


def write(path: Path, rollouts: Iterable[Rollout]) -> int:
    """Appends rollouts and flushes them to the disk; returns how many.

    Mappings and sequences in `Task.meta` and call arguments come back as dicts and lists, whatever they were.
    Raises RecordError if `path` is another kind of file or the disk refuses: the file is then as it was.
    """
    compressor = zstandard.ZstdCompressor(level=3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = _whole_bytes(path) if path.exists() else 0
        with path.open("r+b" if path.exists() else "xb", buffering=0) as f:
            f.truncate(whole)
            f.seek(whole)
            try:
                count = _append(f, compressor, rollouts, new=whole == 0)
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
    decoder = msgspec.msgpack.Decoder(Rollout)
    for payload in _frames(path):
        try:
            yield decoder.decode(zstandard.ZstdDecompressor().decompress(payload))
        except (msgspec.DecodeError, zstandard.ZstdError) as e:
            raise RecordError(f"{path}: a record is no rollout of this version: {e}") from e


def torn_bytes(path: Path) -> int:
    """How many bytes at the end belong to no whole frame: 0 for an undamaged file."""
    return path.stat().st_size - _whole_bytes(path)


def _append(f: FileIO, compressor: zstandard.ZstdCompressor, rollouts: Iterable[Rollout], *, new: bool) -> int:
    count = 0
    _write_all(f, _MAGIC if new else b"")
    for rollout in rollouts:
        payload = compressor.compress(msgspec.msgpack.encode(rollout))
        _write_all(f, _HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
        count += 1
    return count


def _write_all(f: FileIO, data: bytes) -> None:
    """Unbuffered: nothing is left over that would fail again when the file is closed."""
    if f.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _whole_bytes(path: Path) -> int:
    frames = sum(_HEAD.size + len(payload) for payload in _frames(path))
    return frames + (len(_MAGIC) if path.stat().st_size >= len(_MAGIC) else 0)


def _frames(path: Path) -> Iterator[bytes]:
    """Stops at the first frame that is not whole: where the next would begin is not known."""
    try:
        f = path.open("rb")
    except OSError as e:
        raise RecordError(f"{path}: cannot read rollouts: {e.strerror or e}") from e
    with f:
        magic = f.read(len(_MAGIC))
        if not _MAGIC.startswith(magic):
            raise RecordError(f"{path}: no rollout record, it begins with {magic[:10]!r}")
        while len(head := f.read(_HEAD.size)) == _HEAD.size:
            length, crc = _HEAD.unpack(head)
            payload = f.read(length) if length <= _LARGEST else b""
            if len(payload) != length or zlib.crc32(payload) != crc:
                return
            yield payload
