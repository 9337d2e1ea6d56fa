from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.conftest import SHAPE
from engine.harness import Scripted, open_llm
from models.tiny import write_target

from paceline import LLM
from paceline.server.connection import Connection

from .harness import Live, live
from .thinker import write_thinker


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


@pytest.fixture(scope="package")
def thinker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="package")
def thinker(thinker_folder: Path) -> Iterator[Live]:
    """A server over a model that reasons and calls tools, with the tags and the template of such a model."""
    llm = open_llm(thinker_folder, Scripted(), max_num_batched_tokens=48, max_num_seqs=8)
    with live(llm, model_names=("thinker",)) as running:
        yield running


@pytest.fixture(scope="package")
def plain_thinker(thinker_folder: Path) -> Iterator[Live]:
    """The same without speculation."""
    with live(open_llm(thinker_folder, None), model_names=("thinker",)) as running:
        yield running


@pytest.fixture(autouse=True)
def patient_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops for a while, between a client's connecting and its sending, is no late client."""
    monkeypatch.setattr(Connection, "head_seconds", 700.0)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test with a shared server: no request, no block, no place is held."""
    yield
    for name in ("server", "thinker", "plain_thinker"):
        if name in request.fixturenames:
            request.getfixturevalue(name).idle()
