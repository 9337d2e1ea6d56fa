"""docs/api.md lists exactly the fields that the server accepts and refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.server.features import REFUSED as OLD
from paceline.server.fields import ACCEPTED, REFUSED

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def names(start: str) -> set[str]:
    paragraph = TEXT[TEXT.index(start) :].split("\n\n")[0]
    return set(re.findall(r"`([a-z_*]+)`", paragraph))


@pytest.mark.parametrize(
    ("start", "table"),
    [
        ("Accepted without effect", set(ACCEPTED)),
        ("Refused by name", set(REFUSED) | set(OLD)),
    ],
)
def test_lists_of_fields(start: str, table: set[str]) -> None:
    assert names(start) == table
