"""The memory of measured costs."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.speculation.costs import SAVE_AFTER, CostFile
from paceline.speculation.length import DraftLengthPolicy


def measured(steps: int = SAVE_AFTER) -> DraftLengthPolicy:
    lengths = DraftLengthPolicy()
    for _ in range(steps + 1):
        lengths.verify.observe(8, 0.0071234567)
    lengths.draft.observe(8, 1.0)  # the first does not count
    for _ in range(20):
        lengths.draft.observe(8, 0.0005)
    return lengths


def test_a_second_run_starts_from_what_the_first_measured(tmp_path: Path) -> None:
    file = CostFile(tmp_path / "sub" / "costs.json")
    file.save(measured())
    again = DraftLengthPolicy()
    CostFile(file.path).load(again)
    assert again.verify.medians == pytest.approx({8: 0.007123}) and again.draft.medians == pytest.approx({8: 0.0005})
    assert [p.name for p in file.path.parent.iterdir()] == ["costs.json"]


def test_a_thread_beside_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs steps only looks at the tables; the file is written elsewhere, and not more often than it should."""
    file, threads = CostFile(tmp_path / "costs.json"), []
    write = file._write
    monkeypatch.setattr(file, "_write", lambda v: (threads.append(threading.current_thread()), write(v)))
    lengths = measured()
    file.save_now_and_then(lengths, beside=True)
    file.save_now_and_then(measured(3 * SAVE_AFTER), beside=True)
    while not threads or threads[0].is_alive():
        time.sleep(0.001)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    again = DraftLengthPolicy()
    CostFile(file.path).load(again)
    assert again.verify.medians == pytest.approx({8: 0.007123})


def test_short_runs_leave_nothing(tmp_path: Path) -> None:
    file = CostFile(tmp_path / "costs.json")
    file.save(measured(SAVE_AFTER - 25))
    assert not file.path.exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CostFile(tmp_path / "file" / "costs.json").save(measured())


DAMAGED = [
    "",
    "[]",
    "{",
    '{"verify": {}}',
    '{"verify": {"8": -1}, "draft": {}}',
    '{"verify": {"0": 1}, "draft": {}}',
    '{"verify": {"8": true}, "draft": {}}',
    '{"verify": {"x": 1}, "draft": {}}',
    '{"verify": [1], "draft": {}}',
    '{"verify": {"8": 1e999}, "draft": {}}',
]


@pytest.mark.parametrize("text", [*DAMAGED, "[" * 100_000])
def test_damaged_files_are_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    lengths = DraftLengthPolicy()
    CostFile(tmp_path / "costs.json").load(lengths)
    assert not lengths.verify.known and not lengths.draft.known


@given(st.recursive(st.none() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_json_is_a_table_or_ignored(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.mktemp("any") / "costs.json"
    path.write_text(json.dumps({"verify": value, "draft": {}}))
    CostFile(path).load(DraftLengthPolicy())
