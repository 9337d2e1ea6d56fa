"""What HTTP costs: streamed chat at concurrency 1 against the same request in process, in turns.

    python -m benchmarks.serve_overhead --output overhead.json

Both arms use one `paceline serve` and one `LLM` of the same model with the same options, each in a process of its own;
an arm sleeps while the other runs. The client is a plain socket that looks for the end of the stream, so that what is
measured is the server, not a client library; --client openai measures with the `openai` package instead. Tokens per
second are completion tokens over the time from sending to the last byte, prompt included, in both arms.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams

PROMPTS = [
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and type hints.",
    "Tom has 3 boxes of 12 pencils. He gives away 7 and buys 2 more boxes. How many pencils has he now?",
    "Explain how a bicycle stays upright.",
]


def start(model: str, extra: list[str]) -> tuple[subprocess.Popen[str], str, int]:
    """A server on a free port: (process, host, port)."""
    command = [sys.executable, "-m", "paceline", "serve", model, "--port", "0", "--log-level", "warning", *extra]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://(\S+):(\d+) is ready", line):
            return process, found[1], int(found[2])
    raise SystemExit("the server did not start")


def over_socket(host: str, port: int, body: dict[str, Any]) -> tuple[float, int]:
    """(seconds, completion tokens) of one streamed request over a connection of its own."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, port)) as connection:
        begin = time.perf_counter()
        connection.sendall(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
        received = bytearray()
        while b"data: [DONE]" not in received[-64:]:
            received += connection.recv(1 << 16)
        seconds = time.perf_counter() - begin
    found = re.findall(rb'"completion_tokens":(\d+)', received)
    return seconds, int(found[-1])


def over_openai(client: Any, body: dict[str, Any]) -> tuple[float, int]:
    extra = {"ignore_eos": body.pop("ignore_eos")}
    begin = time.perf_counter()
    tokens = 0
    for chunk in client.chat.completions.create(model=None, extra_body=extra, **body):
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    return time.perf_counter() - begin, tokens


def in_process(llm: LLM, prompt: str, params: SamplingParams) -> tuple[float, int]:
    begin = time.perf_counter()
    tokens = sum(len(d.token_ids) for d in llm.stream([{"role": "user", "content": prompt}], params))
    return time.perf_counter() - begin, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--client", choices=["socket", "openai"], default="socket")
    parser.add_argument("--no-speculation", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    extra = ["--no-speculation"] if arguments.no_speculation else []
    process, host, port = start(arguments.model, extra)
    client: Any = None
    if arguments.client == "openai":
        import openai

        client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
    try:
        llm = LLM(arguments.model, speculative_config=None if arguments.no_speculation else "auto")
        params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
        ratios: list[float] = []
        rates: dict[str, list[float]] = {"in process": [], "streamed HTTP": []}
        for repeat in range(arguments.repeats + 1):
            for prompt in PROMPTS:
                body = {
                    "messages": [{"role": "user", "content": prompt}],
                    "temperature": 0,
                    "max_tokens": arguments.tokens,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                own = in_process(llm, prompt, params)
                over = over_openai(client, body) if client is not None else over_socket(host, port, body)
                assert own[1] == over[1] == arguments.tokens
                if repeat:  # the first round warms both up
                    rates["in process"].append(own[1] / own[0])
                    rates["streamed HTTP"].append(over[1] / over[0])
                    ratios.append(own[0] / over[0])
    finally:
        process.terminate()
        process.wait()
    result: dict[str, Any] = {name: statistics.median(values) for name, values in rates.items()}
    result["ratio of medians"] = result["streamed HTTP"] / result["in process"]
    result["median of ratios"] = statistics.median(ratios)
    result["requests per arm"] = len(ratios)
    for name, value in result.items():
        print(f"{name:20} {value:10.3f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
