"""Programs that misbehave score nothing and leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from paceline.bench import sandbox
from paceline.bench.sandbox import Limits, run_program

# fractions of a second would do on an idle machine
SHORT = Limits(cpu_s=1, wall_s=30.0, memory=256 << 20)


@pytest.fixture(params=["namespaces", "none"])
def isolation(request, monkeypatch, tmp_path):
    """Both what this system offers and what a system without namespaces has, with a folder for its folders alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if request.param == "none":
        monkeypatch.setattr(sandbox, "isolation", lambda: ())
    elif not sandbox.isolation():
        pytest.skip("this system has no unprivileged namespaces")
    return request.param


def leftovers():
    return {p.name for p in Path(tempfile.gettempdir()).glob("paceline-sandbox-*")}


def commands_with(marker):
    """Command lines of running processes that hold `marker`, or whose working folder does."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = os.readlink(process / "cwd")
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if marker in where or marker.encode() in line:
            found.append(line)
    return found


def ends(condition):
    """Whether `condition` comes true: what was killed has no command line, but is in its folder for a moment."""
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_program_that_ends_has_passed(isolation):
    before = leftovers()
    assert run_program("import math, re, collections\nassert math.gcd(6, 4) == 2\n", SHORT) == "passed"
    assert leftovers() == before


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 == 2",
        "def f(:",
        "raise SystemExit(0)",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "x = 'a' * (1 << 40)",
        "x = []\nwhile True: x.append(bytearray(1 << 24))",
        "def f(): return f()\nf()",
        "import numpy",
        "input()",
        "import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)",
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['sleep', '60'])",
        "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join()",
        "import os; os.system('sleep 60')",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes; ctypes.CDLL(None).fork()",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "\0",
        "\ud800",
    ],
)
def test_a_program_that_fails_leaves_early_or_reaches_out_has_not(isolation, program):
    before = leftovers()
    assert run_program(program, SHORT) in ("failed", "timed out")
    assert leftovers() == before


@pytest.mark.parametrize("program", ["while True: pass", "sum(iter(int, 1))"])
def test_a_loop_ends_at_the_limit_of_processor_time(isolation, program):
    assert run_program(program, SHORT) == "timed out"


def test_a_program_that_only_waits_ends_at_the_deadline(isolation):
    before, begin = leftovers(), time.perf_counter()
    assert run_program("import time\ntime.sleep(600)", Limits(wall_s=1.0)) == "timed out"
    assert time.perf_counter() - begin < 60
    assert leftovers() == before
    assert ends(lambda: not commands_with(f"{tempfile.gettempdir()}/paceline-sandbox-"))


@pytest.mark.parametrize(
    "how",
    [
        "open({path!r}, 'w').write('x')",
        "open({path!r}, 'a')",
        "import os; os.open({path!r}, os.O_CREAT | os.O_WRONLY)",
        "import pathlib; pathlib.Path({path!r}).write_text('x')",
        "import os; os.mkdir({path!r})",
        "import os; os.symlink('/', {path!r})",
        "import io; io.FileIO({path!r}, 'x')",
        "import sqlite3; sqlite3.connect({path!r}).execute('create table t (a)')",
        "open('here', 'w')",
        "import os; os.mkfifo({path!r})",
        "import readline; readline.write_history_file({path!r})",
    ],
)
def test_nothing_is_written(isolation, tmp_path, how):
    path = tmp_path / "written"
    assert run_program(how.format(path=str(path)), SHORT) == "failed"
    assert list(tmp_path.iterdir()) == []


def test_files_that_exist_stay_as_they_are(isolation, tmp_path):
    path = tmp_path / "kept"
    path.write_text("kept")
    for how in ("open({p!r}, 'r+')", "import os; os.remove({p!r})", "import shutil; shutil.rmtree({d!r})"):
        assert run_program(how.format(p=str(path), d=str(tmp_path)), SHORT) == "failed"
    assert path.read_text() == "kept"


def test_it_sees_neither_variables_nor_the_callers_folder(isolation, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    program = (
        "import os, sys\nassert 'SECRET_TOKEN' not in os.environ\nassert os.listdir() == []\nassert sys.path[0] != ''"
    )
    assert run_program(program, SHORT) == "passed"


def test_limits_hold_without_the_audit_hook(tmp_path):
    """The limits are the kernel's own: a program that came past the hook still cannot write."""
    code = (
        "import runpy, sys\nchild = runpy.run_path(sys.argv[1])\nchild['limit'](1, 256 << 20)\n"
        "with open(sys.argv[2], 'w') as file:\n    file.write('x' * 100)\n"
    )
    path = tmp_path / "out"
    done = subprocess.run([sys.executable, "-I", "-c", code, str(sandbox.CHILD), str(path)], capture_output=True)
    assert done.returncode != 0
    assert b"File too large" in done.stderr
    assert path.read_text() == ""
