"""What this process may use: threads, instruction-set path, memory. Decided once, reported at start."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

from paceline import _native
from paceline.errors import ConfigError


def allowed_cores() -> int:
    """Physical cores this process may use: affinity mask and cgroup quota honoured (at least 1)."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {core_of(cpu) for cpu in cpus}
    quota = _cgroup_quota()
    count = len(cores)
    return max(1, min(count, int(quota))) if quota else max(1, count)


def core_of(cpu: int) -> str:
    """The set of hardware threads that share a core with `cpu`, as the kernel prints it."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_quota() -> float | None:
    """CPU quota in cores (cgroup v2, then v1), or None when unlimited or unreadable."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1.0, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    try:
        base = Path("/sys/fs/cgroup/cpu")
        us = int((base / "cpu.cfs_quota_us").read_text())
        return None if us <= 0 else max(1.0, us / int((base / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError):
        return None


def available_memory() -> int:
    """Bytes that can be taken without swapping: MemAvailable, capped by the cgroup's limit."""
    available = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available


def choose_threads(threads: int | None) -> int:
    """`threads` if given, else PACELINE_THREADS, else the allowed physical cores. Raises ConfigError when not >= 1."""
    if threads is None:
        text = os.environ.get("PACELINE_THREADS", "")
        if not text:
            return allowed_cores()
        try:
            threads = int(text)
        except ValueError:
            raise ConfigError(f"PACELINE_THREADS: {text[:40]!r} is not a whole number") from None
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise ConfigError(f"threads: {threads!r} is not a whole number; leave it unset to use the allowed cores")
    if not 1 <= threads <= 1024:
        raise ConfigError(f"threads: {threads} is outside 1..1024; leave it unset to use the allowed cores")
    return threads


def choose_isa(name: str = "") -> str:
    """The kernel path: `name`, else PACELINE_ISA, else the fastest here. Raises ConfigError if it cannot run here."""
    if not isinstance(name, str) or "\0" in name:
        raise ConfigError(f"isa: {name!r} is not the name of a path; leave it unset for the best one")
    try:
        return _native.select_isa(name)
    except RuntimeError as error:
        raise ConfigError(f"{'isa' if name else 'PACELINE_ISA'}: {error}") from None


def missed_isa(isa: str) -> str | None:
    """Why the processor's best kernels are not those of `isa`, where nobody chose that: AMX that may not be used."""
    if os.environ.get("PACELINE_ISA") or isa != _native.default_isa():
        return None
    why = _native.amx_refused()
    return why if why and why.startswith("the processor has AMX") else None


class _Pool(_native.ThreadPool):
    """One that can be referred to weakly."""


_pools: weakref.WeakValueDictionary[int, _Pool] = weakref.WeakValueDictionary()
_making = threading.Lock()


def thread_pool(threads: int) -> _native.ThreadPool:
    """The pool of this size; models of one process share it, since passes never overlap. Its threads end with the last
    model that has it."""
    with _making:
        pool = _pools.get(threads)
        if pool is None:
            pool = _pools[threads] = _Pool(threads)
        return pool


def _forget_pools() -> None:
    global _making
    _making = threading.Lock()  # another thread may have held it
    _pools.clear()


# A forked child has none of the pools' workers: it must make its own.
os.register_at_fork(after_in_child=_forget_pools)
