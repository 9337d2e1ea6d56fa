"""Let the target answer the training prompts itself: a drafter learns what its target says, not what is right.

An answers file has one JSON object per line: ``id``, ``domain``, ``prompt_tokens``, ``tokens`` (the answer's ids, the
end-of-text token included where it came), ``finish``. A run that was interrupted goes on behind the last whole line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .errors import TrainError
from .prompts import Prompt, read_json_lines

if TYPE_CHECKING:
    from paceline.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """One training sequence: the prompt's ids and the target's own answer."""

    id: int
    domain: str
    prompt: list[int]
    answer: list[int]


class Generator(Protocol):
    """What is needed of ``paceline.LLM``."""

    def generate(self, prompts: Any, sampling_params: Any = None) -> Sequence[Any]: ...


def finished_ids(path: Path) -> set[int]:
    """Ids already answered; a last line that was cut off is removed from the file."""
    if not path.exists():
        return set()
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) != len(raw):
        path.write_bytes(whole)
    return {item["id"] for _, item in read_json_lines(path)}


def regenerate(
    llm: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 256,
    max_prompt: int = 2048,
    report: Callable[[str], None] = print,
) -> int:
    """Answer ``prompts`` in batches and append to ``out``; returns the number of answer tokens made in this call.

    Prompts that tokenise to more than ``max_prompt`` tokens are left out.
    """
    from paceline.sampling_params import SamplingParams

    done = finished_ids(out)
    todo = [p for p in prompts if p.id not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    made, started = 0, time.monotonic()
    with out.open("a", encoding="utf-8") as file:
        for first in range(0, len(todo), batch):
            part = []
            for p in todo[first : first + batch]:
                ids = tokenizer.encode_chat(list(p.messages))
                if len(ids) <= max_prompt:
                    part.append((p, ids))
            params = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + p.id) for p, _ in part]
            outputs = llm.generate([ids for _, ids in part], params)
            for (p, ids), output in zip(part, outputs, strict=True):
                choice = output.outputs[0]
                line = {
                    "id": p.id,
                    "domain": p.domain,
                    "prompt_tokens": ids,
                    "tokens": list(choice.token_ids),
                    "finish": choice.finish_reason,
                }
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                made += len(choice.token_ids)
            file.flush()
            seconds = time.monotonic() - started
            report(
                f"{len(done) + min(first + batch, len(todo))}/{len(prompts)} prompts, "
                f"{made / max(seconds, 1e-9):.0f} answer tokens/s"
            )
    return made


def read_answers(
    path: Path, prompts: Iterable[Prompt] | None = None, tokenizer: Tokenizer | None = None
) -> list[Answer]:
    """Read an answers file. Lines without ``prompt_tokens`` need ``prompts`` (by id) and their ``tokenizer``."""
    by_id = {p.id: p for p in prompts} if prompts is not None else {}
    out = []
    for number, item in read_json_lines(path):
        try:
            identity, tokens = int(item["id"]), [int(t) for t in item["tokens"]]
        except (KeyError, TypeError, ValueError):
            raise TrainError(
                f"{path}, line {number}: needs an integer 'id' and a list 'tokens' of token ids; "
                "`paceline train regenerate` writes such files"
            ) from None
        ids = item.get("prompt_tokens")
        if ids is None:
            if identity not in by_id or tokenizer is None:
                raise TrainError(
                    f"{path}, line {number}: no 'prompt_tokens', and no prompt with id {identity}: "
                    "give the file of prompts with --prompts"
                )
            ids = tokenizer.encode_chat(list(by_id[identity].messages))
        out.append(Answer(identity, str(item.get("domain", "own")), [int(t) for t in ids], tokens))
    if not out:
        raise TrainError(f"{path}: no answers in it")
    return out


def usable(
    answers: Iterable[Answer], *, max_prompt: int, max_answer: int, trim_loops: bool = False
) -> Iterator[Answer]:
    """Drop prompts beyond ``max_prompt`` tokens and answers too short to draft for; cut answers at ``max_answer``, and
    with ``trim_loops`` where they begin to repeat themselves without end."""
    for a in answers:
        answer = a.answer[:max_answer]
        if trim_loops:
            answer = answer[: loop_start(answer)]
        if len(a.prompt) <= max_prompt and len(answer) >= 2:
            yield Answer(a.id, a.domain, a.prompt, answer)


def loop_start(tokens: Sequence[int], longest: int = 64, repeats: int = 3) -> int:
    """Where an answer that ends in a loop has gone round twice; ``len(tokens)`` for one that does not.

    A loop is a tail that repeats a period of at most ``longest`` tokens at least ``repeats`` times. What follows its
    second round teaches nothing but copying.
    """
    end = len(tokens)
    best = end
    for period in range(1, min(longest, end // repeats) + 1):
        at = end - period
        while at > 0 and tokens[at - 1] == tokens[at - 1 + period]:
            at -= 1
        if end - at >= repeats * period:
            best = min(best, at + 2 * period)
    return best
