"""From runs to figures: the RESULT rows and the IDS rows.

Definitions (also in docs/bench.md): `decode_tok_s` = tokens after the first / time from first token to last, both
summed over requests; `output_tok_s` = all tokens / wall time of the run; `speedup` and `output_speedup` = ratios of
these to the arm that drafts nothing, within a repeat. Rates are medians over the repeats; counts are those of one
repeat, the one of median speed (or with the most failures).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from paceline.bench.backend import Arm, Completion, Run
from paceline.bench.runner import Measurement

RESULT_KEYS = (
    "dataset",
    "num_speculative_tokens",
    "concurrency",
    "completed",
    "failed",
    "output_tokens",
    "output_tok_s",
    "decode_tok_s",
    "mean_tpot_ms",
    "mean_ttft_ms",
    "speedup",
    "identical",
    "spec_decode",
    "arm",
    "repeats",
    "output_speedup",
    "spread",
    "prompt_tokens",
    "cached_tokens",
    "chosen_draft_lengths",
    "num_found_drafts",
    "warnings",
)
WIDE = 0.10  # (largest - smallest) / median of a figure's repeats beyond which a reader is warned
CLOSE = 0.02  # a speed-up this near 1 is called none, whatever its repeats

Answers = dict[tuple[int, int], Completion]


def reference_arm(arms: Sequence[Arm]) -> int:
    """Whose answers count as right: the arm without drafts, else the baseline, else the first."""
    for wanted in (lambda a: a.length == 0, lambda a: a.baseline):
        for i, arm in enumerate(arms):
            if wanted(arm):
                return i
    return 0


def baseline_arm(arms: Sequence[Arm]) -> int | None:
    """Which arm speed-ups refer to, if any."""
    i = reference_arm(arms)
    return i if arms[i].length == 0 or arms[i].baseline else None


def reference_answers(measurement: Measurement) -> Answers:
    """The reference arm's answers in the first repeat: every other answer must equal them."""
    run = measurement.runs[0][reference_arm(measurement.arms)]
    return {c.key: c for c in reversed(run.completions)}  # of copies, the first


def result_rows(measurement: Measurement, answers: Answers | None = None) -> list[dict[str, Any]]:
    """One RESULT row per arm. answers: what to compare with; None = the reference arm's own first answers."""
    arms, runs = measurement.arms, measurement.runs
    alone = answers is None and len(arms) == 1 and len(runs) == 1 and not any(c.copy for c in runs[0][0].completions)
    answers = reference_answers(measurement) if answers is None else answers
    base = baseline_arm(arms)
    rows = []
    for i, arm in enumerate(arms):
        column = [repeat[i] for repeat in runs]
        plain = None if base is None else [repeat[base] for repeat in runs]
        same = None if alone else all(c.same_output(answers[c.key]) for run in column for c in run.completions)
        rows.append(_row(measurement, arm, column, plain, same))
    return rows


def _row(
    measurement: Measurement, arm: Arm, column: Sequence[Run], plain: Sequence[Run] | None, same: bool | None
) -> dict[str, Any]:
    speed = _figures(column, _decode_rate)
    output = _figures(column, _output_rate)
    ratios = {
        "speedup": _ratios(speed, _figures(plain, _decode_rate)) if plain is not None else [],
        "output_speedup": _ratios(output, _figures(plain, _output_rate)) if plain is not None else [],
    }
    spread = {
        name: [min(known), max(known)]
        for name, values in {"output_tok_s": output, "decode_tok_s": speed, **ratios}.items()
        if (known := [v for v in values if v is not None])
    }
    shown = _typical(column, speed)
    good = [c for c in shown.completions if c.error is None]
    is_plain = plain is not None and plain[0] is column[0]
    values: dict[str, Any] = {
        "dataset": measurement.dataset,
        "num_speculative_tokens": arm.length,
        "concurrency": measurement.concurrency,
        "completed": len(good),
        "failed": len(shown.completions) - len(good),
        "output_tokens": sum(c.tokens for c in good),
        "output_tok_s": _median(output),
        "decode_tok_s": _median(speed),
        "mean_tpot_ms": _median(_figures(column, _tpot_ms)),
        "mean_ttft_ms": _median(_figures(column, _ttft_ms)),
        "speedup": _median(ratios["speedup"]),
        "identical": same,
        "spec_decode": shown.spec_decode.as_dict(),
        "arm": arm.name,
        "repeats": len(column),
        "output_speedup": _median(ratios["output_speedup"]),
        "spread": spread,
        "prompt_tokens": sum(c.prompt_tokens for c in good),
        "cached_tokens": sum(c.cached_tokens for c in good),
        "chosen_draft_lengths": {str(k): n for k, n in sorted(shown.chosen.items())} if arm.length == "auto" else None,
        "num_found_drafts": shown.spec_decode.num_found_drafts if arm.backend.local else None,
        "warnings": [f"a request failed: {c.error}" for c in shown.completions if c.error is not None][:1]
        + spread_warnings(measurement.concurrency, spread, len(column), is_plain)
        + list(dict.fromkeys(note for run in column for note in run.notes)),
    }
    return {key: values[key] for key in RESULT_KEYS}


def _typical(column: Sequence[Run], speed: Sequence[float | None]) -> Run:
    """The repeat whose counts are shown: the one with most failures, else the one of median speed."""
    failures = [sum(c.error is not None for c in run.completions) for run in column]
    if any(failures):
        return column[failures.index(max(failures))]
    known = [value for value in speed if value is not None]
    return column[speed.index(statistics.median_low(known))] if known else column[0]


def spread_warnings(concurrency: int, spread: dict[str, list[float]], repeats: int, is_plain: bool) -> list[str]:
    """What a reader must not conclude from an arm's figures: repeats too far apart, or on both sides of 1."""
    if repeats < 2:
        return []
    name, ratio = ("decode_tok_s", "speedup") if concurrency == 1 else ("output_tok_s", "output_speedup")
    is_ratio = not is_plain and ratio in spread
    shown = ratio if is_ratio else name
    if shown not in spread:
        return []
    low, high = spread[shown]
    what = f"{shown} ranges from {low:.3g} to {high:.3g} over {repeats} repeats"
    if is_ratio and low < 1 - CLOSE and high > 1 + CLOSE:
        return [f"{what}, on both sides of 1: whether it is faster is not decided"]
    if high > 0 and (high - low) / ((high + low) / 2) > WIDE:
        return [f"{what}: too wide to conclude"]
    return []


def _figures(runs: Sequence[Run], of: Callable[[Run], float | None]) -> list[float | None]:
    return [of(run) for run in runs]


def _ratios(mine: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    return [a / b if a and b else None for a, b in zip(mine, theirs, strict=True)]


def _decode_rate(run: Run) -> float | None:
    several = _several(run)
    return _ratio(sum(c.tokens - 1 for c in several), sum(c.decode_s for c in several))


def _output_rate(run: Run) -> float | None:
    return _ratio(sum(c.tokens for c in run.completions if c.error is None), run.wall_s)


def _tpot_ms(run: Run) -> float | None:
    return _mean(1e3 * c.decode_s / (c.tokens - 1) for c in _several(run))


def _ttft_ms(run: Run) -> float | None:
    return _mean(1e3 * c.ttft_s for c in run.completions if c.error is None)


def _several(run: Run) -> list[Completion]:
    """Answers of more than one token: others have no decoding speed."""
    return [c for c in run.completions if c.error is None and c.tokens > 1 and c.decode_s > 0]


def _ratio(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 and amount > 0 else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def output_rows(measurement: Measurement, dataset: str | None = None) -> Iterator[dict[str, Any]]:
    """IDS rows of the first repeat, prompt by prompt; logprobs as hex floats so that equality means equality of bits.

    A row carries the prompt's other keys; where one has the name of a field of ours, ours stands. `dataset` is added
    when given (a run over several sets), `concurrency` above 1, `turn` after the first, `text` where a server told no
    ids, `error` where the request failed.
    """
    for together in zip(*(run.completions for run in measurement.runs[0]), strict=True):
        for arm, completion in zip(measurement.arms, together, strict=True):
            if completion.copy:
                continue
            fields: dict[str, Any] = {
                "index": completion.prompt.index,
                "num_speculative_tokens": completion.num_speculative_tokens,
                "token_ids": completion.token_ids,
                "logprobs": [value.hex() for value in completion.logprobs or ()],
                "finish_reason": completion.finish_reason,
            }
            optional = {
                "dataset": dataset,
                "concurrency": measurement.concurrency if measurement.concurrency > 1 else None,
                "turn": completion.turn or None,
                "arm": arm.label or None,
                "text": None if completion.num_tokens is None else completion.text,
                "error": completion.error,
            }
            yield {
                **completion.prompt.extra,
                **fields,
                **{key: value for key, value in optional.items() if value is not None},
            }
