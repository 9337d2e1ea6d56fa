from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline import _native


def available_isas() -> list[str]:
    found = []
    for name in ("portable", "avx2", "avx512"):
        try:
            _native.select_sampling_isa(name)
        except ValueError:
            continue
        found.append(name)
    _native.select_sampling_isa("")
    return found


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once per instruction-set path of the sampler that this machine has."""
    _native.select_sampling_isa(request.param)
    yield request.param
    _native.select_sampling_isa("")


@pytest.fixture
def every_isa() -> Iterator[list[str]]:
    """The names of all paths here; the initial one is selected again afterwards."""
    yield available_isas()
    _native.select_sampling_isa("")
