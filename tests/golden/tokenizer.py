"""Golden targets have no tokenizer; the Python API needs one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel


def add_tokenizer(target: Path, folder: Path) -> Path:
    """Fill `folder` with links to the files of `target` and a tokenizer whose words name the ids; returns it."""
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    for file in target.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    words = WordLevel({f"<{i}>": i for i in range(vocab_size)}, unk_token="<0>")
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder
