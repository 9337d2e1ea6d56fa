"""Training prompts: rebuilt from public sources by one command, or the user's own from a JSON-lines file.

A prompts file has one JSON object per line: ``prompt`` (text of the user's turn) or ``messages`` (a whole chat), and
optionally ``id`` (default: the line number), ``domain`` (default ``own``), ``source``, ``licence``. A name that ends
in ``.gz`` is read and written compressed.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import TrainError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One chat to answer. ``messages`` are in the usual role/content form."""

    id: int
    domain: str
    messages: tuple[dict[str, Any], ...]
    source: str = ""
    licence: str = ""


def open_text(path: Path) -> Any:
    """A text file for reading, gzip-compressed or not."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and objects. Raises TrainError that names the line."""
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        item = json.loads(line)
                    except json.JSONDecodeError as error:
                        raise TrainError(f"{path}, line {number}: not JSON ({error})") from None
                    if not isinstance(item, dict):
                        raise TrainError(f"{path}, line {number}: expected a JSON object, got {type(item).__name__}")
                    yield number, item
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise TrainError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_prompts(path: Path) -> list[Prompt]:
    """Read a prompts file. Raises TrainError for lines without ``prompt`` or ``messages`` and for repeated ids."""
    prompts: list[Prompt] = []
    seen: set[int] = set()
    for number, item in read_json_lines(path):
        messages = item.get("messages")
        if messages is None:
            text = item.get("prompt")
            if not isinstance(text, str) or not text.strip():
                raise TrainError(f"{path}, line {number}: needs a non-empty 'prompt' or a list 'messages'")
            messages = [{"role": "user", "content": text}]
        elif not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
            raise TrainError(f"{path}, line {number}: 'messages' must be a non-empty list of role/content objects")
        identity = item.get("id", number - 1)
        if not isinstance(identity, int) or identity in seen:
            raise TrainError(f"{path}, line {number}: id {identity!r} must be an integer that no other line has")
        seen.add(identity)
        prompts.append(
            Prompt(
                id=identity,
                domain=str(item.get("domain", "own")),
                messages=tuple(messages),
                source=str(item.get("source", "")),
                licence=str(item.get("licence", "")),
            )
        )
    if not prompts:
        raise TrainError(f"{path}: no prompts in it")
    return prompts


def write_prompts(prompts: Iterable[Prompt], path: Path) -> int:
    """Write a prompts file (``.gz``: compressed); returns how many."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    count = 0
    with opener(path, "wt", encoding="utf-8") as out:
        for p in prompts:
            item = {**asdict(p), "messages": list(p.messages)}
            if len(p.messages) == 1 and p.messages[0].get("role") == "user":
                item = {**item, "prompt": p.messages[0]["content"]}
                del item["messages"]
            out.write(json.dumps(item, ensure_ascii=False) + "\n")
            count += 1
    return count


def mix(sources: dict[str, list[tuple[str, str, str]]], seed: int, limit: int | None = None) -> list[Prompt]:
    """Shuffle within each domain and deal the domains out in turn, so that every prefix is balanced.

    ``sources`` maps a domain to ``(text, source, licence)``. Texts that repeat are kept once. Ids are the
    positions in the result, which stops when the first domain is used up, then goes on with the others.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    decks: dict[str, list[tuple[str, str, str]]] = {}
    for domain in sorted(sources):
        deck = []
        for entry in sources[domain]:
            key = " ".join(entry[0].split()).lower()
            if key and key not in seen:
                seen.add(key)
                deck.append(entry)
        rng.shuffle(deck)
        decks[domain] = deck
    out: list[Prompt] = []
    longest = max((len(d) for d in decks.values()), default=0)
    for i in range(longest):
        for domain, deck in decks.items():
            if i < len(deck):
                text, source, licence = deck[i]
                message = {"role": "user", "content": text}
                out.append(Prompt(len(out), domain, (message,), source, licence))
    return out[:limit]
