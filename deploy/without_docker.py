"""Run the steps of the Dockerfile where there is no Docker: in copies of a base system, with chroot.

    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python3-dev bookworm base
    python deploy/without_docker.py base --work /tmp/image -- smollm2-135m --dtype bfloat16

As root. Each stage becomes a folder of its own below --work, to which COPY, RUN, ENV, USER and WORKDIR apply in order;
then the entry point runs in the last one with what stands behind `--`, as the image's user, until a SIGINT. What Docker
does besides (layers, .dockerignore, isolation of networks and processes, the health check's schedule) is not done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (name.upper(), rest.strip()) for name, _, rest in (line.strip().partition(" ") for line in joined.splitlines())
    ]


@dataclass
class Stage:
    """A system that is being made."""

    root: Path
    env: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    user: str = "root"
    folder: str = "/"
    entry: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def inside(self, path: str) -> Path:
        return self.root / os.path.join(self.folder, path).lstrip("/")

    def command(self, argv: list[str]) -> list[str]:
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        variables = [f"{name}={value}" for name, value in {"HOME": home, **self.env}.items()]
        shell = 'cd "$1" && shift && exec "$@"'
        inner = ["env", "-i", *variables, "sh", "-c", shell, "sh", self.folder, *argv]
        # /proc as in a container, in a mount namespace of its own, so that it is gone with the command
        mounted = 'mount -t proc proc "$1/proc" && shift && exec "$@"'
        chroot = ["chroot", f"--userspec={self.user}", str(self.root), *inner]
        return ["unshare", "--mount", "sh", "-c", mounted, "sh", str(self.root), *chroot]

    def run(self, argv: list[str]) -> None:
        print("+", shlex.join(argv)[:200], flush=True)
        subprocess.run(self.command(argv), check=True)


def build(base: Path, work: Path, dockerfile: str, files: list[Path]) -> Stage:
    """All stages; returns the last. files: copied into each stage from this machine (resolv.conf, pip.conf)."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for name, rest in instructions(dockerfile):
        if name == "FROM":
            label = (
                re.sub(r".*\sAS\s+", "", rest, flags=re.IGNORECASE) if " AS " in rest.upper() else f"stage{len(stages)}"
            )
            root = work / label
            subprocess.run(["cp", "-a", str(base), str(root)], check=True)
            for file in files:
                (root / file.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, root / file.relative_to("/"))
            stage = stages[label] = Stage(root)
            continue
        if name == "ARG":
            continue
        assert stage is not None
        if name == "RUN":
            stage.run(["/bin/sh", "-c", rest])
        elif name == "COPY":
            copy(stage, stages, rest)
        elif name == "ENV":
            for word in shlex.split(rest):
                key, _, value = word.partition("=")
                stage.env[key] = re.sub(r"\$(\w+)", lambda m, s=stage: s.env.get(m[1], ""), value)
        elif name == "USER":
            stage.user = rest
        elif name == "WORKDIR":
            stage.folder = rest
            stage.inside(rest).mkdir(parents=True, exist_ok=True)
        elif name == "ENTRYPOINT":
            stage.entry = json.loads(rest)
        elif name == "HEALTHCHECK":
            stage.health = json.loads(rest[rest.index("[") :])
        elif name not in ("VOLUME", "EXPOSE", "STOPSIGNAL"):
            raise SystemExit(f"{name}: not known here")
    assert stage is not None
    return stage


def copy(stage: Stage, stages: dict[str, Stage], rest: str) -> None:
    words = shlex.split(rest)
    source = HERE
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *sources, target = words
    for name in sources:
        origin = source / name.lstrip("/")
        to = stage.inside(target)
        if target.endswith("/") or len(sources) > 1:
            to = to / origin.name
        to.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so") if source == HERE else None  # as .dockerignore
            shutil.copytree(origin, to, symlinks=True, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy2(origin, to)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--file", type=Path, action="append", default=[Path("/etc/resolv.conf")])
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    options.work.mkdir()
    stage = build(options.base, options.work, (HERE / "Dockerfile").read_text(), options.file)
    print("entry point:", shlex.join(stage.entry), " health check:", shlex.join(stage.health)[:120], flush=True)
    device = stage.root / "dev"
    for name in ("null", "urandom", "random", "zero"):
        if not (device / name).exists():
            subprocess.run(["cp", "-a", f"/dev/{name}", str(device / name)], check=True)
    return subprocess.run(stage.command([*stage.entry, *words[split + 1 :]])).returncode


if __name__ == "__main__":
    sys.exit(main())
