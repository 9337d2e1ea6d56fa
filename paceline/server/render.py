"""From what the engine says to what clients read: log-probabilities, usage, and the extras of other servers."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from paceline.outputs import Logprob, PromptLogprobs, RequestMetrics, RequestOutput, TokenAlternatives, own_logprob
from paceline.speculation.stats import SpecDecodeStats
from paceline.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


class TokenTexts:
    """Tokens as strings and bytes, remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes = lru_cache(maxsize=1 << 16)(tokenizer.token_bytes)
        self.text = tokenizer.token_text

    def key(self, token: int) -> str:
        """Its characters, or "bytes:\\x.." where they are no text: distinct for distinct bytes."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(float(logprob), LOWEST_LOGPROB)


def _likeliest(found: TokenAlternatives, count: int) -> list[tuple[int, float]]:
    """The best `count`, in order of rank."""
    best = sorted((entry.rank, token) for token, entry in found.items() if entry.rank <= count)
    return [(token, found[token].logprob) for _, token in best]


def chat_logprobs(entries: Sequence[TokenAlternatives], texts: TokenTexts, count: int) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat choice."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": list(texts.bytes(token))}

    content = []
    for found in entries:
        token, own = own_logprob(found)
        top = [item(*pair) for pair in _likeliest(found, count)]
        content.append({**item(token, own.logprob), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(entries: PromptLogprobs, count: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: the prompt's own tokens and the best `count`."""

    def item(entry: Logprob) -> dict[str, Any]:
        return {"logprob": _finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}

    def shown(found: TokenAlternatives) -> dict[str, Any]:
        own, _ = own_logprob(found)
        return {str(i): item(entry) for i, entry in found.items() if i == own or entry.rank <= count}

    return [None if found is None else shown(found) for found in entries]


class TextOffsets:
    """Where tokens begin in the text that they make, in characters; one that goes on with a character, at that one."""

    def __init__(self, begin: int = 0) -> None:
        self.end = begin
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, raw: bytes) -> int:
        """The offset of the next token, whose bytes are `raw`."""
        begin = self.end
        self.end += len(self._decoder.decode(raw))
        return begin


def completion_logprobs(
    entries: Sequence[TokenAlternatives], texts: TokenTexts, count: int, offsets: TextOffsets
) -> dict[str, Any]:
    """OpenAI's `logprobs` of the next tokens of a completion choice; a token that is not among the best comes last."""
    tokens, values, tops, begins = [], [], [], []
    for found in entries:
        token, own = own_logprob(found)
        top = dict(_likeliest(found, count)) | {token: own.logprob}
        tokens.append(texts.key(token))
        values.append(_finite(own.logprob))
        tops.append({texts.key(i): _finite(value) for i, value in top.items()})
        begins.append(offsets.take(texts.bytes(token)))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": begins}


def echoed_logprobs(
    output: RequestOutput, entries: Sequence[TokenAlternatives], texts: TokenTexts, count: int, echo: int
) -> dict[str, Any]:
    """The same of a choice whose text begins with its prompt, in `echo` characters; entries: of what it added. The
    first token has no log-probability. Tokens before the echoed text (a BOS) are at its beginning."""
    own = output.prompt_token_ids
    asked = [found for found in output.prompt_logprobs or () if found is not None]
    offsets = TextOffsets(echo - len(b"".join(map(texts.bytes, own)).decode("utf-8", "replace")))
    begin = offsets.take(texts.bytes(own[0]))
    prompt, rest = (
        completion_logprobs(part, texts, count, at) for part, at in ((asked, offsets), (entries, TextOffsets(echo)))
    )
    return {
        "tokens": [texts.key(own[0]), *prompt["tokens"], *rest["tokens"]],
        "token_logprobs": [None, *prompt["token_logprobs"], *rest["token_logprobs"]],
        "top_logprobs": [None, *prompt["top_logprobs"], *rest["top_logprobs"]],
        "text_offset": [max(0, offset) for offset in (begin, *prompt["text_offset"], *rest["text_offset"])],
    }


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """reasoning_tokens: of the completion's; None for a model without reasoning."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return found


def usage_of(outputs: Sequence[RequestOutput], reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Of one request, perhaps with several prompts; a prompt counts once for all of its choices."""
    return usage(
        sum(len(o.prompt_token_ids) for o in outputs),
        sum(len(c.token_ids) for o in outputs for c in o.outputs),
        sum(o.num_cached_tokens for o in outputs),
        reasoning_tokens,
    )


def spec_summary(stats: SpecDecodeStats) -> dict[str, Any]:
    """vLLM's `metrics.speculative_decoding` of one request."""
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": list(stats.accepted_histogram),
        "num_spec_steps": stats.num_drafts,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": max(0, len(stats.accepted_histogram) - 1),
    }


def metrics_of(output: RequestOutput) -> dict[str, Any]:
    """vLLM's per-request `metrics`."""
    m, tokens = output.metrics, len(output.outputs[0].token_ids)
    gaps, seconds = max(0, tokens - 1), m.generation_time_s
    return {
        "time_to_first_token_ms": 1e3 * m.time_to_first_token_s,
        "generation_time_ms": 1e3 * seconds,
        "queue_time_ms": 1e3 * m.queue_time_s,
        "mean_itl_ms": 1e3 * seconds / gaps if gaps else None,
        "tokens_per_second": gaps / seconds if gaps and seconds > 0 else None,
        "speculative_decoding": spec_summary(m.spec_decode),
    }


def meta_info(output: RequestOutput) -> dict[str, Any]:
    """SGLang's `meta_info`. Histogram and counts are those of passes with drafts."""
    stats, choice = output.metrics.spec_decode, output.outputs[0]
    info: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": {"type": choice.finish_reason},
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(c.token_ids) for c in output.outputs),
        "cached_tokens": output.num_cached_tokens,
        "e2e_latency": output.metrics.time_to_first_token_s + output.metrics.generation_time_s,
    }
    if stats.num_drafts:
        info |= {
            "spec_accept_length": stats.acceptance_length,
            "spec_accept_rate": stats.acceptance_rate,
            "spec_verify_ct": stats.num_drafts,
            "spec_num_correct_drafts": stats.num_accepted_tokens,
            "spec_num_proposed_drafts": stats.num_draft_tokens,
            "spec_correct_drafts_histogram": list(stats.accepted_histogram),
        }
    return info


def timings(output: RequestOutput) -> dict[str, Any]:
    """llama-server's `timings`; `prompt_n` counts what the prefix cache did not have."""
    m: RequestMetrics = output.metrics
    cached, made = output.num_cached_tokens, sum(len(c.token_ids) for c in output.outputs)
    prompt = len(output.prompt_token_ids) - cached
    prompt_ms, made_ms = 1e3 * max(0.0, m.time_to_first_token_s - m.queue_time_s), 1e3 * m.generation_time_s

    def rate(count: int, ms: float) -> float | None:
        return 1e3 * count / ms if ms > 0 else None

    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt,
        "prompt_per_second": rate(prompt, prompt_ms),
        "predicted_n": made,
        "predicted_ms": made_ms,
        "predicted_per_token_ms": made_ms / made if made else None,
        "predicted_per_second": rate(made, made_ms),
        "draft_n": m.spec_decode.num_draft_tokens,
        "draft_n_accepted": m.spec_decode.num_accepted_tokens,
    }


def extras(output: RequestOutput, *, metrics: bool, meta: bool) -> dict[str, Any]:
    """What answers carry beyond OpenAI's fields. Metrics describe one choice, so several have none, as with vLLM."""
    out: dict[str, Any] = {"timings": timings(output)}
    if metrics and len(output.outputs) == 1:
        out["metrics"] = metrics_of(output)
    if meta:
        out["meta_info"] = meta_info(output)
    return out
