"""The sampler once more, slowly: sorts, float64, Python integers. Shares no code with the native one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

GUMBEL, DRAFT, ACCEPT, NEXT = 0x47554D42, 0x44524654, 0x41434350, 0x4E455854
M32 = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & M32, (a >> 32) ^ c[3] ^ k[1], a & M32]
        k = [(k[0] + 0x9E3779B9) & M32, (k[1] + 0xBB67AE85) & M32]
    return c


def gumbel(seed: int, choice: int, position: int, token: int, stream: int = GUMBEL) -> float:
    """-log(-log(1 - v)), v from word (token / 16) mod 4 of counter (16 * (token / 64) + token mod 16, ...)."""
    counter = [token // 64 * 16 + token % 16, position, choice, stream]
    word = philox(counter, [seed & M32, seed >> 32])[token // 16 % 4]
    v = (word + 0.5) / 2.0**32
    return float(-np.log(-np.log1p(-v)))


def uniform(seed: int, choice: int, position: int, stream: int) -> float:
    w = philox([0, position, choice, stream], [seed & M32, seed >> 32])
    return (((w[0] << 32 | w[1]) >> 12) + 0.5) / 2.0**52


@dataclass
class Request:
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)
    min_tokens: int = 0
    allowed: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    seed: int = 0
    choice: int = 0

    def native_arguments(self) -> dict:
        names: tuple[str, ...] = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        names += ("frequency_penalty", "banned", "min_tokens", "allowed", "bad_words", "seed", "choice")
        return {n: getattr(self, n) for n in names} | {"logit_bias": sorted(self.logit_bias.items())}


def processed(row: np.ndarray, r: Request, before: Sequence[int] = (), allowed: set[int] | None = None) -> np.ndarray:
    """Logits after mask, bans, bias and penalties; `before`: the block's drafts before this row."""
    x = np.where(np.isnan(row), -np.inf, row).astype(np.float32)
    output = [*r.output, *before]
    if allowed is not None:
        x[[i for i in range(len(x)) if i not in allowed]] = -np.inf
    if r.allowed:
        x[[i for i in range(len(x)) if i not in r.allowed]] = -np.inf
    x[forbidden(r.bad_words, output)] = -np.inf
    if len(output) < r.min_tokens:
        x[r.banned] = -np.inf
    for token, bias in r.logit_bias.items():
        x[token] += np.float32(bias)
    for token in {*r.prompt, *output}:
        rep = np.float32(r.repetition_penalty)
        x[token] = x[token] / rep if x[token] > 0 else x[token] * rep
        count = output.count(token)
        if count:
            x[token] -= np.float32(r.frequency_penalty) * np.float32(count)
            x[token] -= np.float32(r.presence_penalty)
    return np.minimum(x, np.finfo(np.float32).max).astype(np.float64)


def forbidden(bad_words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """Ids that would complete one of the words."""
    return [word[-1] for word in bad_words if list(output[len(output) - len(word) + 1 :]) == list(word[:-1])]


def survivors(x: np.ndarray, r: Request) -> np.ndarray:
    """Ids that survive the filters, best first (ties: lowest id)."""
    with np.errstate(over="ignore", invalid="ignore"):
        d = (x - x.max()) / r.temperature
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[x[order] > -np.inf]
    if r.min_p > 0:
        order = order[d[order] >= np.log(r.min_p)]
    if 0 < r.top_k < len(order):
        order = order[: r.top_k]
    if r.top_p < 1:
        w = np.exp(d[order])
        before = np.cumsum(w) - w
        order = order[before < r.top_p * w.sum()] if len(order) > 1 else order
    return order


def probs(x: np.ndarray, r: Request) -> np.ndarray:
    out = np.zeros(len(x))
    if r.temperature == 0:
        out[int(np.argmax(x))] = 1
        return out
    kept = survivors(x, r)
    w = np.exp((x[kept] - x.max()) / r.temperature)
    out[kept] = w / w.sum()
    return out


def scores(x: np.ndarray, r: Request, position: int, stream: int = GUMBEL, ids: Sequence[int] | None = None):
    """Kept columns in increasing order and their log p + gumbel (up to a constant). ids: target id of each column."""
    kept = np.sort(survivors(x, r))
    with np.errstate(over="ignore"):
        base = (x[kept] - x.max()) / r.temperature
    target = [int(c) if ids is None else ids[c] for c in kept]
    return kept, base + [gumbel(r.seed, r.choice, position, t, stream) for t in target]


def draw(x: np.ndarray, r: Request, position: int, stream: int = GUMBEL, ids: Sequence[int] | None = None) -> int:
    """Column drawn; -1 where nothing is left."""
    if not (x > -np.inf).any():
        return -1
    if r.temperature == 0:
        return int(np.argmax(x))
    kept, s = scores(x, r, position, stream, ids)
    return int(kept[int(np.argmax(s))])
