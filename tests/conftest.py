from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, settings

# a busy machine is no reason for a test to fail
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# a shell starts what runs in the background with Ctrl-C ignored, and what tests start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """The processes of a run have to agree on the names of tests."""
    named = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
    if named:
        raise pytest.UsageError(f"{named[0]}: has an address in its name; give its parameters ids")


@pytest.fixture(scope="session", autouse=True)
def own_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure says nothing about this machine: it stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_COSTS", str(tmp_path_factory.mktemp("costs")))
        yield
