from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from engine.harness import Scripted, kib, open_llm
from models.tiny import Shape, write_target

from paceline import LLM

# every byte has a token, so every document can be written; some tokens hold several bytes
SHAPE = Shape(vocab=300, hidden=48, inner=64, heads=4, kv_heads=2, head_dim=16, context=512, sharp=1.5)


@dataclass
class World:
    """One model twice: decoding plainly, and with a scripted drafter, a small cache and small chunks of prompt."""

    folder: Path
    plain: LLM
    spec: LLM

    @property
    def vocab(self) -> int:
        return self.plain.model.vocab_size


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("structured"), SHAPE, tokenizer=True)


@pytest.fixture(scope="session")
def world(folder: Path) -> World:
    plain = open_llm(folder, None)
    spec = open_llm(folder, Scripted(), max_num_batched_tokens=48, max_num_seqs=8, kv_cache_space=kib(24, plain))
    return World(folder, plain, spec)
