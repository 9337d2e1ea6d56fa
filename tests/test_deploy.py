"""Dockerfile, unit and the files beside them fit the server that they start."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.cli import run
from paceline.server.run import LAST_RESORT

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("without_docker", ROOT / "deploy" / "without_docker.py")
assert spec is not None and spec.loader is not None
without_docker = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = without_docker  # its dataclasses look there
spec.loader.exec_module(without_docker)

STEPS = without_docker.instructions((ROOT / "Dockerfile").read_text())
LAST = STEPS[max(i for i, (name, _) in enumerate(STEPS) if name == "FROM") :]
UNIT = (ROOT / "deploy" / "paceline.service").read_text()


def settings(section: str) -> dict[str, str]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT)
    return dict(parser[section])


def served(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What `paceline` says to these arguments and, last, an address that cannot be: whatever is wrong before it is said
    instead."""
    code = run([*argv, "--host", "256.1.1.1"])
    said = " ".join(capsys.readouterr().err.split())
    assert code == 1
    return said


def test_the_image_takes_the_arguments_of_vllm_s(capsys):
    [entry] = [json.loads(rest) for name, rest in LAST if name == "ENTRYPOINT"]
    assert entry[0] == "paceline"
    config = '{"method": "ngram", "num_speculative_tokens": 5}'
    words = ["smollm2-135m", "--dtype", "bfloat16", "--trust-remote-code", "--speculative-config", config]
    assert "--host 256.1.1.1" in served(capsys, *entry[1:], *words)
    assert "0.0.0.0" in entry


def test_the_image_is_no_root_s():
    users = [rest for name, rest in LAST if name == "USER"]
    assert users and users[-1] not in ("root", "0")
    made = " ".join(rest for name, rest in LAST if name == "RUN")
    assert f"useradd --create-home --uid 1000 {users[-1]}" in made


def test_the_health_check_is_a_program_that_asks_for_health():
    [check] = [rest for name, rest in LAST if name == "HEALTHCHECK"]
    program, option, code = json.loads(check[check.index("[") :])
    assert (program, option) == ("python3", "-c")
    compile(code, "healthcheck", "exec")
    [port] = [rest for name, rest in LAST if name == "EXPOSE"]
    assert f"http://127.0.0.1:{port}/health" in code


def test_what_is_copied_is_there_and_not_ignored():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    for name, rest in STEPS:
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in allowed


def test_steps_are_read_as_docker_reads_them():
    text = "# a\nFROM x AS y\nRUN a \\\n  # no\n && b\n\nENV A=1 B=$A\n"
    assert without_docker.instructions(text) == [("FROM", "x AS y"), ("RUN", "a   && b"), ("ENV", "A=1 B=$A")]


def test_stages_are_made_in_order(tmp_path, monkeypatch):
    """COPY, COPY --from, ENV, USER and WORKDIR as Docker has them; RUN is recorded instead of run."""
    base, ran = tmp_path / "base", []
    (base / "etc").mkdir(parents=True)
    monkeypatch.setattr(without_docker.Stage, "run", lambda self, argv: ran.append((self.user, self.folder, argv[-1])))
    text = (
        "FROM b AS one\nWORKDIR /src\nCOPY LICENSE README.md ./\nCOPY paceline/server paceline/server\nRUN make\n"
        'FROM b\nCOPY --from=one /src/LICENSE /opt/LICENSE\nENV PATH=/opt:$PATH\nUSER me\nRUN go\nENTRYPOINT ["x"]\n'
    )
    last = without_docker.build(base, tmp_path, text, [])
    assert ran == [("root", "/src", "make"), ("me", "/", "go")]
    assert (tmp_path / "one/src/README.md").exists() and (tmp_path / "one/src/paceline/server/app.py").exists()
    assert (last.root / "opt/LICENSE").exists() and not (last.root / "src").exists()
    assert last.env["PATH"].startswith("/opt:/usr") and last.entry == ["x"] and last.user == "me"
    (tmp_path / "again").mkdir()
    with pytest.raises(SystemExit, match="SHELL"):
        without_docker.build(base, tmp_path / "again", 'FROM b\nSHELL ["x"]\n', [])


def test_options_of_the_unit_are_options_of_the_server(capsys):
    service = settings("Service")
    command = service["ExecStart"].split()
    assert command[1:3] == ["serve", "--config"]
    assert "--host 256.1.1.1" in served(capsys, "serve", "--config", str(ROOT / "deploy" / "serve.yaml"))


def test_the_unit_gives_the_server_time_to_drain():
    service = settings("Service")
    options = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) > options["shutdown-timeout"] + LAST_RESORT


def test_the_unit_has_no_rights_that_it_does_not_need():
    service = settings("Service")
    assert service["DynamicUser"] == "yes" and "User" not in service
    assert service["CapabilityBoundingSet"] == ""
    assert service["ProtectSystem"] == "strict" and service["NoNewPrivileges"] == "yes"
    cache = f"/var/cache/{service['CacheDirectory']}"
    assert f"XDG_CACHE_HOME={cache}" in service["Environment"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_reads_the_unit(tmp_path):
    file = tmp_path / "paceline.service"
    file.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
