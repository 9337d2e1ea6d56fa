"""Beam search with vLLM's names and rules, over the engine's log-probabilities.

Every step asks the engine for one token more of every beam, each a prompt of its own whose beginning the prefix cache
has: whole blocks of 16 tokens, so that up to 16 rows per beam and step are computed again (all of them with
enable_prefix_caching=False). Nothing is drafted. docs/from-vllm.md has measured times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.cache import check_room
from paceline.errors import ConfigError
from paceline.outputs import FinishReason, TokenAlternatives
from paceline.prompts import as_list, cache_salt, token_ids
from paceline.sampling_params import MAX_CHOICES, SamplingParams, SamplingParamsError, known_fields
from paceline.values import MAX_INT32, as_integer, as_number, shown

if TYPE_CHECKING:
    from paceline.llm import LLM

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "beam_search"]

MOST_PENALTY = 32  # a context to this power is still a double


@known_fields
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """beam_width: sequences that are kept at each step, and returned, 1 to 1024. max_tokens: 1 or more.

    ignore_eos: ends of sequence are tokens like others. temperature: 0, as vLLM's default; scores are the model's own
    log-probabilities. length_penalty: the score is the sum of log-probabilities / length ** length_penalty, where the
    length counts prompt and output without the end of sequence, as vLLM has it. include_stop_str_in_output: keep the
    end of sequence in the tokens.

    Raises SamplingParamsError, which names the field, the value and the remedy.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_CHOICES), ("max_tokens", MAX_INT32)):
            number = as_integer(getattr(self, name))
            if number is None or not 1 <= number <= most:
                raise _fail(name, getattr(self, name), f"use a whole number from 1 to {most}")
            object.__setattr__(self, name, number)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "use True or False")
        for name in ("temperature", "length_penalty"):
            value = as_number(getattr(self, name))
            if value is None:
                raise _fail(name, getattr(self, name), "use a finite number")
            object.__setattr__(self, name, value)
        if abs(self.length_penalty) > MOST_PENALTY:
            raise _fail("length_penalty", self.length_penalty, f"use a number from -{MOST_PENALTY} to {MOST_PENALTY}")
        if self.temperature != 0:
            raise _fail(
                "temperature", self.temperature, "beams are scored by the model's own probabilities; leave it 0"
            )


def _fail(name: str, value: object, remedy: str) -> SamplingParamsError:
    return SamplingParamsError(f"{name}={shown(value)}: {remedy}")


@dataclass(slots=True)
class BeamSearchSequence:
    """A prompt with a continuation. tokens and text include the prompt, as vLLM's do. logprobs: per step, of the token
    and of the likeliest in its place; the end of sequence's too, whether it is kept in the tokens or not. cum_logprob:
    their sum. stop_reason: the end of sequence, with the finish reason "stop"."""

    tokens: list[int]
    logprobs: list[TokenAlternatives] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    length: int = 0  # that the length penalty counts


@dataclass(slots=True)
class BeamSearchOutput:
    """The best first; `beam_width` of them, fewer where there are no more."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    salt: str | None
    beams: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    llm: LLM, prompts: Any, params: BeamSearchParams, concurrency_limit: int | None = None
) -> list[BeamSearchOutput]:
    """The likeliest continuations of each prompt (texts, token ids, vLLM's mappings). concurrency_limit: searches side
    by side, None = all.

    At each step every beam goes on with each of its likeliest `2 * beam_width` tokens; those that end the sequence are
    put aside, and the `beam_width` best of the others are the next beams. In the end the best of all are returned. A
    beam that fills the context ends there. Raises ConfigError, CapacityError, before anything runs.
    """
    if not isinstance(params, BeamSearchParams):
        raise ConfigError(
            f"params: {type(params).__name__} given; use BeamSearchParams(beam_width=..., max_tokens=...)"
        )
    limit = as_integer(concurrency_limit)
    if concurrency_limit is not None and (limit is None or limit < 1):
        raise ConfigError(f"concurrency_limit={shown(concurrency_limit)}: use a whole number of 1 or more, or None")
    searches = []
    for prompt in as_list(prompts):
        _, ids = token_ids(prompt, llm.tokenizer, llm.model.vocab_size)
        # else the last of many steps would find out
        most = min(len(ids) + params.max_tokens, llm.max_model_len)
        check_room(len(ids), most, llm.max_model_len, llm.engine.pool.size)
        searches.append(_Search(cache_salt(prompt), [BeamSearchSequence(ids, length=len(ids))]))
    together = limit or max(1, len(searches))
    for first in range(0, len(searches), together):
        _search(llm, searches[first : first + together], params)
    return [_best(search, params, llm) for search in searches]


def _search(llm: LLM, searches: list[_Search], params: BeamSearchParams) -> None:
    """All steps of some searches side by side."""
    ends = frozenset(() if params.ignore_eos else llm.tokenizer.eos_token_ids)
    # so many that beam_width of them go on, whichever of them are ends
    count = max(2 * params.beam_width, params.beam_width + len(ends))
    one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=count, ignore_eos=True)
    for step in range(params.max_tokens):
        going = [s for s in searches if s.beams and (step == 0 or s.beams[0].length < llm.max_model_len)]
        if not going:
            break
        asked = [{"prompt_token_ids": b.tokens, "cache_salt": s.salt} for s in going for b in s.beams]
        found = iter(llm.generate(asked, one, speculation=False))
        for search in going:
            nexts = [next(found).outputs[0].logprobs or [] for _ in search.beams]
            _advance(search, [alternatives for [alternatives] in nexts], params, ends)


def _advance(search: _Search, nexts: list[TokenAlternatives], params: BeamSearchParams, ends: frozenset[int]) -> None:
    """One token more for every beam; nexts: of each the likeliest."""
    longer: list[tuple[float, int, int]] = []  # (sum, beam, token): they are of one length, so that the sum ranks them
    for i, (beam, alternatives) in enumerate(zip(search.beams, nexts, strict=True)):
        for token, found in alternatives.items():
            total = beam.cum_logprob + found.logprob
            if token not in ends:
                longer.append((total, i, token))
                continue
            tokens = [*beam.tokens, token] if params.include_stop_str_in_output else beam.tokens
            logprobs = [*beam.logprobs, alternatives]
            search.ended.append(BeamSearchSequence(tokens, logprobs, total, None, "stop", token, beam.length))
    search.ended = _ranked(search.ended, params)
    longer.sort(key=lambda candidate: -candidate[0])
    beams = []
    for total, i, token in longer[: params.beam_width]:
        beam = search.beams[i]
        logprobs = [*beam.logprobs, nexts[i]]
        beams.append(BeamSearchSequence([*beam.tokens, token], logprobs, total, length=beam.length + 1))
    search.beams = beams


def _ranked(sequences: list[BeamSearchSequence], params: BeamSearchParams) -> list[BeamSearchSequence]:
    """The best; equal ones in the order in which they were found."""
    found = sorted(sequences, key=lambda s: -s.cum_logprob / s.length**params.length_penalty)
    return found[: params.beam_width]


def _best(search: _Search, params: BeamSearchParams, llm: LLM) -> BeamSearchOutput:
    for beam in search.beams:
        beam.finish_reason = "length"
    best = _ranked([*search.ended, *search.beams], params)
    for sequence in best:
        sequence.text = llm.tokenizer.decode(sequence.tokens, skip_special_tokens=False)
    return BeamSearchOutput(best)
