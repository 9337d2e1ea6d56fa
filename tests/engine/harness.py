"""Engines on tiny models with scripted drafters, and what "the same output" means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.errors import EngineError
from paceline.outputs import CompletionOutput, RequestOutput
from paceline.speculation import factory
from paceline.speculation.drafting import Proposal

Script = Callable[[Any, int], list[int]]


class Scripted:
    """A drafter that says what `script(sequence, limit)` says, and checks the protocol from its side.

    With taps it keeps what it observes: `rows[request_id]` must grow by exactly the committed positions, from the first
    one that the prefix cache did not have (None before it). What is observed again after a preemption must be the same.
    """

    name = "scripted"

    def __init__(self, max_drafts: int = 7, taps: tuple[int, ...] = ()) -> None:
        self.max_drafts = max_drafts
        self.taps = taps
        self.script: Script = nothing
        self.rows: dict[int, list[np.ndarray | None]] = {}
        self.lost: dict[int, list[np.ndarray | None]] = {}
        self.live: set[int] = set()

    window = 0

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        return 0

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        assert blocks > 0 and max_num_seqs > 0

    def propose(self, sequences: Sequence[Any], limits: Sequence[int]) -> Proposal:
        assert len(sequences) == len(limits) and any(limits)
        assert len({s.request_id for s in sequences}) == len(sequences)
        drafts = []
        for sequence, limit in zip(sequences, limits, strict=True):
            assert 0 <= limit <= self.max_drafts
            assert sequence.num_computed == len(sequence.token_ids) - 1, "the anchor is the only row that is missing"
            if self.taps and limit:
                known = self.rows.get(sequence.request_id)
                if known is None:  # all of its rows were in the prefix cache
                    assert sequence.num_computed % 16 == 0
                else:
                    assert len(known) == len(sequence.token_ids) - 1
            drafts.append(self.script(sequence, limit)[:limit] if limit else [])
            self.live.add(sequence.request_id)
        return Proposal(drafts)

    def observe(self, items: Sequence[tuple[Any, int, np.ndarray]]) -> None:
        assert self.taps
        for sequence, first, taps in items:
            name = sequence.request_id
            if name not in self.rows:
                assert first % 16 == 0, "whole blocks are shared"
                self.rows[name] = [None] * first
            seen = self.rows[name]
            assert first == len(seen), f"rows from {first} on, {len(seen)} known"
            seen += list(taps.copy())
            for before, now in zip(self.lost.get(name, ()), seen, strict=False):
                assert before is None or now is None or (before.view(np.uint32) == now.view(np.uint32)).all()

    def finish(self, sequence: Any) -> None:
        self.live.discard(sequence.request_id)
        if sequence.finish_reason is None:  # preempted
            self.lost[sequence.request_id] = self.rows.pop(sequence.request_id, [])


# ---- scripts


def nothing(sequence: Any, limit: int) -> list[int]:
    return []


def repeat_last(sequence: Any, limit: int) -> list[int]:
    return [sequence.token_ids[-1]] * limit


def at_random(vocab: int, seed: int) -> Script:
    rng = np.random.default_rng(seed)
    return lambda sequence, limit: rng.integers(0, vocab, rng.integers(0, limit + 1)).tolist()


class Oracle:
    """Knows how every output goes on: `known[(prompt, choice)]` holds its ids, perhaps beyond its end."""

    def __init__(self) -> None:
        self.known: dict[tuple[tuple[int, ...], int, int], list[int]] = {}

    def learn(self, output: RequestOutput) -> None:
        for choice in output.outputs:
            self.known[tuple(output.prompt_token_ids), choice.seed, choice.index] = choice.token_ids

    def __call__(self, sequence: Any, limit: int) -> list[int]:
        prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
        ids = self.known[prompt, sequence.state.seed, sequence.choice]
        done = sequence.num_output_tokens
        return ids[done : done + limit]


def wrong(oracle: Oracle, vocab: int) -> Script:
    """Never right, as long as the oracle knows what is."""
    return lambda sequence, limit: [(token + 1) % vocab for token in oracle(sequence, limit)]


def half_right(oracle: Oracle, vocab: int, seed: int) -> Script:
    """A right beginning of any length, then noise; sometimes nothing."""
    rng = np.random.default_rng(seed)

    def script(sequence: Any, limit: int) -> list[int]:
        right = oracle(sequence, limit)[: rng.integers(0, limit + 1)]
        return [*right, *rng.integers(0, vocab, limit - len(right)).tolist()][: rng.integers(0, limit + 1)]

    return script


def alternating(oracle: Oracle) -> Script:
    """Right drafts of length 0, 1, 2, ... in turn, for all sequences together."""
    calls = iter(range(1 << 30))

    def script(sequence: Any, limit: int) -> list[int]:
        return oracle(sequence, limit)[: next(calls) % (limit + 1)]

    return script


# ---- engines


def watched(llm: LLM, *, adaptive: bool = False) -> LLM:
    """Every step is followed by the integrity check of the cache, every eighth by that of its index. Draft lengths are
    the most that is allowed, since the clock would choose them otherwise; `adaptive` leaves them to it."""
    step, engine = llm.engine.step, llm.engine
    steps = iter(range(1 << 60))

    def checked() -> Any:
        results = step()
        engine.check(index=next(steps) % 8 == 0)
        for s in engine.running:
            assert s.finish_reason is None
            assert s.num_computed <= len(s.token_ids) - (0 if s.is_prefill else 1)
        return results

    engine.step = checked  # type: ignore[method-assign]
    if not adaptive:
        engine.lengths.choose = lambda requests, limits, *_: list(limits)  # type: ignore[method-assign]
        engine.lengths.trim = lambda *_: None  # type: ignore[method-assign]
        engine.lengths.looks = lambda *_: True  # type: ignore[method-assign]
    return llm


def open_llm(folder: Path, drafter: Any = None, *, adaptive: bool = False, **options: Any) -> LLM:
    """An LLM whose drafter is the object given; see `watched`."""
    with patch.object(factory, "make_drafter", lambda *_, **__: (None, drafter)):
        llm = LLM(folder, **{"threads": 1, "dtype": "float32", **options})
    return watched(llm, adaptive=adaptive)


def assert_idle(llm: LLM) -> None:
    """Nothing runs, nothing waits, every block is free."""
    engine = llm.engine
    assert not engine.busy and engine.pool.free == engine.pool.size, (engine.running, engine.waiting, engine.pool.free)
    engine.check()
    assert not llm._streamed
    assert not len(engine.lengths._memory)
    if isinstance(engine.proposer, Scripted):
        assert not engine.proposer.live


@contextmanager
def scripted(llm: LLM, script: Script) -> Iterator[Scripted]:
    drafter = llm.engine.proposer
    assert isinstance(drafter, Scripted)
    drafter.script = script
    drafter.rows.clear()
    drafter.lost.clear()
    try:
        yield drafter
    finally:
        drafter.script = nothing


def kib(blocks: int, llm: LLM) -> float:
    """kv_cache_space in GiB for so many blocks of a model like this one."""
    return blocks * llm.model.new_cache(1).bytes_per_block / 2**30 + 1e-9


# ---- comparisons


def seen_by_client(choice: CompletionOutput) -> dict[str, Any]:
    """Everything of a choice that has to be the same; log-probabilities as their bits."""
    logprobs = [
        [(token, p.logprob.hex(), p.rank, p.decoded_token) for token, p in found.items()]
        for found in choice.logprobs or ()
    ]
    return {
        "index": choice.index,
        "token_ids": choice.token_ids,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "cumulative_logprob": None if choice.cumulative_logprob is None else choice.cumulative_logprob.hex(),
        "logprobs": None if choice.logprobs is None else logprobs,
        "seed": choice.seed,
    }


def assert_same(got: RequestOutput, want: RequestOutput, about: object) -> None:
    assert got.finished and want.finished
    assert got.prompt_token_ids == want.prompt_token_ids and len(got.outputs) == len(want.outputs)
    assert got.prompt_logprobs == want.prompt_logprobs, about
    for a, b in zip(got.outputs, want.outputs, strict=True):
        left, right = seen_by_client(a), seen_by_client(b)
        for name in left:
            assert left[name] == right[name], (
                f"{name} of choice {a.index} differs\n got  {left[name]}\n want {right[name]}\n"
                f"prompt {got.prompt_token_ids}\n{about}"
            )


def assert_stats(output: RequestOutput) -> None:
    """The identities of the counters."""
    stats = output.metrics.spec_decode
    d = stats.as_dict()
    total = sum(len(c.token_ids) for c in output.outputs)
    assert d["num_delivered_tokens"] == total, (d, total)
    assert 0 <= d["num_accepted_tokens"] <= d["num_draft_tokens"]
    assert 0 <= stats.num_cut_tokens <= d["num_accepted_tokens"]
    assert 0 <= stats.num_found_drafts <= d["num_drafts"]
    rates = d["per_position_acceptance_rates"]
    assert all(0 <= r <= 1 for r in rates) and rates == sorted(rates, reverse=True)
    assert abs(d["acceptance_length"] - 1 - sum(rates)) < 1e-9
    assert all(0 <= r <= 1 for r in d["conditional_acceptance_rates"])
    assert np.allclose(np.cumprod(d["conditional_acceptance_rates"]), rates)
    metrics = output.metrics
    assert 0 <= metrics.queue_time_s <= metrics.time_to_first_token_s and metrics.generation_time_s >= 0
    # tokens that came from drafts are among those delivered
    assert d["num_accepted_tokens"] - stats.num_cut_tokens <= total


def params_of(text: str = "", **values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **values})


def run_with_failing_passes(llm: LLM) -> None:
    """Step until nothing runs; some steps fail between their pass and its commit, and are made again."""

    def fail(*_: Any) -> Any:
        raise EngineError("made up")

    commit = llm.engine._commit
    for step in range(200):
        if not llm.engine.busy:
            break
        if step in (0, 1, 4, 9, 10):
            llm.engine._commit = fail  # type: ignore[method-assign]
            with pytest.raises(EngineError, match="made up"):
                llm._step()
            llm.engine._commit = commit  # type: ignore[method-assign]
        llm._step()
