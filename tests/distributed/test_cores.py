"""Claims of cores: disjoint over processes, freed by any end of a process, refused when there are not enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CapacityError, ConfigError
from paceline.ray.cores import Core, claim, physical_cores

CORES: list[Core] = [(0, 8), (1, 9), (2, 10), (3, 11)]


def test_claims_are_disjoint_and_come_back(tmp_path: Path) -> None:
    first = claim(2, CORES, folder=tmp_path)
    second = claim(2, CORES, folder=tmp_path)
    assert first.cpus == [0, 1, 8, 9]
    assert second.cpus == [2, 3, 10, 11]
    with pytest.raises(CapacityError, match="cores: fewer than 1 of 4"):
        claim(1, CORES, folder=tmp_path, wait_s=0)
    first.release()
    first.release()
    assert claim(2, CORES, folder=tmp_path).cores == CORES[:2]


def test_a_claim_that_fails_holds_nothing(tmp_path: Path) -> None:
    held = claim(3, CORES, folder=tmp_path)
    with pytest.raises(CapacityError):
        claim(2, CORES, folder=tmp_path, wait_s=0)
    rest = claim(1, CORES, folder=tmp_path, wait_s=0)
    assert not set(rest.cpus) & set(held.cpus)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_counts_that_are_none(count: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cores"):
        claim(count, CORES, folder=tmp_path)  # type: ignore[arg-type]


def test_more_cores_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="5 asked for a replica, this machine allows 4"):
        claim(5, CORES, folder=tmp_path)


HOLDER = """
import sys
from pathlib import Path
from paceline.ray.cores import claim
held = claim(int(sys.argv[2]), [(i,) for i in range(4)], folder=Path(sys.argv[1]), wait_s=30)
print(*held.cpus, flush=True)
sys.stdin.read()
"""


def holder(folder: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def cpus_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(cpu) for cpu in process.stdout.readline().split()]


def test_processes_that_start_together_share_nothing_and_a_killed_one_frees_its_cores(tmp_path: Path) -> None:
    running = [holder(tmp_path, 2) for _ in range(2)]
    try:
        first, second = (cpus_of(process) for process in running)
        assert len(first) == len(second) == 2
        assert not set(first) & set(second)
        waiting = holder(tmp_path, 2)  # a replacement that starts before its predecessor is gone
        running.append(waiting)
        running[0].kill()
        assert cpus_of(waiting) == first
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_pinning_moves_threads_that_run_already() -> None:
    code = (
        "import os, threading\n"
        "from pathlib import Path\n"
        "from paceline.ray.cores import pin_process\n"
        "done = threading.Event()\n"
        "threading.Thread(target=done.wait).start()\n"
        "pin_process([min(os.sched_getaffinity(0))])\n"
        "print({tuple(os.sched_getaffinity(int(t.name))) for t in Path('/proc/self/task').iterdir()})\n"
        "done.set()\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"{{({min(os.sched_getaffinity(0))},)}}"


def test_physical_cores_cover_the_affinity_once() -> None:
    cpus = [cpu for core in physical_cores() for cpu in core]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 3), st.just(0)), min_size=1, max_size=12))
def test_any_order_of_claims_and_releases(tmp_path_factory: pytest.TempPathFactory, steps: list[int]) -> None:
    """A number claims so many cores, 0 releases the oldest claim: never is a core held twice, never is one lost."""
    folder = tmp_path_factory.mktemp("locks")
    held = []
    for step in steps:
        free = len(CORES) - sum(len(c.cores) for c in held)
        if step == 0:
            if held:
                held.pop(0).release()
        elif step <= free:
            held.append(claim(step, CORES, folder=folder, wait_s=0))
        else:
            with pytest.raises(CapacityError):
                claim(step, CORES, folder=folder, wait_s=0)
        cpus = [cpu for c in held for cpu in c.cpus]
        assert len(cpus) == len(set(cpus))
    for c in held:
        c.release()
    claim(len(CORES), CORES, folder=folder, wait_s=0).release()
