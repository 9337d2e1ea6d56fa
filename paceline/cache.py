"""Blocks of the paged key/value cache: who holds which, what they contain, and proof that none is lost.

A full block of committed tokens is published under a key that names every token up to its end, so that a later sequence
with the same beginning takes the block instead of computing it again. Blocks that nobody holds keep their content until
they are needed for something else, the longest unused first.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

import numpy as np

from paceline._native import KEYS_PER_BLOCK
from paceline.errors import CapacityError

BLOCK_TOKENS: int = KEYS_PER_BLOCK


def blocks_for(tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def check_room(prompt: int, most: int, context: int, blocks: int) -> None:
    """Whether a sequence can ever run. prompt, most: tokens of its prompt, and of prompt and output at their longest;
    context: max_model_len; blocks: of the cache. Raises CapacityError."""
    if prompt >= context:
        raise CapacityError(
            f"prompt: {prompt} tokens leave no room in the context of {context} (max_model_len); shorten the prompt"
        )
    if blocks_for(most) > blocks:
        raise CapacityError(
            f"prompt and max_tokens: {most} tokens do not fit the cache of {blocks * BLOCK_TOKENS}; "
            "lower max_tokens or raise kv_cache_space"
        )


def stack_tables(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Tables of several sequences as int32 [sequences, most blocks].

    Past a sequence's own blocks stands -1, which no pass accepts.
    """
    if len(tables) == 1:
        return tables[0][None]
    out = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for i, table in enumerate(tables):
        out[i, : len(table)] = table
    return out


def block_keys(keys: list[bytes], token_ids: Sequence[int], blocks: int, salt: str | None = None) -> list[bytes]:
    """Extend `keys` in place to the keys of the first `blocks` blocks of a text, and return it.

    A key is a 128-bit BLAKE2b digest of its block's tokens and the key before it, so equal keys mean equal texts from
    the first token on. salt: texts with different salts share nothing.
    """
    root = b"" if salt is None else _digest(salt.encode("utf-8", "surrogatepass"))
    for i in range(len(keys), blocks):
        tokens = array("i", token_ids[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
        assert len(tokens) == BLOCK_TOKENS
        keys.append(_digest((keys[-1] if keys else root) + tokens.tobytes()))
    return keys


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


@dataclass(slots=True)
class PrefixCacheStats:
    """In tokens of admitted sequences, as vLLM counts: asked for, and found in the cache."""

    queries: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


class BlockPool:
    """A fixed number of cache blocks with reference counts.

    `tapped` blocks also hold the drafter's keys and values, which a sequence that drafts needs.
    """

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._blank = list(range(blocks - 1, -1, -1))  # without content, taken first
        self._unused: dict[int, None] = {}  # with content that nobody holds now, longest unused first
        self._references = np.zeros(blocks, np.int32)
        self._keys: list[bytes | None] = [None] * blocks
        self._tapped = bytearray(blocks)
        self._published: dict[bytes, int] = {}
        self.on_evict: Callable[[bytes], None] = lambda _: None  # called with the key of a content that is gone

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._blank) + len(self._unused)

    @property
    def published(self) -> int:
        """Blocks whose content can be found."""
        return len(self._published)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks that hold the longest known beginning of a text with these block keys."""
        found = []
        for key in keys:
            block = self._published.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_tapped(self, blocks: Sequence[int]) -> int:
        """How many of `blocks`, from the first on, hold a drafter's rows too."""
        return next((i for i, block in enumerate(blocks) if not self._tapped[block]), len(blocks))

    def room_beside(self, blocks: Sequence[int]) -> int:
        """Blocks that can still be taken once `blocks` (of `find`) are shared."""
        return self.free - sum(block in self._unused for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks of `find` once more."""
        for block in blocks:
            self._unused.pop(block, None)
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """Hold `count` blocks without content. Raises CapacityError, and takes none, when fewer are free."""
        if count > self.free:
            raise CapacityError(f"kv_cache_space: {count} blocks asked for, {self.free} of {self.size} free")
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block = next(iter(self._unused))
                del self._unused[block]
                self.on_evict(self._forget(block))
            self._references[block] = 1
            taken.append(block)
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Hold blocks no more. The end of a text is reused before its beginning."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} was given back twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._keys[block] is None:
                    self._blank.append(block)
                else:
                    self._unused[block] = None

    def publish(self, block: int, key: bytes, tapped: bool) -> None:
        """Let others find a block that is held, full, and will not change. The first block of a content stays the one
        that is found, unless it cannot serve drafting sequences and this one can."""
        known = self._published.get(key)
        if known == block:
            self._tapped[block] |= tapped
            return
        if known is not None:
            if self._tapped[known] or not tapped:
                return
            self._forget(known)
            if known in self._unused:
                del self._unused[known]
                self._blank.append(known)
        self._published[key] = block
        self._keys[block] = key
        self._tapped[block] = tapped

    def forget_all(self) -> None:
        """Nothing is found any more; who holds blocks keeps them."""
        for block in list(self._published.values()):
            self.on_evict(self._forget(block))
        self._blank.extend(self._unused)
        self._unused.clear()

    def _forget(self, block: int) -> bytes:
        key = self._keys[block]
        assert key is not None
        del self._published[key]
        self._keys[block] = None
        self._tapped[block] = False
        return key

    def check_idle(self) -> None:
        """With nobody holding anything, every block is free. Raises AssertionError otherwise."""
        assert self.free == self.size and not self._references.any(), f"{self.size - self.free} cache blocks lost"

    def check(self, held: Iterable[Sequence[int]], *, index: bool = True) -> None:
        """Every block is free or held by exactly those who say so, and the index of contents agrees (unless that is not
        to be looked at: it takes longer); else AssertionError."""
        count = np.zeros(self.size, np.int64)
        for blocks in held:
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            count[list(blocks)] += 1
        assert (count == self._references).all(), "references differ from holders"
        free = np.fromiter(chain(self._blank, self._unused), np.int64, self.free)
        assert (np.bincount(free, minlength=self.size) == (count == 0)).all(), "cache blocks lost or shared"
        if not index:
            return
        assert all(self._keys[b] is not None for b in self._unused), "an unused block has no content"
        assert set(self._published.values()).isdisjoint(self._blank), "a blank block has content"
        assert all(self._keys[block] == key for key, block in self._published.items()), "the index of contents is wrong"
        assert self._keys.count(None) == self.size - self.published, "the index of contents is incomplete"
