"""Every golden case, part by part. Cases on the PENDING list have to fail; one that passes fails the run."""

from __future__ import annotations

import pytest

from paceline.errors import PacelineError

from . import adapter, checks
from .cases import Case, all_parts, pending


def _parameters() -> list:
    waiting = pending()
    found = []
    for name, case, part in all_parts():
        # Only a clear refusal counts as pending: a crash or a wrong number is a failure all the same.
        mark = pytest.mark.xfail(reason="listed in tests/golden/PENDING", strict=True, raises=PacelineError)
        found.append(pytest.param(case, part, id=name, marks=[mark] if (case.name, part) in waiting else []))
    return found


@pytest.mark.parametrize(("case", "part"), _parameters())
def test_golden(case: Case, part: str) -> None:
    if part == "target":
        checks.check_target(case, adapter.NativeTarget(case.target))
    elif part == "speculation":
        checks.check_speculation(case, adapter.NativeSpeculator(case.target, case.drafter))
    else:
        adapter.check_sampling(case)
