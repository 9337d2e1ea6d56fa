"""Batched generation: the same answers as one sequence at a time by whole forwards."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from paceline.train.decode import answer_all, answer_batch  # noqa: E402
from paceline.train.target import TargetConfig, TorchTarget  # noqa: E402

from .conftest import CONFIG, target_weights  # noqa: E402


def plain(target: TorchTarget, prompt: list[int], limit: int) -> list[int]:
    ids, out = list(prompt), []
    while len(out) < limit:
        _, final = target.forward(torch.tensor([ids]), [])
        token = int((final[0, -1] @ target.head.T).argmax())
        out.append(token)
        ids.append(token)
        if token in target.config.eos_token_ids:
            break
    return out


@pytest.fixture(scope="module")
def ending() -> TorchTarget:
    """A target for which several tokens end a text, so that answers end at different steps."""
    return TorchTarget(TargetConfig.from_hf({**CONFIG, "eos_token_id": [1, 3, 8, 20, 33, 51]}), target_weights())


@settings(max_examples=15, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(2, 96), min_size=1, max_size=12), min_size=1, max_size=6),
    limit=st.integers(1, 40),
)
def test_a_batch_answers_as_each_prompt_alone(ending: TorchTarget, prompts: list[list[int]], limit: int) -> None:
    answers = answer_batch(ending, prompts, max_tokens=limit)
    assert answers == [plain(ending, p, limit) for p in prompts]


def test_every_prompt_is_answered_once_in_any_batch_size(ending: TorchTarget) -> None:
    prompts = [[5 + i, 9, 7 * i % 90 + 2][: 1 + i % 3] for i in range(11)]
    said: list[str] = []
    whole = dict(answer_all(ending, prompts, max_tokens=24, batch=4, report=said.append))
    assert sorted(whole) == list(range(11))
    assert len(said) == 3
    assert whole == dict(answer_all(ending, prompts, max_tokens=24, batch=64, report=said.append))


def test_sampled_answers_depend_on_the_seed_alone(ending: TorchTarget) -> None:
    def draw(seed: int) -> dict[int, list[int]]:
        options = {"max_tokens": 20, "temperature": 2.0, "seed": seed, "report": lambda _: None}
        return dict(answer_all(ending, [[5, 6], [7]] * 6, **options))  # type: ignore[arg-type]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
