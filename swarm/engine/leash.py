"""Runs one command and ends it, with all that it started, when the process that asked for it is gone.

    parent ══ pipe ══▶ leash ──▶ command ──▶ its children, and theirs
           (end of file, or the parent's death: SIGTERM, a grace, SIGKILL for everything that is left)

A process that is killed hard cannot clean up after itself, and the processes of a server do not die with it. This
one waits for nothing else. What leaves its parent comes to the leash as an orphan, so nothing escapes by a session
of its own. Folders that the parent would have removed are removed too.

A program, run by its path: `leash.py PARENT_PID GRACE_SECONDS FOLDER… -- COMMAND…`, the pipe as standard input. It
imports nothing but the standard library, and takes a few milliseconds and megabytes. Linux only.

Not here: who starts it, and what is done when the command ends (`swarm.engine.server`).
"""

import ctypes
import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(parent: int, grace: float, folders: list[str], command: list[str]) -> int:
    """Returns the command's exit status, 128 + N where signal N ended it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)
    alive = os.pidfd_open(child)
    let_go = wait_for_one(parent, alive) != alive
    if let_go:
        os.kill(child, signal.SIGTERM)
        readable([alive], grace)
    status = status_of(child)
    for folder in folders if let_go else ():
        shutil.rmtree(folder, ignore_errors=True)
    return status


def wait_for_one(parent: int, alive: int) -> int:
    """What came first: the pipe's end (0), the parent's death (its descriptor, or -1) or the command's (`alive`)."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return -1
    if os.getppid() != parent:  # it was gone before it could be watched
        return -1
    while True:
        for ready in readable([alive, watched, 0], None):
            if ready or not os.read(0, 64):
                return ready


def readable(descriptors: list[int], seconds: float | None) -> list[int]:
    return select.select(descriptors, [], [], seconds)[0]


def status_of(child: int) -> int:
    """Kills what is left of the command and all its offspring; returns when there is none."""
    status = 0
    while True:
        for pid in children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == child:
            code = os.waitstatus_to_exitcode(ended)
            status = code if code >= 0 else 128 - code


def children() -> list[int]:
    """Of this process, orphans that came to it included."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    dashes = sys.argv.index("--")
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:dashes], sys.argv[dashes + 1 :]))
