"""The step loop: schedule, propose, verify, accept, commit.

A step is one pass of the target over the rows of all running sequences: a chunk of prompt, or an anchor and its drafts.
Speculation is a transaction: rows of rejected drafts stay in the cache behind the committed end, where nothing reads
them before the next pass overwrites them, and nothing else has seen the drafts.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.branches import Branches, Copy, grow
from paceline.cache import BlockPool, blocks_for, check_room, stack_tables
from paceline.errors import CapacityError, ConfigError, EngineError
from paceline.models.target import TargetModel
from paceline.recurrent import RecurrentStates, StatePlan
from paceline.recurrent_pass import RecurrentPass
from paceline.request import Sequence
from paceline.sampling import NO_TOKEN, SamplerMode, token_logprobs, verify, walk_rows
from paceline.scheduler import Scheduler
from paceline.speculation.drafting import Drafter, Proposal, trim_to_masks
from paceline.speculation.length import DraftLengthPolicy
from paceline.speculation.stats import SpecDecodeStats
from paceline.structured.passes import bitmask, trim_drafts

log = logging.getLogger(__name__)

WARN_AFTER_DRAFTS = 200
SCORED_BYTES = 64 << 20  # of logits of prompts in one pass, where prompt_logprobs asks for them: longer chunks wait
DAMAGED = "the model's logits are not finite: its weights are damaged or overflow in this dtype"
EXPECTED_TOKENS = 64  # that a request is taken to have before it still, at least
WARN_BELOW_LENGTH = 1.15  # a healthy drafter stays far above; a wrong pairing or template sits near 1


@dataclass(slots=True)
class StepResult:
    """What a step added to a sequence: committed ids, which of them were drafts, text that may be shown. num_drafts,
    num_accepted: how far the drafts of the pass reached and how many the model agreed with, before a stop cuts them."""

    sequence: Sequence
    token_ids: list[int]
    accepted: list[bool]
    text: str
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class RoundSeconds:
    """Where the time of all steps went: making drafts, the model's pass, choosing tokens and committing them
    (sampling, stops, the drafter's look at the pass), and deciding who takes part."""

    draft: float = 0.0
    forward: float = 0.0
    commit: float = 0.0
    schedule: float = 0.0

    def add(self, begin: float, draft: float, scheduled: float, passed: float, end: float) -> None:
        """One step by its clock: when it began, was scheduled, had its logits, and ended; draft: seconds of drafting
        while it was scheduled."""
        self.draft += draft
        self.schedule += scheduled - begin - draft
        self.forward += passed - scheduled
        self.commit += end - passed


@dataclass(slots=True)
class _Work:
    """One sequence's part of a pass: rows for `tokens`, of which the last `rows_wanted` need logits to draw from.
    scored: rows of its prompt that need logits for prompt_logprobs."""

    sequence: Sequence
    tokens: list[int]
    drafts: list[int]
    rows_wanted: int
    tapped: bool = False  # the drafter sees its rows
    tree: Branches | None = None  # drafts are its nodes, in the order of its rows
    found: bool = False  # drafts were at hand, and say nothing of the drafter
    scored: range = range(0)


class Engine:
    """Runs sequences on a target model. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        model: TargetModel,
        *,
        proposer: Drafter | None,
        max_model_len: int,
        max_num_seqs: int,
        kv_blocks: int,
        sampler: SamplerMode = "coupled",
        prefix_caching: bool = True,
        states: StatePlan | None = None,
    ) -> None:
        """kv_blocks: the cache's size in blocks of 16 tokens; a drafter's cache grows with it. states: how many a
        recurrent model keeps; None: one for each sequence, and no snapshots.

        Raises CapacityError or ConfigError when they leave nothing to run on.
        """
        if kv_blocks < blocks_for(2):
            raise CapacityError("kv_cache_space: no room for a single block; give more memory")
        if max_num_seqs > model.max_rows:
            raise ConfigError(
                f"max_num_seqs: {max_num_seqs} sequences need as many rows, a pass of this model has {model.max_rows}; "
                "lower it or raise max_num_batched_tokens"
            )
        self.model = model
        self.proposer = proposer
        self.sampler = sampler
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.pool = BlockPool(kv_blocks)
        self.cache = model.new_cache(kv_blocks)
        self.states: RecurrentStates | None = None
        if model.recurrent:
            plan = states or StatePlan(running=max_num_seqs)
            self.states = RecurrentStates(model.new_states(plan.running + plan.snapshots), plan.running)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            prefix_caching=prefix_caching,
            states=self.states,
            tap_again=self._tap_again,
            keep=self._uncached_tokens,
            on_preempt=self._forget_drafts,
        )
        self.stats = SpecDecodeStats()  # of all sequences so far
        self.round_seconds = RoundSeconds()
        self.lengths = DraftLengthPolicy()
        self._recurrent: RecurrentPass | None = None  # of the step that runs
        self._process = os.getpid()
        self._stepping = False
        self._draft_seconds = 0.0  # of the step that runs
        self._scratch: list[int] = []  # blocks that branches of trees have in the step that runs
        self._doomed: list[Sequence] = []  # to be aborted when the step that runs is over
        self._warned = False
        self._logits = np.empty((0, model.vocab_size), np.float32)
        self._taps = np.empty((0, 0), np.float32)
        if proposer is not None:
            proposer.bind(kv_blocks, max_num_seqs)
            self.scheduler.taps_are_shared = not proposer.window
            grows = getattr(proposer, "tree_budget", None) is not None
            self.lengths.confident = getattr(proposer, "confident", False)
            self.lengths.whole = grows or self.lengths.confident

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ConfigError or CapacityError when it can never run."""
        if not sequence.token_ids:
            raise ConfigError("prompt: empty; give at least one token")
        check_room(sequence.num_prompt_tokens, sequence.most_tokens, self.max_model_len, self.pool.size)
        self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence; its blocks are free again when this returns or, called from inside a step (a stream that the
        garbage collector or a signal handler closes), when the step does."""
        if self._stepping:
            self._doomed.append(sequence)
            return
        if sequence not in self.running and sequence not in self.waiting:
            return
        sequence.stopper.flush()
        sequence.aborted = True
        self._release(sequence)

    @property
    def waiting(self) -> deque[Sequence]:
        """Sequences that wait for room, the next one first."""
        return self.scheduler.waiting

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold cache blocks, in order of admission."""
        return self.scheduler.running

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def step(self) -> list[StepResult]:
        """One pass. Returns what it added, in order of admission; [] when there is nothing to do.

        Raises EngineError when called from inside a step or in a forked child, and for output that is not finite.
        """
        if os.getpid() != self._process:
            raise EngineError(
                "this model was loaded before a fork, which leaves its threads behind; load it in the child"
            )
        if self._stepping:
            raise EngineError(
                "a step is running: generate cannot be called from a signal handler or finalizer inside it"
            )
        self._stepping = True
        begin = time.perf_counter()
        try:
            self.scheduler.admit()
            work, proposal = self._schedule()
            if not work:
                return []
            self._recurrent = RecurrentPass(self.states, self.scheduler.prefix_caching) if self.states else None
            with self._recurrent or nullcontext():
                scheduled = time.perf_counter()
                logits, taps = self._forward(work)
                passed = time.perf_counter()
                results = self._commit(work, proposal, logits, taps)
            end = time.perf_counter()
            self.round_seconds.add(begin, self._draft_seconds, scheduled, passed, end)
            self._learn_cost(work, end - begin)
            return results
        finally:
            self._stepping = False
            self.pool.give(self._scratch)
            self._scratch = []
            while self._doomed:
                self.abort(self._doomed.pop())
            if not self.busy:
                self.pool.check_idle()

    def check(self, *, index: bool = True) -> None:
        """Integrity of the caches: every block is free or held by those who say so, and the index of contents (unless
        `index` is False) agrees. Raises AssertionError."""
        self.pool.check([s.block_ids for s in self.running], index=index)
        if self.states is not None:
            self.states.check([s.state_slot for s in self.running if s.state_slot is not None])
        assert not any(s.block_ids for s in self.waiting), "a waiting sequence holds blocks"

    def reset_prefix_cache(self) -> None:
        """Forget the content of blocks that no sequence holds; those that are held are not found any more either."""
        self.pool.forget_all()

    # ---- what a drafter needs of a sequence

    def _follows(self, sequence: Sequence) -> bool:
        """Whether the drafter should see a sequence's rows now: not where drafts would not pay anyway."""
        if self.proposer is None or not self.proposer.taps or not sequence.max_drafts:
            return False
        return sequence.fixed_drafts or self.lengths.worthwhile

    def _uncached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a drafter must see again although their blocks are known: its own ring of rows is not shared."""
        return self.proposer.window if self.proposer is not None and self._follows(sequence) else 0

    def _up_to_date(self, sequence: Sequence) -> bool:
        """Whether the drafter has seen every row that is computed, or needs none."""
        return self.proposer is None or not self.proposer.taps or sequence.num_tapped == sequence.num_computed

    def _catch_up(self, sequence: Sequence) -> None:
        """Compute the rows again that a drafter missed while drafts did not pay, if the tokens to come are worth it."""
        if sequence.num_computed == sequence.num_tapped:
            return
        first = self.scheduler.restart_rows(sequence, sequence.num_tapped)
        if self._tap_again(sequence, sequence.num_computed - first):
            sequence.num_catch_ups += 1
            self.scheduler.restart(sequence, sequence.num_tapped)

    def _tap_again(self, sequence: Sequence, missed: int) -> bool:
        """Whether it pays to compute known rows once more so that the drafter sees them. Each time, less easily."""
        if not self._follows(sequence):
            return False
        if sequence.fixed_drafts:
            return True
        to_come = min(sequence.stopper.remaining, max(EXPECTED_TOKENS, sequence.num_output_tokens))
        saved = self.lengths.saved(max(1, len(self.running)), sequence.max_drafts) * to_come
        return saved > (2 << sequence.num_catch_ups) * missed * self.lengths.verify.row_seconds

    def _forget_drafts(self, sequence: Sequence) -> None:
        if self.proposer is not None:
            self.proposer.finish(sequence)

    # ---- schedule

    def _schedule(self) -> tuple[list[_Work], Proposal]:
        """Who takes part in the next pass: decoding sequences first, then prompts in chunks as rows are left."""
        self.scheduler.restart_stale()
        for sequence in [s for s in self.running if not s.is_prefill]:
            if sequence in self.running:  # an earlier one may have taken its blocks
                self.scheduler.reserve(sequence, len(sequence.token_ids))
        if self.proposer is not None:
            if not self.lengths.worthwhile and self.running:
                self.lengths.reconsider(len(self.running))
            decoding = [s for s in self.running if not s.is_prefill]
            for sequence in decoding if self.proposer.taps else ():
                self._catch_up(sequence)
        decoding = [s for s in self.running if not s.is_prefill]
        prompts = [s for s in self.running if s.is_prefill]
        rows = self.model.max_rows - len(decoding)
        missing = sum(len(s.token_ids) - s.num_computed for s in prompts)
        limits = [s.draft_room if self._up_to_date(s) else 0 for s in decoding]
        found = self._found(decoding, limits)
        asks = getattr(self.proposer, "asks", True)
        limits = [len(row) or (limit if asks else 0) for row, limit in zip(found, limits, strict=True)]
        # drafts leave a part of the pass to prompts, so that these never starve
        while sum(limits) > rows - min(missing, -(-rows // 2)):
            limits = [limit // 2 for limit in limits]
        proposal, room = Proposal([[] for _ in decoding]), list(limits)
        if self.proposer is not None and any(limits):
            proposal = self._propose(decoding, limits, found, min(missing, rows))
        trim_to_masks([s.state for s in decoding], proposal)
        if any(s.grammar is not None for s in decoding):
            room = [
                self.scheduler.reserve_drafts(s, n) if s.grammar else 0 for s, n in zip(decoding, room, strict=True)
            ]
            proposal = trim_drafts([s.grammar for s in decoding], proposal, room)
        if any(s.grammar is not None for s in self.running):
            proposal.trees = None  # a grammar's state follows one text
        trees = self._grow(decoding, proposal, rows - min(missing, -(-rows // 2)), min(missing, rows))
        work = []
        for sequence, drafts, tree, at_hand in zip(decoding, proposal.drafts, trees, found, strict=True):
            drafts = drafts if tree is None else tree.rows.tokens
            tokens = [sequence.token_ids[-1], *drafts]
            work.append(_Work(sequence, tokens, drafts, len(tokens), tree=tree, found=bool(at_hand)))
            rows -= len(drafts)
        to_score = max(1, SCORED_BYTES // (4 * self.model.vocab_size))
        for sequence in prompts:
            start, wanted = sequence.num_computed, sequence.rows_to_score
            end = min(len(sequence.token_ids), start + rows)
            if start < sequence.num_tapped < end:  # the drafter goes on from there
                end = sequence.num_tapped
            if wanted:
                end = min(end, max(start, wanted.start) + to_score)
            if start < end:
                whole = end == len(sequence.token_ids)
                scored = range(max(start, wanted.start), min(end, wanted.stop)) if wanted else wanted
                work.append(_Work(sequence, sequence.token_ids[start:end], [], 1 if whole else 0, scored=scored))
                rows -= end - start
                to_score -= len(scored)
        return work, proposal

    def _found(self, sequences: list[Sequence], limits: list[int]) -> list[list[float]]:
        """Survival of drafts that are at hand, per sequence; empty where there are none or the drafter is asked, which
        may be for limits[i] drafts."""
        # of a Finder; isinstance of a Protocol takes tens of microseconds behind a pass
        find: Callable[..., list[list[float]]] | None = getattr(self.proposer, "find", None)
        if find is None or not sequences:
            return [[] for _ in sequences]
        rooms = [s.draft_room for s in sequences]
        free = [room for s, room in zip(sequences, rooms, strict=True) if room and not s.fixed_drafts]
        if free and not self.lengths.looks(len(sequences), sum(free)):
            rooms = [room if s.fixed_drafts else 0 for s, room in zip(sequences, rooms, strict=True)]
        awake = self.lengths.worthwhile
        able = [limit > 0 and (s.fixed_drafts or awake) for s, limit in zip(sequences, limits, strict=True)]
        return find(sequences, rooms, able)

    def _propose(
        self, sequences: list[Sequence], limits: list[int], found: list[list[float]], other_rows: int
    ) -> Proposal:
        """Drafts of at most limits[i] tokens: so many where a request fixed the number, as many as pay elsewhere.
        found: survival of those that are at hand. other_rows: rows of prompts in the same pass."""
        assert self.proposer is not None
        free = [i for i, s in enumerate(sequences) if not s.fixed_drafts and limits[i]]
        everybody = len(free) == len(sequences)  # is free, mostly: lists are taken as they are
        named = [sequences[i].request_id for i in free]
        if free:
            others = other_rows
            if not everybody:
                others += sum(limits) + len(limits) - sum(limits[i] + 1 for i in free)
            at_hand = [found[i][: limits[i]] for i in free] if any(found) else ()
            wanted = limits if everybody else [limits[i] for i in free]
            lengths = self.lengths.choose(named, wanted, others, at_hand, len(sequences))
            for i, length in zip(free, lengths, strict=True):
                limits[i] = length
        for i, sequence in enumerate(sequences):
            limits[i] = self.scheduler.reserve_drafts(sequence, limits[i]) if limits[i] else 0
        if not any(limits):
            return Proposal([[] for _ in sequences])
        begin = time.perf_counter()
        proposal = self.proposer.propose(sequences, limits)
        self._draft_seconds = time.perf_counter() - begin
        if proposal.confidence is not None and free:
            drafts, chances, others = proposal.drafts, proposal.confidence, other_rows
            if not everybody:
                others += sum(len(d) + 1 for i, d in enumerate(drafts) if i not in free)
                drafts, chances = [drafts[i] for i in free], [chances[i] for i in free]
            self.lengths.trim(named, drafts, chances, others)
        rows = sum(limit + 1 for limit, at_hand in zip(limits, found, strict=True) if limit and not at_hand)
        if rows:
            self.lengths.observe_draft(rows, getattr(self.proposer, "context_rows", 0), self._draft_seconds)
        return proposal

    def _grow(self, sequences: list[Sequence], proposal: Proposal, room: int, other_rows: int) -> list[Branches | None]:
        """Trees for sequences that have one, as large as is wanted and fits; one without branches becomes the
        sequence's drafts. room: rows for all drafts."""
        trees = [None] * len(sequences) if proposal.trees is None else proposal.trees
        found = {i: tree for i, tree in enumerate(trees) if tree is not None}
        out: list[Branches | None] = [None] * len(sequences)
        if not found:
            return out
        sizes = [len(tree) for tree in found.values()]
        if getattr(self.proposer, "tree_budget", None) == "auto":
            drafted = sum(len(proposal.drafts[i]) for i in found)
            named = {sequences[i].request_id: tree for i, tree in found.items()}
            sizes = self.lengths.tree_sizes(named, drafted, other_rows + len(sequences) - len(found))
        room -= sum(len(drafts) for i, drafts in enumerate(proposal.drafts) if i not in found)
        wanted = [(tree, sequences[i].num_computed, sequences[i].blocks) for i, tree in found.items()]
        for i, (drafts, branches) in zip(found, grow(wanted, sizes, room, self.pool), strict=True):
            proposal.drafts[i], out[i] = drafts, branches
            self._scratch += [] if branches is None else branches.scratch
        return out

    def _learn_cost(self, work: list[_Work], seconds: float) -> None:
        """What a step cost beside its drafts, if no prompt was in it: by this the draft length is chosen."""
        if all(item.rows_wanted == len(item.tokens) for item in work):
            drafts = sum(len(item.drafts) for item in work)
            self.lengths.observe_step(sum(len(item.tokens) for item in work), drafts, seconds - self._draft_seconds)
        self._draft_seconds = 0.0

    # ---- verify

    def _forward(self, work: list[_Work]) -> tuple[np.ndarray, np.ndarray | None]:
        """Logits [rows wanted, then rows scored, vocab] and, where a drafter listens, taps [rows, width]. Buffers are
        reused."""
        starts = [0]
        tokens: list[int] = []
        positions: list[int] = []
        select: list[int] = []
        scored: list[int] = []
        tables: list[np.ndarray] = []
        mirrors: list[tuple[int, int]] = []
        copies: list[Copy] = []
        for item in work:
            first, begin = item.sequence.num_computed, starts[-1]
            end = begin + len(item.tokens)
            tokens += item.tokens
            select += range(end - item.rows_wanted, end)
            scored += range(begin + item.scored.start - first, begin + item.scored.stop - first) if item.scored else ()
            if item.tree is None:
                assert item.sequence.blocks is not None
                positions += range(first, first + len(item.tokens))
                tables.append(item.sequence.blocks)
                starts.append(end)
                continue
            positions += item.tree.positions
            mirrors += item.tree.mirrors(begin, len(tables))
            copies += item.tree.copies
            tables += item.tree.tables
            starts += [begin + branch.end for branch in item.tree.rows.branches]
        select += scored
        if len(self._logits) < len(select):
            self._logits = np.empty((len(select), self.model.vocab_size), np.float32)
        layers = self._tapped_layers(work)
        taps = self._tap_buffer(len(tokens), len(layers))
        recurrent: dict[str, Any] = {}
        if self._recurrent is not None:
            recurrent = self._recurrent.arguments([(w.sequence, len(w.tokens), bool(w.drafts)) for w in work])
        self.model.plan(layers).forward(
            self.cache,
            positions,
            starts,
            tokens=tokens,
            block_tables=stack_tables(tables),
            select=select,
            logits=self._logits,
            taps=taps,
            **recurrent,
            mirrors=np.array(mirrors, np.int32) if mirrors else None,
            copies=np.array(copies, np.int32) if copies else None,
        )
        return self._logits[: len(select)], taps

    def _tapped_layers(self, work: list[_Work]) -> tuple[int, ...]:
        for item in work:
            item.tapped = self._follows(item.sequence) and self._up_to_date(item.sequence)
        return self.proposer.taps if self.proposer is not None and any(item.tapped for item in work) else ()

    def _tap_buffer(self, rows: int, layers: int) -> np.ndarray | None:
        if not layers:
            return None
        width = layers * self.model.config.hidden_size
        if self._taps.shape[0] < rows or self._taps.shape[1] != width:
            self._taps = np.empty((rows, width), np.float32)
        return self._taps

    # ---- accept and commit

    def _commit(
        self,
        work: list[_Work],
        proposal: Proposal,
        logits: np.ndarray,
        taps: np.ndarray | None,
    ) -> list[StepResult]:
        sampled = [item for item in work if item.rows_wanted]
        num_sampled = sum(item.rows_wanted for item in sampled)
        if num_sampled < len(logits):
            _score(work, logits[num_sampled:])
            logits = logits[:num_sampled]
        states = [item.sequence.state for item in sampled]
        # prompts that end in this pass come behind the decoding sequences and have no drafts
        drafts = [item.drafts for item in sampled]
        paths: list[Seq[int]]  # of each, the rows whose tokens are committed, counted from its own first one
        if any(item.tree is not None for item in sampled):
            paths, committed = self._walk(sampled, logits)
        else:
            allowed = bitmask([(item.sequence.grammar, item.drafts) for item in sampled])
            committed = []
            if sampled:
                committed = verify(
                    logits,
                    states,
                    drafts,
                    allowed,
                    mode=self.sampler,
                    draft_probs=proposal.probs,
                    pool=self.model.pool,
                )
            paths = [range(len(tokens)) for tokens in committed]
        _check_finite(logits, committed, paths, drafts)
        now = time.perf_counter()
        results, row, taken = [], 0, iter(zip(committed, paths, strict=True))
        observed: list[tuple[Sequence, int, np.ndarray]] = []
        end = 0
        for item in work:
            sequence = item.sequence
            first = sequence.num_computed
            path: Seq[int] = range(len(item.tokens))
            if item.rows_wanted:
                tokens, path = next(taken)
                result = self._take(item, tokens, logits, [row + r for r in path], now)
                row += item.rows_wanted
                results.append(result)
                rows = len(item.tokens) if not item.drafts else len(result.token_ids)
            else:
                rows = len(item.tokens)
            sequence.num_computed = first + rows
            if item.tapped and rows:
                assert taps is not None
                # rows of rejected drafts are passed over
                own = taps[end : end + rows] if item.tree is None else taps[[end + r for r in path[:rows]]]
                observed.append((sequence, first, own))
                sequence.num_tapped = first + rows
            end += len(item.tokens)
        if self._recurrent is not None:
            self._recurrent.commit(self.model.isa)
        if observed and self.proposer is not None:
            self.proposer.observe(observed)
            self._warn_of_collapse()
        for item in work:
            self.scheduler.publish(item.sequence)
        for result in results:
            if result.sequence.finish_reason is not None:
                self._release(result.sequence)
        return results

    def _walk(self, sampled: list[_Work], logits: np.ndarray) -> tuple[list[Seq[int]], list[list[int]]]:
        """Follow the target's draws down every tree (drafts in a row are one, too), and bring the keys and values of
        the accepted path to where the sequence's own are: paths and committed tokens."""
        parents = [list(range(len(item.drafts))) if item.tree is None else item.tree.rows.parents for item in sampled]
        found = walk_rows(logits, [item.sequence.state for item in sampled], [i.drafts for i in sampled], parents)
        for item, (path, _) in zip(sampled, found, strict=True):
            if item.tree is not None:
                for source, to, slot, count in item.tree.moves(path):
                    self.cache.copy_rows(source, to, slot, count)
                self.lengths.observe_tree(item.tree.chances, len(path) - 1)
        return [path for path, _ in found], [tokens for _, tokens in found]

    def _take(self, item: _Work, tokens: list[int], logits: np.ndarray, rows: list[int], now: float) -> StepResult:
        """Commit what stops let through of one sequence's tokens; rows: those of the logits that they came from."""
        sequence = item.sequence
        accepted = len(tokens) - 1
        stop = sequence.stopper.feed(tokens)
        kept = tokens[: stop.num_tokens]
        drafted = proposed = len(item.drafts) if item.tree is None else item.tree.rows.depth
        for stats in (sequence.stats, self.stats):
            stats.observe(drafted, accepted, len(kept), len(item.drafts), found=item.found)
        if sequence.params.logprobs is not None:
            sequence.logprobs += token_logprobs(logits, rows[: len(kept)], kept, sequence.params.logprobs)
        if item.found:
            self.lengths.settle(sequence.request_id, len(item.drafts), accepted)
        if sequence.grammar is not None:  # the drafter is judged by its own drafts: trimmed ones too, forced ones not
            drafted, accepted = sequence.grammar.drafted, min(accepted, sequence.grammar.kept)
        if not item.found:
            self.lengths.observe(sequence.request_id, drafted, accepted)
        sequence.token_ids += kept
        sequence.state.commit(kept)
        if not sequence.first_token:
            sequence.first_token = now
        sequence.last_token = now
        flags = [i < len(tokens) - 1 for i in range(len(kept))]
        return StepResult(sequence, kept, flags, stop.text, proposed, len(tokens) - 1)

    def _warn_of_collapse(self) -> None:
        """Say once that a trained drafter is hardly ever right: the pairing may be wrong in a way no check can see."""
        if self._warned or self.stats.num_drafts < WARN_AFTER_DRAFTS:
            return
        self._warned = True
        if self.stats.acceptance_length < WARN_BELOW_LENGTH:
            log.warning(
                "acceptance length is %.2f after %d drafts: the drafter hardly helps. Was it trained for this exact "
                "model, chat template and mode (thinking or not)? Output is right either way; it is only not faster.",
                self.stats.acceptance_length,
                self.stats.num_drafts,
            )

    def _release(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.lengths.finish(sequence.request_id)
        self._forget_drafts(sequence)


def _score(work: list[_Work], logits: np.ndarray) -> None:
    """Log-probabilities of prompts' tokens. logits: of the rows scored, in order of the work."""
    first = 0
    for sequence, scored in ((item.sequence, item.scored) for item in work if item.scored):
        count = sequence.params.prompt_logprobs
        assert count is not None
        following = sequence.token_ids[scored.start + 1 : scored.stop + 1]
        entries = token_logprobs(logits, range(first, first + len(scored)), following, count)
        if any(math.isnan(entry.logprob) for entry in entries):
            raise EngineError(DAMAGED)
        sequence.prompt_logprobs += entries
        first += len(scored)


def _check_finite(logits: np.ndarray, committed: Seq[Seq[int]], paths: Seq[Seq[int]], drafts: Seq[Seq[int]]) -> None:
    """A chosen token whose own logit is not finite comes from damaged weights (or an overflow), not from the model."""
    first = 0
    for block, path, drafted in zip(committed, paths, drafts, strict=True):
        pairs = zip(path, block, strict=True)
        if not all(token == NO_TOKEN or math.isfinite(logits.item(first + row, token)) for row, token in pairs):
            raise EngineError(DAMAGED)
        first += len(drafted) + 1
