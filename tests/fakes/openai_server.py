"""A small OpenAI-compatible server over the scripted `FakeLLM`, with vLLM's names, on a real socket.

Streams chat completions as server-sent events, a chunk per step; counts requests in flight; serves /v1/models,
/metrics and /reset_prefix_cache. `quirks` turn it into other servers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fakes.llm import FakeLLM
from paceline.sampling_params import SamplingParams
from paceline.speculation.stats import SpecDecodeStats


class FakeServer:
    """quirks: "no ids" (usage alone), "no usage", "strict" (HTTP 400 for unknown fields), "no metrics", "llama.cpp"
    (timings in place of metrics), "per request" (vLLM's metrics in the last chunk), "cached" (claims cached prompts),
    "broken" (ends mid-stream), "error event"."""

    def __init__(self, *quirks: str, drafts: int = 4, pause: float = 0.002) -> None:
        self.llm = FakeLLM("fake")
        self.quirks = set(quirks)
        self.drafts, self.pause = drafts, pause
        self.stats = SpecDecodeStats()
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = self.resets = 0
        self.lock = threading.Lock()
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two writes: the second would wait 40 ms for an ACK

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                server.get(self)

            def do_POST(self) -> None:
                server.post(self)

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        http.daemon_threads = True
        self.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            http.shutdown()
            http.server_close()
            thread.join()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/v1/models":
            _send(request, 200, json.dumps({"data": [{"id": "fake-model"}]}))
        elif request.path == "/metrics" and not self.quirks & {"no metrics", "llama.cpp"}:
            _send(request, 200, self.metrics())
        else:
            _send(request, 404, "no such page")

    def post(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["content-length"])) or b"{}")
        if request.path == "/reset_prefix_cache":
            self.resets += 1
            _send(request, 404 if "no metrics" in self.quirks else 200, "")
            return
        self.bodies.append(body)
        unknown = [name for name in ("return_token_ids", "cache_salt") if name in body]
        if "strict" in self.quirks and unknown:
            _send(request, 400, json.dumps({"error": {"message": f"Unrecognized argument: {unknown[0]}"}}))
            return
        with self.lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self.stream(request, body)
        finally:
            with self.lock:
                self.in_flight -= 1

    def stream(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        request.send_response(200)
        request.send_header("content-type", "text/event-stream")
        request.send_header("connection", "close")
        request.end_headers()
        params = SamplingParams(temperature=0.0, max_tokens=body["max_tokens"])
        drafts = body.get("num_speculative_tokens", self.drafts)
        ids_wanted = body.get("return_token_ids") and "no ids" not in self.quirks
        _event(request, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for delta in self.llm.stream(list(body["messages"]), params, num_speculative_tokens=drafts):
            time.sleep(self.pause)
            choice: dict[str, Any] = {"index": 0, "delta": {"content": delta.text}}
            choice |= {"token_ids": delta.token_ids} if ids_wanted else {}
            choice["finish_reason"] = delta.finish_reason
            _event(request, {"choices": [choice]})
            if "broken" in self.quirks:
                return
            if "error event" in self.quirks:
                _event(request, {"error": {"message": "out of blocks"}})
                return
            if delta.output is not None:
                self.finish(request, delta.output)
        request.wfile.write(b"data: [DONE]\n\n")

    def finish(self, request: BaseHTTPRequestHandler, output: Any) -> None:
        stats = output.metrics.spec_decode
        with self.lock:
            self.stats.merge(stats)
        tokens = len(output.outputs[0].token_ids)
        prompt = len(output.prompt_token_ids)
        cached = prompt if "cached" in self.quirks else 0
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        last: dict[str, Any] = {"choices": [], "usage": usage}
        if "llama.cpp" in self.quirks:
            last["timings"] = {"draft_n": stats.num_draft_tokens, "draft_n_accepted": stats.num_accepted_tokens}
        if "per request" in self.quirks:
            last["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram": stats.accepted_histogram,
                    "num_draft_tokens": stats.num_draft_tokens,
                }
            }
        if "no usage" in self.quirks:
            del last["usage"]
        _event(request, last)

    def metrics(self) -> str:
        labels = 'model_name="fake-model",engine="0"'
        counts = {
            "num_drafts": self.stats.num_drafts,
            "num_draft_tokens": self.stats.num_draft_tokens,
            "num_accepted_tokens": self.stats.num_accepted_tokens,
        }
        lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts.", "vllm:num_requests_running{} 0.0"]
        lines += [f"vllm:spec_decode_{name}_total{{{labels}}} {float(value)}" for name, value in counts.items()]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {float(n)}'
            for i, n in enumerate(self.stats.num_accepted_tokens_per_pos)
        ]
        return "\n".join(lines) + "\n"


def _send(request: BaseHTTPRequestHandler, status: int, text: str) -> None:
    data = text.encode()
    request.send_response(status)
    request.send_header("content-length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)


def _event(request: BaseHTTPRequestHandler, value: dict[str, Any]) -> None:
    request.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
    request.wfile.flush()
