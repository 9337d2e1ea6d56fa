from __future__ import annotations

import pytest
from fakes.llm import FakeLLM


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM("fake")
