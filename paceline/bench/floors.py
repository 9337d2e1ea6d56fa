"""The least time that memory and arithmetic allow a round: max(bytes / bandwidth, operations / peak) of its passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.bench.local import LocalBackend
from paceline.bench.synthetic import SyntheticDrafter
from paceline.speculation.dflash import DFlashProposer

CONTEXT = 160  # tokens that a sequence has on average in a short benchmark


@dataclass(frozen=True, slots=True)
class Machine:
    """GB/s of a plain read loop and GFLOP/s of the kernels' own instruction, all threads."""

    bandwidth: float
    peak: float

    def floor(self, cost: tuple[float, float]) -> float:
        """Seconds for (bytes, operations)."""
        return max(cost[0] / (self.bandwidth * 1e9), cost[1] / (self.peak * 1e9))


def measure_machine(backend: LocalBackend) -> Machine:
    """Best of two of each, with the threads of the model."""
    import paceline._native as _native
    from paceline.bench.kernels import READ_BYTES

    model = backend.llm.model
    reads = [_native.measure_read_bandwidth(model.pool, READ_BYTES, model.isa) for _ in range(2)]
    peaks = [_native.measure_peak(model.pool, model.isa, model.f32, weights=model.weight_type) for _ in range(2)]
    return Machine(max(reads), max(peaks))


def draft_cost(proposer: DFlashProposer, drafts: int, context: int = CONTEXT) -> tuple[float, float]:
    """(bytes, operations) of a draft: two context rows, and a block of drafts + 1 slots, all but one with logits."""
    weights, config = proposer.drafter.weights, proposer.drafter.config.decoder
    stack = [w for layer in weights.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    gated = sum(layer.gate_up.n * layer.gate_up.k for layer in weights.layers)  # n counts pairs of rows there
    block = sum(w.n * w.k for w in stack) + gated
    head = weights.head
    element = 4 if proposer.drafter.target.f32 else 2
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * element * (context + drafts + 1)
    operations = 2 * (block * (drafts + 1) + head.n * head.k * drafts + 2 * weights.fc.n * weights.fc.k)
    return weights.fc.nbytes + sum(w.nbytes for w in stack) + head.nbytes + cache, operations


def round_floor(backend: LocalBackend, machine: Machine, drafts: int) -> float:
    """Seconds of the floors of a verify pass of drafts + 1 rows and of the draft pass, if there is one."""
    seconds = machine.floor(backend.llm.pass_cost(drafts + 1, CONTEXT))
    proposer: Any = backend.llm.engine.proposer
    if isinstance(proposer, SyntheticDrafter):
        proposer = proposer.inner
    if drafts and isinstance(proposer, DFlashProposer):
        seconds += machine.floor(draft_cost(proposer, drafts))
    return seconds
