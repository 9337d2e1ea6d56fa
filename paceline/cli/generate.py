"""`paceline generate`: one prompt, answered on standard output as it is decoded."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline.cli import options as opt

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from paceline.llm import LLM
    from paceline.outputs import RequestOutput, StreamDelta
    from paceline.sampling_params import SamplingParams

MAX_TOKENS = "--max-tokens"


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='The prompt; "-" reads it from standard input.')],
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Complete the text as it stands instead of answering it as a chat message."),
    ] = False,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System message; default: the chat template's own."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Longest answer in tokens.")
    ] = 512,
    temperature: opt.TemperatureOption = 0.0,
    top_p: opt.TopPOption = 1.0,
    top_k: opt.TopKOption = 0,
    min_p: opt.MinPOption = 0.0,
    seed: opt.SeedOption = None,
    repetition_penalty: opt.RepetitionPenaltyOption = 1.0,
    presence_penalty: opt.PresencePenaltyOption = 0.0,
    frequency_penalty: opt.FrequencyPenaltyOption = 0.0,
    stop: opt.StopOption = None,
    min_tokens: opt.MinTokensOption = 0,
    ignore_eos: opt.IgnoreEosOption = False,
    speculative_config: opt.SpeculativeConfigOption = None,
    num_speculative_tokens: opt.NumSpeculativeTokensOption = None,
    no_speculation: opt.NoSpeculationOption = False,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
    threads: opt.ThreadsOption = None,
    max_model_len: opt.MaxModelLenOption = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object at the end: text, token ids, usage, timings, speculation.",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="A line of figures on standard error.", rich_help_panel=opt.OUTPUT_PANEL),
    ] = False,
) -> None:
    """Answer one prompt, streaming the text to standard output.

    Decoding is speculative by default and changes no token: the answer of plain decoding, only sooner.
    """
    opt.check_speculation(no_speculation, num_speculative_tokens, speculative_config)
    config = opt.parse_speculative_config(speculative_config)
    if raw and system is not None:
        raise typer.BadParameter("a raw completion has no system message", param_hint="--system")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    params = opt.sampling_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    from paceline.cli.engine import note_long_drafts, open_llm

    llm = open_llm(
        opt.EngineOptions(
            model,
            dtype,
            threads,
            max_model_len,
            config,
            not no_speculation,
            quantization,
            kv_cache_dtype=kv_cache_dtype,
        )
    )
    note_long_drafts(llm, num_speculative_tokens)
    request = text if raw else chat_request(llm, text, system)
    show = None if as_json else _write
    output = stream_to(show, llm, request, params, 0 if no_speculation else num_speculative_tokens)
    if as_json:
        print(json.dumps(result_json(llm, output), ensure_ascii=False))
    elif (cut := cut_off(output, params)) is not None and cut != MAX_TOKENS:
        print(f"(cut off: {cut})", file=sys.stderr)
    if stats:
        print(stats_line(output), file=sys.stderr)


def chat_request(llm: LLM, text: str, system: str | None = None) -> str | list[dict[str, Any]]:
    """The text as one user message, or the text itself for a base model, which has no chat template."""
    if llm.tokenizer.chat_template is None:
        if system is not None:
            raise typer.BadParameter("this model has no chat template", param_hint="--system")
        return text
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def stream_to(
    show: Callable[[str], None] | None,
    llm: LLM,
    request: Any,
    params: SamplingParams,
    num_speculative_tokens: int | None,
) -> RequestOutput:
    """Decode to the end, passing each new piece of text to `show`; an interrupt drops the request."""
    output = None
    with closing(open_stream(llm, request, params, num_speculative_tokens)) as stream:
        for delta in stream:
            if show is not None and delta.text:
                show(delta.text)
            output = delta.output or output
    assert output is not None, "the last delta of a stream carries the output"
    if show is not None and not output.outputs[0].text.endswith("\n"):
        show("\n")
    return output


def cut_off(output: RequestOutput, params: SamplingParams) -> str | None:
    """What ended the answer before the model did; None where the model or a stop text did."""
    choice = output.outputs[0]
    if choice.finish_reason != "length":
        return None
    if params.max_tokens is not None and len(choice.token_ids) >= params.max_tokens:
        return MAX_TOKENS
    return "the context is full"


def open_stream(
    llm: LLM, request: Any, params: SamplingParams, num_speculative_tokens: int | None
) -> Generator[StreamDelta]:
    """`LLM.stream`, which is a generator: closing it drops the request."""
    return cast("Generator[StreamDelta]", llm.stream(request, params, num_speculative_tokens=num_speculative_tokens))


def result_json(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """The `--json` object; docs/cli.md lists its fields."""
    choice, metrics = output.outputs[0], output.metrics
    return {
        "model": llm.model_name,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "seed": choice.seed,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(choice.token_ids),
            "total_tokens": len(output.prompt_token_ids) + len(choice.token_ids),
        },
        "timings": {
            "queue_time_ms": 1e3 * metrics.queue_time_s,
            "time_to_first_token_ms": 1e3 * metrics.time_to_first_token_s,
            "generation_time_ms": 1e3 * metrics.generation_time_s,
            "decode_tok_s": decode_rate(output),
        },
        "spec_decode": metrics.spec_decode.as_dict(),
    }


def decode_rate(output: RequestOutput) -> float | None:
    """Tokens after the first per second between the first and the last; None for an answer of one token."""
    after_first = len(output.outputs[0].token_ids) - 1
    if after_first < 1 or output.metrics.generation_time_s <= 0:
        return None
    return after_first / output.metrics.generation_time_s


def stats_line(output: RequestOutput) -> str:
    """`31 + 128 tokens (length) | first token 84 ms | 212.4 tok/s | acceptance length 2.31 (18.7% ...)`."""
    choice, metrics = output.outputs[0], output.metrics
    parts = [
        f"{len(output.prompt_token_ids)} + {len(choice.token_ids)} tokens ({choice.finish_reason})",
        f"first token {1e3 * metrics.time_to_first_token_s:.0f} ms",
    ]
    rate = decode_rate(output)
    if rate is not None:
        parts.append(f"{rate:.1f} tok/s")
    spec = metrics.spec_decode.as_dict()
    if spec["num_drafts"]:
        parts.append(
            f"acceptance length {spec['acceptance_length']:.2f} ({spec['acceptance_rate']:.1%} of drafted tokens)"
        )
    return " | ".join(parts)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
