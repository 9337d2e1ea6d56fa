"""From what a benchmark measured to what its report shows: the machine's facts, round times, predictions."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.bench.backend import Arm
from paceline.bench.costmodel import prediction_rows
from paceline.bench.datasets import BenchPrompt
from paceline.bench.floors import Machine, measure_machine, round_floor
from paceline.bench.local import LocalBackend
from paceline.bench.profile import profile
from paceline.bench.sections import Study
from paceline.sampling_params import SamplingParams

PROFILED_PROMPTS = 2  # of each set: some hundred steps an arm


def make_study(
    arms: Sequence[Arm],
    lines: Sequence[str],
    rows: list[dict[str, Any]],
    sets: Mapping[str, Sequence[BenchPrompt]],
    params: SamplingParams,
    settings: str,
    price: float | None = None,
    synthetic: bool = False,
) -> Study:
    """The study of a benchmark that has just run. Times the parts of a round, which takes a few seconds more."""
    sample = [prompt for prompts in sets.values() for prompt in prompts[:PROFILED_PROMPTS]]
    local = next((arm.backend for arm in arms if isinstance(arm.backend, LocalBackend)), None)
    machine = None if local is None else measure_machine(local)
    rounds = profile(arms, sample, params)
    for row in rounds:
        if local is not None and machine is not None and isinstance(row["k"], int):
            row["floor"] = 1e3 * round_floor(local, machine, row["k"])
    return Study(
        machine_facts(local, machine, lines, settings), rows, rounds, prediction_rows(rows, arms), price, synthetic
    )


def machine_facts(
    local: LocalBackend | None, machine: Machine | None, lines: Sequence[str], settings: str
) -> dict[str, str]:
    """What a reader needs to judge the figures by: processor, path, threads, bandwidth, settings, version, date."""
    facts = {f"arm {i + 1}" if len(lines) > 1 else "engine": line for i, line in enumerate(lines)}
    facts["processor"] = processor()
    if local is not None and machine is not None:
        facts["instruction set path"] = local.llm.model.isa
        facts["machine"] = f"reads {machine.bandwidth:.1f} GB/s, computes {machine.peak:.0f} GFLOP/s, after the run"
    facts["measured"] = settings
    facts["version"] = f"paceline {version('paceline')}, {platform.system()} {platform.machine()}, {date.today()}"
    return facts


def processor() -> str:
    """The processor's name and how many logical processors there are."""
    names = []
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        pass
    return f"{names[0]} ({len(names)} logical processors)" if names else platform.processor() or platform.machine()
