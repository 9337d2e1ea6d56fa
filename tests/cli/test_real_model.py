"""The commands with the real engine and SmolLM2, each in a process of its own as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROMPT = "Write a Python class Stack with the methods push and pop."


def paceline(*argv: str, **options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *argv], capture_output=True, text=True, timeout=600, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def _model() -> None:
    paceline("pull", "smollm2-135m")


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8", "--seed", "11")])
def test_generate_says_the_same_with_and_without_speculation(sampling):
    arguments = ("generate", PROMPT, "--max-tokens", "60", *sampling)
    streamed = paceline(*arguments)
    plain = json.loads(paceline(*arguments, "--no-speculation", "--json"))
    spec = json.loads(paceline(*arguments, "--json"))
    assert streamed.rstrip("\n") == plain["text"].rstrip("\n") == spec["text"].rstrip("\n")
    assert plain["token_ids"] == spec["token_ids"]
    assert plain["spec_decode"]["num_drafts"] == 0
    assert spec["spec_decode"]["num_drafts"] > 0


def test_chat_reads_turns_from_a_pipe():
    assert len(paceline("chat", "--max-tokens", "12", input="Say hello.\nSay bye.\n").splitlines()) >= 2


def test_demo_json_is_identical_and_accepts_drafts():
    result = json.loads(paceline("demo", "--json", "--max-tokens", "96", "--repeats", "1"))
    assert result["identical"] is True
    assert result["spec_decode"]["num_accepted_tokens"] > 0
    assert result["speedup"] == pytest.approx(result["spec_tok_s"] / result["plain_tok_s"])


def test_demo_on_a_pipe_shows_one_text_twice():
    shown = paceline("demo", "--max-tokens", "64", "--repeats", "1")
    plain, spec = (
        shown.split(f"--- {arm} decoding ---\n")[1].split(f"\n--- {arm}")[0] for arm in ("plain", "speculative")
    )
    assert plain == spec.replace("⟦", "").replace("⟧", "")
    assert shown.rstrip().splitlines()[-1] == "Outputs identical: yes (64 token ids compared)"


def test_bench_keeps_ids_and_logprobs_bit_identical(tmp_path):
    prompts, ids = tmp_path / "p.jsonl", tmp_path / "ids.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n" + json.dumps({"prompt": "Count to ten.", "id": 7}))
    arguments = ("bench", "-d", str(prompts), "--output-len", "48", "-k", "0,3,7", "--save-outputs", str(ids))
    rows = json.loads(paceline(*arguments, "--json"))
    assert [row["identical"] for row in rows] == [True] * 3
    assert [row["completed"] for row in rows] == [2] * 3
    outputs = [json.loads(line) for line in ids.read_text().splitlines()]
    assert len({json.dumps([o["token_ids"], o["logprobs"]]) for o in outputs}) == 2
    assert all(len(o["logprobs"]) == len(o["token_ids"]) > 0 for o in outputs)
    assert [o.get("id") for o in outputs] == [None] * 3 + [7] * 3


def test_bench_kernels_measures_every_row_count():
    result = json.loads(paceline("bench", "kernels", "--rows", "1,8", "--repeats", "1", "--json"))
    assert result["read_bandwidth_gbs"] > 0
    assert [row["rows"] for row in result["rows"]] == [1, 8]
    assert all(row["ms"] > 0 and row["vs_floor"] > 0 for row in result["rows"])


def test_info_of_the_real_model():
    facts = json.loads(paceline("info", "smollm2-135m", "--json"))
    assert (facts["num_layers"], facts["vocab_size"], facts["parameters"]) == (30, 49152, 134_515_008)
    assert facts["engine"]["weight_type"] == "int4" and 9e7 < facts["engine"]["weights_bytes"] < 1e8
    facts = json.loads(paceline("info", "smollm2-135m", "--quantization", "none", "--json"))
    assert facts["engine"]["weight_type"] == "bfloat16" and facts["engine"]["weights_bytes"] > 2.6e8
