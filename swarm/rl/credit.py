# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What an update made of each token, kept beside the record of the rollouts: for whoever asks where credit went.

    rollouts/iteration_0007.rollouts   rollouts/iteration_0007.credit.npz

Axes: N action tokens of the root agents, in the order of rollouts, segments and ids. Not here: how advantages,
values and ratios come about (`swarm.rl.signals`, `swarm.rl.learner`).
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from swarm.rl.batch import Batch
from swarm.rl.signals import Signals

Array = np.ndarray[Any, Any]


class CreditError(ValueError):
    """A file of credit that cannot be read; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Credit:
    """float32 each but `rollout_N`, int32: the token's rollout among all that were handed in, left out ones included.

    `advantage_N` is what the policy's loss was given, `value_N` the critic's V before the update, `ratio_N` π/π_old
    when the token was last learnt from; NaN where there was none, as without a critic.
    """

    rollout_N: Array
    advantage_N: Array
    value_N: Array
    ratio_N: Array

    @staticmethod
    def of(batch: Batch, signals: Signals, ratio_N: Tensor) -> Credit:
        """That of one process's batch. `ratio_N` is NaN for tokens that no pass has come to."""
        rollout_N = batch.kept_R[batch.rollout_N]
        floats = (signals.advantage_N, signals.value_N, ratio_N)
        return Credit(_numpy(rollout_N).astype(np.int32), *(_numpy(x).astype(np.float32) for x in floats))

    @staticmethod
    def joined(parts: Sequence[tuple[Sequence[int], Credit]]) -> Credit:
        """Of several processes: each one's rollouts among all, and its credit; in the order of all rollouts."""
        rollout_N = np.concatenate([np.asarray(which, np.int32)[credit.rollout_N] for which, credit in parts])
        order_N = rollout_N.argsort(kind="stable")
        rest = ("advantage_N", "value_N", "ratio_N")
        each = (np.concatenate([getattr(credit, name) for _, credit in parts])[order_N] for name in rest)
        return Credit(rollout_N[order_N], *each)


def path_of(record: Path) -> Path:
    """The file of credit beside a record of rollouts."""
    return record.with_suffix(".credit.npz")


def write(path: Path, credit: Credit) -> None:
    """Replaces the file as a whole."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **{name: getattr(credit, name) for name in Credit.__slots__})
    os.replace(part, path)


def read(path: Path) -> Credit:
    """Raises CreditError for a file that is none, FileNotFoundError where there is none."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            credit = Credit(*(arrays[name] for name in Credit.__slots__))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
        raise CreditError(f"{path}: no credit of tokens: {e}") from e
    lengths = {len(getattr(credit, name)) for name in Credit.__slots__}
    if len(lengths) != 1:
        raise CreditError(f"{path}: arrays of {sorted(lengths)} tokens, want all of one length")
    return credit


def _numpy(x: Tensor) -> Array:
    return x.detach().cpu().numpy()
