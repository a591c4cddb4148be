"""Seeds derived from seeds: one number for a run gives every agent, turn and call its own."""

from __future__ import annotations

import hashlib


def derive(seed: int, *path: int | str) -> int:
    """A 63-bit seed that depends on all of `seed` and `path`, the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
