"""Refusals of settings out of range, all in one form: `ppo: epochs = 0, want at least 1`."""

from __future__ import annotations


def want(group: str, name: str, value: object, right: bool, wanted: str) -> None:
    """Raises ValueError unless `right`, with what was seen and what is `wanted`."""
    if not right:
        raise ValueError(f"{group}: {name} = {value!r}, want {wanted}")
