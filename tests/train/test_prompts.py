"""Prompt files, the sources that need no network, and the target's own answers."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.train.errors import TrainError
from paceline.train.prompts import Prompt, mix, read_prompts, write_prompts
from paceline.train.regenerate import Answer, read_answers, regenerate, usable
from paceline.train.sources import SOURCES, collect


def test_prompts_survive_a_file(tmp_path: Path) -> None:
    messages = ({"role": "system", "content": "terse"}, {"role": "user", "content": "é"})
    prompts = [Prompt(3, "code", ({"role": "user", "content": "a\nb"},), "x", "MIT"), Prompt(9, "own", messages)]
    for name in ("p.jsonl", "p.jsonl.gz"):
        assert write_prompts(prompts, tmp_path / name) == 2
        assert read_prompts(tmp_path / name) == prompts


def test_a_users_file_needs_only_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "domain": "mail"}\n')
    assert [(p.id, p.domain, p.messages[0]["content"]) for p in read_prompts(path)] == [
        (0, "own", "one"),
        (2, "mail", "two"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts"),
        ("nonsense\n", "line 1: not JSON"),
        ("[1]\n", "line 1: expected a JSON object"),
        ('{"prompt": "a"}\n{"prompt": " "}\n', "line 2: needs a non-empty 'prompt'"),
        ('{"messages": []}\n', "'messages' must be"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', "line 2: id 1"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TrainError, match=message):
        read_prompts(path)


def test_a_truncated_gzip_file_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-20])
    with pytest.raises(TrainError, match="cannot be read"):
        read_prompts(path)


def test_mix_balances_every_prefix_and_drops_repeats() -> None:
    texts = {d: [(f"{d} {i}", "s", "l") for i in range(n)] for d, n in (("a", 5), ("b", 5), ("c", 2))}
    texts["a"].append(("A  3", "s", "l"))
    mixed = mix(texts, 1)
    assert [p.domain for p in mixed] == [*"abcabc", *"ababab"]
    assert [p.id for p in mixed] == list(range(12))
    assert mix(texts, 1) == mixed
    assert mix(texts, 2) != mixed
    assert mix(texts, 1, 4) == mixed[:4]


def test_sources_give_their_forms(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    (library / "test").mkdir(parents=True)
    function = 'def twice(x, *, by=2):\n    """Return x multiplied by the factor.\n\n    More."""\n    return x * by\n'
    (library / "mod.py").write_text(function)
    (library / "test" / "skipped.py").write_text(function.replace("twice", "hidden"))
    (library / "broken.py").write_text("def (:\n")
    files = {"stdlib": library}
    rows: dict[str, list[dict[str, Any]]] = {
        "gsm8k": [{"question": "1 + 1?", "answer": "2"}],
        "nq-open": [{"question": "who wrote dune", "answer": ["Herbert"]}],
        "self-instruct": [{"instruction": "Sum up.", "instances": [{"input": "text", "output": ""}]}],
        "codeio": [{"task_description": "What is x?", "code_sample": "x = 1"}] * 40,
    }
    for name, items in rows.items():
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(i) + "\n" for i in items))
    found = collect([s.name for s in SOURCES], files, tmp_path / "cache", 0, lambda _: None)
    text = {d: [t for t, _, _ in entries] for d, entries in found.items()}
    assert text["math"] == ["1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."]
    assert any(t.startswith("Who wrote dune?") for t in text["chat"])
    assert "Sum up.\n\ntext" in text["chat"]
    assert len(text["chat"]) > 1000  # the forms of our own
    code = next(t for t in text["code"] if "twice" in t)
    assert 'def twice(x, *, by=2):\n    """Return x multiplied by the factor.' in code
    compile(code.split("```python\n")[1].split("```")[0] + "\n", "prompt", "exec")
    assert not any("hidden" in t for t in text["code"])
    assert {t.split("\n")[0] for t in text["code"] if "x" in t} >= {
        "What is x?",
        "Write unit tests with pytest for this Python code:",
    }
    assert {entry[2] for entry in found["chat"]} == {"CC BY-SA 3.0", "Apache-2.0"}


def test_a_source_that_cannot_be_reached_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def refuse(*_: Any, **__: Any) -> Any:
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(httpx, "stream", refuse)
    with pytest.raises(TrainError, match="--without gsm8k"):
        collect(["gsm8k"], {}, tmp_path, 0, lambda _: None)
    with pytest.raises(TrainError, match="unknown prompt source 'foo'"):
        collect(["foo"], {}, tmp_path, 0, lambda _: None)
    with pytest.raises(TrainError, match="line 1: lacks the text 'question'"):
        (tmp_path / "x").write_text("{}\n")
        collect(["gsm8k"], {"gsm8k": tmp_path / "x"}, tmp_path, 0, lambda _: None)


@dataclass
class Choice:
    token_ids: list[int]
    finish_reason: str = "stop"


@dataclass
class Output:
    outputs: list[Choice]


class Letters:
    """One token per character, so that a prompt's ids can be told apart."""

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return [ord(c) for m in messages for c in m["content"]]


class Engine:
    def __init__(self, fail_after: int = 99) -> None:
        self.seen: list[list[int]] = []
        self.params: list[Any] = []
        self.fail_after = fail_after

    def generate(self, prompts: Any, sampling_params: Any = None, **_: Any) -> list[Output]:
        if len(self.seen) >= self.fail_after:
            raise KeyboardInterrupt
        self.seen += prompts
        self.params += sampling_params
        return [Output([Choice([p[0], 2])]) for p in prompts]


def test_an_interrupted_regeneration_goes_on_and_answers_each_prompt_once(tmp_path: Path) -> None:
    prompts = [
        Prompt(i, random.choice(["code", "math"]), ({"role": "user", "content": c},)) for i, c in enumerate("abcdef")
    ]
    out = tmp_path / "answers.jsonl"
    options: dict[str, Any] = {"batch": 2, "max_tokens": 7, "report": lambda _: None}
    with pytest.raises(KeyboardInterrupt):
        regenerate(Engine(fail_after=4), Letters(), prompts, out, **options)  # type: ignore[arg-type]
    with out.open("a") as file:
        file.write('{"id": 4, "dom')  # the line that a kill cut off
    engine = Engine()
    assert regenerate(engine, Letters(), prompts, out, **options) == 4  # type: ignore[arg-type]
    assert engine.seen == [[ord("e")], [ord("f")]]
    assert [p.max_tokens for p in engine.params] == [7, 7]
    assert [p.temperature for p in engine.params] == [0.0, 0.0]
    answers = read_answers(out)
    assert [(a.id, a.prompt, a.answer) for a in answers] == [(i, [ord(c)], [ord(c), 2]) for i, c in enumerate("abcdef")]


def test_answers_without_prompt_tokens_take_them_from_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": 5, "domain": "math", "tokens": [1, 2]}\n')
    prompts = [Prompt(5, "math", ({"role": "user", "content": "hi"},))]
    assert read_answers(path, prompts, Letters()) == [Answer(5, "math", [104, 105], [1, 2])]  # type: ignore[arg-type]
    with pytest.raises(TrainError, match="--prompts"):
        read_answers(path)
    path.write_text('{"id": 5}\n')
    with pytest.raises(TrainError, match="line 1"):
        read_answers(path)


def test_usable_cuts_and_drops() -> None:
    answers = [Answer(0, "a", [1] * 5, [2] * 9), Answer(1, "a", [1] * 6, [2] * 9), Answer(2, "a", [1], [2])]
    assert list(usable(answers, max_prompt=5, max_answer=4)) == [Answer(0, "a", [1] * 5, [2] * 4)]
