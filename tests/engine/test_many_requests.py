"""Many different requests at once in a cache too small for them: each output is what the request gives alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models.tiny import Draft, Shape, write_drafter, write_target

from paceline import LLM, SamplingParams
from paceline.speculation.dflash import DFlashProposer

from .harness import assert_idle, assert_same, assert_stats, watched

TARGET = Shape("qwen3", vocab=90, hidden=32, inner=40, layers=3, heads=2, kv_heads=1, context=2304, sharp=1.5)
REQUESTS = 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = write_target(tmp_path_factory.mktemp("target"), TARGET, tokenizer=True)
    full = Draft(taps=(0, 2))
    sliding = Draft(taps=(0, 2), window=64, sliding=(0, 1))
    return target, {
        "full": write_drafter(tmp_path_factory.mktemp("full"), TARGET, full),
        "sliding": write_drafter(tmp_path_factory.mktemp("sliding"), TARGET, sliding),
        "ngram": None,
    }


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 2,000 tokens, a third with a common beginning; greedy and seeded; stops of every kind."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, TARGET.vocab, 700).tolist()
    out = []
    for i in range(REQUESTS):
        length = int(np.exp(rng.uniform(0, np.log(2000))))
        prompt = rng.integers(0, TARGET.vocab, length).tolist()
        if i % 3 == 0:
            prompt = common[: rng.integers(1, 700)] + prompt[:300]
        values: dict[str, Any] = {
            "seed": i,
            "max_tokens": int(rng.integers(1, 200)),
            "temperature": [0.0, 0.7, 1.1][i % 3],
        }
        match i % 7:
            case 0:
                values |= {"logprobs": 2}
            case 1:
                values |= {"stop_token_ids": rng.integers(0, TARGET.vocab, 4).tolist(), "min_tokens": 2}
            case 2:
                values |= {"stop": ["a", "q!"], "include_stop_str_in_output": bool(i % 2)}
            case 3:
                values |= {"repetition_penalty": 1.2, "top_p": 0.9}
            case 4:
                values |= {"n": 2, "top_k": 12, "frequency_penalty": 0.4}
            case 5:
                values |= {"min_p": 0.02, "logit_bias": {3: 2.0}}
        values["ignore_eos"] = i % 4 > 0
        values["min_tokens"] = min(values.get("min_tokens", 0), values["max_tokens"])
        out.append((prompt, SamplingParams(**values)))
    return out


@pytest.fixture(scope="module")
def alone(folders):
    """Every request by itself, plainly, without a prefix cache."""
    plain = LLM(folders[0], threads=1, dtype="float32", speculative_config=None, enable_prefix_caching=False)
    return [plain.generate(prompt, params)[0] for prompt, params in requests(5)]


@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "fixed"])
@pytest.mark.parametrize("name", ["full", "sliding", "ngram"])
def test_sixty_four_requests_at_once(folders, alone, name, adaptive):
    target, drafters = folders
    config = {"method": "dflash", "model": str(drafters[name])} if drafters[name] else {"method": "ngram"}
    probe = LLM(target, threads=1, dtype="float32", speculative_config=config)
    per_block = probe.model.new_cache(1).bytes_per_block
    if isinstance(probe.engine.proposer, DFlashProposer):
        per_block += probe.engine.proposer.drafter.new_cache(1).bytes_per_block
    llm = watched(
        LLM(
            target,
            threads=1,
            dtype="float32",
            speculative_config=config,
            max_num_seqs=24,
            max_num_batched_tokens=192,
            kv_cache_space=(142 + 60 * (name == "sliding"))
            * per_block
            / 2**30,  # one request needs up to 144 blocks of 16, all together 2,300
        ),
        adaptive=adaptive,
    )
    drop = {3, 17, 30, 44, 58}  # cancelled after some tokens, while others run
    streams = {}
    with llm._lock:
        added = [llm._add(prompt, params, llm._draft_length(True, None)) for prompt, params in requests(5)]
    for step in range(100_000):
        if not llm.engine.busy:
            break
        llm._step()
        for i in drop:
            if i not in streams and added[i].choices[0].num_output_tokens >= i % 5 and step > i:
                streams[i] = llm._abort([added[i]])
    assert not llm.engine.busy
    # with measured costs the clock decides how fast requests grow
    assert adaptive or llm.engine.scheduler.num_preemptions > 0, "the budget was meant to be too small"
    assert llm.engine.scheduler.stats.hits > 0
    for i, (request, want) in enumerate(zip(added, alone, strict=True)):
        got = request.output()
        if i in drop and any(c.finish_reason == "abort" for c in got.outputs):
            for mine, his in zip(got.outputs, want.outputs, strict=True):
                assert mine.token_ids == his.token_ids[: len(mine.token_ids)]
            continue
        assert_same(got, want, i)
        assert_stats(got)
    assert_idle(llm)


def test_a_cancelled_stream_leaves_nothing_and_its_prompt_can_come_again(folders):
    """Closed in the middle of a block, the same prompt again: the cache holds what was computed, and only that."""
    target, drafters = folders
    config = {"method": "dflash", "model": str(drafters["full"])}
    fresh = LLM(target, threads=1, dtype="float32", speculative_config=None)
    llm = watched(LLM(target, threads=1, dtype="float32", speculative_config=config))
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=80, logprobs=1, ignore_eos=True)
    prompt = np.random.default_rng(1).integers(0, TARGET.vocab, 333).tolist()
    want = fresh.generate(prompt, params)[0]
    for tokens in (1, 7, 37):
        stream, seen = llm.stream(prompt, params), []
        for delta in stream:
            seen += delta.token_ids
            if len(seen) >= tokens:
                break
        stream.close()
        assert seen == want.outputs[0].token_ids[: len(seen)]
        assert_idle(llm)
    got = llm.generate(prompt, params)[0]
    assert got.num_cached_tokens == 320
    assert_same(got, want, "after cancelled streams")


def test_memory_of_drafters_is_part_of_the_budget(folders):
    """A sliding-only drafter keeps a window for each sequence that may run, not the whole context; both kinds count."""
    target, drafters = folders
    space = 0.02
    for name in ("full", "sliding"):
        config = {"method": "dflash", "model": str(drafters[name])}
        llm = LLM(
            target,
            threads=1,
            dtype="float32",
            speculative_config=config,
            kv_cache_space=space,
            max_num_batched_tokens=64,
            max_num_seqs=4,
        )
        proposer = llm.engine.proposer
        assert isinstance(proposer, DFlashProposer)
        mine, his = llm.engine.cache, proposer._cache
        assert mine.blocks * mine.bytes_per_block + his.blocks * his.bytes_per_block <= space * 2**30
        if name == "sliding":
            assert his.blocks == 4 * (-(-(64 + 8 + 64) // 16) + 1) < mine.blocks
        else:
            assert his.blocks == mine.blocks
