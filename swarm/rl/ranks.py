"""Processes that work in step: one method is called on all of them at once, and one that fails ends the call.

On this machine each is spawned anew, so that no thread or lock of this process comes with it, and ends with this
process, however that ends. Not here: what they do (`swarm.rl.group`), and other machines (`swarm.cluster`).
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, Protocol

RankFactory = Callable[[int, str, int], object]
"""Makes, in a rank's process, what is called there, of its number, the host that the others find it at, and its
number among those of its machine; it must be picklable."""


class LearnerError(Exception):
    """A process raised; the first line says which and what, and its traceback follows."""


class LearnerLost(LearnerError):
    """A process died or was late: one line for the user."""


class Ranks(Protocol):
    """Processes 0 to n − 1, and in each an object whose methods are called."""

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """Calls a method with one of the tuples on each rank, as many as there are tuples, all at once.

        Raises LearnerError at the first that fails, LearnerLost where it died or was late after so many seconds.
        """
        ...

    def close(self) -> None:
        """Ends all processes, whatever they are doing."""
        ...


class LocalRanks:
    """`LocalRanks(factory, 2, threads=1)`: two processes of one core each. Raises ValueError for a factory that
    cannot be sent to them. What starts them must not do so when it is imported: they import it."""

    def __init__(self, factory: RankFactory, count: int, threads: int = 1) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            sent = pickle.dumps(factory)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ValueError(f"learners: factory = {factory!r}, want one that can be pickled: {e}") from e
        context = get_context("spawn")
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, sent, rank, threads), name=f"learner {rank}", daemon=True
            )
            process.start()
            # The only other end is the child's, so that its death is the end of the pipe.
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        """See `Ranks`. The death of any rank is a failure, also of one that was not called."""
        if not self._processes:
            raise LearnerLost("learners: the group is closed")
        answers: dict[int, Any] = {}
        for rank, given in enumerate(arguments):
            self._send(rank, pickle.dumps((method, given)))
        deadline = monotonic() + seconds
        while len(answers) < len(arguments):
            waited = {self._pipes[k]: k for k in range(len(self._pipes)) if k not in answers}
            ready = wait(list(waited), max(0.0, deadline - monotonic()))
            if not ready:
                raise LearnerLost(f"learners: {method} was not done after {seconds:.0f} s")
            for pipe in ready:
                rank = waited[pipe]  # pyright: ignore[reportArgumentType]
                answers[rank] = self._receive(rank)
        return [answers[rank] for rank in range(len(arguments))]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._pipes[rank].send_bytes(message)
        except OSError as e:
            raise self._died(rank) from e

    def _receive(self, rank: int) -> Any:
        try:
            value, error, trace = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError) as e:
            raise self._died(rank) from e
        if error:
            raise LearnerError(f"learners: rank {rank} of {len(self._pipes)} raised {error}\n{trace}")
        return value

    def _died(self, rank: int) -> LearnerLost:
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return LearnerLost(f"learners: rank {rank} of {len(self._pipes)} died {how}")


def _work(pipe: Connection, sent: bytes, rank: int, threads: int) -> None:
    """A rank's process: one call after another."""
    # Ctrl-C reaches every process of a terminal; this one ends when its parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    worker = pickle.loads(sent)(rank, "127.0.0.1", rank)
    while True:
        try:
            method, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_done(worker, method, arguments)))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _done(worker: object, method: str, arguments: tuple[Any, ...]) -> tuple[Any, str, str]:
    """What a method gave, what it raised in one line, and the traceback."""
    try:
        return getattr(worker, method)(*arguments), "", ""
    except Exception as e:  # the boundary: what a rank raises is told to who asked
        return None, f"{type(e).__name__}: {e}".splitlines()[0], traceback.format_exc()
