"""The DSpark drafter in the step loop: slots drawn one after the other in one native call, with their confidence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.models.dspark import DSparkDrafter
from paceline.sampling import DraftProbs, SamplerMode
from paceline.speculation.calibration import Calibration, read_calibration
from paceline.speculation.dflash import Blocks, DFlashProposer, Drawn


class DSparkProposer(DFlashProposer):
    """calibration: what turns the confidence head's logits into chances; the checkpoint's sidecar, else none needed.

    confidence_threshold: drafts from the first one on whose confidence is below it are dropped; what decides on a draft
    was computed before it was drawn, so the rule leaves every distribution as it is.
    """

    drafter: DSparkDrafter

    def __init__(
        self,
        drafter: DSparkDrafter,
        max_drafts: int,
        sampler: SamplerMode = "coupled",
        confidence_threshold: float | None = None,
    ) -> None:
        super().__init__(drafter, max_drafts, sampler)
        self.confident = drafter.config.confidence is not None
        self.confidence_threshold = confidence_threshold
        # of each block of the last pass: logits of the confidence head, and of the slots' likeliest tokens
        self.said: list[tuple[list[float], list[float]]] = []
        self.calibration = read_calibration(drafter.path) if self.confident else Calibration()

    def _arrange(self, slots: list[range]) -> list[int]:
        """Slot by slot over all sequences, long drafts first: each step of the Markov head is one run of rows."""
        if self.drafter.head is None:
            return super()._arrange(slots)
        order = _longest_first([len(rows) for rows in slots])
        longest = len(slots[order[0]])
        return [slots[i][step] for step in range(longest) for i in order if step < len(slots[i])]

    def _draw(self, blocks: Blocks) -> Drawn:
        drawn = self._draw_block(blocks)
        if self.confidence_threshold is None or drawn.confidence is None:
            return drawn
        return cut(drawn, drawn.confidence, self.confidence_threshold)

    def _draw_block(self, blocks: Blocks) -> Drawn:
        """All slots of all sequences, whatever the confidence."""
        if self.drafter.head is None:
            drawn = super()._draw(blocks)
            if self.confident:
                own = own_logits(blocks.logits) if self.calibration.mix else np.zeros(len(blocks.logits))
                ends = np.cumsum(blocks.counts).tolist()
                parts = [slice(end - count, end) for end, count in zip(ends, blocks.counts, strict=True)]
                values, sure = blocks.features[:, -1].tolist(), own.tolist()
                drawn.confidence = self._chances([values[part] for part in parts], [sure[part] for part in parts])
            return drawn
        order = _longest_first(blocks.counts)
        counts = [blocks.counts[i] for i in order]
        tokens, logits, probs, certain = self.drafter.head.draft(
            blocks.logits,
            blocks.features,
            [blocks.anchors[i] for i in order],
            counts,
            [blocks.states[i] for i in order],
            self._ids,
            self.sampler == "rejection",
        )
        if len(order) == 1:
            drawn = Drawn([tokens])
            if probs is not None:
                drawn.probs = self._probs(probs)
            if self.confident:
                drawn.confidence = self._chances([logits], [certain])
            return drawn
        places: list[list[int]] = [[] for _ in order]  # rows of each sequence
        row = 0
        for step in range(counts[0]):
            for i, count in zip(order, counts, strict=True):
                if step < count:
                    places[i].append(row)
                    row += 1
        drawn = Drawn([[tokens[r] for r in rows] for rows in places])
        if probs is not None:
            drawn.probs = self._probs(probs[[r for rows in places for r in rows]])
        if self.confident:
            drawn.confidence = self._chances(
                [[logits[r] for r in rows] for rows in places], [[certain[r] for r in rows] for rows in places]
            )
        return drawn

    def _probs(self, rows: np.ndarray) -> DraftProbs:
        ids = self.drafter.head_rows
        return DraftProbs(rows, None if ids is None else ids[None])

    def _chances(self, logits: Sequence[list[float]], own: Sequence[list[float]]) -> list[list[float]]:
        self.said = list(zip(logits, own, strict=True))
        return [self.calibration.chances(row, sure) for row, sure in self.said]


def own_logits(logits: np.ndarray) -> np.ndarray:
    """fp64 [rows]: the logit of the likeliest token's share in the softmax of each row of logits [rows, columns]."""
    apart = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return -np.log(np.maximum(apart.sum(1) - 1.0, 1e-6))


def _longest_first(counts: Sequence[int]) -> list[int]:
    return sorted(range(len(counts)), key=lambda i: -counts[i])


def cut(drawn: Drawn, confidence: Sequence[Sequence[float]], threshold: float) -> Drawn:
    """Without the drafts from the first one on whose confidence is below the threshold, and their distributions."""
    kept = [next((j for j, c in enumerate(row) if c < threshold), len(row)) for row in confidence]
    probs = drawn.probs
    if probs is not None:
        starts = np.cumsum([0, *map(len, drawn.drafts)])
        rows = [int(start) + j for start, count in zip(starts, kept, strict=False) for j in range(count)]
        probs = DraftProbs(probs.probs[rows], probs.ids)
    return Drawn(
        [row[:count] for row, count in zip(drawn.drafts, kept, strict=True)],
        probs,
        [list(row[:count]) for row, count in zip(confidence, kept, strict=True)],
    )
