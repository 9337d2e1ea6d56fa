"""Cores that a replica has for itself: claimed by file locks, so that no two replicas of a machine share one.

Ray counts CPUs but does not say which; two engines on the same cores slow each other down several times, since every
pass waits for its slowest thread. A lock lives as long as the process that holds it, however that process ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CapacityError, ConfigError
from paceline.runtime import core_of

Core = tuple[int, ...]  # the hardware threads of one physical core


def lock_folder() -> Path:
    """Where this user's locks lie: the same folder for all processes of a machine (or container)."""
    return Path(tempfile.gettempdir()) / f"paceline-cores-{os.getuid()}"


def physical_cores(cpus: Iterable[int] | None = None) -> list[Core]:
    """Allowed hardware threads (default: this process's affinity) by physical core, one NUMA node after another."""
    allowed = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        cores.setdefault(core_of(cpu), []).append(cpu)
    return [tuple(core) for core in sorted(cores.values(), key=lambda core: (_numa_node(core[0]), core[0]))]


def _numa_node(cpu: int) -> int:
    found = sorted(Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*"))
    return int(found[0].name.removeprefix("node")) if found else 0


@dataclass(slots=True)
class Claim:
    """Cores held by this process until `release`, or until it ends."""

    cores: list[Core]
    _locks: list[int]

    @property
    def cpus(self) -> list[int]:
        return sorted(cpu for core in self.cores for cpu in core)

    def release(self) -> None:
        """Give the cores back; again is harmless."""
        while self._locks:
            os.close(self._locks.pop())


def claim(
    count: int, cores: Sequence[Core] | None = None, *, folder: Path | None = None, wait_s: float = 30.0
) -> Claim:
    """Take `count` cores that no other claim holds, the first free ones; waits up to `wait_s` for a predecessor to end.

    Raises ConfigError for a count below 1, CapacityError when so many are not there or do not come free.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"cores: {count!r} is not a whole number of 1 or more")
    candidates = physical_cores() if cores is None else list(cores)
    if count > len(candidates):
        raise CapacityError(
            f"cores: {count} asked for a replica, this machine allows {len(candidates)} physical cores; lower cores"
        )
    folder = folder or lock_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    while True:
        # One at a time: two claimers that each held half of what is left would both fail.
        door = os.open(folder / "claims.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(door, fcntl.LOCK_EX)
            found = _take(count, candidates, folder)
        finally:
            os.close(door)
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            raise CapacityError(
                f"cores: fewer than {count} of {len(candidates)} physical cores are free after {wait_s:.0f} s, other "
                "replicas hold the rest; start fewer replicas on this machine (Ray's --num-cpus is the number of its "
                "physical cores), or give each fewer cores"
            )
        time.sleep(0.2)


def _take(count: int, candidates: Sequence[Core], folder: Path) -> Claim | None:
    taken = Claim([], [])
    for core in candidates:
        lock = os.open(folder / f"core-{core[0]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        taken.cores.append(core)
        taken._locks.append(lock)
        if len(taken.cores) == count:
            return taken
    taken.release()
    return None


def pin_process(cpus: Iterable[int]) -> None:
    """Move every thread of this process, those that Ray started included, to these CPUs; new threads follow."""
    wanted = set(cpus)
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), wanted)
        except ProcessLookupError:  # a thread that has ended meanwhile
            continue
