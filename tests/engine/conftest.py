from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from models.tiny import Shape, write_target

from paceline import LLM

from .harness import Scripted, kib, open_llm

SHAPE = Shape(vocab=120, hidden=48, inner=64, heads=4, kv_heads=2, head_dim=16, context=160, sharp=1.5)
DTYPES = ("float32", "bfloat16")


@dataclass
class World:
    """One model twice: decoding plainly, and with a scripted drafter, a small cache and small chunks of prompt."""

    folder: Path
    dtype: str
    plain: LLM
    spec: LLM

    @property
    def vocab(self) -> int:
        return self.plain.model.vocab_size


@pytest.fixture(scope="package")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), SHAPE, tokenizer=True)


@pytest.fixture(scope="package")
def worlds(tiny_target: Path) -> dict[str, World]:
    out = {}
    for dtype in DTYPES:
        plain = open_llm(tiny_target, None, dtype=dtype)
        small: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "kv_cache_space": kib(24, plain)}
        out[dtype] = World(tiny_target, dtype, plain, open_llm(tiny_target, Scripted(), dtype=dtype, **small))
    return out


@pytest.fixture(params=DTYPES)
def world(request: pytest.FixtureRequest, worlds: dict[str, World]) -> World:
    return worlds[request.param]
