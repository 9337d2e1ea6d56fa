"""Training batches from a feature folder: which sequences, which anchors, which labels.

Order, anchors and block lengths are pure functions of the seed and the step, so a resumed run sees exactly the batches
that an uninterrupted one would have seen, with no sampler state to save. Data may be added in the middle of a run: a
phase says which sequences are drawn from which step on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .feature_store import Features

SORT_WINDOW = 16  # batches whose sequences are sorted together by length, to save padding


@dataclass(frozen=True, slots=True)
class Batch:
    """S sequences with A blocks of B slots each, over contexts padded to L tokens.

    ``taps [S, L, T*H]``; ``anchors [S, A]`` (absolute positions); ``tokens [S, A, B]`` (ids of the block, -1 beyond the
    end); ``valid [S, A, B-1]`` (slot k holds a token of the answer); ``teacher [S, A, B-1, H]`` (final hidden state
    that predicts slot k) or None; ``domains``, one per sequence.
    """

    taps: Tensor
    anchors: Tensor
    tokens: Tensor
    valid: Tensor
    teacher: Tensor | None
    domains: list[str]

    def split(self, parts: int) -> list[Batch]:
        """The same sequences in ``parts`` batches (fewer if there are fewer sequences)."""
        size = -(-len(self.domains) // parts)
        out = []
        for i in range(0, len(self.domains), size):
            at = slice(i, i + size)
            teacher = None if self.teacher is None else self.teacher[at]
            out.append(
                Batch(self.taps[at], self.anchors[at], self.tokens[at], self.valid[at], teacher, self.domains[at])
            )
        return out

    def share(self, rank: int, world: int) -> Batch | None:
        """Part ``rank`` of ``world``; None where there are too few sequences."""
        parts = self.split(world)
        return parts[rank] if rank < len(parts) else None


@dataclass(frozen=True, slots=True)
class Phase:
    """From step ``first_step`` on, batches are drawn from the sequences ``members`` of the store."""

    first_step: int
    members: tuple[int, ...]


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int, phase: int = 0) -> list[list[int]]:
    """Every sequence once, in batches of like length, in an order that depends on (seed, epoch, phase) alone."""
    rng = np.random.default_rng([seed, 1, epoch, phase])
    order = rng.permutation(len(lengths))
    batches: list[list[int]] = []
    for i in range(0, len(order), batch_size * SORT_WINDOW):
        window = sorted(order[i : i + batch_size * SORT_WINDOW].tolist(), key=lambda j: (lengths[j], j))
        batches += [window[j : j + batch_size] for j in range(0, len(window), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def choose_anchors(prompt_len: int, length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` distinct anchors among the answer tokens that have a successor; fewer answers repeat some.

    The first answer token can be an anchor; so can any but the last.
    """
    candidates = np.arange(prompt_len, length - 1)
    chosen = rng.permutation(candidates)[:count]
    if len(chosen) < count:
        chosen = np.concatenate((chosen, rng.choice(candidates, count - len(chosen))))
    return np.sort(chosen)


def make_batch(
    store: Features,
    indices: Sequence[int],
    anchors: Sequence[np.ndarray],
    block_size: int,
    *,
    with_teacher: bool,
) -> Batch:
    """Read the features of ``indices`` and cut blocks at ``anchors`` (one array of equal size per sequence)."""
    width = store.meta["hidden_size"]
    rows = [store.rows(i) for i in indices]
    # a drafter sees rows before its anchor alone: nothing at or after the last anchor is needed as context
    lengths = [int(a.max()) for a in anchors]
    device = rows[0].device
    taps = torch.zeros(len(indices), max(lengths), rows[0].shape[1] - width, dtype=torch.bfloat16, device=device)
    offsets = np.arange(block_size)
    tokens, teachers = [], []
    for s, (i, r) in enumerate(zip(indices, rows, strict=True)):
        taps[s, : lengths[s]] = r[: lengths[s], :-width]
        ids = np.asarray(store.sequences[i]["tokens"])
        at = anchors[s][:, None] + offsets
        tokens.append(np.where(at < len(ids), ids[np.minimum(at, len(ids) - 1)], -1))
        if with_teacher:
            before = torch.from_numpy(np.minimum(at[:, 1:], len(ids)) - 1).to(device)
            teachers.append(r[:, -width:][before])
    blocks = torch.from_numpy(np.stack(tokens))
    return Batch(
        taps=taps,
        anchors=torch.from_numpy(np.stack(anchors)),
        tokens=blocks,
        valid=blocks[..., 1:] >= 0,
        teacher=torch.stack(teachers) if with_teacher else None,
        domains=[store.sequences[i]["domain"] for i in indices],
    )


def training_batches(
    store: Features,
    phases: Sequence[Phase],
    *,
    batch_size: int,
    anchors: int,
    block_sizes: Sequence[int],
    seed: int,
    first_step: int,
    with_teacher: bool,
) -> Iterator[Batch]:
    """Endless batches from step ``first_step`` on. ``phases`` are in order, the first one from step 0."""
    step = first_step
    while True:
        number = max(i for i, p in enumerate(phases) if p.first_step <= step)
        phase = phases[number]
        end = phases[number + 1].first_step if number + 1 < len(phases) else None
        lengths = [len(store.sequences[m]["tokens"]) for m in phase.members]
        per_epoch = len(epoch_batches(lengths, batch_size, seed, 0, phase.first_step))
        while end is None or step < end:
            epoch, offset = divmod(step - phase.first_step, per_epoch)
            for chosen in epoch_batches(lengths, batch_size, seed, epoch, phase.first_step)[offset:]:
                if step == end:
                    break
                yield _batch_of_step(
                    store, [phase.members[j] for j in chosen], anchors, block_sizes, seed, step, with_teacher
                )
                step += 1


def _batch_of_step(
    store: Features,
    indices: list[int],
    anchors: int,
    block_sizes: Sequence[int],
    seed: int,
    step: int,
    with_teacher: bool,
) -> Batch:
    rng = np.random.default_rng([seed, 2, step])
    cut = [
        choose_anchors(store.sequences[i]["prompt_len"], len(store.sequences[i]["tokens"]), anchors, rng)
        for i in indices
    ]
    size = block_sizes[int(rng.integers(len(block_sizes)))]
    return make_batch(store, indices, cut, size, with_teacher=with_teacher)


def split_members(store: Features, every: int = 50) -> tuple[list[int], list[int]]:
    """Training and held-out sequences: one in ``every`` by prompt id (0: none), the same whatever the store's size."""
    train: list[int] = []
    held: list[int] = []
    for i, s in enumerate(store.sequences):
        (held if every and s["id"] % every == every - 1 else train).append(i)
    return train, held


def frequent_rows(answers: Iterable[Sequence[int]], count: int, always: Iterable[int], vocab_size: int) -> list[int]:
    """The ``count`` most frequent answer tokens (and ``always``, such as end-of-text), ascending; ties by lower id.

    Tokens that never occur fill up by ascending id, which in a byte-pair vocabulary is by descending merge rank.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in answers:
        np.add.at(counts, np.asarray(tokens, dtype=np.int64), 1)
    counts[list(always)] = np.iinfo(np.int64).max
    order = np.lexsort((np.arange(vocab_size), -counts))
    return sorted(order[: min(count, vocab_size)].tolist())
