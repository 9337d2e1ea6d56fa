"""Who runs: admission in order of arrival, cache blocks for the rows of a pass, preemption when they run out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from paceline.cache import BLOCK_TOKENS, BlockPool, PrefixCacheStats, block_keys, blocks_for
from paceline.recurrent import RecurrentStates
from paceline.request import Sequence


class Scheduler:
    """Sequences that wait and those that run, and the blocks between them.

    A sequence is admitted when the blocks of its known tokens are free, and takes more as it grows. When none is left,
    the one that arrived last gives its blocks back and waits at the front of the queue; its rows are computed again
    later, with the same bits. Who arrived first is therefore never held up by others and always finishes.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        prefix_caching: bool = True,
        states: RecurrentStates | None = None,
        tap_again: Callable[[Sequence, int], bool] = lambda *_: False,
        keep: Callable[[Sequence], int] = lambda _: 0,
        on_preempt: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        """states: of a recurrent model; a sequence runs when there is one for it too.

        tap_again: whether a drafter needs so many known tokens of a sequence to be computed once more. keep: how
        many tokens at the end of what the cache knows must be computed all the same. on_preempt: called for a sequence
        whose blocks are gone."""
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.prefix_caching = prefix_caching
        self.states = states
        if states is not None:
            pool.on_evict = states.forget
        self.taps_are_shared = True  # a drafter's keys and values are in the blocks, not in rings of its own
        self.stats = PrefixCacheStats()
        self.num_preemptions = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._tap_again = tap_again
        self._keep = keep
        self._on_preempt = on_preempt
        self._arrivals = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._arrivals += 1
        sequence.order = self._arrivals
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out, wherever it is, and free its blocks. False when it is not here."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return False
        self._drop(sequence)
        return True

    def _drop(self, sequence: Sequence) -> None:
        self.pool.give(sequence.drop_blocks())
        if self.states is not None and sequence.state_slot is not None:
            self.states.give(sequence.state_slot)
            sequence.state_slot = None

    # ---- admission

    def admit(self) -> None:
        """Start waiting sequences, first come, first served, as long as there is room for their known tokens and one
        more block for each that runs."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if self._prompt_is_coming(sequence) or (self.states is not None and not self.states.free):
                return
            shared = self._cached_blocks(sequence)
            need = blocks_for(len(sequence.token_ids)) - len(shared)
            if need + len(self.running) > self.pool.room_beside(shared):
                return
            self.waiting.popleft()
            self._start(sequence, shared, need)

    def _prompt_is_coming(self, sequence: Sequence) -> bool:
        """Another choice of the same request computes the prompt now: in a moment it is in the cache."""
        if not self.prefix_caching or not sequence.group or len(sequence.token_ids) <= BLOCK_TOKENS:
            return False
        return any(s.group == sequence.group and s.is_prefill for s in self.running)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of its text. The last token is always computed: its logits are wanted."""
        if not self.prefix_caching:
            return []
        usable = (len(sequence.token_ids) - 1 - self._keep(sequence)) // BLOCK_TOKENS
        if usable <= 0:
            return []
        keys = block_keys(sequence.block_keys, sequence.token_ids, usable, sequence.cache_salt)
        found = self.pool.find(keys[:usable])
        if self.states is not None:
            self._plan_snapshots(sequence, usable, len(found))
            found = found[: self.states.known(keys[: len(found)])]
        if sequence.rows_to_score:
            found = found[: sequence.rows_to_score.start // BLOCK_TOKENS]
            found = found[: len(found) if self.states is None else self.states.known(keys[: len(found)])]
        if self.taps_are_shared:
            tapped = self.pool.num_tapped(found)
            if self.states is not None:
                tapped = self.states.known(keys[:tapped])
            missed = BLOCK_TOKENS * (len(found) - tapped)
            if missed and self._tap_again(sequence, missed):
                return found[:tapped]
        return found

    def _plan_snapshots(self, sequence: Sequence, usable: int, found: int) -> None:
        """States to keep while the prompt is read: at the last boundary that the same prompt would use again, with a
        drafter and without, and where the text leaves what the cache knows, which others may share as well."""
        ends = {usable, (len(sequence.token_ids) - 1) // BLOCK_TOKENS, *({found} if found < usable else ())}
        sequence.snapshot_rows = sorted(BLOCK_TOKENS * end for end in ends if end)

    def _start(self, sequence: Sequence, shared: list[int], need: int) -> None:
        self.pool.share(shared)
        if self.states is not None:
            sequence.state_slot = self.states.take()
            if self.states.load(sequence.state_slot, sequence.block_keys[: len(shared)]) != len(shared):
                raise AssertionError("the state of a shared beginning is missing")
        sequence.hold(shared)
        sequence.hold(self.pool.take(need))
        sequence.num_computed = BLOCK_TOKENS * len(shared)
        if self.taps_are_shared:
            sequence.num_tapped = BLOCK_TOKENS * self.pool.num_tapped(shared)
        else:
            sequence.num_tapped = sequence.num_computed if self._keep(sequence) else 0
        sequence.num_published = len(shared)
        self.running.append(sequence)
        if self.prefix_caching and sequence.num_cached is None:
            self.stats.queries += len(sequence.token_ids)
            self.stats.hits += sequence.num_computed
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            sequence.admitted = time.perf_counter()

    # ---- blocks of a pass

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for the first `tokens` rows of a running sequence, at the expense of later arrivals if need be. False
        when it had to give way itself."""
        while True:
            missing = blocks_for(tokens) - len(sequence.block_ids)
            if missing <= self.pool.free:
                if missing > 0:
                    sequence.hold(self.pool.take(missing))
                return True
            victim = max(self.running, key=lambda s: s.order)
            self._preempt(victim)
            if victim is sequence:
                return False

    def reserve_drafts(self, sequence: Sequence, drafts: int) -> int:
        """Blocks for as many of `drafts` rows behind the anchor as are free; returns how many that is."""
        known = len(sequence.token_ids)
        room = (len(sequence.block_ids) + self.pool.free) * BLOCK_TOKENS - known
        drafts = max(0, min(drafts, room))
        missing = blocks_for(known + drafts) - len(sequence.block_ids)
        if missing > 0:
            sequence.hold(self.pool.take(missing))
        return drafts

    def publish(self, sequence: Sequence) -> None:
        """Offer the blocks that became full of committed rows."""
        if not self.prefix_caching:
            return
        full = sequence.num_computed // BLOCK_TOKENS
        if full <= sequence.num_published:
            return
        keys = block_keys(sequence.block_keys, sequence.token_ids, full, sequence.cache_salt)
        for i in range(sequence.num_published, full):
            self.pool.publish(sequence.block_ids[i], keys[i], (i + 1) * BLOCK_TOKENS <= sequence.num_tapped)
        sequence.num_published = full

    def compute_again(self, sequence: Sequence, first: int) -> None:
        """Forget the rows of a running sequence from `first` on; the next passes compute them again, to the same
        bits, so that who shares their blocks does not notice."""
        sequence.num_computed = first
        sequence.num_published = min(sequence.num_published, first // BLOCK_TOKENS)

    def restart_rows(self, sequence: Sequence, at_most: int) -> int:
        """Where `restart` would begin."""
        if self.states is None:
            return at_most
        return BLOCK_TOKENS * self.states.known(sequence.block_keys[: at_most // BLOCK_TOKENS])

    def restart_stale(self) -> None:
        """Restart sequences whose state has seen rows that were not committed: they were in a pass that failed."""
        for sequence in self.running if self.states is not None else ():
            assert self.states is not None and sequence.state_slot is not None
            if self.states.rows(sequence.state_slot) != sequence.num_computed:
                self.restart(sequence, sequence.num_computed)

    def restart(self, sequence: Sequence, at_most: int) -> None:
        """Compute a running sequence's rows again from `at_most` on. What a recurrent state has seen cannot be taken
        back: there, from the longest state known that has not seen more."""
        if self.states is None:
            self.compute_again(sequence, at_most)
            return
        assert sequence.state_slot is not None
        keys = sequence.block_keys[: at_most // BLOCK_TOKENS]
        self.compute_again(sequence, BLOCK_TOKENS * self.states.load(sequence.state_slot, keys))

    def _preempt(self, sequence: Sequence) -> None:
        """Later arrivals than this one all wait, so the front of the queue is its place."""
        self.running.remove(sequence)
        self._drop(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self._on_preempt(sequence)
