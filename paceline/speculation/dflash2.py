"""The DFlash 2 drafter in the step loop: a walk through the best tokens of each slot, in one native call."""

from __future__ import annotations

import numpy as np

from paceline.models.dflash2 import DFlash2Drafter
from paceline.sampling import DraftProbs
from paceline.speculation.dflash import Blocks, DFlashProposer, Drawn


class DFlash2Proposer(DFlashProposer):
    """Coupled: drafts are drawn with the target's noise of the candidates. Rejection: they come with their sparse
    distributions, the candidates' ids and chances; every other token has none."""

    drafter: DFlash2Drafter

    def _draw(self, blocks: Blocks) -> Drawn:
        if self.drafter.selector is None:
            return super()._draw(blocks)
        tokens, ids, _, probs = self.drafter.selector.draft(
            blocks.logits,
            blocks.features,
            blocks.anchors,
            blocks.counts,
            blocks.states,
            self._ids,
            self.sampler == "rejection",
        )
        ends = np.cumsum(blocks.counts).tolist()
        drafts = [tokens[end - count : end] for end, count in zip(ends, blocks.counts, strict=True)]
        return Drawn(drafts, None if probs is None else DraftProbs(probs, ids))
