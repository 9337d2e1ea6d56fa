"""examples/agent.py: its tools, and its loop against a server."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import openai
import pytest
from engine.harness import repeat_last, scripted

spec_ = importlib.util.spec_from_file_location("agent", Path(__file__).parents[2] / "examples" / "agent.py")
assert spec_ is not None and spec_.loader is not None
agent = importlib.util.module_from_spec(spec_)
sys.modules[spec_.name] = agent
spec_.loader.exec_module(agent)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.md").write_text("# Drafter lengths\n\nA drafter drafts. The drafter is a drafter.\n")
    (folder / "b.md").write_text("# Server\n\nIt serves.\n")
    return agent.Corpus(folder)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 * 12 - 7", "29"),
        ("84 / 1.5", "56"),
        ("(1 + 2) * -3", "-9"),
        ("1 / 0", "error: division by zero"),
        ("2 ** 9", "error: only numbers, + - * / and brackets"),
        ("__import__('os')", "error: only numbers, + - * / and brackets"),
        ("1 +", "error: "),
        ("(" * 500 + "1" + ")" * 500, "error: "),
    ],
)
def test_the_calculator_calculates_and_nothing_else(expression, result):
    found = agent.calculate(expression)
    assert found == result if not result.endswith(": ") else found.startswith(result)


def test_a_search_finds_the_line_with_most(corpus):
    assert corpus.words == ["drafter", "lengths", "server"]
    assert corpus.search("drafter").splitlines() == [
        "a.md:3: A drafter drafts. The drafter is a drafter.",
        "a.md:1: # Drafter lengths",
    ]
    assert corpus.search("nowhere") == "nothing found"


def test_what_a_call_gets_wrong_is_its_result(corpus):
    tools = agent.Tools(corpus)
    assert tools.call("calculate", '{"expression": "1 + 1"}') == "2"
    for name, arguments in (("nothing", "{}"), ("calculate", "{"), ("calculate", '{"x": 1}'), ("search", "[]")):
        assert tools.call(name, arguments).startswith("error: ")


def test_an_answer_is_one_when_it_has_the_schema():
    assert agent.is_answer('{"answer": "5", "based_on": "guess"}')
    assert not agent.is_answer('{"answer": "5"') and not agent.is_answer("5") and not agent.is_answer(None)


def test_a_loop_takes_the_same_steps_with_drafts_and_without(thinker, corpus):
    """On a tiny random model: calls as planned, arguments of their schema, an answer at the end."""
    client = openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=600)
    solver = agent.Agent(client, "thinker", agent.Tools(corpus), 6)
    task = agent.Task("both", "What is 1 + 1?", ["search", "search"])
    silent = {"chat_template_kwargs": {"enable_thinking": False}}
    with scripted(thinker.llm, repeat_last):
        spec = solver.solve(task, silent)
    plain = solver.solve(task, {**silent, "num_speculative_tokens": 0})
    assert spec.steps == plain.steps and spec.tokens == plain.tokens > 0 and plain.drafts == 0 < spec.drafts
    for call, result in zip(spec.steps[:4:2], spec.steps[1:4:2], strict=True):
        name, arguments = call.removesuffix(")").split("(", 1)
        word = json.loads(arguments)["word"]
        assert name == "search" and word in corpus.words and result == f"-> {corpus.search(word)}"
    assert len(spec.steps) == 5


def test_the_table_has_a_row_for_each_task():
    runs = [agent.Run(seconds=2.0, steps=["a(1)", "-> 2", "{}"], tokens=7, drafts=4, accepted=6, valid=True)] * 4

    class Ready:
        def solve(self, task, arm, free):
            assert ("num_speculative_tokens" in arm) != (len(arm) == 1)
            return runs[0]

    [row] = agent.compare(Ready(), [agent.TASKS[0]], 2, False)
    assert (row["ratio"], row["acceptance_length"], row["calls"], row["same_steps"]) == (1.0, 2.5, 1, True)
    assert "| pencils | 1 | 7 | 2.00 s | 2.00 s | 1.00x | 2.50 | yes | yes |" in agent.table([row])
