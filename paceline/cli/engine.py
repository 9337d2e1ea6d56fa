"""Opening a model for a command: download with a progress bar, load with a note, errors as errors."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.cli.options import NO_DRAFTS, count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.cli.options import EngineOptions
    from paceline.llm import LLM


def open_llm(options: EngineOptions) -> LLM:
    """Load the model that the options name, fetching it first where it is not on disk."""
    from paceline.cli.progress import download_progress
    from paceline.weights.store import resolve_model

    with download_progress() as progress:
        resolve_model(options.model, progress=progress)
    with note(f"Loading {options.model} ..."):
        from paceline.llm import LLM

        arguments: dict[str, Any] = {
            "dtype": options.dtype,
            "quantization": options.quantization,
            "kv_cache_dtype": options.kv_cache_dtype,
            "threads": options.threads,
            "max_model_len": options.max_model_len,
        }
        if options.max_num_seqs is not None:
            arguments["max_num_seqs"] = options.max_num_seqs
        if not options.speculation or options.speculative_config == NO_DRAFTS:
            arguments["speculative_config"] = None
        elif options.speculative_config is not None:
            arguments["speculative_config"] = options.speculative_config
        return LLM(options.model, **arguments)


def note_long_drafts(llm: LLM, wanted: int | None) -> None:
    """Say on standard error that drafts of `wanted` tokens are longer than a DFlash drafter was trained for."""
    from paceline.speculation.dflash import DFlashProposer

    proposer = llm.engine.proposer
    if wanted is None or not isinstance(proposer, DFlashProposer):
        return
    trained = proposer.drafter.config.max_drafts
    if wanted > trained:
        print(
            f"Note: -k {wanted} is more than the {trained} drafts this drafter was trained for; positions beyond them "
            "are rarely accepted.",
            file=sys.stderr,
        )


def summary(llm: LLM, lengths: Sequence[int | None] = (None,)) -> str:
    """One line on how this machine runs the model: kernels, threads, memory, what drafts.

    `lengths`: the draft lengths that are asked for; None is the default, as many tokens as pay.
    """
    facts = llm.info()
    wanted = [length for length in lengths if length != 0]
    if not facts["speculation"] or not wanted:
        drafts = "plain"
    elif None in wanted:
        drafts = f"{facts['speculation']} drafts up to {count(facts['num_speculative_tokens'], 'token')}"
    else:
        drafts = f"{facts['speculation']} drafts {' or '.join(map(str, wanted))} token{'s' * (wanted != [1])}"
    return (
        f"{llm.model_name}: {facts['isa']}, {count(facts['threads'], 'thread')}, "
        f"{facts['weights_bytes'] / 2**20:,.0f} MiB {facts.get('weight_type', facts['dtype'])} weights, "
        f"KV cache up to {facts['kv_cache_bytes'] / 2**20:,.0f} MiB, {drafts}"
    )


def kernels_text(facts: dict[str, Any]) -> str:
    """Kernels and threads, and why not better kernels that the processor has. `facts`: of LLM.info()."""
    from paceline.runtime import missed_isa

    missed = missed_isa(facts["isa"])
    return f"{facts['isa']}{f' ({missed})' if missed else ''}, {count(facts['threads'], 'thread')}"


@contextmanager
def note(text: str) -> Iterator[None]:
    """Show a line on a terminal's standard error while the block runs, then take it away again."""
    shown = sys.stderr.isatty()
    if shown:
        print(text, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
