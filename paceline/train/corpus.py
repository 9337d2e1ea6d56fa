"""The first two steps of ``paceline train``, which need no PyTorch: prompts, and the target's answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .errors import TrainError
from .prompts import mix, read_prompts, write_prompts
from .regenerate import regenerate
from .sources import SOURCES, collect


def say(line: str) -> None:
    print(line, flush=True)


def build_prompts(
    out: Path, *, limit: int | None, without: Sequence[str], source_files: Sequence[str], seed: int
) -> None:
    """`train prompts`."""
    from paceline.weights.store_files import cache_dir

    files: dict[str, Path] = {}
    for entry in source_files:
        name, separator, path = entry.partition("=")
        if not separator:
            raise TrainError(f"--source-file {entry!r}: write NAME=PATH")
        files[name] = Path(path)
    known = [s.name for s in SOURCES]
    for name in without:
        if name not in known:
            raise TrainError(f"--without {name!r}: known sources are {', '.join(known)}")
    names = [n for n in known if n not in without]
    found = collect(names, files, cache_dir() / "train-sources", seed, say)
    count = write_prompts(mix(found, seed, limit), out)
    say(f"{count} prompts in {out}")


def answer_prompts(
    model: str,
    prompts: Path,
    out: Path,
    *,
    dtype: str,
    max_tokens: int,
    temperature: float,
    limit: int | None,
    batch: int,
    seed: int,
) -> None:
    """`train regenerate`."""
    from paceline.llm import LLM

    wanted = read_prompts(prompts)[:limit]
    # in the precision that training sees, also of a quantised file
    llm = LLM(model, dtype=dtype, quantization="none", speculative_config=None, max_num_seqs=64)  # type: ignore[arg-type]
    made = regenerate(
        llm,
        llm.tokenizer,
        wanted,
        out,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        batch=batch,
        report=say,
    )
    say(f"{made} new answer tokens in {out}")
