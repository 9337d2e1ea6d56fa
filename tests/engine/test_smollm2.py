"""SmolLM2 itself: prompts of the three kinds that are measured, with every drafter there is, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.speculation.factory import SHIPPED

from .harness import assert_idle, assert_same, assert_stats

CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
MATH = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PROMPTS = [
    CODE.format('def is_palindrome(text: str) -> bool:\n    """Does text read the same backwards, spaces aside?"""'),
    CODE.format('def running_max(numbers):\n    """running_max([1, 3, 2]) == [1, 3, 3]"""'),
    "Explain this function, then add type hints:\n```python\ndef f(xs):\n    return sorted(set(xs))[::-1]\n```",
    MATH.format("A baker sells 24 loaves in the morning, half as many later, at $3 each. What does he take in a day?"),
    MATH.format("A train travels 60 km in 45 minutes. How far does it travel in 3 hours at that speed?"),
    MATH.format("Anna has 3 times as many stamps as Ben, and together they have 48. How many has Ben?"),
    "Write a short travel blog post about a recent trip to a small island, with one surprise in it.",
    "Give me five tips for learning to play the piano as an adult.",
    "What is the difference between weather and climate? Answer as if I were ten years old.",
]
LENGTH = 48


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("smollm2-135m", speculative_config=None)


def methods() -> list[Any]:
    shipped = sorted(SHIPPED.glob("*/config.json")) if SHIPPED.is_dir() else []
    dflash = [{"method": "dflash", "model": str(config.parent)} for config in shipped]
    return [{"method": "ngram"}, *dflash]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", methods(), ids=lambda c: c["method"])
def test_speculation_changes_no_bit(plain, config, temperature):
    """Ids, log-probabilities and text of nine prompts, one by one and all at once, at several draft lengths."""
    chats = [[{"role": "user", "content": p}] for p in PROMPTS]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=LENGTH, logprobs=2) for i in range(len(PROMPTS))
    ]
    want = [plain.chat(c, p)[0] for c, p in zip(chats, params, strict=True)]
    llm = LLM("smollm2-135m", speculative_config=config)
    accepted = 0
    for drafts in (None, 3):
        together = llm.chat(chats, params, num_speculative_tokens=drafts)
        for mine, his in zip(together, want, strict=True):
            assert_same(mine, his, (config, drafts))
            assert_stats(mine)
            accepted += mine.metrics.spec_decode.num_accepted_tokens
    for chat, p, his in zip(chats, params, want, strict=True):
        assert_same(llm.chat(chat, p)[0], his, (config, "alone"))
    assert accepted > 0
    assert_idle(llm)
