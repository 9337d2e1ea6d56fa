"""`paceline serve`: options, what it refuses before loading, and a process from start to signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from engine.harness import open_llm

from paceline.cli import run
from paceline.cli.serve import _keys
from paceline.errors import CapacityError, ConfigError
from paceline.server import plan
from paceline.server.figures import lines
from paceline.server.run import end_process, take_port

from .harness import Live


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = run(["serve", *argv])
    return code, " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--cpus", "0-x"], "--cpus"),
        (["--cpus", "5-1"], "backwards"),
        (["--cpus", "99999"], "not among those allowed"),
        (["--kv-cache-space", "100000"], "do not fit"),
        (["--chat-template", "no/such/file"], "--chat-template"),
        (["--tool-call-parser", "nix"], "tool_call_parser: 'nix' is unknown"),
        (["--reasoning-parser", "nix"], "reasoning_parser: 'nix' is unknown"),
        (["--tool-call-parser", "pythonic"], "needs a chat template with tools"),
        (["--quantization", "int3"], "--quantization"),
        (["--num-speculative-tokens", "99"], "--allow-longer-drafts"),
        (["--max-num-seqs", "600", "--max-num-batched-tokens", "70000"], "max_num_batched_tokens"),
        (["--speculative-config", '{"method": "eagle"}'], "eagle"),
        (["--no-speculation", "--num-speculative-tokens", "3"], "contradicts"),
        (["--host", "256.1.1.1"], "--host"),
        (["--port", "70000"], "65535"),
        (["--kv-cache-space", "nan"], "--kv-cache-space nan"),
        (["--kv-cache-space", "inf"], "--kv-cache-space inf"),
        (["--kv-cache-space", "-1"], "--kv-cache-space -1"),
        (["--host", ""], "--host: empty"),
        (["--api-key", ""], "--api-key: the key is empty"),
        (["--api-key", "good", "--api-key", " \n"], "--api-key: the key is empty"),
        (["--served-model-name", ""], "--served-model-name: empty"),
    ],
)
def test_what_cannot_work_is_refused_in_words(folder, capsys, monkeypatch, argv, words):
    monkeypatch.setenv("COLUMNS", "200")
    code, said = refused(capsys, str(folder), "--port", "0", *argv)
    assert code in (1, 2) and words in said and "Traceback" not in said


def test_an_empty_key_in_the_environment_lets_nobody_in(folder, capsys, monkeypatch):
    monkeypatch.setenv("PACELINE_API_KEY", " \n")
    code, said = refused(capsys, str(folder), "--port", "0")
    assert code == 1 and "PACELINE_API_KEY: the key is empty" in said


def test_keys_lose_the_line_end_of_their_file(monkeypatch):
    monkeypatch.setenv("PACELINE_API_KEY", "secret\n")
    assert _keys([" other"]) == ("other", "secret")
    monkeypatch.setenv("PACELINE_API_KEY", "")
    assert _keys(None) == ()


def test_a_process_ends_beside_a_compiler_that_does_not():
    code = """
import threading
from paceline.server.run import end_process
from paceline.structured.compiler import THREAD_NAME, is_compiling
assert not is_compiling()
threading.Thread(target=threading.Event().wait, name=THREAD_NAME).start()
print("said before", flush=False)
end_process(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (3, "said before\n"), done.stderr
    with pytest.raises(SystemExit) as ended:
        end_process(4)
    assert ended.value.code == 4


def test_a_port_in_use_is_refused_before_the_model_is_loaded_and_behind_mistakes(folder, capsys):
    with take_port("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = refused(capsys, str(folder), "--port", port)
        assert code == 1 and "--port" in said and "in use" in said
        code, said = refused(capsys, "org/not-here", "--port", port)
        assert code == 1 and "in use" in said, "nothing is fetched for a port that is taken"
        for argv, words in (
            (["nope"], "'nope' could not be found"),
            ([str(folder), "--max-model-len", "100000"], "--max-model-len 100000: this model has a context of"),
            ([str(folder), "--kv-cache-space", "100000"], "do not fit"),
            ([str(folder), "--allowed-origins", "localhost"], "--allowed-origins localhost: write"),
            ([str(folder), "--ssl-keyfile", "x"], "needs --ssl-certfile"),
        ):
            code, said = refused(capsys, *argv, "--port", port)
            assert code == 1 and words in said and "in use" not in said


def test_cpus_are_read_as_taskset_reads_them():
    assert plan.parse_cpus("0-3,8, 10-11") == {0, 1, 2, 3, 8, 10, 11}
    for bad in ("", "a", "-1", "3-1", "1-", "0x1", "1,,2"):
        with pytest.raises(ConfigError, match="--cpus"):
            plan.parse_cpus(bad)


def test_case_32_memory_is_checked_before_it_is_taken(folder, monkeypatch):
    monkeypatch.setattr(plan.runtime, "available_memory", lambda: 1 << 20)
    plan.check_memory(folder, "float32", None)
    with pytest.raises(CapacityError, match=r"--kv-cache-space.*are left for the cache"):
        plan.check_memory(folder, "float32", 0.001)
    monkeypatch.setattr(plan.runtime, "available_memory", lambda: 1000)
    with pytest.raises(CapacityError, match="weights do not fit"):
        plan.check_memory(folder, "float32", None)


def test_vllm_s_variable_for_the_cache(monkeypatch):
    for text, want in (("", None), ("2", 2.0), ("0.5", 0.5), ("0", None)):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", text)
        assert plan.kv_cache_space(None) == want and plan.kv_cache_space(3) == 3
    for text in ("much", "-1", "nan", "inf"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", text)
        with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE"):
            plan.kv_cache_space(None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nix: 1", "nix"),
        ("- a", "name: value"),
        ("a: [", "--config"),
        ("port: many", "--port"),
        ("config: x", "config"),
    ],
)
def test_config_files_are_read_strictly(folder, tmp_path, capsys, monkeypatch, text, words):
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    code, said = refused(capsys, str(folder), "--config", str(file))
    assert code in (1, 2) and words in said and "Traceback" not in said


def start(*argv: str, **env: str) -> tuple[subprocess.Popen[str], str, str]:
    """A server process: (process, its address, what it said on the way)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "serve", *argv],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PACELINE_THREADS": "1", **env},
    )
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"(https?://\S+) is ready", line):
            return process, found[1], said
    raise AssertionError(said)


def test_a_process_from_start_to_signal(folder: Path, tmp_path: Path):
    """Options from a file and the command line; the first signal drains and ends with code 0."""
    template = tmp_path / "t.jinja"
    template.write_text("ab{{ messages[0].content }}")
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"model: {folder}\ndtype: float32\nport: 1\nserved-model-name: [first, second]\nchat_template: {template}\n"
        "speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\nkv-cache-space: 0.01\n"
    )
    process, url, said = start("--config", str(config), "--port", "0", "--trust-remote-code", PACELINE_API_KEY="secret")
    try:
        assert "no remote code is ever run" in said
        assert re.search(r"Path: \w+, 1 thread\n", said) and re.search(r"Memory: \d+ MiB of float32 weights", said)
        assert "ngram, up to 3 tokens" in said
        with httpx.Client(base_url=url, headers={"authorization": "Bearer secret"}, timeout=600) as client:
            assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["first", "second"]
            body = client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "c"}], "return_token_ids": True, "max_tokens": 3},
            ).json()
            llm = open_llm(folder, None)
            assert body["prompt_token_ids"] == llm.tokenizer.encode("abc") and body["model"] == "first"
            with client.stream(
                "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 150, "ignore_eos": True, "stream": True}
            ) as stream:
                pieces = stream.iter_lines()
                next(pieces)
                process.send_signal(signal.SIGTERM)
                assert [p for p in pieces if p][-1] == "data: [DONE]"
        process.wait(600)
    finally:
        process.terminate()
        rest = process.stderr.read()
        process.stderr.close()
    assert process.wait(600) == 0, rest
    assert "Traceback" not in rest


def test_a_second_signal_ends_requests_at_once(folder: Path):
    """Nor does it leave a traceback, or another code."""
    process, url, _ = start(str(folder), "--port", "0", "--max-model-len", "160")
    try:
        ask = {"prompt": ["a"] * 100, "max_tokens": 150, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=None) as client,
            client.stream("POST", "/v1/completions", json=ask) as s,
        ):
            pieces = s.iter_lines()
            next(pieces)
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            with suppress(httpx.TransportError):
                list(pieces)
        assert process.wait(600) == 0
    finally:
        process.kill()
        rest = process.stderr.read()
        process.stderr.close()
    assert "Traceback" not in rest


def test_the_lines_of_the_log(server: Live):
    """vLLM's, word for word: dashboards and scripts read them."""
    from engine.harness import repeat_last, scripted

    before = server.engine.stats()
    with scripted(server.llm, repeat_last):
        server.ok("/v1/completions", prompt="ab", max_tokens=12, logit_bias={"5": 100}, ignore_eos=True)
    first, second = lines(server.engine.stats(), before, 2.0)
    assert re.fullmatch(
        r"Engine 000: Avg prompt throughput: 0\.5 tokens/s, Avg generation throughput: 6\.0 tokens/s, Running: 0 reqs, "
        r"Waiting: 0 reqs, GPU KV cache usage: 0\.0%, Prefix cache hit rate: \d+\.\d%",
        first,
    )
    assert re.fullmatch(
        r"SpecDecoding metrics: Mean acceptance length: \d+\.\d\d, Accepted throughput: \d+\.\d\d tokens/s, Drafted "
        r"throughput: \d+\.\d\d tokens/s, Accepted: \d+ tokens, Drafted: \d+ tokens, Per-position acceptance rate: "
        r"(\d\.\d{3}(, )?)+, Avg Draft acceptance rate: \d+\.\d%",
        second,
    )


def test_case_32_threads_are_the_processors_that_are_allowed(folder):
    """Two servers on disjoint processors stay apart; one processor is one thread."""
    first = min(os.sched_getaffinity(0))
    process, _, said = start(str(folder), "--port", "0", "--cpus", str(first), PACELINE_THREADS="")
    try:
        assert re.search(r"Path: \w+, 1 thread\n", said)
        assert os.sched_getaffinity(process.pid) == {first}
    finally:
        process.terminate()
        process.stderr.close()
        assert process.wait(600) == 0
