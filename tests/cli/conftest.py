"""Running command lines in this process, with a scripted model in place of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from fakes.llm import FakeLLM

from paceline.cli import engine, run


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def paceline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """`paceline("generate", "hello")` -> exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "200")  # messages stay in one line

    def call(*argv: str) -> Ran:
        code = run(argv)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The scripted model that every command opens; `opened` holds the options it was opened with."""
    fake = FakeLLM("fake")
    fake.opened = []

    def open_llm(options: engine.EngineOptions) -> FakeLLM:
        fake.opened.append(options)
        return fake

    monkeypatch.setattr(engine, "open_llm", open_llm)
    return fake
