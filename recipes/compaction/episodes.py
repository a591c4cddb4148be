"""One evaluated rollout on trails a line: numbers only, in `trails.jsonl`.

Not here: running anything, summaries over tasks and seeds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from recipes.episodes import json_lines
from swarm.types import Rollout

FILE = "trails.jsonl"


@dataclass(frozen=True, slots=True)
class TrailEpisode:
    """One system on one task: `TrailEpisode("chained", "trails-12", trails=7, score=.86, ...)`.

    `compactions` counts rewrites of the context, by summary or by dropping; `steps` are critical steps, `tokens`
    were sampled, `transcript` were seen or said in all contexts together, copies not counted again.
    `failed`: the infrastructure's fault, in no mean.
    """

    system: str
    task: str
    trails: int
    score: float
    success: float
    compactions: int
    steps: int
    tokens: int
    transcript: int
    status: str
    failed: bool


def of(system: str, rollout: Rollout, scores: Mapping[str, float]) -> TrailEpisode:
    """The episode of a scored rollout."""
    counts = rollout.ledger.counts
    segments = rollout.trace.segments
    copied = sum(len(s.spans[0].ids) for s in segments[1:] if s.spans)
    return TrailEpisode(
        system=system,
        task=rollout.task.id,
        trails=len(rollout.task.gold),
        score=scores["score"],
        success=scores["success"],
        compactions=counts.get("compactions", 0) + counts.get("truncations", 0),
        steps=rollout.ledger.critical_steps,
        tokens=rollout.ledger.tokens_sampled,
        transcript=sum(len(s.ids) for s in segments) - copied,
        status=rollout.trace.status,
        failed=rollout.failed,
    )


def write(path: Path, episodes: Iterable[TrailEpisode]) -> None:
    """Replaces the file as a whole: a crash leaves the old one or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in episodes))
    os.replace(part, path)


def read(path: Path) -> list[TrailEpisode]:
    """All whole lines; none where there is no file. Raises `EpisodesError` for a line that does not read."""
    return json_lines(path, TrailEpisode) if path.exists() else []
