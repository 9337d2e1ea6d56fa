"""Acceptance from teacher forcing equals acceptance from running the loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from paceline.train.evaluate import Acceptance, draft_run_lengths, walk  # noqa: E402
from paceline.train.feature_store import FeatureStore, TorchFeatures  # noqa: E402
from paceline.train.features import extract  # noqa: E402
from paceline.train.heads import Heads  # noqa: E402
from paceline.train.regenerate import Answer  # noqa: E402
from paceline.train.target import TorchTarget  # noqa: E402

from .conftest import TAPS, VOCAB  # noqa: E402
from .test_fit import MASK, ROWS, drafter  # noqa: E402


@given(st.lists(st.integers(0, 7), min_size=1, max_size=60))
def test_a_walk_commits_the_answer_exactly(runs: list[int]) -> None:
    end = len(runs) + 1
    accepted = walk(np.array(runs), 0, end)
    assert sum(a + 1 for a in accepted) == end - 1
    at = 0
    for a in accepted[:-1]:
        assert a == runs[at]
        at += a + 1


def test_survival_and_length() -> None:
    a = Acceptance()
    a.add([0, 2, 3, 0], 4)
    assert a.length == 9 / 4
    assert a.survival == [0.5, 0.5, 0.25, 0.0]
    assert Acceptance().length == 1.0


@torch.no_grad()
def test_equals_a_drafting_loop_run_against_the_target(target: TorchTarget, tmp_path: Path) -> None:
    """Greedy target, real loop: draft a block, compare with the target's own continuation, commit, repeat."""
    ids = [0, 9, 4, 33, 9]
    for _ in range(30):
        _, final = target.forward(torch.tensor([ids]), [])
        ids.append(int((final[0, -1] @ target.head.T).argmax()))
    prompt_len = 5
    extract(
        TorchFeatures(target),
        [Answer(0, "code", ids[:prompt_len], ids[prompt_len:])],
        TAPS,
        tmp_path,
        report=lambda _: None,
    )
    store = FeatureStore(tmp_path)
    model = drafter(1)
    model.fc.weight.data.mul_(20)
    full = Heads(target.embed, target.head, list(range(VOCAB)), MASK)
    for heads in (full, Heads(target.embed, target.head, ROWS, MASK)):
        runs = draft_run_lengths(model, heads, store, 0, 3, torch.float32)
        loop = []
        at = prompt_len
        while at < len(ids) - 1:
            taps = store.rows(0)[None, :at, : -target.config.hidden_size]
            embeds = heads.block_embeds(torch.tensor([[ids[at]]]), 4)
            hidden = model(embeds, torch.tensor([[at]]), taps)[0, 0, 1:]
            drafts = heads.rows[(hidden @ heads.head.T).argmax(-1)].tolist()
            right = 0
            while right < 3 and at + 1 + right < len(ids) - 1 and drafts[right] == ids[at + 1 + right]:
                right += 1
            loop.append(right)
            at += right + 1
        assert walk(runs, 0, len(ids) - prompt_len) == loop
