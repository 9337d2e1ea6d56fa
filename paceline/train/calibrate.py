"""`paceline train calibrate`: let a DSpark drafter draft, see what is kept, and fit its confidence to that.

Needs no PyTorch: this engine drafts and verifies, and the fit is a grid search over one number per position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.speculation.calibration import Calibration, Fit, fit_blocks, write_calibration
from paceline.speculation.dspark import DSparkProposer
from paceline.speculation.length import DraftLengthPolicy

from .corpus import say
from .errors import TrainError
from .prompts import read_prompts

if TYPE_CHECKING:
    from paceline.llm import LLM


class Recorder(DraftLengthPolicy):
    """Lets whole blocks be drafted and verified, and keeps (logits of the confidence head, of the likeliest tokens,
    number accepted) of each."""

    def __init__(self, proposer: DSparkProposer) -> None:
        super().__init__()
        self.blocks: list[tuple[list[float], list[float], int]] = []
        self._proposer = proposer
        self._blocks_of: dict[int, tuple[list[float], list[float]]] = {}

    def choose(
        self,
        requests: Sequence[int],
        limits: Sequence[int],
        other_rows: int = 0,
        found: Sequence[Sequence[float]] = (),
        decoding: int = 0,
    ) -> list[int]:
        return list(limits)

    def trim(
        self,
        requests: Sequence[int],
        drafts: Sequence[list[int]],
        chances: Sequence[Sequence[float]],
        other_rows: int = 0,
    ) -> None:
        made = [request for request, row in zip(requests, drafts, strict=True) if row]
        self._blocks_of.update(zip(made, self._proposer.said, strict=True))

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        found = self._blocks_of.pop(request, None)
        if found is not None and drafted:
            said, own = found
            self.blocks.append((said[:drafted], own[:drafted], accepted))

    def finish(self, request: int) -> None:
        self._blocks_of.pop(request, None)


def record(
    llm: LLM, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float, seed: int = 0, batch: int = 16
) -> list[tuple[list[float], list[float], int]]:
    """What became of these prompts' drafts; see `Recorder`. Raises TrainError for a drafter without confidence."""
    from paceline.sampling_params import SamplingParams

    proposer = llm.engine.proposer
    if not isinstance(proposer, DSparkProposer) or not proposer.confident:
        raise TrainError("this drafter has no confidence head: there is nothing to calibrate")
    # one that asks for what it weighs, whatever the sidecar holds
    before, proposer.calibration = proposer.calibration, Calibration(mix=(1.0, 0.0, 0.0))
    policy, recorder = llm.engine.lengths, Recorder(proposer)
    llm.engine.lengths = recorder
    try:
        for first in range(0, len(prompts), batch):
            part = list(prompts[first : first + batch])
            params = [
                SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + first + i)
                for i in range(len(part))
            ]
            llm.generate(part, params)
    finally:
        llm.engine.lengths, proposer.calibration = policy, before
    return recorder.blocks


def calibrate(
    model: str,
    drafter: str,
    prompts: Path,
    *,
    limit: int,
    max_tokens: int,
    temperature: float,
    dtype: str,
    out: Path | None,
    report: Callable[[str], None] = say,
) -> Fit:
    """`train calibrate`: fit, report, and write the sidecar into the drafter's folder or `out`."""
    from paceline.llm import LLM

    llm = LLM(model, dtype=dtype, speculative_config={"method": "dspark", "model": drafter})  # type: ignore[arg-type]
    proposer = llm.engine.proposer
    assert isinstance(proposer, DSparkProposer)
    wanted = read_prompts(prompts)[:limit]
    room = llm.max_model_len - 8
    ids = [llm.tokenizer.encode_chat(list(p.messages)) for p in wanted]
    blocks = record(llm, [i for i in ids if len(i) < room], max_tokens=max_tokens, temperature=temperature)
    try:
        fit = fit_blocks(blocks)
    except ValueError as error:
        raise TrainError(f"{prompts}: {error}; use more prompts or longer answers") from None
    folder = out or proposer.drafter.path
    about = {"model": model, "prompts": len(wanted), "max_tokens": max_tokens, "temperature": temperature}
    try:
        path = write_calibration(folder, fit, about)
    except OSError as error:
        raise PacelineError(f"{folder}: cannot be written: {error.strerror}; name another folder with --out") from None
    for line in table(fit):
        report(line)
    report(f"{path} written; it is used whenever this drafter is loaded from that folder")
    return fit


def table(fit: Fit) -> list[str]:
    """One line per position: how many drafts reached it, its temperature, the error of survival before and after."""
    lines = []
    if fit.mix is not None:
        head, own, constant = fit.mix
        lines.append(f"confidence = {head:.2f} x head {own:+.2f} x likeliest token {constant:+.2f}")
    lines.append("position  drafts  temperature  error before  after")
    rows = zip(fit.samples, fit.temperatures, fit.error_before, fit.error_after, strict=True)
    for i, (count, temperature, before, after) in enumerate(rows, 1):
        lines.append(f"{i:8d}  {count:6d}  {temperature:11.3f}  {before:12.4f}  {after:.4f}")
    return lines
