"""Task accuracy: what is taken from an answer, and how it is judged."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction

import pytest
from fakes.llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import datasets, tasks
from paceline.bench.answers import number_of, program_of, same_number, test_program
from paceline.bench.backend import Arm
from paceline.bench.datasets import DatasetError
from paceline.bench.local import LocalBackend
from paceline.bench.runner import measure
from paceline.bench.sandbox import run_program
from paceline.sampling_params import SamplingParams

test_program.__test__ = False  # not a test in spite of its name

PROBLEM = {
    "task_id": "t/0",
    "entry_point": "area",
    "prompt": 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r: float) -> float:\n    """Half a disc.\n'
    '    >>> area(2.0)\n    6.28\n    """\n',
    "canonical_solution": "    total = math.pi * r * r\n    return half(total)\n",
    "test": "def check(candidate):\n    assert abs(candidate(2.0) - 6.2832) < 1e-3\n",
}
WHOLE = PROBLEM["prompt"] + PROBLEM["canonical_solution"]
ALONE = "def area(r):\n    return 3.14159265 * r ** 2 / 2\n"


def passes(answer, problem=PROBLEM):
    return run_program(test_program(answer, problem)) == "passed"


@pytest.mark.parametrize(
    "answer",
    [
        PROBLEM["canonical_solution"],
        PROBLEM["canonical_solution"].lstrip(),
        "total = math.pi * r * r\nreturn half(total)",
        "return half(math.pi * r ** 2)",
        "    return half(math.pi * r ** 2)\n\nThis is half of pi r squared.",
        f"```python\n{WHOLE}```",
        f"Sure:\n\n```\n{ALONE}```\nIt multiplies.",
        f"```python\n{ALONE}\nprint(area(1))\nassert area(1) == 7\n```",
        f"```python\n{ALONE}",
        f"```py\n{ALONE}\n\ndef unfinished(x):\n    return (x +",
        f"Here is one from me:\n\n{ALONE}\nThis works.",
        f"{ALONE}```",
        f"Write a solution:\n```python\n{PROBLEM['prompt']}\n```\n\nSolution:\n```python\n{ALONE}\n```",
        f"```python\n{PROBLEM['prompt']}    pass\n```\n```python\n{ALONE}\n```",
        "```python\ndef square(x):\n    return x * x\n```\nand then\n"
        "```python\ndef area(r):\n    return half(math.pi * square(r))\n```",
        f"  ```python\n  {'  '.join(ALONE.splitlines(True))}  ```",
        "```python\ndef area(r):\n\treturn half(math.pi * r * r)\n```",
        f"```python\n{ALONE}\nif __name__ == '__main__':\n    raise SystemExit(3)\n```",
        f'```python\nPATTERN = "\\d"\n{ALONE}```',
    ],
)
def test_programs_of_right_answers_pass(answer):
    assert passes(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I cannot do that.",
        PROBLEM["prompt"],
        f"```python\n{PROBLEM['prompt']}\n```",
        "```python\ndef area(r):\n    return r\n```",
        "```python\ndef surface(r):\n    return 3.14159265 * r ** 2 / 2\n```",
        "    while True: pass\n",
        "    import os\n    while True: os.fork()\n",
        "    return [0] * (1 << 40)\n",
        "    raise SystemExit(0)\n",
        "def check(candidate): pass",
        "(" * 5000,
    ],
)
def test_programs_of_wrong_answers_do_not(answer):
    assert not passes(answer)


@given(st.text(alphabet="`def area(r):\n \"'returnpython#\\", max_size=120))
def test_any_text_makes_a_program_that_starts_with_the_problem(text):
    assert program_of(text, PROBLEM).startswith(PROBLEM["prompt"].rstrip())


def humaneval():
    try:
        return datasets.packaged_rows("humaneval")
    except Exception as error:
        pytest.skip(f"HumanEval cannot be fetched: {error}")


FORMS = {
    "body": lambda row: row["canonical_solution"],
    "examples": lambda row: f"Code from me:\n\n{row['prompt']}{row['canonical_solution']}\n\nassert 1 == 2\nSo.",
    "repeated": lambda row: (
        f"```python\n{row['prompt']}\n```\nSolution:\n```\n{row['prompt']}{row['canonical_solution']}"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_canonical_solutions_of_the_whole_set_score_one(form):
    task = tasks.Task("humaneval", humaneval())
    verdicts = {row["task_id"]: task.verdict(i, FORMS[form](row)) for i, row in enumerate(task.rows)}
    assert len(verdicts) == 164
    assert {k: v for k, v in verdicts.items() if v != "passed"} == {}


@pytest.mark.slow
def test_no_problem_is_solved_by_repeating_it():
    task = tasks.Task("humaneval", humaneval())
    assert [
        i for i, row in enumerate(task.rows) if task.verdict(i, f"```python\n{row['prompt']}\n```") == "passed"
    ] == []


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("The answer is \\boxed{18}.", 18),
        ("\\boxed{1,430}", 1430),
        ("\\boxed{\\$2{,}000.50}", Fraction("2000.5")),
        ("\\boxed{12 \\text{ apples}}", 12),
        ("\\boxed{\\frac{1}{4}}", Fraction(1, 4)),
        ("\\boxed{x = -3}", -3),
        ("First \\boxed{3}, no: \\boxed{4}", 4),
        ("so \\boxed{7} and \\boxed{}", 7),
        ("\\boxed{42", 42),
        ("It is 5 + 6 = 11.\n#### 11", 11),
        ("#### $1,000 in 3 days", 1000),
        ("She has 3 boxes of 12, so 36 pencils.", 36),
        ("That is 50%.", 50),
        ("It costs $3.50.", Fraction("3.5")),
        ("The answer: 40.0", 40),
        ("ratio 3/4", Fraction(3, 4)),
        ("10/0", None),
        ("no number here", None),
        ("", None),
        ("v2.1b is not 8", 8),
    ],
)
def test_the_final_number(answer, number):
    assert number_of(answer) == number


def test_numbers_are_compared_as_numbers():
    assert same_number("\\boxed{18.00}", "18")
    assert same_number("2,125", "2125")
    assert not same_number("\\boxed{18.01}", "18")
    assert not same_number("nothing", "0")


@given(st.integers(-(10**9), 10**9), st.text(alphabet="abc ,.${}\\", max_size=30))
def test_a_boxed_integer_is_found_behind_any_text(n, text):
    assert number_of(f"{text} \\boxed{{{n:,}}}") == n


def test_reference_answers_of_gsm8k_score_one():
    try:
        rows = datasets.packaged_rows("gsm8k")
    except Exception as error:
        pytest.skip(f"GSM8K cannot be fetched: {error}")
    task = tasks.Task("gsm8k", rows)
    assert {task.verdict(i, row["upstream_answer"]) for i, row in enumerate(rows)} == {"correct"}
    assert {task.verdict(i, f"\\boxed{{{row['expected']}}}") for i, row in enumerate(rows)} == {"correct"}


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    """Two small sets in place of the real ones."""
    rows = {
        "humaneval": [PROBLEM, {**PROBLEM, "task_id": "t/1", "test": "def check(candidate):\n    assert False\n"}],
        "gsm8k": [{"prompt": "How many?", "expected": "3"}, {"prompt": "And now?", "expected": "4"}],
    }
    paths = {}
    for name, values in rows.items():
        path = tmp_path / datasets.PACKAGED[name].member.rpartition("/")[2]
        data = "".join(json.dumps(row) + "\n" for row in values).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        paths[name] = path
    monkeypatch.setattr(datasets, "fetch", paths.__getitem__)


def scored(name, llm, lengths=(0, 4), concurrency=1):
    task, backend = tasks.load_task(name), LocalBackend(llm)
    arms = [Arm(backend, k) for k in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=512)
    found = measure(name, datasets.load_dataset(name), arms, params, concurrency=concurrency)
    return tasks.score_rows(task, found), list(tasks.sample_rows(task, found))


BOXED = {
    f"{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.": "\\boxed{3}"
    for question in ("How many?", "And now?")
}


@pytest.mark.parametrize("concurrency", [1, 8])
def test_scores_of_arms_that_agree(packaged, concurrency):
    rows, samples = scored("gsm8k", FakeLLM(answers=BOXED), concurrency=concurrency)
    assert [tuple(row) for row in rows] == [tasks.SCORE_KEYS] * 2
    for row in rows:
        assert (row["score"], row["correct"], row["total"], row["metric"]) == (0.5, 1, 2, "exact_match")
        assert row["verdicts"] == {"correct": 1, "wrong": 1}
        assert row["stderr"] == pytest.approx(0.5)
        assert (row["identical"], row["same_score"], row["cut"]) == (True, True, 0)
    assert [(s["index"], s["arm"], s["verdict"], s["extracted"]) for s in samples] == [
        (0, "k = 0", "correct", "3"),
        (1, "k = 0", "wrong", "3"),
        (0, "k = 4", "correct", "3"),
        (1, "k = 4", "wrong", "3"),
    ]


def test_an_arm_that_differs_is_seen(packaged):
    rows, _ = scored("gsm8k", FakeLLM(answers=BOXED, corrupt_speculation=True))
    assert [row["identical"] for row in rows] == [True, False]


def test_programs_are_run_once_per_answer(packaged, monkeypatch):
    ran = []
    monkeypatch.setattr(tasks, "run_program", lambda program, _limits: ran.append(program) or "failed")
    rows, _ = scored("humaneval", FakeLLM())
    assert [row["score"] for row in rows] == [0.0, 0.0]
    assert len(ran) == 2  # a problem each, not an arm each


def test_a_refused_request_is_a_problem_not_solved(packaged):
    rows, samples = scored("gsm8k", FakeLLM(answers=BOXED, context=20))
    assert rows[0]["verdicts"] == {"request failed": 2}
    assert rows[0]["score"] == 0.0
    assert "holds 20" in samples[0]["error"]


def test_a_set_without_answers_is_no_task():
    with pytest.raises(DatasetError, match="task 'mt-bench' has no answers to compare with; use humaneval or gsm8k"):
        tasks.load_task("mt-bench")


def test_the_standard_error():
    assert tasks.stderr(0.5, 101) == pytest.approx(0.05)
    assert tasks.stderr(1.0, 1) is None
