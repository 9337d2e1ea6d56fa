"""The shipped drafter through the reference class of z-lab's `dflash` package: the same drafts in fp32, full head."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from paceline.models import load_model
from paceline.models.dflash import HEAD_ROWS_FILE, load_drafter
from paceline.speculation.factory import SHIPPED
from paceline.tokenizer import load_tokenizer
from paceline.weights.store import resolve_model

pytestmark = pytest.mark.slow

PROMPTS = [
    "Write a Python function that reverses a string.",
    "What is 17 * 23? Reason step by step.",
    "Name three rivers in Europe.",
    "Tom has 3 boxes of 12 pencils and gives away 7. How many are left?",
    "Explain what a hash table is.",
    "Write a SQL query that counts orders per customer.",
    "A train travels 120 km in 1.5 hours. What is its speed?",
    "Give me a recipe for pancakes.",
    "def fibonacci(n):",
    "Summarise the water cycle in two sentences.",
]
ROUNDS = 6


def test_ten_prompts_give_the_drafts_of_the_reference(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("dflash.model")
    folder = tmp_path / "drafter"
    shutil.copytree(SHIPPED / "smollm2-135m-dflash", folder)
    (folder / HEAD_ROWS_FILE).unlink()
    path = resolve_model("smollm2-135m")
    target = load_model(path, dtype="float32")
    drafter = load_drafter(folder, target)
    tokenizer = load_tokenizer(path)
    theirs = reference.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    head = torch.from_numpy(target.checkpoint.load("model.embed_tokens.weight", "float32").copy())
    config = drafter.config
    for prompt in PROMPTS:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        for _ in range(ROUNDS):
            logits, taps = target.logits(ids, taps=config.target_layer_ids)
            anchor = int(logits[-1].argmax())
            n = len(ids)
            block = np.full(config.block_size, config.mask_token_id, np.int32)
            block[0] = anchor
            blocks = -(-(n + config.block_size) // 16)
            cache, table = drafter.new_cache(blocks), np.arange(blocks, dtype=np.int32)[None]
            drafter.add_context(cache, taps, np.arange(n, dtype=np.int32), np.array([0, n], np.int32), table)
            ours = drafter.draft_logits(
                cache,
                block,
                np.arange(n, n + len(block), dtype=np.int32),
                np.array([0, len(block)], np.int32),
                table,
                np.arange(1, len(block), dtype=np.int32),
            )
            with torch.no_grad():
                hidden = theirs(
                    position_ids=torch.arange(n + len(block))[None],
                    noise_embedding=head[torch.from_numpy(block).long()][None],
                    target_hidden=torch.from_numpy(taps)[None],
                )
                expected = (hidden[0, 1:] @ head.T).numpy()
            np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-3)
            assert ours.argmax(-1).tolist() == expected.argmax(-1).tolist()
            ids = [*ids, anchor, *ours.argmax(-1)[:2].tolist()]
