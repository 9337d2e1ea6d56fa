"""Running a model's code: a process of its own with hard limits, of which nothing is left.

Layers, each of which holds without the others as far as the system allows:

- `sandbox_child` sets resource limits (processor time, memory, file size, files, processes) on itself, then lets an
  audit hook, which cannot be taken away again, refuse writing, processes, signals, sockets and native calls;
- the interpreter is isolated (`-I -S`): no site packages, no user folder, no variables; it starts in an empty folder;
- where unprivileged namespaces exist, `unshare` gives it no network and process numbers of its own, so that killing the
  first process kills them all;
- it has a session and process group of its own, a deadline, and is killed with its group whatever happened.
"""

from __future__ import annotations

import functools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CHILD = Path(__file__).with_name("sandbox_child.py")
ISOLATED = ["-I", "-S", "-B", "-X", "utf8"]
NAMESPACES = ["--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
FAILED = 3  # exit status of the child for a program that ended with an exception
PROBE_SECONDS = 10.0

Verdict = Literal["passed", "failed", "timed out"]


@dataclass(frozen=True, slots=True)
class Limits:
    """cpu_s: processor seconds; wall_s: seconds until it is killed whatever it does; memory: bytes of address space."""

    cpu_s: int = 5
    wall_s: float = 20.0
    memory: int = 1 << 30


DEFAULT = Limits()


@functools.cache
def isolation() -> tuple[str, ...]:
    """The command that takes network and foreign processes away: `unshare` with namespaces, or nothing where the
    system lets nobody have them (many containers)."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, *NAMESPACES)
    try:
        done = subprocess.run(
            [*command, sys.executable, *ISOLATED, "-c", ""],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return command if done.returncode == 0 else ()


def describe() -> str:
    """What holds a program back on this system, for a reader."""
    own = "an interpreter of its own with limits on time and memory, no writing, no processes"
    return f"{own}; {'no network (namespaces)' if isolation() else 'sockets refused, but no namespaces on this system'}"


def run_program(program: str, limits: Limits = DEFAULT) -> Verdict:
    """Run a program to its end. `passed`: it got there, without an exception and without leaving early.

    Its output is thrown away. Nothing that it started or wrote is left afterwards.
    """
    passed = random.SystemRandom().randrange(64, 126)  # nothing but reaching the end tells this exit status
    folder = tempfile.mkdtemp(prefix="paceline-sandbox-")
    head = f"{passed} {FAILED} {limits.cpu_s} {limits.memory}\n".encode()
    process = subprocess.Popen(
        [*isolation(), sys.executable, *ISOLATED, str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
        start_new_session=True,
    )
    before = _cpu_seconds()
    try:
        process.communicate(head + program.encode("utf-8", "replace"), timeout=limits.wall_s)
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)
    if process.returncode == passed:
        return "passed"
    # What was killed at the limit has used most of it: the kernel counts in ticks, and differently for each of the two.
    killed = process.returncode not in (0, FAILED)
    return "timed out" if killed and _cpu_seconds() - before > limits.cpu_s / 2 else "failed"


def _cpu_seconds() -> float:
    """Processor time of all children that have ended: `unshare` does not tell of the signal that comes at the limit."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
