"""llama.cpp as a peer: build it natively, make its model files, run it, return figures as JSON.

The sources are those vendored in a pinned source distribution of ``llama-cpp-python``, so that a package
index is all that is needed. Everything lands in ``peers/`` of Paceline's cache folder and is reused:

    python -m benchmarks.peers.llamacpp build
    python -m benchmarks.peers.llamacpp tune  --model smollm2.gguf --type bf16
    python -m benchmarks.peers.llamacpp bench --model smollm2.gguf --type bf16,q8_0,q4_0,q4_1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.weights.store_files import cache_dir

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize")
TYPES = ("bf16", "f16", "q8_0", "q4_0", "q4_1")
# GCC does not know that loading a tile configuration reads memory and removes, as dead, what was written there, and
# llama.cpp crashes in its first AMX product (ggml-org/llama.cpp pull request 26954). Without that removal it runs.
CXX_FLAGS = "-fno-tree-dse -fno-dse"
# The tree also holds a web page, test models and documentation: 90 % of the files, none of them needed.
UNWANTED = ("tools/ui/", "models/", "docs/", "media/", "tests/")


class PeerError(RuntimeError):
    """The peer could not be fetched, built or run; the message names the step and where its log is."""


def cache_root() -> Path:
    """Folder that holds the built peers and their model files."""
    return cache_dir() / "peers"


def cpu_fingerprint() -> str:
    """Short name of this machine's instruction sets: a native build is no good for another kind of CPU."""
    flags = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(("flags", "Features")):
            flags += " ".join(sorted(line.partition(":")[2].split()))
            break
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def tools_dir() -> Path:
    flags = hashlib.sha256(CXX_FLAGS.encode()).hexdigest()[:4]
    return cache_root() / f"llama.cpp-{VERSION}-{cpu_fingerprint()}-{flags}"


def tool(name: str) -> Path:
    """Path of a built tool. Raises PeerError when it has not been built."""
    path = tools_dir() / name
    if not path.exists():
        raise PeerError(f"{name} is not built; run: python -m benchmarks.peers.llamacpp build")
    return path


def build(jobs: int = 2) -> Path:
    """Fetch, verify, unpack and build the tools (once); returns the folder that holds them.

    Takes 5 to 20 minutes on two cores, at low priority. Raises PeerError with the tail of the failing log.
    """
    target = tools_dir()
    if all((target / name).exists() for name in TOOLS):
        return target
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    sdist = _fetch_sdist(root)
    with tempfile.TemporaryDirectory(prefix="llamacpp-", dir=root) as scratch:
        work = Path(scratch)
        source = _unpack(sdist, work)
        built = _compile(source, work / "build", jobs, root / f"llama.cpp-{VERSION}.log")
        finished = work / "tools"
        finished.mkdir()
        for name in TOOLS:
            shutil.copy2(built / "bin" / name, finished / name)
        shutil.copy2(source / "LICENSE", finished / "LICENSE")
        shutil.rmtree(target, ignore_errors=True)
        finished.rename(target)
    return target


def _fetch_sdist(root: Path) -> Path:
    path = root / f"{PACKAGE.replace('-', '_')}-{VERSION}.tar.gz"
    if not path.exists():
        _note(f"fetching the source distribution of {PACKAGE} {VERSION} (77 MB)")
        with tempfile.TemporaryDirectory(dir=root) as folder:
            # --no-build-isolation: pip reads the metadata with this environment's tools; nothing is built.
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
            command += ["--no-build-isolation", "--dest", folder, f"{PACKAGE}=={VERSION}"]
            _check(command, root / "download.log", "fetching the source distribution")
            found = list(Path(folder).glob("*.tar.gz"))
            if len(found) != 1:
                raise PeerError(f"pip left {len(found)} archives instead of one source distribution")
            _verify(found[0])
            found[0].rename(path)
    _verify(path)
    return path


def _verify(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SDIST_SHA256:
        path.unlink()
        raise PeerError(
            f"{path.name}: sha256 is {digest}, expected {SDIST_SHA256}; removed, run again to fetch it anew"
        )


def _unpack(sdist: Path, work: Path) -> Path:
    prefix = f"{sdist.name.removesuffix('.tar.gz')}/vendor/llama.cpp/"
    with tarfile.open(sdist) as archive:
        wanted = [
            member
            for member in archive.getmembers()
            if member.name.startswith(prefix) and not member.name.removeprefix(prefix).startswith(UNWANTED)
        ]
        archive.extractall(work, members=wanted, filter="data")
    return work / prefix


def _compile(source: Path, build_dir: Path, jobs: int, log: Path) -> Path:
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=_path()) else []
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_FLAGS": CXX_FLAGS,
        "GGML_NATIVE": "ON",
        "BUILD_SHARED_LIBS": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_SERVER": "OFF",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_OPENSSL": "OFF",
    }
    definitions = [f"-D{key}={value}" for key, value in options.items()]
    nice = ["nice", "-n", "15"] if shutil.which("nice") else []
    log.write_bytes(b"")
    _note(f"building {', '.join(TOOLS)} with {jobs} jobs; log: {log}")
    _check(
        ["cmake", "-S", str(source), "-B", str(build_dir), *generator, *definitions],
        log,
        "configuring llama.cpp",
    )
    command = [*nice, "cmake", "--build", str(build_dir), f"-j{jobs}", "--target", *TOOLS]
    _check(command, log, "building llama.cpp")
    return build_dir


def _check(command: Sequence[str], log: Path, what: str) -> None:
    # The environment's own cmake and ninja come first, if it has them.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with log.open("ab") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PATH": path}, check=False
        )
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise PeerError(f"{what} failed (exit {done.returncode}); the last lines of {log}:\n{tail}")


def _path() -> str:
    """PATH with this environment's own cmake and ninja first, if it has them."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _note(text: str) -> None:
    print(f"llama.cpp: {text}", file=sys.stderr, flush=True)


# --- model files --------------------------------------------------------------------------------------


def model_file(source: Path, kind: str) -> Path:
    """A GGUF of ``source`` with its weights as ``kind``, made once beside the peers.

    bf16 and f16 hold the values of ``source`` rounded once, as Paceline rounds them; the quantised kinds are
    requantised from it by llama-quantize (good for measuring speed, not quality).
    """
    if kind not in TYPES:
        raise PeerError(f"type: {kind!r} is none of {', '.join(TYPES)}")
    source = source.resolve()
    stat = source.stat()
    key = hashlib.sha256(f"{source}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:8]
    target = cache_root() / "models" / f"{source.stem}-{key}.{kind}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    command = [
        str(tool("llama-quantize")),
        "--allow-requantize",
        "--pure",
        str(source),
        str(partial),
        kind.upper(),
        "2",
    ]
    log = target.with_suffix(".log")
    _note(f"writing {target.name}")
    _check(command, log, f"converting {source.name} to {kind}")
    partial.rename(target)
    log.unlink()
    return target


# --- running ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """How the tools run: only what moves their speed on a CPU. The defaults are the fastest `tune` found."""

    threads: int = 2
    flash_attn: str = "on"
    load_mode: str = "none"
    repack: bool = True
    cache_type: str = "f16"

    def arguments(self) -> list[str]:
        """Options that llama-bench and llama-batched-bench share."""
        cache = ["-ctk", self.cache_type, "-ctv", self.cache_type]
        return ["-t", str(self.threads), "-fa", self.flash_attn, "-lm", self.load_mode, *cache]


def bench(
    model: Path, tests: Sequence[str], settings: Settings | None = None, *, repetitions: int = 3
) -> dict[str, list[float]]:
    """Tokens per second of each repetition of `tgN` (decode N) and `ppN` (prefill N tokens) on a GGUF file.

    One process runs all of them after a warm-up of each.
    """
    settings = settings or Settings()
    options = {"pp": "-p", "tg": "-n"}
    arguments = ["-m", str(model), "-r", str(repetitions), "-o", "json", "-ngl", "0"]
    for kind, option in options.items():
        sizes = [test.removeprefix(kind) for test in tests if test.startswith(kind)]
        arguments += [option, ",".join(sizes) or "0"]
    if not all(test[:2] in options and test[2:].isdigit() for test in tests):
        raise PeerError(f"tests: {','.join(tests)!r}: each must be tgN or ppN")
    arguments += ["--repack", str(int(settings.repack)), *settings.arguments()]
    speeds = {}
    for result in json.loads(_output("llama-bench", arguments)):
        test = f"pp{result['n_prompt']}" if result["n_prompt"] else f"tg{result['n_gen']}"
        speeds[test] = [float(value) for value in result["samples_ts"]]
    return speeds


def passes(
    model: Path, rows: Sequence[int], settings: Settings | None = None, *, context: int = 128, steps: int = 32
) -> dict[int, float]:
    """Milliseconds of one pass of each number of rows, logits of every row, behind a shared context.

    Rows are sequences of their own that share a prompt: the arithmetic of verifying that many drafts.
    """
    settings = settings or Settings()
    size = context + steps * max(rows)
    arguments = ["-m", str(model), "-c", str(size), "-npp", str(context), "-ntg", str(steps), "-pps"]
    arguments += ["-npl", ",".join(map(str, rows)), "--output-format", "jsonl", "-tb", str(settings.threads)]
    arguments += [*settings.arguments(), *([] if settings.repack else ["--no-repack"])]
    times = {}
    for line in _output("llama-batched-bench", arguments).splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            times[int(result["pl"])] = 1e3 * float(result["t_tg"]) / float(result["tg"])
    if set(times) != set(rows):
        raise PeerError(f"llama-batched-bench reported {sorted(times)} rows of {sorted(rows)}")
    return times


def batch(
    model: Path, sequences: int, settings: Settings | None = None, *, prompt: int = 128, output: int = 128
) -> tuple[float, float]:
    """Seconds of (prefill, decoding) of `sequences` requests at once: `prompt` tokens each, then `output` tokens each.

    All of them start and end together, which is the best case for a batch; nothing is sampled or detokenised.
    """
    settings = settings or Settings()
    size = sequences * (prompt + output)
    arguments = ["-m", str(model), "-c", str(size), "-npp", str(prompt), "-ntg", str(output), "-npl", str(sequences)]
    arguments += ["-b", "2048", "-ub", "512", "--output-format", "jsonl", "-tb", str(settings.threads)]
    arguments += [*settings.arguments(), *([] if settings.repack else ["--no-repack"])]
    for line in _output("llama-batched-bench", arguments).splitlines():
        if line.startswith("{"):
            result = json.loads(line)
            if int(result["pl"]) == sequences:
                return float(result["t_pp"]), float(result["t_tg"])
    raise PeerError(f"llama-batched-bench reported nothing for {sequences} sequences")


def _output(name: str, arguments: Sequence[str]) -> str:
    done = subprocess.run([str(tool(name)), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerError(f"{name} exited {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


def tune(model: Path, *, threads: Sequence[int] = (1, 2), rounds: int = 3) -> dict[str, Any]:
    """Find the fastest settings for decoding and for prefill: one change at a time, in interleaved rounds."""
    base = Settings(threads=max(threads))
    candidates = [base, *(replace(base, threads=count) for count in threads if count != base.threads)]
    candidates += [replace(base, flash_attn="off"), replace(base, load_mode="mmap")]
    candidates += [replace(base, repack=False), replace(base, cache_type="bf16")]
    speeds: dict[tuple[str, Settings], list[float]] = {}
    for _ in range(rounds):
        for settings in candidates:
            for test, samples in bench(model, ["tg128", "pp512"], settings, repetitions=2).items():
                speeds.setdefault((test, settings), []).extend(samples)
    table = [
        {"test": test, "tok_s": round(statistics.median(samples), 1), **asdict(settings)}
        for (test, settings), samples in speeds.items()
    ]
    table.sort(key=lambda row: (row["test"], -row["tok_s"]))
    return {"model": model.name, "fastest_first": table}


def main(arguments: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.llamacpp", description=summary)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="fetch and build the tools")
    building.add_argument("--jobs", type=int, default=2)
    for name, text in (("bench", "measure"), ("tune", "find the fastest settings")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--model", type=Path, required=True, help="GGUF file")
        command.add_argument("--type", default="bf16", help=f"comma-separated: {', '.join(TYPES)}")
        command.add_argument("--threads", type=int, default=2)
        if name == "bench":
            command.add_argument("--tests", default="tg128,pp512")
            command.add_argument("--rows", default="1,2,4,8,12,16")
            command.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    try:
        if options.command == "build":
            print(build(options.jobs))
            return 0
        build()
        print(json.dumps([_measure(options, kind) for kind in options.type.split(",")], indent=2))
        return 0
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _measure(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    path = model_file(options.model, kind)
    if options.command == "tune":
        return {"type": kind, **tune(path, threads=range(1, options.threads + 1))}
    settings = Settings(threads=options.threads)
    speeds = bench(path, options.tests.split(","), settings, repetitions=options.repetitions)
    times = passes(path, [int(count) for count in options.rows.split(",")], settings)
    return {
        "type": kind,
        "settings": asdict(settings),
        "tok_s": {test: round(statistics.median(samples), 1) for test, samples in speeds.items()},
        "ms_per_pass": {str(rows): round(value, 2) for rows, value in times.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
