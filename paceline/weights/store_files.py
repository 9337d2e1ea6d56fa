"""What every source of the model store needs: the cache folder, one download at a time, hashing, errors."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import PacelineError

# (what is being done, bytes done, bytes in all or None)
Progress = Callable[[str, int, int | None], None]
CHUNK = 1 << 20


class StoreError(PacelineError):
    """A model could not be found or fetched."""


def cache_dir() -> Path:
    """PACELINE_CACHE, else paceline/ in XDG_CACHE_HOME, else ~/.cache/paceline."""
    if chosen := os.environ.get("PACELINE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


@contextmanager
def exclusive(name: str, progress: Progress) -> Iterator[None]:
    """Hold the lock `name` of the cache; a second process waits here until the first has the model."""
    from filelock import FileLock, Timeout

    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that fetches {name}", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def hash_file(path: Path, digest: hashlib._Hash | None = None) -> hashlib._Hash:
    """Feed a file to a hash (SHA-256 unless given another)."""
    digest = digest or hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest


def describe_os_error(error: OSError, path: Path) -> str:
    """An OSError while writing to the cache, with its remedy."""
    if error.errno == errno.ENOSPC:
        return f"no space left for {path}; free some, or set PACELINE_CACHE to a folder on another disk"
    return f"{error.strerror or error} ({error.filename or path}); set PACELINE_CACHE to a writable folder"
