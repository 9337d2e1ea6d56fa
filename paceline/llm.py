"""The Python API: `LLM` and `SamplingParams`, with vLLM's names."""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Never, Unpack

import numpy as np

from paceline import runtime
from paceline.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from paceline.cache import BLOCK_TOKENS, blocks_for
from paceline.call_arguments import refuse_unknown
from paceline.chat_options import CHAT_ARGUMENTS, ChatArguments, ChatOptions
from paceline.dtypes import DEFAULT_KV_CACHE_DTYPE, DEFAULT_QUANTIZATION, KVCacheDtype, Quantization
from paceline.engine import Engine
from paceline.errors import CapacityError, ConfigError, EngineDeadError
from paceline.interrupts import uninterrupted
from paceline.lifetime import Closable
from paceline.models.target import TargetModel, state_arguments
from paceline.other_names import is_neutral, unknown_option
from paceline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamDelta, TokenAlternatives
from paceline.prompts import as_list, cache_salt, check_ids, is_conversation, one_params, params_for, token_ids
from paceline.recurrent import StatePlan, plan_states
from paceline.request import Sequence as EngineSequence
from paceline.sampling import SamplerMode, TokenLogprobs, draw_seed, make_state
from paceline.sampling_params import RequestOutputKind, SamplingParams
from paceline.so_far import SoFar
from paceline.speculation.config import SpeculativeConfig
from paceline.speculation.costs import CostFile
from paceline.speculation.drafting import Drafter
from paceline.speculation.stats import SpecDecodeStats
from paceline.stopping import StopChecker
from paceline.structured.compiler import GrammarCompiler
from paceline.token_masks import read_masks
from paceline.tokenizer import Tokenizer, load_tokenizer
from paceline.values import shown
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.store import resolve_model

__all__ = ["LLM", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams", "StreamDelta"]

log = logging.getLogger(__name__)

Message = dict[str, Any]
Prompt = str | list[int] | list[Message]
Config = Mapping[str, Any] | str | SpeculativeConfig | None

DEFAULT_KV_SHARE = 0.4  # of the memory that is free once the weights are in
DEFAULT_KV_LIMIT = 4 << 30
PREFIX_SHARE = 8  # a prefix cache is useful beyond what all sequences at their longest can hold: this many times


class _Request:
    """A prompt with its n choices, while they run."""

    def __init__(
        self, request_id: str, prompt: str | None, ids: list[int], choices: list[EngineSequence], tokenizer: Tokenizer
    ) -> None:
        self._tokenizer = tokenizer
        self.request_id = request_id
        self.prompt = prompt
        self.ids = ids
        self.choices = choices
        self.cut_off = False  # by the end of its LLM
        self.deltas: deque[StreamDelta] = deque()  # of a stream: what steps added and its reader has not seen

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.choices)

    def next_delta(self) -> StreamDelta | None:
        """What its reader has not seen, piece by piece; the very last piece carries the output."""
        if not self.deltas:
            return None
        delta = self.deltas.popleft()
        if self.finished and not self.deltas:
            delta.output = self.output()
        return delta

    def output(self) -> RequestOutput:
        first = [c.first_token for c in self.choices if c.first_token]
        arrival = self.choices[0].arrival
        metrics = RequestMetrics(
            queue_time_s=max(0.0, self.choices[0].admitted - arrival),
            time_to_first_token_s=min(first) - arrival if first else 0.0,
            generation_time_s=max((c.last_token - c.first_token for c in self.choices), default=0.0),
            spec_decode=SpecDecodeStats.total(c.stats for c in self.choices),
        )
        outputs = [c.output(self.alternatives) for c in self.choices]
        cached = max(c.num_cached or 0 for c in self.choices[:1])
        prompt_logprobs = None
        if self.choices[0].params.prompt_logprobs is not None:
            prompt_logprobs = [None, *map(self.alternatives, self.choices[0].prompt_logprobs)]
        return RequestOutput(
            self.request_id, self.prompt, self.ids, outputs, self.finished, metrics, cached, prompt_logprobs
        )

    def alternatives(self, entry: TokenLogprobs) -> TokenAlternatives:
        """What the sampler says of a token, with texts, as vLLM has it."""
        text = self._tokenizer.token_text
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            if token >= 0:  # there are fewer in a row of which most are -inf
                found.setdefault(token, Logprob(logprob, rank, text(token)))
        return found


class LLM(Closable):
    """A model ready to generate.

    model: a known name ("smollm2-135m"), a Hugging Face folder, a *.gguf file or a hub id.
    dtype: of weights that are not quantised. "auto" and "bfloat16" are bf16; "float32" is for comparison with
    references and expands quantised files too.
    quantization: of the matrices. "auto" runs what a quantised file holds, and dtype for others; "none" runs dtype,
    whatever the file holds; "int8", "int8_channel" and "int4" convert to that (docs/quantisation.md).
    kv_cache_dtype: "auto" stores keys and values as dtype, "int8" with a scale per token and head: half the bytes.
    speculative_config: vLLM's JSON or mapping; "auto" takes the drafter that ships for the model beside prompt lookup,
    else prompt lookup alone; None decodes plainly. The text never depends on it.
    threads: None = the physical cores that affinity and cgroup allow. kv_cache_space: GiB; None = up to 4, at most
    40 % of the free memory. enable_prefix_caching: what a prompt has in common with earlier requests is taken from
    their cache, as long as it is there; the output is the same. fixed_draft_length: always draft as many tokens as
    configured, also where fewer would be faster. sampler: "coupled" (the text for a seed is the same with and without
    speculation) or "rejection" (exact in distribution, accepts more drafts). allow_longer_drafts: drafts
    beyond what a drafter was trained for are worth a warning; False makes them an error.
    Options of vLLM that ask for what is the case here anyway, such as trust_remote_code, enforce_eager and
    tensor_parallel_size=1, are taken and do nothing: no remote code is ever run.

    `close`, or the end of `with LLM(...) as llm:`, frees weights, caches and threads.

    Raises ConfigError, CheckpointError or CapacityError, all of them PacelineError.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        *,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        quantization: Quantization = DEFAULT_QUANTIZATION,
        kv_cache_dtype: KVCacheDtype = DEFAULT_KV_CACHE_DTYPE,
        speculative_config: Config | Literal["auto"] = "auto",
        threads: int | None = None,
        max_model_len: int | None = None,
        kv_cache_space: float | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        fixed_draft_length: bool = False,
        sampler: SamplerMode = "coupled",
        isa: str = "",
        seed: int | None = None,
        allow_longer_drafts: bool = True,
        **unknown: Never,
    ) -> None:
        for name in unknown:
            if is_neutral(name, unknown[name]):
                continue
            parameters = inspect.signature(LLM).parameters
            raise ConfigError(unknown_option(name, [known for known in parameters if known != "unknown"]))
        if sampler not in ("coupled", "rejection"):
            raise ConfigError(f"sampler: {sampler!r} is unknown; use 'coupled' or 'rejection'")
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65536:
                raise ConfigError(f"{name}: {value!r} is not a whole number from 1 to 65536")
        for name, flag in (
            ("enable_prefix_caching", enable_prefix_caching),
            ("fixed_draft_length", fixed_draft_length),
        ):
            if not isinstance(flag, bool):
                raise ConfigError(f"{name}: {flag!r} must be True or False")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ConfigError(f"seed: {seed!r} must be a whole number of 0 or more")
        self.model_name = str(model)
        path = resolve_model(str(model))
        checkpoint = open_checkpoint(path)
        self.tokenizer = load_tokenizer(checkpoint)
        self.model = TargetModel(
            checkpoint,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            threads=threads,
            isa=isa,
            max_rows=max(max_num_batched_tokens, max_num_seqs),
            max_model_len=max_model_len if isinstance(max_model_len, int) else None,
        )
        self.max_model_len = self._context(max_model_len)
        self.sampler: SamplerMode = sampler
        self.prefix_caching = enable_prefix_caching
        self._fixed = fixed_draft_length
        self.speculative_config, self._drafter = self._choose_drafter(speculative_config, allow_longer_drafts)
        blocks = self._kv_blocks(kv_cache_space, max_num_seqs)
        self.engine = Engine(
            self.model,
            proposer=self._drafter,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            kv_blocks=blocks,
            sampler=sampler,
            prefix_caching=enable_prefix_caching,
            states=self._states,
        )
        self._costs = CostFile.of(self.model, self._drafter)
        self._costs.load(self.engine.lengths)
        self._save_costs = weakref.finalize(self, self._costs.save, self.engine.lengths)
        self.grammars = GrammarCompiler(self.tokenizer, self.model.vocab_size)
        self._seeds = None if seed is None else np.random.default_rng(seed)
        self._lock = threading.RLock()
        self._counter = itertools.count(1)
        self._streamed: dict[int, _Request] = {}
        self._timing: tuple[Any, ...] | None = None

    # ---- generation

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[int] | Sequence[str | list[int] | Mapping[str, Any]] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: bool = True,
        num_speculative_tokens: int | None = None,
        progress: bool = False,
        use_tqdm: bool = False,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Complete prompts (texts, token ids, or vLLM's mappings of either), all at once; outputs in their order.

        num_speculative_tokens: drafts per step; None = as many as pay, chosen each step up to the configured number;
        0 = plain decoding, as is speculation=False. progress, or use_tqdm as vLLM calls it: a bar. Other arguments of
        vLLM's are taken where they ask for nothing (lora_request=None).
        Raises ConfigError for a prompt or parameter that cannot be served, before anything runs.
        """
        if unknown:
            known = [name for name in inspect.signature(self.generate).parameters if name != "unknown"]
            refuse_unknown(unknown, known, CHAT_ARGUMENTS, takes=False)
        return self._run(as_list(prompts), sampling_params, speculation, num_speculative_tokens, progress or use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: bool = True,
        num_speculative_tokens: int | None = None,
        progress: bool = False,
        use_tqdm: bool = False,
        **chat: Unpack[ChatArguments],
    ) -> list[RequestOutput]:
        """Answer conversations ({"role", "content"} messages, where content is text or a list of text parts).

        chat: tools, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs, as vLLM has
        them; see `ChatArguments`. The rest is as for `generate`.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise ConfigError("messages: give a list with at least one {'role': ..., 'content': ...} mapping")
        options = ChatOptions.read(self.chat, chat)
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [options.encode(conversation, self.tokenizer) for conversation in conversations]
        return self._run(prompts, sampling_params, speculation, num_speculative_tokens, progress or use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        num_speculative_tokens: int | None = None,
        **chat: Unpack[ChatArguments],
    ) -> Generator[StreamDelta, None, None]:
        """Generate one prompt (text, token ids or messages) and yield what each step adds; closing it aborts.

        A piece has what was added as `text` and `token_ids`, and what has come so far in `outputs`; see StreamDelta.
        chat: for messages, as for `chat`. Other calls may run between two deltas; they share the passes.
        """
        prompt = self._ids_of_chat(prompt, ChatOptions.read(self.stream, chat), chat)
        params = one_params(sampling_params)
        drafts = self._draft_length(True, num_speculative_tokens)
        self.grammars.prepare([params])
        with self._lock, uninterrupted:
            request = self._add(prompt, params, drafts)
            self._watch(request)
            stream = self._stream(request)
            next(stream)  # enter its `try`: from here on, closing it aborts the request, read or not
        return stream  # type: ignore[return-value]

    def _ids_of_chat(self, prompt: Any, options: ChatOptions, given: Mapping[str, Any]) -> Any:
        """Token ids of messages; another prompt as it is. Raises ConfigError."""
        if is_conversation(prompt):
            return options.encode(prompt, self.tokenizer)
        options.refuse_without_messages(given)
        return prompt

    def _stream(self, request: _Request) -> Generator[StreamDelta | None, None, None]:
        final_only = request.choices[0].params.output_kind is RequestOutputKind.FINAL_ONLY
        try:
            yield None
            while request.deltas or not request.finished:
                if not request.deltas:
                    with self._lock:
                        if not request.deltas and not request.finished:
                            self._step()
                    continue
                delta = request.next_delta()
                if delta is not None and (delta.finished or not final_only):
                    yield delta
            if request.cut_off:
                raise EngineDeadError("this LLM was closed before the request had ended")
        finally:
            with self._lock:
                self._abort([request])

    def _watch(self, request: _Request) -> None:
        """From now on `_step` keeps what it adds to this request for its reader; `_abort` ends that."""
        self._streamed.update({choice.request_id: request for choice in request.choices})

    def _step(self) -> None:
        """One pass for everybody; what it adds to a streamed request waits there for its reader."""
        with uninterrupted:
            for result in self.engine.step():
                sequence = result.sequence
                request = self._streamed.get(sequence.request_id)
                if request is not None:
                    ids, end = result.token_ids, sequence.finish_reason
                    delta = StreamDelta(sequence.choice, result.text, ids, result.accepted, end)
                    delta.stop_reason = sequence.stopper.stop_reason
                    delta.passes = [(result.num_drafts, result.num_accepted)]
                    if sequence.params.logprobs is not None:
                        shown = sequence.shown_logprobs(request.alternatives)
                        delta.logprobs = shown[len(shown) - len(ids) :]
                    delta.belongs_to(SoFar.now(request, sequence))
                    request.deltas.append(delta)

    def _run(
        self, prompts: list[Any], params: Any, speculation: bool, drafts: int | None, progress: bool
    ) -> list[RequestOutput]:
        each = params_for(params, len(prompts))
        length = self._draft_length(speculation, drafts)
        self.grammars.prepare(each)  # outside the lock: others generate meanwhile
        with self._lock, uninterrupted.prepared():
            requests: list[_Request] = []
            try:
                for prompt, one in zip(prompts, each, strict=True):
                    with uninterrupted:
                        requests.append(self._add(prompt, one, length))
                for _ in _progress(requests, progress):
                    self._step()
            finally:
                self._abort(requests)
            self._costs.save_now_and_then(self.engine.lengths)
        return [request.output() for request in requests]

    def _abort(self, requests: Sequence[_Request]) -> None:
        """End what has not finished; streams forget it."""
        with uninterrupted:
            for choice in (choice for request in requests for choice in request.choices):
                self._streamed.pop(choice.request_id, None)
                if choice.finish_reason is None:
                    self.engine.abort(choice)

    def _add(self, prompt: Any, params: SamplingParams, drafts: tuple[int, bool]) -> _Request:
        request = self._prepare(prompt, params, drafts)
        self._enqueue(request)
        return request

    def _enqueue(self, request: _Request) -> None:
        """All choices of a request, or none with the error of the first that can never run."""
        try:
            for choice in request.choices:
                self.engine.add(choice)
        except Exception:
            self._abort([request])
            raise

    def _prepare(self, prompt: Any, params: SamplingParams, drafts: tuple[int, bool]) -> _Request:
        """A request that the engine has not seen yet. Touches nothing that a step does: any thread may call it."""
        vocab = self.model.vocab_size
        text, ids = token_ids(prompt, self.tokenizer, vocab)
        salt = cache_salt(prompt)
        check_ids("logit_bias", params.logit_bias or {}, vocab)
        check_ids("stop_token_ids", params.stop_token_ids or (), vocab)
        bad_words = read_masks(params, self.tokenizer, vocab, self.tokenizer.eos_token_ids)
        name = f"request-{next(self._counter)}"
        now = time.perf_counter()
        seed = params.seed if params.seed is not None else self._draw_seed()
        choices = [self._sequence(ids, params, *drafts, seed, choice, now, bad_words) for choice in range(params.n)]
        for each in choices:
            each.group, each.cache_salt = choices[0].request_id, salt
        return _Request(name, text, ids, choices, self.tokenizer)

    def _sequence(
        self,
        ids: list[int],
        params: SamplingParams,
        drafts: int,
        fixed: bool,
        seed: int,
        choice: int,
        now: float,
        bad_words: list[list[int]],
    ) -> EngineSequence:
        from paceline.detokenizer import IncrementalDetokenizer

        eos = self.tokenizer.eos_token_ids
        grammar = self.grammars.constraint(params, ids)
        # a grammar keeps min_tokens itself: it knows where nothing but a stop is left
        sampling = params if grammar is None else replace(params, min_tokens=0)
        return EngineSequence(
            request_id=next(self._counter),
            choice=choice,
            token_ids=list(ids),
            num_prompt_tokens=len(ids),
            params=params,
            state=make_state(
                sampling,
                ids,
                vocab_size=self.model.vocab_size,
                seed=seed,
                choice=choice,
                eos_token_ids=eos,
                bad_words=bad_words,
            ),
            stopper=StopChecker(
                params,
                IncrementalDetokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens),
                eos_token_ids=eos,
                num_prompt_tokens=len(ids),
                max_model_len=self._room(params),
                grammar=grammar,
            ),
            grammar=grammar,
            max_drafts=drafts,
            fixed_drafts=fixed,
            arrival=now,
        )

    def _room(self, params: SamplingParams) -> int:
        """Tokens of prompt and output together; a request without max_tokens also ends where the cache does."""
        cache = self.engine.pool.size * BLOCK_TOKENS
        return min(self.max_model_len, cache) if params.max_tokens is None else self.max_model_len

    def _draw_seed(self) -> int:
        if self._seeds is None:
            return draw_seed()
        return int(self._seeds.integers(0, 1 << 53, dtype=np.uint64))

    def _draft_length(self, speculation: bool, wanted: int | None) -> tuple[int, bool]:
        """Most drafts per step, and whether a request fixed that number."""
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0):
            raise ConfigError(f"num_speculative_tokens: {wanted!r} must be a whole number, 0 for plain decoding")
        if not isinstance(speculation, bool):
            raise ConfigError(f"speculation: {speculation!r} must be True or False")
        if self._drafter is None or not speculation or wanted == 0:
            return 0, True
        if wanted is not None:
            trained = getattr(self._drafter, "trained_drafts", wanted)
            if wanted > trained:
                log.warning(
                    "num_speculative_tokens = %d: this drafter was trained for %d; more rarely help", wanted, trained
                )
            return wanted, True
        # the text that rejection sampling draws depends on the drafts: keep their number out of the clock's hands
        return self._drafter.max_drafts, self._fixed or self.sampler == "rejection"

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt; prompts as for `generate`. Slow: see `paceline.beam_search`.

        The other arguments are vLLM's: there is no LoRA and no bar; concurrency_limit: prompts that are searched side
        by side, None = all. Raises ConfigError, CapacityError, before anything runs.
        """
        if lora_request is not None:
            raise ConfigError(f"lora_request={shown(lora_request)}: is not supported; leave it out")
        return beam_search(self, prompts, params, concurrency_limit)

    # ---- set-up

    def _context(self, wanted: int | None) -> int:
        most = self.model.config.max_position_embeddings
        if wanted is None:
            return most
        if not isinstance(wanted, int) or not 2 <= wanted <= most:
            raise ConfigError(f"max_model_len: {wanted!r} is outside 2..{most}, the context of this model")
        return wanted

    def _choose_drafter(
        self, config: Config | Literal["auto"], longer: bool
    ) -> tuple[SpeculativeConfig | None, Drafter | None]:
        from paceline.speculation import factory

        return factory.make_drafter(config, self.model, self.sampler, allow_longer_drafts=longer)

    def _kv_blocks(self, space: float | None, max_num_seqs: int) -> int:
        """Cache blocks that fit the budget; memory is only taken as they are first used."""
        per_block = self.model.new_cache(1).bytes_per_block
        available = runtime.available_memory()
        if space is None:
            budget = min(DEFAULT_KV_LIMIT, int(available * DEFAULT_KV_SHARE))
        else:
            if isinstance(space, bool) or not isinstance(space, int | float) or not 0 < space < 1 << 30:
                raise ConfigError(f"kv_cache_space: {space!r} must be a positive number of GiB")
            budget = int(space * 2**30)
            if budget > available:
                raise CapacityError(
                    f"kv_cache_space: {space} GiB asked for, {available / 2**30:.1f} GiB of memory are free"
                )

        self._states = self._plan_states(budget, max_num_seqs)
        budget -= self._states.bytes

        def needed(blocks: int) -> int:
            beside = self._drafter.cache_bytes(blocks, max_num_seqs) if self._drafter is not None else 0
            return blocks * per_block + beside

        most = blocks_for(self.max_model_len) * max_num_seqs * (PREFIX_SHARE if self.prefix_caching else 1)
        blocks = bisect_right(range(1, min(budget // per_block, most) + 1), budget, key=needed)
        if blocks < 1:
            raise CapacityError(
                f"kv_cache_space: {budget} bytes hold no cache block of {needed(1)} bytes; give more memory"
            )
        return blocks

    def _plan_states(self, budget: int, max_num_seqs: int) -> StatePlan:
        """Recurrent states out of the budget; none for a model without."""
        native = self.model.new_states(1)
        if native is None:
            return StatePlan()
        plan = plan_states(
            budget,
            native.slot_bytes,
            native.journal_row_bytes,
            sequences=max_num_seqs,
            rows=0 if self._drafter is None else self._drafter.max_drafts + 1,
            snapshots=self.prefix_caching,
        )
        if plan.running < max_num_seqs:
            log.info(
                "%d sequences run at once instead of %d: kv_cache_space has room for so many recurrent states",
                plan.running,
                max_num_seqs,
            )
        if self.prefix_caching and not plan.snapshots:
            log.warning(
                "the prefix cache will find nothing: kv_cache_space has no room for snapshots of the recurrent state, "
                "%.0f MiB each; raise it",
                native.slot_bytes / 2**20,
            )
        return plan

    def info(self) -> dict[str, Any]:
        """Facts for start-up lines: path, threads, sizes in bytes, and the memory plan."""
        c, engine = self.model.config, self.engine
        drafter = self._drafter
        per_block = self.model.new_cache(1).bytes_per_block
        return {
            "model": self.model_name,
            "path": str(self.model.path),
            "architecture": c.model_type,
            "dtype": self.model.dtype,
            "quantization": self.model.quantization,
            "weight_type": self.model.weight_type,
            "kv_cache_dtype": self.model.kv_cache_dtype,
            "isa": self.model.isa,
            "threads": self.model.threads,
            "num_layers": c.num_layers,
            "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            "max_model_len": self.max_model_len,
            "weights_bytes": self.model.weight_bytes,
            "kv_cache_bytes": engine.pool.size * per_block,
            "kv_cache_tokens": engine.pool.size * BLOCK_TOKENS,
            "kv_bytes_per_token": per_block // BLOCK_TOKENS,
            "state_bytes": self._states.bytes,
            "states": self._states.running,
            "state_snapshots": self._states.snapshots,
            "speculation": None if drafter is None else drafter.name,
            "num_speculative_tokens": 0 if drafter is None else drafter.max_drafts,
        }

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of calls without any: `SamplingParams()`, whatever the model's generation_config.json says."""
        return SamplingParams()

    def reset_prefix_cache(self) -> None:
        """Forget the cache of earlier requests."""
        with self._lock, uninterrupted:
            self.engine.reset_prefix_cache()

    # ---- measuring

    def pass_cost(self, rows: int, context: int) -> tuple[int, int]:
        """(bytes read, operations) of one pass of `rows` rows behind `context` tokens with logits of all rows."""
        c = self.model.config
        kv = self.model.new_cache(1).bytes_per_block // BLOCK_TOKENS
        attention = 4 * self.model.num_attention_layers * c.num_heads * c.head_dim * (context + rows)
        states = self.model.new_states(1)
        state = 0 if states is None else 2 * states.slot_bytes  # read and written
        return self.model.weight_bytes + kv * (context + rows) + state, rows * (
            2 * self.model.matrix_elements + attention
        )

    def time_forward(self, rows: int, context: int) -> float:
        """Seconds of one pass of `rows` rows behind `context` tokens, logits of all rows, nothing sampled."""
        blocks = blocks_for(context + rows)
        with self._lock:
            if self._timing is None or self._timing[0] < blocks:
                cache, states = self.model.new_cache(blocks), self.model.new_states(1)
                self._timing = (blocks, cache, states)
                self._time_pass(cache, states, blocks, 0, context)
            _, cache, states = self._timing
            return self._time_pass(cache, states, blocks, context, rows)

    def _time_pass(self, cache: Any, states: Any, blocks: int, start: int, rows: int) -> float:
        plan, elapsed = self.model.plan(), 0.0
        for at in range(start, start + rows, self.model.max_rows):
            n = min(self.model.max_rows, start + rows - at)
            logits = np.empty((n, self.model.vocab_size), np.float32)
            logits.fill(0)  # touched before the clock runs
            arguments: dict[str, Any] = {
                "tokens": np.full(n, 1, np.int32),
                "block_tables": np.arange(blocks, dtype=np.int32)[None],
                "select": np.arange(n, dtype=np.int32),
                "logits": logits,
            }
            positions, starts = np.arange(at, at + n, dtype=np.int32), np.array([0, n], np.int32)
            if states is not None:
                states.assume(0, at)
                arguments |= state_arguments(states, [0])
            begin = time.perf_counter()
            plan.forward(cache, positions, starts, **arguments)
            elapsed += time.perf_counter() - begin
        return elapsed


def _progress(requests: list[_Request], shown: bool) -> Iterator[None]:
    """Yields until all requests have finished, with a bar on a terminal if wanted."""
    if not shown:
        while not all(r.finished for r in requests):
            yield
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("Generating", total=len(requests))
        while not all(r.finished for r in requests):
            yield
            bar.update(task, completed=sum(r.finished for r in requests))
