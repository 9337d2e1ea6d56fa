"""A server process for the soak, and what the operating system says about it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BODY_MIB = 1
# Small enough that the queue and the limits are reached now and then.
OPTIONS = ["--max-num-seqs", "8", "--max-waiting", "24", "--max-body-mib", str(BODY_MIB), "--kv-cache-space", "0.1"]
COMPLAINT = re.compile(r"Traceback|\bERROR\b|\bCRITICAL\b|never awaited|never retrieved")


@dataclass(frozen=True)
class Usage:
    """files: open descriptors, connections among them."""

    resident_mib: float
    threads: int
    files: int


class ServerProcess:
    """`paceline serve` on a free port of 127.0.0.1. Use with `with`."""

    def __init__(self, model: str, extra: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "paceline", "serve", model, "--host", "127.0.0.1", "--port", "0", *OPTIONS]
        self.process = subprocess.Popen([*command, *extra], stderr=subprocess.PIPE, text=True, errors="replace")
        self._log: deque[str] = deque(maxlen=2000)
        self._complaints: list[str] = []
        self._ready = threading.Event()
        self.host, self.port = "127.0.0.1", 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        self._ready.wait()
        if not self.port:
            raise SystemExit("the server did not start:\n" + "".join(self._log))
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.append(line)
            if found := re.search(r"http://\S+:(\d+) is ready", line):
                self.port = int(found[1])
                self._ready.set()
            if COMPLAINT.search(line) and len(self._complaints) < 100:
                self._complaints.append(re.sub(r"^[\d:]+ ", "", line.strip())[:200])
        self._ready.set()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def complaints(self) -> list[str]:
        """Lines of its log that speak of errors of its own."""
        return list(self._complaints)

    def usage(self) -> Usage:
        folder = Path("/proc") / str(self.process.pid)
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        files = sum(1 for _ in (folder / "fd").iterdir())
        return Usage(int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"]), files)

    def stop(self, seconds: float = 60.0) -> int:
        """Its exit code after SIGTERM."""
        self.process.terminate()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return -9
        self._reader.join()
        return code
