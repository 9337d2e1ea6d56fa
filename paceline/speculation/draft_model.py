"""A smaller model with the same tokenizer as drafter: it drafts token by token (Leviathan et al. 2023).

Its cache has the target's block numbers. What a block of it holds is known by the tokens it was computed from, so rows
are reused exactly as far as they belong to a sequence's text, whoever computed them: after rejected drafts, steps
without drafts, preemptions, and in blocks that sequences share. What is missing is computed from the tokens when a
draft is asked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from paceline._native import KEYS_PER_BLOCK, IdMap, draft_step
from paceline.cache import stack_tables
from paceline.models.target import TargetModel
from paceline.sampling import DraftProbs, SamplerMode
from paceline.speculation.drafting import Proposal, SequenceView


class BlockContents:
    """Which tokens the rows of each cache block were computed from.

    A row is right for a text if its block's rows up to it hold the text's tokens and everything before the block is the
    text's beginning, by a running hash.
    """

    def __init__(self, blocks: int) -> None:
        self._tokens = np.full((blocks, KEYS_PER_BLOCK), -1, np.int64)
        self._before = np.zeros(blocks, np.int64)

    def valid_rows(self, text: Text, blocks: np.ndarray) -> int:
        """Rows from the beginning of `text` on that its blocks hold."""
        count = min(len(blocks), -(-len(text) // KEYS_PER_BLOCK))
        held = blocks[:count]
        known = self._before[held] == text.before(count)
        same = self._tokens[held] == text.blocks(count)
        whole = known & same.all(1)
        first = count if whole.all() else int(np.argmin(whole))
        rows = first * KEYS_PER_BLOCK
        if first < count and known[first]:
            rows += int(np.argmin(same[first]))
        return min(rows, len(text))

    def record(self, text: Text, blocks: np.ndarray, start: int, end: int) -> None:
        """Rows [start, end) of the text were computed; what followed them in their blocks is void."""
        first, last = start // KEYS_PER_BLOCK, (end - 1) // KEYS_PER_BLOCK + 1
        self._before[blocks[first:last]] = text.before(last)[first:]
        tokens = text.blocks(last)[first:].copy()
        tokens.reshape(-1)[end - first * KEYS_PER_BLOCK :] = -1
        self._tokens[blocks[first:last]] = tokens


class Text:
    """Tokens of a sequence as an array, with a running hash of what comes before each block."""

    def __init__(self) -> None:
        self._tokens = np.full(256, -2, np.int64)
        self._before = np.zeros(17, np.int64)
        self._length = 0
        self._committed = 0  # behind these stand drafts
        self._hashed = 1  # blocks whose _before is known; nothing comes before the first one
        self.highest = -1

    def __len__(self) -> int:
        return self._length

    def follow(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Become tokens + drafts. Committed tokens do not change: those that were given before are taken as known."""
        known = min(self._committed, len(tokens))
        self._tokens[known : self._length] = -2
        self._length = known
        self._hashed = min(self._hashed, known // KEYS_PER_BLOCK + 1)
        self._append(tokens[known:])
        self._committed = self._length
        self._append(drafts)

    def _append(self, new: Sequence[int]) -> None:
        if not new:
            return
        end = self._length + len(new)
        if end > len(self._tokens):
            more = -(-max(end, 2 * len(self._tokens)) // KEYS_PER_BLOCK) * KEYS_PER_BLOCK - len(self._tokens)
            self._tokens = np.concatenate([self._tokens, np.full(more, -2, np.int64)])
            self._before = np.concatenate([self._before, np.zeros(more // KEYS_PER_BLOCK, np.int64)])
        self._tokens[self._length : end] = new
        self.highest = max(self.highest, *new)
        self._length = end
        while self._hashed * KEYS_PER_BLOCK <= end:
            at = self._hashed
            block = self._tokens[(at - 1) * KEYS_PER_BLOCK : at * KEYS_PER_BLOCK]
            self._before[at] = hash((int(self._before[at - 1]), block.tobytes()))
            self._hashed += 1

    def tokens(self, start: int, end: int) -> np.ndarray:
        return self._tokens[start:end]

    def blocks(self, count: int) -> np.ndarray:
        """int64 [count, 16]; -2 behind the end."""
        return self._tokens[: count * KEYS_PER_BLOCK].reshape(count, KEYS_PER_BLOCK)

    def before(self, count: int) -> np.ndarray:
        return self._before[:count]


class DraftModelProposer:
    """`model` may have fewer ids than the target's vocabulary_size (padding, mostly): those are what it drafts."""

    name = "draft_model"
    taps: tuple[int, ...] = ()
    window = 0

    def __init__(self, model: TargetModel, vocab_size: int, max_drafts: int, sampler: SamplerMode = "coupled") -> None:
        self.model = model
        self.max_drafts = max_drafts
        self.sampler = sampler
        self.columns = min(model.vocab_size, vocab_size)
        ids = np.arange(self.columns, dtype=np.int32)
        self._ids = None if self.columns == vocab_size else IdMap(ids, vocab_size)
        self._listed = None if self._ids is None else ids[None]
        self._texts: dict[Hashable, Text] = {}

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        return self.model.new_cache(1).bytes_per_block * blocks

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        self._cache = self.model.new_cache(blocks)
        self._contents = BlockContents(blocks)

    def propose(self, sequences: Sequence[SequenceView], limits: Sequence[int]) -> Proposal:
        """Up to limits[i] drafts, one pass each behind the pass that catches up. A text with ids that this model does
        not have gets none."""
        drafts: list[list[int]] = [[] for _ in sequences]
        active = []
        for i, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            if limit > 0:
                text = self._texts.setdefault(sequence.request_id, Text())
                text.follow(sequence.token_ids)
                if text.highest < self.model.vocab_size:
                    active.append(i)
        probs: dict[int, list[np.ndarray]] = {i: [] for i in active}
        step = 0
        while active:
            logits = self._forward([sequences[i] for i in active], again=step == 0)
            filled = np.empty_like(logits) if self.sampler == "rejection" else None
            states = [sequences[i].state for i in active]
            tokens = draft_step(logits, states, [drafts[i] for i in active], self._ids, filled)
            for row, (i, token) in enumerate(zip(active, tokens, strict=True)):
                drafts[i].append(token)
                if filled is not None:
                    probs[i].append(filled[row])
            step += 1
            active = [i for i in active if step < limits[i]]
            for i in active:
                self._texts[sequences[i].request_id].follow(sequences[i].token_ids, drafts[i])
        rows = [row for i in sorted(probs) for row in probs[i]]
        return Proposal(drafts, DraftProbs(np.array(rows), self._listed) if rows else None)

    def _forward(self, sequences: Sequence[SequenceView], *, again: bool) -> np.ndarray:
        """Compute what is missing of each text, its last row in any case: float32 [sequences, columns] logits of that.

        again: the cache may hold less than all rows but the last one.
        """
        out = np.empty((len(sequences), self.model.vocab_size), np.float32)
        todo = []
        for i, sequence in enumerate(sequences):
            text, blocks = self._texts[sequence.request_id], _blocks(sequence)
            start = min(self._contents.valid_rows(text, blocks), len(text) - 1) if again else len(text) - 1
            todo.append((i, start))
        while todo:
            rows, part, rest = self.model.max_rows, [], []
            for i, start in todo:
                text = self._texts[sequences[i].request_id]
                end = min(len(text), start + rows)
                if end > start:
                    part.append((i, start, end))
                    rows -= end - start
                if end < len(text):
                    rest.append((i, end))
            self._pass(sequences, part, out)
            todo = rest
        return out if self.columns == out.shape[1] else np.ascontiguousarray(out[:, : self.columns])

    def _pass(self, sequences: Sequence[SequenceView], part: Sequence[tuple[int, int, int]], out: np.ndarray) -> None:
        """Rows [start, end) of some sequences; logits of those that reach the end of their text go to their row."""
        texts = [self._texts[sequences[i].request_id] for i, _, _ in part]
        starts = np.cumsum([0, *(end - start for _, start, end in part)]).astype(np.int32)
        whole = [(j, i) for j, (i, _, end) in enumerate(part) if end == len(texts[j])]
        logits = np.empty((len(whole), self.model.vocab_size), np.float32)
        self.model.plan().forward(
            self._cache,
            np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in part]),
            starts,
            tokens=np.concatenate([t.tokens(a, b) for t, (_, a, b) in zip(texts, part, strict=True)]).astype(np.int32),
            block_tables=stack_tables([_blocks(sequences[i]) for i, _, _ in part]),
            select=np.array([starts[j + 1] - 1 for j, _ in whole], np.int32),
            logits=logits,
        )
        for text, (i, start, end) in zip(texts, part, strict=True):
            self._contents.record(text, _blocks(sequences[i]), start, end)
        for row, (_, i) in enumerate(whole):
            out[i] = logits[row]

    def observe(self, items: Sequence[tuple[SequenceView, int, np.ndarray]]) -> None:
        """Tokens are all it needs."""

    def finish(self, sequence: SequenceView) -> None:
        """The sequence ended: forget its text. Its rows stay right for whoever has the same tokens."""
        self._texts.pop(sequence.request_id, None)


def _blocks(sequence: SequenceView) -> np.ndarray:
    blocks = sequence.blocks
    assert blocks is not None
    return blocks
