"""What the ranks of tests do, in a module that is imported quickly. Not a test itself."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Fails:
    """Adds numbers, and at 0 does what it is told on rank 1: die, raise or hang."""

    how: str
    rank: int
    host: str
    local: int

    def add(self, number: int) -> int:
        if number == 0 and self.rank == 1:
            match self.how:
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exit":
                    os._exit(3)
                case "raise":
                    raise ZeroDivisionError("of rank 1")
        if number == 0 and (self.rank == 0 or self.how == "hang"):
            # As one does that waits for the others.
            signal.pause()
        return 10 * self.rank + number
