"""What only a real process shows: signals and closed pipes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fakes" / "fake_cli.py"


def start(*argv: str, pause: str = "0.003") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), pause, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("argv", [["generate", "long"], ["demo", "long", "--max-tokens", "2000"]])
def test_ctrl_c_is_code_130_without_a_traceback(argv):
    process = start(*argv)
    process.stdout.read(200)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (130, "")


def test_a_closed_pipe_is_quiet():
    process = start("generate", "long")
    process.stdout.read(20)
    process.stdout.close()
    err = process.stderr.read()
    process.stdin.close()
    process.wait(timeout=600)
    process.stderr.close()
    assert err == ""
    assert process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("argv", [["generate", "hi"], ["generate", "hi", "--json"], ["demo", "hi"], ["drafters"]])
def test_a_full_disk_is_one_line_and_code_1(argv):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, str(SCRIPT), "0", *argv], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "paceline: standard output: No space left on device\n")


def test_a_pipe_that_closes_before_the_last_words_is_quiet():
    process = start("generate", "hi", "--json")
    process.stdout.close()
    err = process.stderr.read()
    process.stdin.close()
    process.wait(timeout=600)
    process.stderr.close()
    assert (process.returncode, err) == (1, "")


def test_ctrl_c_ends_the_answer_but_not_the_chat():
    process = start("chat")
    process.stdin.write("long\n")
    process.stdin.flush()
    process.stdout.read(30)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/reset\nhi\n", timeout=600)
    assert process.returncode == 0
    assert out.endswith("(conversation forgotten)\nYou said: hi\n")
    assert "(interrupted)" in err
    assert "Traceback" not in err
