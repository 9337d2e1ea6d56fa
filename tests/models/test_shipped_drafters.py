"""The drafters in the package, as other loaders see their folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline
from paceline.weights.safetensors_file import SafetensorsFile

FOLDERS = sorted(path.parent for path in (Path(paceline.__file__).parent / "drafters").glob("*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_only_the_weights_are_taken_for_weights(folder: Path) -> None:
    """vLLM loads every *.safetensors that the index names, all without one, and refuses tensors it does not know."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    taken = {file.name for file in folder.glob("*.safetensors")} & set(index["weight_map"].values())
    assert taken == {"model.safetensors"}
    entries = SafetensorsFile(folder / "model.safetensors").entries
    assert set(index["weight_map"]) == set(entries)
    assert index["metadata"]["total_size"] == sum(e.end - e.begin for e in entries.values())
