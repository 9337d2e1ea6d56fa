"""Batched generation with a PyTorch target: how a GPU answers thousands of prompts in a minute.

On a CPU the engine does this (``train regenerate``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .target import TargetConfig, TorchTarget, apply_rope, rms_norm, rope_tables

COMPACT_EVERY = 16  # steps between looks for sequences that have ended
ALIGN = 16  # keys are read in whole groups of so many, which attention kernels ask for


class KeyValues:
    """Keys and values of a batch, ``[layers, 2, B, kv_heads, room, head_dim]``, and how long each sequence is."""

    def __init__(self, c: TargetConfig, batch: int, room: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (c.num_layers, 2, batch, c.num_kv_heads, room, c.head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but ``rows``."""
        self.data = self.data[:, :, rows].contiguous()
        self.lengths = self.lengths[rows]


@torch.inference_mode()
def advance(target: TorchTarget, cache: KeyValues, ids: Tensor, counts: Tensor) -> Tensor:
    """Append ``counts[b]`` of the tokens ``ids [B, L]`` to each sequence; returns logits ``[B, V]`` (fp32) after the
    last of them. Columns beyond a count are padding: what they write is overwritten before anything reads it."""
    c = target.config
    batch, width = ids.shape
    positions = cache.lengths[:, None] + torch.arange(width, device=ids.device)
    cos, sin = (t.unsqueeze(1) for t in rope_tables(positions, c.head_dim, c.rope_theta))
    room = cache.data.shape[4]
    reach = min(room, -(-(int(positions.max()) + 1) // ALIGN) * ALIGN)
    group = c.num_heads // c.num_kv_heads
    index = positions.clamp(max=room - 1)[:, None, :, None]
    seen = torch.arange(reach, device=ids.device) <= positions.repeat(1, group)[:, :, None]
    x = F.embedding(ids, target.embed).float()
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for layer, w in enumerate(target.layers):
        dtype = w["o"].dtype
        qkv = F.linear(rms_norm(x, w["in_norm"], c.rms_norm_eps, dtype), w["qkv"], w.get("qkv_bias"))
        parts = qkv.split((q_size, kv_size, kv_size), -1)
        q, k, v = (t.view(batch, width, -1, c.head_dim).transpose(1, 2) for t in parts)
        if "q_norm" in w:
            q = rms_norm(q, w["q_norm"], c.rms_norm_eps, dtype)
            k = rms_norm(k, w["k_norm"], c.rms_norm_eps, dtype)
        q, k = apply_rope(q.float(), cos, sin).to(dtype), apply_rope(k.float(), cos, sin).to(dtype)
        keys, values = cache.data[layer]
        at = index.expand(-1, c.num_kv_heads, -1, c.head_dim)
        keys.scatter_(2, at, k)
        values.scatter_(2, at, v)
        # the query heads of a key head are rows beside each other: its keys are read once and never copied
        out = F.scaled_dot_product_attention(
            q.reshape(batch, c.num_kv_heads, group * width, c.head_dim),
            keys[:, :, :reach],
            values[:, :, :reach],
            attn_mask=seen.unsqueeze(1),
            scale=1.0 / math.sqrt(c.head_dim),
        ).view(batch, c.num_heads, width, c.head_dim)
        x = x + F.linear(out.transpose(1, 2).reshape(batch, width, q_size), w["o"])
        gate, up = F.linear(rms_norm(x, w["post_norm"], c.rms_norm_eps, dtype), w["gate_up"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, w["down"])
    cache.lengths += counts
    last = x[torch.arange(batch, device=ids.device), counts - 1]
    return F.linear(rms_norm(last, target.norm, c.rms_norm_eps, target.dtype), target.head).float()


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator).squeeze(-1)


def answer_batch(
    target: TorchTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """The target's continuation of each prompt, up to and with its end-of-text token, at most ``max_tokens`` long."""
    device = target.device
    counts = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.zeros(len(prompts), int(counts.max()), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    room = ids.shape[1] + max_tokens
    cache = KeyValues(target.config, len(prompts), room, target.dtype, device)
    ends = torch.tensor(target.config.eos_token_ids, device=device, dtype=torch.long)
    out = torch.full((len(prompts), max_tokens), -1, dtype=torch.long, device=device)
    alive = torch.arange(len(prompts), device=device)  # which prompt each row of the cache answers
    token = _choose(advance(target, cache, ids.to(device), counts), temperature, generator)
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for step in range(max_tokens):
        out[alive[running], step] = token[running]
        running &= ~torch.isin(token, ends)
        if step + 1 == max_tokens:
            break
        if step % COMPACT_EVERY == COMPACT_EVERY - 1:
            rows = running.nonzero().squeeze(1)
            if not len(rows):
                break
            if len(rows) < len(running):
                cache.keep(rows)
                alive, token, running = alive[rows], token[rows], running[rows]
        logits = advance(target, cache, token[:, None], torch.ones_like(cache.lengths))
        token = _choose(logits, temperature, generator)
    lengths = (out >= 0).sum(1).tolist()
    return [row[:n] for row, n in zip(out.tolist(), lengths, strict=True)]


def answer_all(
    target: TorchTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    batch: int = 1024,
    temperature: float = 0.0,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Iterator[tuple[int, list[int]]]:
    """``(index, answer)`` for every prompt, batch by batch of similar prompt length."""
    import time

    generator = torch.Generator(target.device).manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    started, made = time.monotonic(), 0
    for first in range(0, len(order), batch):
        group = order[first : first + batch]
        answers = answer_batch(
            target,
            [prompts[i] for i in group],
            max_tokens=max_tokens,
            temperature=temperature,
            generator=generator,
        )
        made += sum(map(len, answers))
        rate = made / max(1e-9, time.monotonic() - started)
        report(f"answers: {first + len(group)}/{len(order)} prompts, {rate:.0f} tokens/s")
        yield from zip(group, answers, strict=True)
