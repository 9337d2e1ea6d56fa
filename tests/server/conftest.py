from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.conftest import SHAPE
from engine.harness import Scripted, open_llm
from models.tiny import write_target

from paceline import LLM

from .harness import Live, live


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("served"), SHAPE, tokenizer=True)


@pytest.fixture(scope="package")
def plain(folder: Path) -> LLM:
    """What every answer is compared with: plain decoding, alone."""
    return open_llm(folder, None)


@pytest.fixture(scope="package")
def spec(folder: Path) -> LLM:
    return open_llm(folder, Scripted(), max_num_batched_tokens=48, max_num_seqs=8)


@pytest.fixture(scope="package")
def server(spec: LLM) -> Iterator[Live]:
    with live(spec) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test with the shared server: no request, no block, no place is held."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").idle()
