"""The inside of `sandbox`: limits on this process, then the program that comes on standard input.

Run as a script by an isolated interpreter, so it imports the standard library alone. The first line of its input is the
exit status that means success, that of a failure, the seconds of processor time and the bytes of memory.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys

# Events of https://docs.python.org/3/library/audit_events.html: what no solution to an exercise needs.
REFUSED = (
    "ctypes.",
    "fcntl.",
    "ftplib.",
    "http.",
    "mmap.",
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.kill",
    "os.link",
    "os.mkdir",
    "os.posix_spawn",
    "os.putenv",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.setxattr",
    "os.spawn",
    "os.symlink",
    "os.system",
    "os.truncate",
    "os.utime",
    "pty.",
    "resource.",
    "shutil.",
    "signal.pthread_kill",
    "smtplib.",
    "sqlite3.",
    "socket.",
    "subprocess.",
    "tempfile.",
    "urllib.",
    "webbrowser.",
)
# What writes or makes files past that hook.
MISSING = ("_ctypes", "_dbm", "_gdbm", "_sqlite3", "faulthandler", "readline")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: raises PermissionError for what is not allowed."""
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not allowed here")
    if event == "open":
        path, mode, flags = arguments
        writes = (isinstance(flags, int) and flags & WRITING) or (isinstance(mode, str) and set(mode) & set("wax+"))
        if writes and not isinstance(path, int):
            raise PermissionError(f"writing {path!r} is not allowed here")


def limit(cpu_s: int, memory: int) -> None:
    """Hard limits, which the process cannot raise again."""
    for what, amount in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 1),
    ):
        hard = resource.getrlimit(what)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(what, (amount, amount))


def main() -> None:
    head, _, program = sys.stdin.buffer.read().partition(b"\n")
    passed, failed, cpu_s, memory = map(int, head.split())
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own is closed already
                os.close(int(name))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    limit(cpu_s, memory)
    leave = os._exit
    for name in MISSING:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it is an error
    for module in (os, sys.modules["posix"]):
        for function in ("mkfifo", "mknod"):
            delattr(module, function)
    sys.addaudithook(refuse)
    try:
        exec(compile(program.decode(), "<program>", "exec"), {"__name__": "__main__"})
    except BaseException:  # SystemExit too: a program that leaves early has not passed
        leave(failed)
    leave(passed)


if __name__ == "__main__":
    main()
