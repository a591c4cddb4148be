"""Seeds derived from seeds: one number for a run gives every agent, turn and call its own."""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

_number = Struct("<Q").unpack


def derive(*path: int | str) -> int:
    """A 63-bit seed that depends on the whole path, a seed and what it is for, the same on every machine."""
    return _number(blake2b(repr(path).encode(), digest_size=8).digest())[0] >> 1
