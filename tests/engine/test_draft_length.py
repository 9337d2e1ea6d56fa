"""The choice of draft lengths in the step loop, on a clock that the test sets."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import SamplingParams

from .conftest import SHAPE
from .harness import Oracle, Scripted, assert_idle, assert_same, open_llm, scripted

V = SHAPE.vocab


def clocked(folder: Any, slope: float, taps: tuple[int, ...]) -> Any:
    """An engine that believes that a pass of n rows takes 1 + slope * n."""
    llm = open_llm(folder, Scripted(taps=taps), adaptive=True)
    table = {rows: 1.0 + slope * rows for rows in range(1, 300)}
    for costs in (llm.engine.lengths.verify, llm.engine.lengths.draft):
        costs.preset(table if costs is llm.engine.lengths.verify else dict.fromkeys(table, 0.1))
        costs.observe = lambda rows, seconds: None  # type: ignore[method-assign]
    return llm


def test_many_requests_rest_the_drafter_and_the_last_ones_draft_again(world):
    """Eight at once at a price where only two can profit; then one alone. The texts are those of plain decoding."""
    for taps in ((), (0, 1)):
        llm = clocked(world.folder, 0.4, taps)
        params = [
            SamplingParams(temperature=0.0, seed=0, max_tokens=140 if i == 0 else 18, ignore_eos=True) for i in range(8)
        ]
        prompts = [[i, 2, 3] for i in range(8)]
        plain = open_llm(world.folder)
        want, oracle = [plain.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)], Oracle()
        for output in want:
            oracle.learn(output)
        lengths = llm.engine.lengths
        for i in range(400):
            lengths.overall.observe(7, i % 2)
        resting: list[tuple[int, bool]] = []
        step = llm.engine.step

        def watched(step: Any = step, llm: Any = llm, resting: list[tuple[int, bool]] = resting) -> Any:
            resting.append((len(llm.engine.running), llm.engine.lengths.worthwhile))
            return step()

        llm.engine.step = watched
        with scripted(llm, oracle):
            got = llm.generate(prompts, params)
        for mine, his in zip(got, want, strict=True):
            assert_same(mine, his, taps)
        assert (8, False) in resting and (1, True) in resting
        assert got[0].metrics.spec_decode.num_accepted_tokens > 40, "alone, it drafts"
        assert_idle(llm)


@settings(max_examples=10, deadline=None)
@given(slope=st.floats(0.0, 2.0), kept=st.integers(0, 7), count=st.integers(1, 6), seed=st.integers(0, 99))
def test_any_price_gives_the_same_text(tiny_target, slope, kept, count, seed):
    llm, plain = clocked(tiny_target, slope, (0, 1)), open_llm(tiny_target)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, V, rng.integers(1, 60)).tolist() for _ in range(count)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=40, logprobs=0, ignore_eos=True) for i in range(count)]
    want, oracle = [plain.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)], Oracle()
    for output in want:
        oracle.learn(output)
    with scripted(llm, lambda s, limit: [*oracle(s, limit)[:kept], 0, 0][:limit]):
        for mine, his in zip(llm.generate(prompts, params), want, strict=True):
            assert_same(mine, his, (slope, kept))
    assert_idle(llm)
