"""A scripted `LLM`: the same interface, answers looked up instead of computed, times made up.

Text is UTF-8 bytes (token id = byte, 256 = end of text), so that ids, pieces and counts can be worked out by
hand. The answer to a prompt is what `answers` says of its last line, and "You said: ..." else. Speculation
drafts k tokens, of which `accepts` are right in each round. A round takes `ROUND_S` (plain) or `SPEC_ROUND_S`
on the made-up clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from paceline.errors import CapacityError
from paceline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamDelta
from paceline.sampling_params import SamplingParams
from paceline.speculation.config import SpeculativeConfig
from paceline.speculation.length import DraftLengthPolicy
from paceline.speculation.stats import SpecDecodeStats

END = 256
TTFT_S = 0.05
ROUND_S = 0.010
SPEC_ROUND_S = 0.012


class FakeTokenizer:
    """Bytes as tokens."""

    vocab_size = 257
    eos_token_ids = (END,)
    bos_token_id = None
    special_ids = frozenset({END})
    byte_level = True

    def __init__(self, chat_template: str | None = "fake") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < END).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else b"<end>"

    def encode_chat(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>")


class FakeLLM:
    """See the module's text. `log` keeps every request: (prompt text, sampling params, draft length)."""

    def __init__(
        self,
        model: str = "fake",
        *,
        answers: dict[str, str] | None = None,
        accepts: int = 2,
        default_drafts: int = 4,
        chat_template: str | None = "fake",
        context: int = 4096,
        on_token: Callable[[int], None] = lambda _count: None,
        corrupt_speculation: bool = False,
        **arguments: Any,
    ) -> None:
        self.model_name = model
        self.arguments = arguments
        self.speculative_config = SpeculativeConfig.parse({"method": "ngram"})
        self.tokenizer = FakeTokenizer(chat_template)
        self.answers = answers or {}
        self.accepts = accepts
        self.default_drafts = default_drafts
        self.context = context
        self.on_token = on_token
        self.corrupt_speculation = corrupt_speculation
        self.log: list[tuple[str, SamplingParams, int]] = []
        self.open_streams = 0
        self.engine = SimpleNamespace(
            proposer=SimpleNamespace(name="ngram", max_drafts=default_drafts), lengths=DraftLengthPolicy()
        )
        self.most_streams = 0
        self.cache_resets = 0
        self.model = SimpleNamespace(pool="pool", isa="avx512", f32=False, weight_type="bfloat16", threads=2)

    def info(self) -> dict[str, Any]:
        return {
            "dtype": "bfloat16",
            "weight_type": "bfloat16",
            "kv_cache_dtype": "bfloat16",
            "isa": "avx512",
            "threads": 2,
            "max_model_len": self.context,
            "weights_bytes": 3 << 20,
            "kv_cache_bytes": 1 << 20,
            "kv_cache_tokens": 1024,
            "kv_bytes_per_token": 1024,
            "speculation": "ngram",
            "num_speculative_tokens": self.default_drafts,
        }

    def reset_prefix_cache(self) -> None:
        self.cache_resets += 1

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        num_speculative_tokens: int | None = None,
        **_: Any,
    ) -> list[RequestOutput]:
        outputs = []
        for prompt in prompts:
            for delta in self.stream(prompt, sampling_params, num_speculative_tokens=num_speculative_tokens):
                if delta.output is not None:
                    outputs.append(delta.output)
        return outputs

    def stream(
        self, prompt: Any, sampling_params: Any = None, *, num_speculative_tokens: int | None = None
    ) -> Iterator[StreamDelta]:
        drafts = self.default_drafts if num_speculative_tokens is None else num_speculative_tokens
        ids = self._prompt_ids(prompt)
        text = self.tokenizer.decode(ids)
        self.log.append((text, sampling_params, drafts))
        if len(ids) >= self.context:
            raise CapacityError(f"the prompt has {len(ids)} tokens, the context holds {self.context}")
        self.open_streams += 1
        self.most_streams = max(self.most_streams, self.open_streams)
        try:
            yield from self._decode(ids, self._answer(text), sampling_params, drafts, num_speculative_tokens is None)
        finally:
            self.open_streams -= 1

    def time_forward(self, rows: int, context: int) -> float:
        return 1e-3 * (1 + rows / 16)

    def pass_cost(self, rows: int, context: int) -> tuple[float, float]:
        return 20e6, 1e6 * rows

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, dict):
            return list(prompt["prompt_token_ids"])
        if prompt and isinstance(prompt[0], dict):
            return self.tokenizer.encode_chat(prompt)
        return list(prompt)

    def _answer(self, prompt: str) -> str:
        question = prompt.removesuffix("<assistant>").rstrip("\n").rpartition(">")[2]
        return self.answers.get(question, f"You said: {question}")

    def _decode(
        self, ids: list[int], answer: str, params: SamplingParams, drafts: int, adaptive: bool
    ) -> Iterator[StreamDelta]:
        tokens = [*answer.encode(), END]
        if self.corrupt_speculation and drafts:
            tokens[1] ^= 1
        limit = min(params.max_tokens or self.context, self.context - len(ids))
        reason = "stop" if len(tokens) <= limit else "length"
        tokens = tokens[:limit]
        stats = SpecDecodeStats()
        done, rounds, sent = 0, 0, ""
        while done < len(tokens):
            take = 1
            if not (drafts and done):
                stats.observe(0, 0, 1)
            else:
                accepted = min(self.accepts, drafts)
                take = accepted + 1
                stats.observe(drafts, accepted, min(take, len(tokens) - done))
            new = tokens[done : done + take]
            flags = [True] * (take - 1) + [False]
            for _ in new:
                done += 1
                self.on_token(done)
            rounds += 1
            if adaptive:
                self.engine.lengths.chosen[drafts] = self.engine.lengths.chosen.get(drafts, 0) + 1
            whole = self.tokenizer.decode(tokens[:done])
            whole = whole.rstrip("\ufffd") if done < len(tokens) else whole
            last = done == len(tokens)
            yield StreamDelta(
                index=0,
                text=whole[len(sent) :],
                token_ids=new,
                accepted=flags[: len(new)],
                finish_reason=reason if last else None,
                output=self._output(ids, tokens, whole, reason, params, stats, rounds, drafts) if last else None,
            )
            sent = whole

    def _output(
        self,
        ids: list[int],
        tokens: list[int],
        text: str,
        reason: str,
        params: SamplingParams,
        stats: SpecDecodeStats,
        rounds: int,
        drafts: int,
    ) -> RequestOutput:
        logprobs = (
            None if params.logprobs is None else [{token: Logprob(-1.0 / (1 + token), 1, "x")} for token in tokens]
        )
        choice = CompletionOutput(
            index=0,
            text=text,
            token_ids=tokens,
            cumulative_logprob=None,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=None,
            seed=params.seed,
        )
        metrics = RequestMetrics(
            queue_time_s=0.0,
            time_to_first_token_s=TTFT_S,
            generation_time_s=(rounds - 1) * (SPEC_ROUND_S if drafts else ROUND_S),
            spec_decode=stats,
        )
        return RequestOutput(
            request_id="fake-0",
            prompt=None,
            prompt_token_ids=ids,
            outputs=[choice],
            finished=True,
            metrics=metrics,
        )
