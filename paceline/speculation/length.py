"""How many tokens to draft: the number that makes the most committed tokens per second, down to none.

A step that drafts k tokens commits 1 + sum of survival(j <= k) on average and takes T_draft + T_verify(rows). Both are
measured while running: costs in a table over rows, survival per position for each request, which starts from what
other requests of the same drafter showed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

from paceline._native import DraftMemory
from paceline.speculation.acceptance import FORGET, PRIOR_FORGET, TRUST_FORGET, TRUST_PRIOR, Trust
from paceline.speculation.allotment import admitted, best_lengths, likeliest, most_gain, slot_worths, survivals_of
from paceline.speculation.cost_table import KNOTS, REFIT_AFTER, TRUST, CostCurve, Costs, Pace, neighbours
from paceline.speculation.tree import DraftTree

DRAFT_SHARE = 0.12  # of a one-row pass: what a draft is taken to cost until one was timed
PROBE_DRAFTS = 2  # tokens of a draft that is made only to see whether drafting has become worthwhile
PROBE_SHARE = 0.01  # of the time goes to such probes
EXPLORE_SHARE = 0.001  # and as much each to passes of other sizes and to plain ones, so that their costs are known
NEW_SHARE = 0.003  # the same as long as costs are new
NEW_STEPS = 1000.0  # after which they are half as new
PLAIN_STEPS = 16  # in a row, when plain decoding is what is tried
SETTLED_AFTER = 12  # of them: until then caches are still filled with what drafts needed
MOST_CURIOSITY = 16.0  # steps whose time is saved up for these, at most
FAR = 4.0  # times as seldom, where drafts bring more than plain steps could turn out to be faster than they look
LEAST_PRICE = 0.1  # of a step, that such a pass counts as, whatever it is expected to cost
HOPE = 0.5  # of the rejections seen so far, if they were this many, a probe would have to pay to be made at all
GIVE_UP_AFTER = 8  # steps without such hope after which drafters are not kept up to date any more
FOLLOW_SHARE = 0.06  # of a step: what it takes that a drafter follows, which drafts have to earn on average
UPSIDE = 0.25  # that drafts would have to bring, were they as good as hoped, for a drafter to follow all the same
GAIN_STEPS = 32.0  # over which that is averaged
MARGIN = 0.08  # that drafts have to bring beyond plain steps, by what steps are seen to cost, for each further request
MARGIN_REQUESTS = 7  # up to so many
FRESH = 0.12  # that drafts are taken to bring when they are tried again after a rest
LOOK_AGAIN_EVERY = 32  # steps until that is reconsidered, sooner if much less runs
MOST_PATIENCE = 32  # times as long, if it was in vain before
NEWCOMERS = 48  # steps with drafts that are made to see sizes which few steps have shown
FEW = 3.0  # steps that have to have shown a size before a choice relies on it
WARM_UP = 16  # steps of a process that tell nothing of costs: memory is touched, caches fill, a core's clock rises
OPTION = 1.1  # times what averages promise that knowing chances in time is taken to be worth at first
MOST_SLOTS = 1 << 20
WHOLE_EVERY = 8  # choices of blocks, one of which has all slots; twice as many each time, up to
WHOLE_SELDOM = 32
MOST_OPTION = 2.0  # that one step can show
FADE = 0.97  # of what is known of acceptance, each time it is reconsidered
KEEP = 8  # steps that a choice is for at most: choosing takes time, too
LIKE = 0.03  # by which a draft's survival may have changed since then
LIKE_CUT = 0.1  # the same where drafts are cut to what is worth verifying once they are made


def _margin(requests: int) -> float:
    """What drafts for so many requests have to bring beyond what costs say: requests that end together share a pass for
    the prompts behind them, which drafts break up."""
    return MARGIN * min(requests - 1, MARGIN_REQUESTS)


def _no_seconds(_: int) -> float:
    return 0.0


class DraftLengthPolicy:
    """Chooses draft lengths for the requests of a step and learns from what became of them.

    Requests whose drafts do not pay are probed now and then, all of them in one step, when the time that plain steps
    have taken since has earned the cost of it. Where drafts would not pay even if they were much better than so far
    (many requests at once), there are no probes, and after a while `worthwhile` says that a drafter need not follow. It
    need not either where drafts bring less than following costs and could not bring much more.
    """

    def __init__(self) -> None:
        pace = Pace()
        self.verify: Costs = CostCurve(pace)
        self.draft: Costs = CostCurve(pace)
        self._memory = DraftMemory(FORGET, PRIOR_FORGET, TRUST_PRIOR, TRUST_FORGET)
        self.overall = self._memory.overall
        self.chosen: dict[int, int] = {}  # draft length -> how often
        self.worthwhile = True
        self.whole = False  # the drafter says how sure it is: draft a block or none, and cut what is doubtful
        self.confident = False  # and it says so of the drafts of a row, not only of a tree's
        self._planned = 0.0  # gain of the step's blocks over a plain step, by averages, before they were made
        self._option = OPTION  # how many times that comes of knowing what to cut, on average
        self._tree_trust = Trust()  # of the chances that the drafter gives its trees
        self._credit = 0.0  # seconds that may be spent on probes
        self._curiosity = 0.0  # seconds that may be spent on passes of other sizes
        self._newcomers = NEWCOMERS
        self._warming_up = WARM_UP
        self._worths: Sequence[float] = ()  # seconds that each slot of a block saves, on average
        self._weighed = 0.0  # blocks, at most those that count
        self._since_whole = 0  # choices
        self._whole_every = WHOLE_EVERY
        self._usual = MOST_SLOTS  # of a block of late
        self._plain_curiosity = 0.0  # and on a few plain steps in a row
        self._upwards = False
        self._kept: list[int] = []  # lengths that the memory may say are still good
        self._kept_until = 0  # changes of costs: from then on it is asked again whether drafts could pay at all
        self._passed = 0  # steps that have kept it
        self._elapsed = 1  # in a step that chooses, steps since the choice before; 0 in one that keeps it
        self._plain_steps = 0  # that are still to come, of those that are tried
        self._plain_run = 0  # steps without drafts since the last one with some
        self._hopeless = 0  # steps in a row
        self._gain = 1.0 + UPSIDE  # of drafting over plain steps, on average of late
        self._patience = 1
        self._given_up_at = 0  # rows
        self._idle = 0  # steps since
        self._found_trust = Trust()  # of what drafts at hand have been worth
        self._promised: dict[int, Sequence[float]] = {}  # their survival in this step
        self._look_gain = 1.0 + FRESH  # of drafts at hand over plain steps, on average of late, while a drafter rests
        self._look_patience = 1
        self._blind = 0  # steps for which nobody looks for drafts
        self._payable: dict[tuple[int, int], float] = {}  # rows, drafts -> the most that they could bring
        self._payable_since = 0  # changes of costs, when the first of them was asked for

    def looks(self, decoding: int, drafts: int) -> bool:
        """Whether to look for drafts that are at hand, at most so many in all, in a step in which so many requests
        decode. Looking takes time, too: while the drafter rests and what is found has not brought that of late, nobody
        looks for a while."""
        if self.worthwhile:
            self._look_gain, self._look_patience, self._blind = 1.0 + FRESH, 1, 0
        elif self._blind:
            self._blind -= 1
            return False
        elif self._look_gain < 1.0 + FOLLOW_SHARE:
            self._blind = self._look_patience * LOOK_AGAIN_EVERY
            self._look_patience = min(2 * self._look_patience, MOST_PATIENCE)
            self._look_gain = 1.0 + FRESH
            return False
        self._look_gain += (1.0 - self._look_gain) / GAIN_STEPS
        return self._could_pay(decoding, drafts, _margin(decoding))

    def choose(
        self,
        requests: Sequence[int],
        limits: Sequence[int],
        other_rows: int = 0,
        found: Sequence[Sequence[float]] = (),
        decoding: int = 0,
    ) -> list[int]:
        """Lengths of at most limits[i] for requests named by number; 0 = decode plainly this time. other_rows: rows of
        the pass that belong to others. found[i]: survival of drafts of request i that are at hand and take no time, as
        many as its limit; empty where the drafter has to make them. decoding: requests that decode in this step, with
        those for which there can be no drafts; these alone unless there are more."""
        rows = len(requests) + other_rows
        decoding = max(decoding, len(requests))
        margin = _margin(decoding) if decoding > 1 else 0.0
        if (
            self.verify.changes < self._kept_until
            and self.worthwhile
            and not (self._plain_steps or any(found))
            and self._memory.holds(requests, limits, rows, margin)
        ):
            lengths = self._kept_lengths()
        else:
            lengths = self._choose(requests, limits, rows, found if any(found) else (), margin)
        for length in lengths:
            self.chosen[length] = self.chosen.get(length, 0) + 1
        return lengths

    def observe_step(self, rows: int, drafts: int, seconds: float) -> None:
        """What a step with so many drafts in its rows took beside making them. The first plain steps behind one with
        drafts do not count: what they need may have been pushed out of the caches by what drafts need, so that they
        tell of neither way of decoding."""
        if self._warming_up:
            self._warming_up -= 1
            return
        self._plain_run = 0 if drafts else self._plain_run + 1
        if drafts or self._plain_run > SETTLED_AFTER:
            self.verify.observe(rows, seconds)

    def observe_draft(self, rows: int, context_rows: int, seconds: float) -> None:
        """What a drafter took for so many rows (drafts and one more for each request), and for writing so many of its
        context before: more of these wait after plain steps, which is not what drafts cost."""
        if context_rows <= rows and not self._warming_up:
            self.draft.observe(rows, seconds)

    def saved(self, rows: int, limit: int) -> float:
        """Seconds that drafting for one request of a step of so many rows saves per token of it, from what requests
        showed on average; 0 where it would not pay, or where so many requests would not draft although it would a
        little. A token more is worth what a token of such a step takes."""
        survival = self.overall.survival(limit)
        if rows > 1 and not self._all_pay(survival, rows):
            return 0.0
        (length,), _ = best_lengths([survival], self.verify, partial(self._draft_seconds, 1), rows - 1)
        if not length:
            return 0.0
        plain, more = self.verify.seconds(rows), sum(survival[:length])
        price = self.verify.seconds(rows + length) + self._draft_seconds(1, length) - plain
        return max(0.0, more * plain / rows - price) / (1.0 + more)

    def _all_pay(self, survival: Sequence[float], rows: int) -> bool:
        """Whether drafts of some length for each of so many requests, as good as on average, are worth their margin.
        Asked for every request that a drafter has not followed, at every step: so lengths are the same for all."""
        least = (1.0 + _margin(rows)) / self.verify.seconds(rows)
        kept = accumulate(survival, initial=1.0)
        return any(
            tokens / (self.verify.seconds(rows * (1 + n)) + self._draft_seconds(rows, rows * n)) > least
            for n, tokens in enumerate(kept)
            if n
        )

    def _kept_lengths(self) -> list[int]:
        """Those of the choice before, for one more step."""
        self._found_trust.forgive()
        self._passed += 1
        self._elapsed = 0
        return self._kept.copy()

    def _choose(
        self,
        requests: Sequence[int],
        limits: Sequence[int],
        rows: int,
        found: Sequence[Sequence[float]],
        margin: float,
    ) -> list[int]:
        if self._plain_steps:
            self._plain_steps -= 1
            return [0] * len(requests)
        if not self._could_pay(rows, sum(limits), margin):
            if self.worthwhile:
                self._lose_hope(rows, False)
            return [0] * len(requests)
        if not found and self.worthwhile and self._memory.holds(requests, limits, rows, margin):
            self._kept_until = self._payable_since + REFIT_AFTER
            return self._kept_lengths()
        self._found_trust.forgive()
        self._promised, nothing_at_hand = {}, not found
        at_hand, asked = [False] * len(requests), limits
        if found:
            self._promised = {r: row for r, row in zip(requests, found, strict=True) if row}
            found = [self._found_trust.of(row) for row in found]
            at_hand = [len(row) > 0 for row in found]
            asked = [0 if free else limit for limit, free in zip(limits, at_hand, strict=True)]
        else:
            found = [()] * len(requests)
        if not self.worthwhile or not any(asked):
            self._elapsed = 1
            lengths, gain = best_lengths(found, self.verify, _no_seconds, rows - len(requests), at_hand, margin)
            self._look_gain += (gain - 1.0) / GAIN_STEPS
            return self._explore(found, at_hand, lengths, rows) if any(lengths) else lengths
        own = self._memory.survivals(requests, limits)
        survivals = own if nothing_at_hand else [row or kept for row, kept in zip(found, own, strict=True)]
        self._memory.drop()
        self._elapsed, self._passed = self._passed + 1, 0
        # plain steps that a drafter follows take longer than those that are left to themselves
        beside = (1.0 + margin) / (1.0 + FOLLOW_SHARE) - 1.0
        made = len(requests) - sum(at_hand)
        draft: Callable[[int], float] | float = partial(self._draft_seconds, made)
        if self.whole:  # however few of them will be verified
            draft = self._draft_seconds(made, sum([min(limit, self._usual) for limit in asked]))
        if self.confident and nothing_at_hand:
            lengths, self._planned = best_lengths(survivals, self.verify, draft, rows - len(requests), margin=-1.0)
            gain = self._planned * max(1.0, self._option)
            if gain <= 1.0 + beside:
                lengths = [0] * len(requests)
        else:
            lengths, gain = best_lengths(survivals, self.verify, draft, rows - len(requests), at_hand, beside)
            self._planned = 0.0
        alone = [0] * len(requests)
        if not nothing_at_hand:  # what the drafter brings beside them
            alone, without = best_lengths(found, self.verify, draft, rows - len(requests), at_hand, margin)
            gain /= without
        if not any([length and not free for length, free in zip(lengths, at_hand, strict=True)]):
            gain = 1.0 / (1.0 + FOLLOW_SHARE)
        self._gain += (gain - self._gain) * self._elapsed / GAIN_STEPS
        if self._gain < 1.0 and self._hope(asked, rows)[1] < (1.0 + UPSIDE) * (1.0 + margin):
            self._rest(rows)
            return alone
        best = list(lengths)
        idle = [i for i, limit in enumerate(asked) if limit and not lengths[i]]
        if idle:
            self._probe(idle, limits, lengths, rows)
        elif any(lengths):
            self._hopeless = 0
            lengths = self._explore(survivals, at_hand, lengths, rows)
        tried = lengths != best
        if self.whole:
            lengths = self._blocks(limits, at_hand, lengths)
        whole = self.confident and any(lengths) and not self._since_whole
        if nothing_at_hand and not (tried or whole or self._hopeless):
            self._kept, self._kept_until = lengths.copy(), self._payable_since + REFIT_AFTER
            self._memory.keep(requests, limits, rows, margin, LIKE_CUT if self.whole else LIKE, KEEP - 1)
        return lengths

    def _could_pay(self, rows: int, drafts: int, margin: float) -> bool:
        """Whether at most so many drafts beside so many rows would be made if every one of them were right and at hand:
        where not, nobody needs to look for any."""
        if self.verify.changes - self._payable_since >= REFIT_AFTER:
            self._payable.clear()
        if not self._payable:
            self._payable_since = self.verify.changes
        key = (rows, drafts)
        if key not in self._payable:
            self._payable[key] = most_gain(rows, drafts, self.verify)
        return self._payable[key] > 1.0 + margin

    def _blocks(self, limits: Sequence[int], found: Sequence[bool], lengths: list[int]) -> list[int]:
        """Slots to draft for requests that were given some: all that pay for themselves, to be cut when it is known how
        sure the drafter is of each. A tree has all of them: its nodes' chances are not those of a row."""
        made = most = 0
        for length, limit, free in zip(lengths, limits, found, strict=True):
            if length and not free:
                made, most = made + 1, most + limit
        if not made:
            return lengths
        slots = max(limits) if not self.confident else self._slots(made, most)
        return [
            min(limit, max(length, slots)) if length and not free else length
            for length, limit, free in zip(lengths, limits, found, strict=True)
        ]

    def _slots(self, requests: int, most: int) -> int:
        """Leading slots of a block that save more than making them takes, on average of late; now and then all of them,
        to see what the others would. most: of all requests together."""
        self._since_whole += 1
        if self._since_whole >= self._whole_every:
            self._since_whole, self._whole_every = 0, min(2 * self._whole_every, WHOLE_SELDOM)
            return most
        half = max(requests, most // 2)
        for drafts in (most, half):  # what they cost is asked for below
            if not self.draft.settled(requests + drafts):
                return drafts
        price = (self._draft_seconds(requests, most) - self._draft_seconds(requests, half)) / max(1, most - half)
        self._usual = max(1, next((j for j, worth in enumerate(self._worths) if worth <= price), most))
        return self._usual

    def _explore(
        self, survivals: Sequence[Sequence[float]], found: Sequence[bool], lengths: list[int], rows: int
    ) -> list[int]:
        """The lengths, or now and then those of a pass one knot larger or smaller, or of a few plain ones: costs that
        look high for no good reason would otherwise never be seen again."""
        now = self._step_seconds(lengths, found, rows)

        def lost(tried: Sequence[int], expected: float) -> float:
            """Against as many tokens at the rate that was chosen."""
            planned = rows + sum([sum(row[:length]) for row, length in zip(survivals, lengths, strict=True)])
            return self._step_seconds(tried, found, rows) - (rows + expected) * now / planned

        if self.verify.known and not self.verify.settled(rows, FEW):
            return self._decode_plainly(len(lengths))
        if not self.confident and (unknown := self._unknown(rows, sum(map(len, survivals)), FEW)):
            tried, expected = likeliest(survivals, unknown)
            if lost(tried, expected) < now:
                self._newcomers -= 1
                return tried
        planned = rows + sum([sum(row[:length]) for row, length in zip(survivals, lengths, strict=True)])
        plain = self.verify.seconds(rows)  # also where blocks are drafted, whose own sizes are tried as they are cut
        # what it lacks to the rate that was chosen; a request that is out of luck will not be for all of these steps
        usual = self.overall.survival(max(lengths))
        usually = rows + sum([sum(usual[:length]) for length in lengths])
        worth = max(1.0, self._option) if self.confident else 1.0  # these averages know of no cut
        price = plain - rows * now / (worth * max(planned, usually))
        far = price * (1.0 + UPSIDE) > UPSIDE * plain
        share = self._elapsed * self._explore_share / (FAR if far else 1.0)
        self._plain_curiosity = min(self._plain_curiosity + share * now, MOST_CURIOSITY * now)
        price = max(PLAIN_STEPS * price, LEAST_PRICE * now)
        if price <= self._plain_curiosity:
            self._plain_curiosity -= price
            return self._decode_plainly(len(lengths))
        if self.whole and not all(found):
            return lengths
        return self._another_size(survivals, lengths, rows, now, lost)

    @property
    def _explore_share(self) -> float:
        return EXPLORE_SHARE + (NEW_SHARE - EXPLORE_SHARE) * NEW_STEPS / (NEW_STEPS + self.verify.changes)

    def _decode_plainly(self, requests: int) -> list[int]:
        """In this step and the next ones."""
        self._plain_steps = PLAIN_STEPS - 1
        self._memory.drop()
        return [0] * requests

    def _another_size(
        self,
        survivals: Sequence[Sequence[float]],
        lengths: list[int],
        rows: int,
        now: float,
        lost: Callable[[Sequence[int], float], float],
    ) -> list[int]:
        """The lengths, which take `now` seconds, or those of a pass one knot larger or smaller. lost: seconds lost by
        lengths that bring so many drafts."""
        most = sum(map(len, survivals))
        self._curiosity = min(self._curiosity + self._elapsed * self._explore_share * now, now)
        if self._curiosity < LEAST_PRICE * now:
            return lengths
        drafts = sum(lengths)
        above, below = neighbours(rows + drafts)
        other = max(below - rows, 0) if self._upwards else min(above - rows, most)
        tried, expected = likeliest(survivals, other)
        price = max(lost(tried, expected), LEAST_PRICE * now)
        if other == drafts or price > now:  # which can never be saved up
            self._upwards = not self._upwards
            return lengths
        if price > self._curiosity:
            return lengths
        self._upwards = not self._upwards
        self._curiosity -= price
        return tried

    def _step_seconds(self, lengths: Sequence[int], found: Sequence[bool], rows: int) -> float:
        """Of a step in which the drafter makes the drafts that are not at hand."""
        made = [length for length, free in zip(lengths, found, strict=True) if length and not free]
        drafting = self._draft_seconds(len(made), sum(made)) if made else 0.0
        return self.verify.seconds(rows + sum(lengths)) + drafting

    def _draft_seconds(self, requests: int, tokens: int) -> float:
        """A block is its request's anchor and the drafts, so that short drafts of many are many rows too."""
        if not self.draft.known:
            return DRAFT_SHARE * self.verify.seconds(1)
        rows = min(requests, tokens) + tokens
        seconds = self.draft.seconds(rows)
        if self.draft.settled(rows, FEW):
            return seconds
        # a drafter that few drafts made look dear would rest, and never be known better
        return min(seconds, DRAFT_SHARE * self.verify.seconds(1))

    def _hope(self, limits: Sequence[int], rows: int) -> tuple[list[int], float]:
        """The short drafts that would pay for these requests, in a pass of `rows` rows, if drafts were better, and how
        much faster than plain steps they would be."""
        kept = 1.0 - HOPE * (1.0 - self.overall.survival(1)[0])
        survivals = [[kept ** (j + 1) for j in range(min(PROBE_DRAFTS, limit))] for limit in limits]
        return best_lengths(survivals, self.verify, partial(self._draft_seconds, len(limits)), rows - len(limits))

    def _probe(self, idle: list[int], limits: Sequence[int], lengths: list[int], rows: int) -> None:
        """Give idle requests a short draft if that has been earned and might pay."""
        rows += sum(lengths)
        now = self.verify.seconds(rows) + (self._draft_seconds(len(lengths), sum(lengths)) if any(lengths) else 0.0)
        self._credit = min(self._credit + self._elapsed * PROBE_SHARE * now, now)
        hope, _ = self._hope([limits[i] for i in idle], rows)
        if not any(hope):
            self._lose_hope(rows, any(lengths))
            return
        self._hopeless = 0
        drafts = sum(hope) + sum(lengths)
        cost = self.verify.seconds(rows + sum(hope)) + self._draft_seconds(len(lengths), drafts) - now
        if self.confident:  # of these, only what pays will be verified
            cost = self._draft_seconds(len(lengths), drafts)
        if cost <= self._credit:
            self._credit -= max(0.0, cost)
            for i, length in zip(idle, hope, strict=True):
                lengths[i] = length

    def _lose_hope(self, rows: int, some_draft: bool) -> None:
        self._hopeless = 0 if some_draft else self._hopeless + 1
        if self._hopeless >= GIVE_UP_AFTER:
            self._rest(rows)

    def _rest(self, rows: int) -> None:
        self._patience = min(2 * self._patience, MOST_PATIENCE) if rows == self._given_up_at else 1
        self.worthwhile = False
        self._given_up_at, self._idle = rows, 0

    def reconsider(self, rows: int) -> None:
        """Once for each step of `rows` rows while drafts are not worthwhile: they may be again, when less runs or what
        was known of them is old."""
        self._idle += 1
        fewer = rows <= 0.75 * self._given_up_at
        look = self._idle % LOOK_AGAIN_EVERY == 0
        if look:
            self.overall.fade(FADE)
        if not look and not fewer:
            return
        _, hope = self._hope([PROBE_DRAFTS] * rows, rows)
        survivals = [self.overall.survival(PROBE_DRAFTS)] * rows
        margin = _margin(rows)
        _, gain = best_lengths(survivals, self.verify, partial(self._draft_seconds, rows), margin=margin)
        long = gain >= 1.0 + FOLLOW_SHARE or self._idle >= self._patience * LOOK_AGAIN_EVERY
        if hope >= (1.0 + UPSIDE) * (1.0 + margin) or (hope > 1.0 + margin and long):
            self.worthwhile, self._hopeless, self._gain = True, 0, 1.0 + FRESH
        elif fewer:
            self._given_up_at = rows  # it looks again when a good part of these are gone

    def trim(
        self,
        requests: Sequence[int],
        drafts: Sequence[list[int]],
        chances: Sequence[Sequence[float]],
        other_rows: int = 0,
    ) -> None:
        """Cut drafts, in place, to what is worth verifying; see `admitted`. The chances are taken to be as
        wrong as they have been so far."""
        verify, draft = self.verify, self.draft
        if (
            not self._elapsed
            and type(verify) is CostCurve
            and type(draft) is CostCurve
            and self._memory.trim(requests, drafts, chances, len(requests) + other_rows, verify, draft, FEW)
        ):
            return
        made = [len(row) for row in drafts if row]
        if not made:
            return
        survivals = survivals_of(chances, self._memory.trust)
        paid = self._draft_seconds(len(made), sum(made))
        lengths = admitted(survivals, self.verify, paid, other_rows)
        if self._elapsed:
            lengths = self._judge(survivals, lengths, paid, len(requests) + other_rows)
        self._memory.cut(requests, drafts, chances, lengths)

    def _judge(self, survivals: Sequence[Sequence[float]], lengths: list[int], paid: float, rows: int) -> list[int]:
        """Learn from blocks, which took `paid` seconds, and how much of them is to be verified: those lengths or, now
        and then, others."""
        now = paid + self.verify.seconds(rows + sum(lengths))
        planned = rows + sum([sum(row[:length]) for row, length in zip(survivals, lengths, strict=True)])
        if self.verify.known:  # until then costs are in passes of one row
            self._weigh_slots([row for row in survivals if row], rows)
        if self._planned:
            found = planned / now * self.verify.seconds(rows) / rows / self._planned
            self._option += (min(found, MOST_OPTION) - self._option) * self._elapsed / GAIN_STEPS
        if not any(lengths):
            return lengths

        def lost(tried: Sequence[int], expected: float) -> float:
            return paid + self.verify.seconds(rows + sum(tried)) - (rows + expected) * now / planned

        unknown = self._unknown(rows, sum(map(len, survivals)), TRUST)
        if unknown:
            self._newcomers -= 1
            return likeliest(survivals, unknown)[0]
        return self._another_size(survivals, lengths, rows, now, lost)

    def _unknown(self, rows: int, most: int, steps: float) -> int:
        """So many drafts, at most `most`, as make the smallest size beyond `rows` that fewer steps have shown: one that
        a slow first step made look dear is not chosen again, and so never known better. 0: there is none."""
        sizes = [k for k in KNOTS if rows < k <= rows + most] if self._newcomers else []
        return next((k - rows for k in sizes if not self.verify.settled(k, steps)), 0)

    def _weigh_slots(self, blocks: Sequence[Sequence[float]], rows: int) -> None:
        token = self.verify.seconds(rows) / (rows * max(1.0, self._planned * self._option))
        self._weighed = min(self._weighed + 1.0, GAIN_STEPS)
        self._worths = slot_worths(self._worths, blocks, self.verify, token, self._weighed, rows)

    def tree_sizes(self, trees: Mapping[int, DraftTree], drafted: int, other_rows: int = 0) -> list[int]:
        """How many nodes of each request's tree to verify; drafted: slots that they were grown from. The drafter's
        chances are taken to be as wrong as they have been so far."""
        share = self._tree_trust.share
        chances = [[share * c for c in tree.chances] for tree in trees.values()]
        sizes = admitted(chances, self.verify, self._draft_seconds(len(trees), drafted), other_rows)
        for request, row, size in zip(trees, chances, sizes, strict=True):
            if not size:
                self._memory.leave_out(request, row[:1])
        return sizes

    def observe_tree(self, chances: Sequence[float], accepted: int) -> None:
        """A tree whose nodes had these chances was verified, and `accepted` of them kept."""
        self._tree_trust.observe(sum(chances), accepted)

    def settle(self, request: int, drafted: int, accepted: int) -> None:
        """So many drafts that a request had at hand were verified and kept."""
        survival = self._promised.pop(request, ())
        if survival and drafted:
            self._found_trust.observe(sum(survival[:drafted]), accepted)

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """What became of a draft."""
        self._memory.observe(request, drafted, accepted)

    def finish(self, request: int) -> None:
        self._memory.finish(request)
