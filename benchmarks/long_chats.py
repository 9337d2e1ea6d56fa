"""Acceptance and round time against context length: chats that grow until the model's context is full.

    python -m benchmarks.long_chats --output long_chats.json --plot docs/long-chats.svg

One chat for each prompt set. Its questions come one after the other, and each answer (greedy, cut at --output-len
tokens) becomes part of the chat, so that contexts are texts which the model has read and written itself. Every answer
is generated twice, without and with drafts, in turns; the prompt is in the prefix cache both times. Figures are
grouped by the context that a turn began with; times are medians over the turns of a group.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.bench.charts import lines
from paceline.bench.datasets import load_dataset
from paceline.dtypes import DEFAULT_QUANTIZATION, QUANTIZATIONS
from paceline.speculation.stats import SpecDecodeStats

EDGES = (0, 512, 1024, 2048, 3072, 4096, 5120, 6144, 7168)  # where groups of contexts begin
MARGIN = 8  # tokens that the chat template adds behind the answer
STYLE = (
    "<style>text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd}.mark{stroke:#888;stroke-dasharray:3 3}</style>"
    '<rect width="100%" height="100%" fill="#fff"/>'
)


@dataclass(slots=True)
class Turn:
    """One answer, generated without drafts and with them. Times in milliseconds, of steps behind the first token."""

    dataset: str
    context: int  # tokens of the prompt
    tokens: int  # of the answer
    plain_ms: float  # a token without drafts
    round_ms: float  # a step with drafts: draft, verify, commit
    tokens_per_round: float
    speedup: float
    identical: bool
    stats: SpecDecodeStats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=DEFAULT_QUANTIZATION)
    parser.add_argument("--speculative-config", default='{"method": "dflash"}', help="JSON; default: %(default)s")
    parser.add_argument("-k", "--drafts", type=int, default=None, help="drafts of a step; default: as many as pay")
    parser.add_argument("--datasets", default="humaneval,gsm8k,mt-bench")
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--max-context", type=int, default=None, help="default: the model's")
    parser.add_argument("--output", type=Path, help="every turn, as JSON")
    parser.add_argument("--plot", type=Path, help="an SVG file with two plots")
    options = parser.parse_args()
    config = json.loads(options.speculative_config)
    llm = LLM(options.model, quantization=options.quantization, speculative_config=config, max_num_seqs=1)
    turns = measure(llm, options.datasets.split(","), options.output_len, options.drafts, options.max_context)
    print(table(turns))
    different = sum(not t.identical for t in turns)
    print(f"{len(turns)} answers, {different} of them not those of plain decoding")
    if options.output:
        rows = [{**asdict(t), "stats": t.stats.as_dict()} for t in turns]
        options.output.write_text(json.dumps({"info": llm.info(), "turns": rows}, indent=1, default=str))
    if options.plot:
        options.plot.write_text(plots(turns))
    raise SystemExit(different > 0)


def measure(llm: LLM, datasets: list[str], length: int, drafts: int | None, most: int | None = None) -> list[Turn]:
    """Every turn of a chat per data set, up to `most` tokens of context (None: the model's). drafts: of a step; None:
    as many as pay."""
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    room = min(most or llm.max_model_len, llm.max_model_len) - length - MARGIN
    turns: list[Turn] = []
    for name in datasets:
        questions = [prompt.messages[0]["content"] for prompt in load_dataset(name)]
        messages: list[dict[str, Any]] = []
        for number in range(1 << 20):
            messages.append({"role": "user", "content": questions[number % len(questions)]})
            ids = llm.tokenizer.encode_chat(messages)
            if len(ids) > room:
                break
            llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=1), num_speculative_tokens=0)
            runs: dict[int | None, Any] = {}
            for k in (0, drafts) if number % 2 else (drafts, 0):  # whoever goes first has the colder caches
                runs[k] = llm.generate(ids, params, num_speculative_tokens=k)[0]
            turns.append(_turn(name, len(ids), runs[0], runs[drafts]))
            messages.append({"role": "assistant", "content": runs[0].outputs[0].text})
    return turns


def _turn(name: str, context: int, plain: Any, drafted: Any) -> Turn:
    stats = drafted.metrics.spec_decode
    answer = plain.outputs[0].token_ids
    behind = len(answer) - 1
    plain_ms = 1e3 * plain.metrics.generation_time_s / behind
    per_token = 1e3 * drafted.metrics.generation_time_s / behind
    # the first token comes with the last row of the prompt, before the clock starts
    steps = behind - stats.num_accepted_tokens + stats.num_cut_tokens
    return Turn(
        dataset=name,
        context=context,
        tokens=len(answer),
        plain_ms=plain_ms,
        round_ms=per_token * behind / steps,
        tokens_per_round=behind / steps,
        speedup=plain_ms / per_token,
        identical=drafted.outputs[0].token_ids == answer,
        stats=stats,
    )


def groups(turns: list[Turn]) -> list[tuple[int, list[Turn]]]:
    """(mean context, turns) of each group that has any."""
    ends = [*EDGES[1:], 1 << 30]
    parts = [[t for t in turns if low <= t.context < high] for low, high in zip(EDGES, ends, strict=True)]
    return [(round(statistics.mean(t.context for t in part)), part) for part in parts if part]


def table(turns: list[Turn]) -> str:
    """A Markdown table, a line for each group of contexts."""
    names = list(dict.fromkeys(t.dataset for t in turns))
    head = ["context", *(f"tokens per round, {n}" for n in names), "plain token", "round", "round / token", "speed-up"]
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for context, part in groups(turns):
        median = {key: statistics.median(getattr(t, key) for t in part) for key in ("plain_ms", "round_ms", "speedup")}
        cells = [f"{context:,}"]
        for name in names:
            own = [t for t in part if t.dataset == name]
            cells.append(f"{_rate(own):.2f}" if own else "")
        cells += [f"{median['plain_ms']:.2f} ms", f"{median['round_ms']:.2f} ms"]
        cells += [f"{median['round_ms'] / median['plain_ms']:.2f}", f"{median['speedup']:.2f}x"]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def _rate(turns: list[Turn]) -> float:
    """Tokens per round of several turns together."""
    return sum(t.tokens - 1 for t in turns) / sum((t.tokens - 1) / t.tokens_per_round for t in turns)


def plots(turns: list[Turn]) -> str:
    """Two plots, one above the other: tokens per round of each set, and the time of a token and of a round."""
    found = groups(turns)
    at = [float(context) for context, _ in found]
    names = list(dict.fromkeys(t.dataset for t in turns))
    accepted: list[tuple[str, list[float | None]]] = []
    for name in names:
        own = [[t for t in part if t.dataset == name] for _, part in found]
        accepted.append((name, [_rate(part) if part else None for part in own]))
    times: list[tuple[str, list[float | None]]] = [
        (label, [statistics.median(getattr(t, key) for t in part) for _, part in found])
        for label, key in (("a token without drafts", "plain_ms"), ("a round", "round_ms"))
    ]
    x_label = "tokens of context"
    parts = [
        lines(at, accepted, unit="tokens per round", x_label=x_label, line=1.0),
        lines(at, times, unit="ms", x_label=x_label),
    ]
    body = "".join(
        part.replace("<svg ", f'<svg y="{310 * i}" width="640" height="300" ') for i, part in enumerate(parts)
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 610" width="640" height="610">'
    return f"{head}{STYLE}{body}</svg>\n"


if __name__ == "__main__":
    main()
