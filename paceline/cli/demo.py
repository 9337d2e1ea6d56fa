"""`paceline demo`: one prompt answered plainly and speculatively, side by side, measured and compared."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.cli.generate import chat_request, decode_rate, open_stream
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.llm import LLM
    from paceline.outputs import RequestOutput, StreamDelta
    from paceline.sampling_params import SamplingParams

DEMO_PROMPT = "Write a Python class Stack with the methods push, pop, peek, is_empty and size, and show how to use it."
WIDE_ENOUGH = 100
WARM_UP_TOKENS = 8


def demo(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help='Your own prompt; "-" reads standard input.')
    ] = None,
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=2, metavar="N", help="Longest answer in tokens.")
    ] = 256,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            min=1,
            metavar="N",
            help="Measured runs of each arm, taken in turns; medians are shown.",
        ),
    ] = 3,
    temperature: opt.TemperatureOption = 0.0,
    seed: opt.RaceSeedOption = 0,
    speculative_config: opt.SpeculativeConfigOption = None,
    num_speculative_tokens: opt.NumSpeculativeTokensOption = None,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
    threads: opt.ThreadsOption = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print only the figures, as JSON.", rich_help_panel=opt.OUTPUT_PANEL),
    ] = False,
) -> None:
    """Race plain against speculative decoding on one prompt, and check that not one token differs.

    Exit code 1 if the two answers differ.
    """
    config = opt.parse_speculative_config(speculative_config)
    if num_speculative_tokens == 0:
        raise typer.BadParameter("the speculative arm needs at least 1", param_hint="--num-speculative-tokens")
    text = DEMO_PROMPT if prompt is None else sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    params = opt.sampling_params(temperature=temperature, seed=seed, max_tokens=max_tokens)
    from paceline.cli.engine import note_long_drafts, open_llm

    llm = open_llm(
        opt.EngineOptions(model, dtype, threads, None, config, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    )
    note_long_drafts(llm, num_speculative_tokens)
    race = Race(llm, chat_request(llm, text), params, num_speculative_tokens)
    race.warm_up()
    if as_json:
        result = race.measure(repeats)
        print(json.dumps(result.to_json()))
    else:
        from paceline.cli.panes import show_race, show_result

        show_race(race, text, side_by_side=sys.stdout.isatty() and opt.terminal_width() >= WIDE_ENOUGH)
        result = race.measure(repeats)
        show_result(result)
    if not result.identical:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Medians over the measured runs. `plain_tok_s`, `spec_tok_s`: tokens after the first per second.

    `passes`: passes of the model in a speculative run that brought the tokens after the first.
    """

    plain_tok_s: float
    spec_tok_s: float
    identical: bool
    repeats: int
    tokens: int
    passes: int
    spec_decode: dict[str, Any]

    @property
    def speedup(self) -> float:
        return self.spec_tok_s / self.plain_tok_s

    def to_json(self) -> dict[str, Any]:
        """Exactly the keys that other tools rely on."""
        return {
            "plain_tok_s": self.plain_tok_s,
            "spec_tok_s": self.spec_tok_s,
            "speedup": self.speedup,
            "identical": self.identical,
            "spec_decode": self.spec_decode,
        }


class Race:
    """One request run by two arms: `0` drafts nothing, `None` (or a length) speculates."""

    def __init__(
        self, llm: LLM, request: Any, params: SamplingParams, num_speculative_tokens: int | None = None
    ) -> None:
        self.llm = llm
        self.params = params
        self.num_speculative_tokens = num_speculative_tokens
        self._request = request
        self._answers: list[list[int]] = []

    @property
    def arms(self) -> tuple[int | None, int | None]:
        return 0, self.num_speculative_tokens

    def warm_up(self) -> None:
        """Touch every code path and page once, so that neither arm pays for being first."""
        from dataclasses import replace

        few = replace(self.params, max_tokens=WARM_UP_TOKENS)
        for arm in self.arms:
            for _ in self.llm.stream(self._request, few, num_speculative_tokens=arm):
                pass

    def stream(self, arm: int | None) -> Iterator[tuple[StreamDelta, float]]:
        """Deltas with the seconds the engine worked so far, without what the caller does in between."""
        stream = open_stream(self.llm, self._request, self.params, arm)
        worked = 0.0
        try:
            while True:
                started = perf_counter()
                delta = next(stream, None)
                worked += perf_counter() - started
                if delta is None:
                    return
                if delta.output is not None:
                    self._answers.append(list(delta.output.outputs[0].token_ids))
                yield delta, worked
        finally:
            stream.close()

    def measure(self, repeats: int) -> RaceResult:
        """Run both arms `repeats` times, in turns; every answer is compared with the first one."""
        from paceline.cli.progress import step_progress

        rates: dict[int | None, list[float]] = {arm: [] for arm in self.arms}
        spec_decode: dict[str, Any] = {}
        spec_passes = 0
        with step_progress("Measuring", 2 * repeats) as advance:
            for repeat in range(repeats):
                for arm in self.arms if repeat % 2 == 0 else self.arms[::-1]:
                    output, passes = self._run(arm)
                    rate = decode_rate(output)
                    if rate is None:
                        raise PacelineError("the answer is a single token: nothing to measure; try another prompt")
                    rates[arm].append(rate)
                    if arm != 0:
                        spec_decode, spec_passes = output.metrics.spec_decode.as_dict(), passes
                    advance("")
        return RaceResult(
            plain_tok_s=statistics.median(rates[0]),
            spec_tok_s=statistics.median(rates[self.num_speculative_tokens]),
            identical=all(answer == self._answers[0] for answer in self._answers),
            repeats=repeats,
            tokens=len(self._answers[0]),
            passes=max(1, spec_passes),
            spec_decode=spec_decode,
        )

    def _run(self, arm: int | None) -> tuple[RequestOutput, int]:
        output, deltas = None, 0
        for delta, _ in self.stream(arm):
            output, deltas = delta.output or output, deltas + 1
        assert output is not None, "the last delta of a stream carries the output"
        return output, deltas - 1
