"""Recurrent models in the step loop: rejected drafts leave nothing in a state, whatever happens around them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.hybrid import HybridShape, write_hybrid
from models.tiny import Draft, Shape, write_drafter

from paceline import LLM, SamplingParams
from paceline.errors import CapacityError, ConfigError

from .harness import (
    Oracle,
    Script,
    Scripted,
    alternating,
    assert_idle,
    assert_same,
    assert_stats,
    at_random,
    half_right,
    kib,
    nothing,
    open_llm,
    repeat_last,
    run_with_failing_passes,
    scripted,
    watched,
    wrong,
)
from .hybrid import Shadow, StateWatch

SHAPE = HybridShape(context=2304)
V = SHAPE.vocab
SCRIPTS = ("wrong", "oracle", "random", "half right", "alternating", "repeat")
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=40, logprobs=1, ignore_eos=True)


@dataclass
class Hybrids:
    folder: Path
    plain: LLM


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrids:
    folder = write_hybrid(tmp_path_factory.mktemp("hybrid"), SHAPE, tokenizer=True)
    return Hybrids(folder, open_llm(folder, None, enable_prefix_caching=False))


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, length).tolist()


def script_for(kind: str, oracle: Oracle) -> Script:
    return {
        "wrong": wrong(oracle, V),
        "oracle": oracle,
        "random": at_random(V, 3),
        "half right": half_right(oracle, V, 4),
        "alternating": alternating(oracle),
        "repeat": repeat_last,
    }[kind]


def space_for(llm: LLM, blocks: int, states: int) -> float:
    """kv_cache_space in GiB for so many states of running sequences, and about so many blocks beside them."""
    native = llm.model.new_states(1)
    return max(2 * states * (native.slot_bytes + 8 * native.journal_row_bytes) / 2**30 + 1e-9, kib(blocks, llm))


# ---- drafts and states (vllm-project/vllm#39273, #52942)


def drafts_leave_no_trace(hybrid: Hybrids, kind: str, count: int, **options: Any) -> None:
    """Greedy output of `count` tokens with and without drafts, and the state after each step."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=count, ignore_eos=True, logprobs=0)
    llm = open_llm(hybrid.folder, Scripted(), **options)
    plain = hybrid.plain if not options else open_llm(hybrid.folder, None, **options)
    prompt, oracle = text(1, 30), Oracle()
    want = plain.generate(prompt, params)[0]
    oracle.learn(want)
    watch = StateWatch(llm)
    with scripted(llm, script_for(kind, oracle)):
        got = llm.generate(prompt, params)[0]
    assert_same(got, want, kind)
    assert_stats(got)
    stats = got.metrics.spec_decode
    assert watch.compared >= stats.num_drafts > 0
    if kind == "wrong":
        assert stats.num_accepted_tokens == 0 and watch.compared >= count - 1
    if kind in ("oracle", "alternating"):
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    watch.check_snapshots([want.prompt_token_ids + want.outputs[0].token_ids])
    assert watch.snapshots
    assert_idle(llm)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_state_is_that_of_the_committed_tokens_after_every_step(hybrid: Hybrids, kind: str) -> None:
    drafts_leave_no_trace(hybrid, kind, 100)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_so_it_is_after_two_thousand_tokens(hybrid: Hybrids, kind: str, dtype: str) -> None:
    drafts_leave_no_trace(hybrid, kind, 2000, dtype=dtype)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512_bf16", "amx"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_every_path(hybrid: Hybrids, isa: str, dtype: str) -> None:
    from native.paths import runs_here

    if not runs_here(isa):
        pytest.skip(f"this processor has no {isa}")
    drafts_leave_no_trace(hybrid, "half right", 60, isa=isa, dtype=dtype, threads=2)


def test_the_bits_do_not_depend_on_threads_or_on_how_a_prompt_is_cut(hybrid: Hybrids) -> None:
    prompt = text(2, 200)
    want = hybrid.plain.generate(prompt, GREEDY)[0]
    for threads, rows in ((2, 512), (3, 7), (1, 33)):
        llm = open_llm(hybrid.folder, None, threads=threads, max_num_batched_tokens=rows, max_num_seqs=4)
        watch = StateWatch(llm)
        assert_same(llm.generate(prompt, GREEDY)[0], want, (threads, rows))
        assert watch.compared >= 200 / rows


def test_a_block_drafter_with_taps(hybrid: Hybrids) -> None:
    """What a drafter observes is what plain decoding would show it: the harness compares it over preemptions."""
    llm = open_llm(hybrid.folder, Scripted(taps=(0, 2)), max_num_batched_tokens=24, max_num_seqs=6)
    prompts = [text(3, 70), text(4, 9), text(3, 50)]
    want, oracle = hybrid.plain.generate(prompts, GREEDY), Oracle()
    for output in want:
        oracle.learn(output)
    StateWatch(llm)
    for _ in range(2):
        with scripted(llm, half_right(oracle, V, 1)):
            for mine, his in zip(llm.generate(prompts, GREEDY), want, strict=True):
                assert_same(mine, his, "taps")
    assert_idle(llm)


# ---- prefix cache (vllm-project/vllm#53912, #53505, #54360)


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_long_prompt_twice_and_then_a_turn_longer(tmp_path: Path, drafts: int) -> None:
    folder = write_hybrid(tmp_path, HybridShape(context=4608), tokenizer=True)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True, logprobs=1)
    plain = open_llm(folder, None, enable_prefix_caching=False)
    llm = open_llm(folder, Scripted(taps=(0, 2)), kv_cache_space=0.05)
    prompt, oracle = text(5, 4096), Oracle()
    first = plain.generate(prompt, params)[0]
    turn = prompt + first.outputs[0].token_ids + text(6, 50)
    second = plain.generate(turn, params)[0]
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    oracle.learn(first)
    oracle.learn(second)
    watch = StateWatch(llm)
    watch.check = lambda: None  # type: ignore[method-assign]
    cached = []
    for text_, want in ((prompt, first), (prompt, first), (turn, second)):
        with scripted(llm, half_right(oracle, V, 7)):
            got = llm.generate(text_, params, num_speculative_tokens=drafts)[0]
        assert_same(got, want, len(text_))
        cached.append(got.num_cached_tokens)
    # the turn finds the answer as well: of 4096 + 40 tokens 4135 rows were computed
    assert cached == [0, 4080, 4128]
    stats = llm.engine.scheduler.stats
    assert (stats.queries, stats.hits) == (2 * 4096 + len(turn), 4080 + 4128)
    watch.check_snapshots([turn + second.outputs[0].token_ids])
    assert_idle(llm)


def test_prompts_with_a_common_beginning_find_it_the_third_time(hybrid: Hybrids) -> None:
    """A state is kept where a text leaves what the cache knows; the blocks alone are of no use."""
    llm = open_llm(hybrid.folder, None)
    watch = StateWatch(llm)
    start, cached = text(7, 100), []
    for seed in range(3):
        prompt = start + text(20 + seed, 40)
        got = llm.generate(prompt, GREEDY)[0]
        assert_same(got, hybrid.plain.generate(prompt, GREEDY)[0], seed)
        cached.append(got.num_cached_tokens)
    assert cached == [0, 0, 96]
    assert watch.compared
    llm.reset_prefix_cache()
    assert llm.generate(start + text(20, 40), GREEDY)[0].num_cached_tokens == 0
    assert_idle(llm)


def test_choices_share_their_prompt(hybrid: Hybrids) -> None:
    llm = open_llm(hybrid.folder, None, max_num_batched_tokens=40)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12, logprobs=1, ignore_eos=True)
    want = hybrid.plain.generate(text(8, 90), params)[0]
    StateWatch(llm)
    assert_same(llm.generate(text(8, 90), params)[0], want, "n = 3")
    stats = llm.engine.scheduler.stats
    assert (stats.queries, stats.hits) == (270, 160)
    assert_idle(llm)


def test_a_block_that_is_evicted_takes_its_state_along(hybrid: Hybrids) -> None:
    llm = open_llm(hybrid.folder, None, max_num_seqs=2, max_model_len=256, kv_cache_space=0.002)
    engine = llm.engine
    assert engine.states is not None and engine.states.num_snapshots >= 4
    for seed in range(60):
        llm.generate(text(100 + seed, 120), SamplingParams(max_tokens=20, seed=0, ignore_eos=True))
        pool = engine.pool
        assert all(key in pool._published for key in engine.states._snapshots), "a state whose block is gone"
    assert engine.pool.published < 60 * 8, "the cache is too large for this test"
    assert_idle(llm)


# ---- preemption, admission, failures


@pytest.mark.parametrize("taps", [(), (0, 2)])
def test_preempted_requests_come_back_to_the_same_bits(hybrid: Hybrids, taps: tuple[int, ...]) -> None:
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 6}
    llm = open_llm(hybrid.folder, Scripted(taps=taps), kv_cache_space=space_for(hybrid.plain, 1, 6), **small)
    blocks = llm.engine.pool.size
    assert blocks < 100
    taken = llm.engine.pool.take(blocks - 11)
    llm.engine.pool.check = lambda held, index=True: None  # type: ignore[method-assign]
    prompts = [text(i, n) for i, n in enumerate((60, 5, 30, 17, 1, 40))]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=60, logprobs=1, ignore_eos=True) for i in range(6)
    ]
    want, oracle = [hybrid.plain.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)], Oracle()
    for output in want:
        oracle.learn(output)
    watch, idle = StateWatch(llm), llm.engine.pool.check_idle
    llm.engine.pool.check_idle = lambda: None  # type: ignore[method-assign]
    with scripted(llm, half_right(oracle, V, 2)):
        got = llm.generate(prompts, params)
    for mine, his in zip(got, want, strict=True):
        assert_same(mine, his, "preempted")
    assert llm.engine.scheduler.num_preemptions > 0 and watch.compared > 60
    watch.check_snapshots([o.prompt_token_ids + o.outputs[0].token_ids for o in want])
    llm.engine.pool.give(taken)
    idle()


def test_no_more_run_than_have_states(hybrid: Hybrids, caplog: pytest.LogCaptureFixture) -> None:
    llm = open_llm(hybrid.folder, Scripted(), kv_cache_space=space_for(hybrid.plain, 64, 3), max_num_seqs=16)
    assert llm.info()["states"] == 3
    most = 0
    step = llm.engine.step

    def counted() -> Any:
        nonlocal most
        results = step()
        most = max(most, len(llm.engine.running))
        return results

    llm.engine.step = counted  # type: ignore[method-assign]
    prompts = [text(i, 20) for i in range(9)]
    with scripted(llm, nothing):
        got = llm.generate(prompts, GREEDY)
    for mine, his in zip(got, hybrid.plain.generate(prompts, GREEDY), strict=True):
        assert_same(mine, his, "few states")
    assert most == 3
    assert_idle(llm)


def test_states_count_in_the_budget(hybrid: Hybrids) -> None:
    for space in (0.01, 0.003):
        llm = open_llm(hybrid.folder, None, kv_cache_space=space)
        info = llm.info()
        assert info["state_bytes"] + info["kv_cache_bytes"] <= space * 2**30
        assert 0 < info["state_bytes"] <= 0.75 * space * 2**30
        native = llm.model.new_states(1)
        assert info["state_bytes"] == (info["states"] + info["state_snapshots"]) * native.slot_bytes
    with pytest.raises(CapacityError, match=r"kv_cache_space.*recurrent state"):
        open_llm(hybrid.folder, None, kv_cache_space=native.slot_bytes / 2**30)


def test_without_room_for_snapshots_the_cache_says_so(hybrid: Hybrids, caplog: pytest.LogCaptureFixture) -> None:
    native = hybrid.plain.model.new_states(1)
    space = 2.2 * native.slot_bytes / 2**30
    llm = open_llm(hybrid.folder, None, kv_cache_space=space, max_model_len=64)
    assert "prefix cache will find nothing" in caplog.text and llm.info()["state_snapshots"] == 0
    for _ in range(2):
        got = llm.generate(text(1, 20), SamplingParams(max_tokens=4, seed=0, ignore_eos=True))[0]
        assert got.num_cached_tokens == 0


def test_a_pass_that_fails_leaves_other_requests_right(hybrid: Hybrids) -> None:
    """States have moved on when the logits turn out to be of no use; the next step computes those rows again."""
    llm = open_llm(hybrid.folder, Scripted())
    watch = StateWatch(llm)
    prompts, oracle = [text(30, 50), text(31, 20)], Oracle()
    want = hybrid.plain.generate(prompts, GREEDY)
    for output in want:
        oracle.learn(output)
    with scripted(llm, half_right(oracle, V, 9)), llm._lock:
        requests = [llm._add(p, GREEDY, (7, True)) for p in prompts]
        run_with_failing_passes(llm)
    for request, his in zip(requests, want, strict=True):
        assert_same(request.output(), his, "failed passes")
    assert watch.compared > 10
    assert_idle(llm)


def test_a_drafter_that_rested_catches_up(hybrid: Hybrids) -> None:
    """Rows it missed are computed again, from the last state known before them."""
    llm = open_llm(hybrid.folder, Scripted(taps=(0, 2)), max_num_batched_tokens=40)
    watch, lengths = StateWatch(llm), llm.engine.lengths
    prompts = [text(7, 50), text(8, 3), text(7, 41)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=60, logprobs=1, ignore_eos=True) for i in range(3)]
    want, oracle = [hybrid.plain.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)], Oracle()
    for output in want:
        oracle.learn(output)
    lengths.reconsider = lambda rows: None  # type: ignore[method-assign]
    lengths.saved = lambda rows, limit: 1e9  # type: ignore[method-assign]
    drafted = 0
    for worth in (0, 5, 17, 40):
        with scripted(llm, half_right(oracle, V, 4)), llm._lock:
            lengths.worthwhile = False
            added = [llm._add(p, q, llm._draft_length(True, None)) for p, q in zip(prompts, params, strict=True)]
            for step in range(1000):
                lengths.worthwhile = worth <= step < worth + 12
                if not llm.engine.busy:
                    break
                llm._step()
            drafted += sum(r.output().metrics.spec_decode.num_drafts for r in added)
        for request, his in zip(added, want, strict=True):
            assert_same(request.output(), his, worth)
    assert drafted and watch.compared
    assert_idle(llm)


def test_a_hybrid_cannot_be_a_draft_model(hybrid: Hybrids) -> None:
    draft = {"method": "draft_model", "model": str(hybrid.folder), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="recurrent layers"):
        LLM(hybrid.folder, dtype="float32", threads=1, speculative_config=draft)


def test_the_shadow_can_tell(hybrid: Hybrids) -> None:
    """One token more or another one, and the state differs."""
    shadow, tokens = Shadow(hybrid.plain.model, 8), text(1, 40)
    states = [shadow.state(t).copy() for t in (tokens, tokens[:-1], [*tokens[:-1], 0], [0, *tokens[1:]], tokens)]
    assert all((states[0] != other).any() for other in states[1:4]) and (states[0] == states[4]).all()


@pytest.mark.parametrize("layers", ["full", "mixed", "sliding, in rings"])
def test_dflash_drafters_of_every_kind(hybrid: Hybrids, tmp_path: Path, layers: str) -> None:
    """z-lab's layouts for Qwen3.5 (full, later five sliding layers and a full one) and Qwen3.8 (all sliding)."""
    window = 0 if layers == "full" else 32
    sliding = {"full": (), "mixed": (0,), "sliding, in rings": (0, 1)}[layers]
    drafter = write_drafter(
        tmp_path,
        Shape("qwen3", vocab=V, hidden=SHAPE.hidden, layers=SHAPE.layers, context=SHAPE.context),
        Draft(taps=(0, 2), window=window, sliding=sliding),
    )
    config = {"method": "dflash", "model": str(drafter)}
    options = {"threads": 1, "dtype": "float32", "max_num_batched_tokens": 40, "max_num_seqs": 4}
    llm = watched(LLM(hybrid.folder, speculative_config=config, **options))
    rings = len(sliding) == 2
    assert llm.engine.proposer is not None and bool(llm.engine.proposer.window) == rings
    watch, prompts = StateWatch(llm), [text(40, 150), text(41, 33)]
    want, cached = hybrid.plain.generate(prompts, GREEDY), []
    for _ in range(2):
        for mine, his in zip(llm.generate(prompts, GREEDY), want, strict=True):
            assert_same(mine, his, layers)
            assert mine.metrics.spec_decode.num_drafts > 0
            cached.append(mine.num_cached_tokens)
    # a ring is a sequence's own: its last 32 rows are computed again
    assert cached == [0, 0, *((112, 0) if rings else (144, 32))]
    assert watch.compared
    assert_idle(llm)


def test_keys_and_values_as_int8(hybrid: Hybrids, tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, HybridShape(head_dim=64), tokenizer=True)
    llm = open_llm(folder, Scripted(), kv_cache_dtype="int8", quantization="int8", dtype="bfloat16")
    plain = open_llm(folder, None, kv_cache_dtype="int8", quantization="int8", dtype="bfloat16")
    oracle, prompt = Oracle(), text(42, 60)
    want = plain.generate(prompt, GREEDY)[0]
    oracle.learn(want)
    watch = StateWatch(llm)
    with scripted(llm, half_right(oracle, V, 5)):
        assert_same(llm.generate(prompt, GREEDY)[0], want, "int8")
    assert watch.compared
