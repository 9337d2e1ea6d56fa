"""The documents hold together: no placeholder is left in them, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("paceline/drafters/*/README.md")])


def test_there_are_documents() -> None:
    assert {"README.md", "CHANGELOG.md"} <= {d.name for d in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_no_placeholder_and_no_dead_link(document: Path) -> None:
    text = document.read_text()
    assert "@" + "@" not in text
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target
