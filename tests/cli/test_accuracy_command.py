"""`paceline bench accuracy`."""

from __future__ import annotations

import gzip
import json

import pytest
from fakes.openai_server import FakeServer

from paceline.bench import datasets, sandbox, tasks

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(autouse=True)
def packaged(monkeypatch, tmp_path):
    prompt = 'def one():\n    """One."""\n'
    rows = {
        "humaneval": [
            {"prompt": prompt, "entry_point": "one", "test": "def check(f):\n    assert f() == 1\n"},
            {"prompt": prompt, "entry_point": "one", "test": "def check(f):\n    assert f() == 2\n"},
        ],
        "gsm8k": [{"prompt": f"{i}?", "expected": str(i)} for i in range(4)],
    }
    paths = {}
    for name, values in rows.items():
        path = tmp_path / datasets.PACKAGED[name].member.rpartition("/")[2]
        data = "".join(json.dumps(row) + "\n" for row in values).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        paths[name] = path
    monkeypatch.setattr(datasets, "fetch", paths.__getitem__)


@pytest.fixture
def answering(llm):
    llm.answers = {f"{i}?{BOXED}": f"It is \\boxed{{{min(i, 2)}}}" for i in range(4)}
    llm.answers |= {
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        '```python\ndef one():\n    """One."""\n\n```': "```python\ndef one():\n    return 1\n```"
    }
    return llm


def test_scores_with_and_without_drafts_and_what_was_judged(paceline, answering, tmp_path):
    scores, samples = tmp_path / "s.json", tmp_path / "a.jsonl"
    ran = paceline("bench", "accuracy", "-o", str(scores), "--save-outputs", str(samples))
    assert ran.code == 0, ran.err
    found = json.loads(scores.read_text())
    assert [(r["task"], r["arm"], r["correct"], r["total"], r["identical"], r["same_score"]) for r in found] == [
        ("humaneval", "k = 0", 1, 2, True, True),
        ("humaneval", "auto", 1, 2, True, True),
        ("gsm8k", "k = 0", 3, 4, True, True),
        ("gsm8k", "auto", 3, 4, True, True),
    ]
    assert [tuple(row) for row in found] == [tasks.SCORE_KEYS] * 4
    assert "75.0%" in ran.out
    assert "3 of 4" in ran.out
    assert sandbox.describe() in ran.out
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == 2 * (2 + 4)
    assert [line["verdict"] for line in lines[:2]] == ["passed", "failed"]
    assert "return 1" in lines[0]["extracted"]
    assert [line["extracted"] for line in lines[4:8]] == ["0", "1", "2", "2"]


def test_the_names_of_evaluation_harnesses_are_understood(paceline, answering):
    ran = paceline("bench", "accuracy", "--tasks", "gsm8k", "--limit", "2", "-k", "0", "--json")
    (row,) = json.loads(ran.out)
    assert (row["total"], row["score"], row["same_score"]) == (2, 1.0, None)
    assert answering.opened[0].speculation is False


def test_answers_that_differ_are_a_bug_and_code_1(paceline, answering):
    answering.corrupt_speculation = True
    ran = paceline("bench", "accuracy", "-d", "gsm8k", "-k", "0,2")
    assert ran.code == 1
    assert "outputs differ between arms (gsm8k k = 2). This is a bug" in ran.err


def test_failed_requests_are_code_1(paceline, answering):
    answering.context = 20
    ran = paceline("bench", "accuracy", "-d", "gsm8k", "-k", "0")
    assert ran.code == 1
    assert "4 requests failed; --save-outputs FILE shows why" in ran.err


def test_a_server_is_scored(paceline, llm):
    with FakeServer().running() as server:
        server.llm.answers = {f"{i}?{BOXED}": f"\\boxed{{{i}}}" for i in range(4)}
        ran = paceline("bench", "accuracy", "-d", "gsm8k", "--base-url", server.url, "--json")
    (row,) = json.loads(ran.out)
    assert (row["arm"], row["score"], row["num_speculative_tokens"]) == ("server", 1.0, None)
    assert not llm.opened


def test_configurations_are_scored(paceline, answering):
    arms = ['{"label": "a", "num_speculative_tokens": 0}', '{"label": "b", "dtype": "float32"}']
    ran = paceline("bench", "accuracy", "-d", "gsm8k", "--json", "--arm", arms[0], "--arm", arms[1])
    assert [row["arm"] for row in json.loads(ran.out)] == ["a", "b"]
    assert [options.dtype for options in answering.opened] == ["auto", "float32"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["-d", "mt-bench"], "has no answers to compare with; use humaneval or gsm8k"),
        (["--temperature", "0.5"], "needs a seed"),
        (["-k", "x"], "'x' in 'x' is not a whole number"),
        (["--limit", "0"], "--limit"),
        (["-k", "0", "--arm", "{}"], "names its arms itself"),
    ],
)
def test_errors_come_before_a_model_is_loaded(paceline, llm, argv, told):
    ran = paceline("bench", "accuracy", *argv)
    assert ran.code == 2
    assert told in ran.err
    assert not llm.opened
