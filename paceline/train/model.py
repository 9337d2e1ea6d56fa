"""The DFlash drafter in PyTorch, in z-lab's checkpoint layout.

One forward serves training and inference: many blocks per sequence, each seeing the context strictly before its anchor
and itself, never another block. At inference there is one block, and every context row is before its anchor.
Residual stream, norms and softmax are fp32; rows are rounded to ``compute_dtype`` as inputs of matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dflash2 import CandidateSelector, LocalConv
from .errors import TrainError
from .layers import Linear, RMSNorm
from .target import apply_rope, rope_tables

FULL, SLIDING = "full_attention", "sliding_attention"
# What stands for a missing half of DFlash 2, whose checkpoints have both: sizes that other engines' kernels take.
ABSENT_CONV_KERNEL, ABSENT_SELECTOR_RANK = 2, 16
# The largest values that the engine loads. It may not be there to be asked: training works without it.
LARGEST = {"block_size": 256, "markov_rank": 1 << 16, "conv_kernel": 64, "selector_rank": 1 << 16}
LARGEST_TOP_K = 1024
DFLASH2_FIELDS = {
    "conv_kernel": "conv_kernel_size",
    "conv_group": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
}


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape and pairing of a drafter; ``to_hf`` gives z-lab's ``config.json``, or DeepSpec's for the family dspark.

    ``anchor_first``: slot k predicts the token behind its position, from the anchor's slot 0 on; else the slots from 1
    on predict the token at their own. ``markov_rank``: of DSpark's Markov head, 0 for none; ``confidence``: whether
    there is a confidence head. A drafter with either of them is of the family dspark. ``conv_kernel``: rows that DFlash
    2's local convolutions mix, 0 for no convolutions; ``selector_rank``: of its candidate selector, 0 for none. A
    drafter with either of them is of the family dflash2.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 8
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 8192
    layer_types: tuple[str, ...] = field(default=())
    sliding_window: int | None = None
    is_causal: bool | None = None
    anchor_first: bool = False
    markov_rank: int = 0
    confidence: bool = False
    conv_kernel: int = 0
    conv_group: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise TrainError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise TrainError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.block_size < 2:
            raise TrainError(f"block_size is {self.block_size}: it must be at least 2 (the anchor and one draft)")
        for name, most in LARGEST.items():
            if getattr(self, name) > most:
                raise TrainError(f"{name} is {getattr(self, name)}: the engine loads drafters with at most {most}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise TrainError("num_attention_heads must be a multiple of num_key_value_heads")
        if SLIDING in self.layer_types and not self.sliding_window:
            raise TrainError("sliding_window is missing: layer_types has sliding_attention layers")
        if self.dflash2:
            self._check_dflash2()

    def _check_dflash2(self) -> None:
        if self.dspark:
            raise TrainError(
                "a drafter has heads of DSpark (--markov-rank, --confidence) or the parts of DFlash 2 (--conv-kernel, "
                "--selector-rank), not both"
            )
        if self.anchor_first:
            raise TrainError("a DFlash 2 drafter predicts from its mask slots: leave out --anchor-first")
        if self.conv_kernel and self.hidden_size % self.conv_group:
            raise TrainError(f"conv_group_size is {self.conv_group}: it must divide hidden_size {self.hidden_size}")
        most = min(self.vocab_size, LARGEST_TOP_K)
        if not 1 <= self.selector_top_k <= most:
            raise TrainError(f"selector_top_k is {self.selector_top_k}: it must be in 1..{most}")

    @property
    def dspark(self) -> bool:
        return self.markov_rank > 0 or self.confidence

    @property
    def dflash2(self) -> bool:
        return self.conv_kernel > 0 or self.selector_rank > 0

    def complete(self) -> DrafterConfig:
        """With both halves of DFlash 2 where it has one: what a checkpoint can say."""
        if not self.dflash2:
            return self
        kernel, rank = self.conv_kernel or ABSENT_CONV_KERNEL, self.selector_rank or ABSENT_SELECTOR_RANK
        group = self.conv_group if self.conv_kernel else math.gcd(self.conv_group, self.hidden_size)
        return replace(self, conv_kernel=kernel, conv_group=group, selector_rank=rank)

    @property
    def drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.anchor_first else self.block_size - 1

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DrafterConfig:
        nested = config.get("dflash_config") or {}

        def value(key: str) -> Any:
            found = nested.get(key, config.get(key))
            if found is None:
                raise TrainError(f"config.json of the drafter lacks {key}")
            return found

        def whole(key: str) -> int:
            found = value(key)
            if isinstance(found, bool) or not isinstance(found, int):
                raise TrainError(f"config.json of the drafter has {key} = {found!r}: it must be a whole number")
            return found

        causal = config.get("is_causal", nested.get("causal"))
        rope = config.get("rope_parameters") or {}
        layers = whole("num_hidden_layers")
        dspark = "Qwen3DSparkModel" in (config.get("architectures") or ())
        if dspark and config.get("markov_head_type", "vanilla") != "vanilla":
            raise TrainError(f"markov_head_type is {config['markov_head_type']!r}: the trainer has vanilla alone")
        first = config.get("sample_from_anchor")
        own: dict[str, int] = {}
        if "DFlash2DraftModel" in (config.get("architectures") or ()):
            own = {mine: whole(theirs) for mine, theirs in DFLASH2_FIELDS.items()}
        return cls(
            hidden_size=whole("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=whole("num_attention_heads"),
            num_key_value_heads=whole("num_key_value_heads"),
            head_dim=whole("head_dim"),
            intermediate_size=whole("intermediate_size"),
            vocab_size=whole("vocab_size"),
            num_target_layers=whole("num_target_layers"),
            target_layer_ids=tuple(value("target_layer_ids")),
            mask_token_id=whole("mask_token_id"),
            block_size=whole("block_size"),
            rms_norm_eps=value("rms_norm_eps"),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or value("rope_theta")),
            max_position_embeddings=config.get("max_position_embeddings", 8192),
            layer_types=tuple(config.get("layer_types") or (FULL,) * layers),
            sliding_window=config.get("sliding_window"),
            is_causal=None if causal is None else bool(causal),
            anchor_first=dspark if first is None else bool(first),
            markov_rank=config.get("markov_rank") or 0,
            confidence=bool(config.get("enable_confidence_head")),
            **own,
        )

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        pairing: dict[str, Any] = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        out: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": pairing,
            "num_target_layers": self.num_target_layers,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "layer_types": list(self.layer_types),
            "use_sliding_window": SLIDING in self.layer_types,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }
        if self.is_causal is not None:
            out["is_causal"] = self.is_causal
        if self.anchor_first != self.dspark:
            out["sample_from_anchor"] = self.anchor_first
        if self.dflash2:
            out["architectures"] = ["DFlash2DraftModel"]
            out["auto_map"] = {"AutoModel": "dflash.DFlash2DraftModel"}
            pairing |= {theirs: getattr(self, mine) for mine, theirs in DFLASH2_FIELDS.items()}
        if self.dspark:
            del out["dflash_config"], out["auto_map"]
            out |= {
                "architectures": ["Qwen3DSparkModel"],
                **pairing,
                "markov_rank": self.markov_rank,
                "markov_head_type": "vanilla",
                "enable_confidence_head": self.confidence,
                "confidence_head_with_markov": self.markov_rank > 0,
            }
        return out


class Attention(nn.Module):
    def __init__(self, c: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.window, self.causal = c.window(layer), c.causal(layer)
        self.q_proj = Linear(c.hidden_size, self.heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, self.kv_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, self.kv_heads * c.head_dim)
        self.o_proj = Linear(self.heads * c.head_dim, c.hidden_size)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def keys_values(self, h: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V ``[..., kv_heads, head_dim]`` of rows ``h [..., H]``; the rope tables are ``[..., head_dim]``."""
        shape = (*h.shape[:-1], self.kv_heads, self.head_dim)
        k = self.k_norm(self.k_proj(h, dtype).view(shape))
        k = apply_rope(k, rope[0].unsqueeze(-2), rope[1].unsqueeze(-2))
        return k.to(dtype), self.v_proj(h, dtype).view(shape)

    def forward(
        self, h: Tensor, ctx: Tensor, ctx_rope: tuple[Tensor, Tensor], rope: tuple[Tensor, Tensor], distance: Tensor
    ) -> Tensor:
        """``h [S, A, B, H]`` normed block rows, ``ctx [S, L, H]``.

        ``distance [S, A, L]`` is anchor position minus context position; visible context has a positive one.
        """
        dtype = ctx.dtype
        seqs, blocks, size, _ = h.shape
        group, hd, kv = self.heads // self.kv_heads, self.head_dim, self.kv_heads
        q = self.q_norm(self.q_proj(h, dtype).view(seqs, blocks, size, self.heads, hd))
        q = apply_rope(q, rope[0].unsqueeze(-2), rope[1].unsqueeze(-2)) * (1.0 / math.sqrt(hd))
        k_ctx, v_ctx = self.keys_values(ctx, ctx_rope, dtype)
        k_blk, v_blk = self.keys_values(h, rope, dtype)
        # [S, kv, A, B, G, hd]: one batch of matrices per sequence and KV head, rows = every query that shares it
        q = q.to(dtype).view(seqs, blocks, size, kv, group, hd).permute(0, 3, 1, 2, 4, 5)
        k_ctx, v_ctx = k_ctx.transpose(1, 2), v_ctx.transpose(1, 2)
        k_blk, v_blk = k_blk.permute(0, 3, 1, 2, 4), v_blk.permute(0, 3, 1, 2, 4)
        ctx_scores = q.reshape(seqs, kv, blocks * size * group, hd) @ k_ctx.transpose(-1, -2)
        ctx_scores = ctx_scores.view(seqs, kv, blocks, size, group, -1).float()
        blk_scores = q.reshape(seqs, kv, blocks, size * group, hd) @ k_blk.transpose(-1, -2)
        blk_scores = blk_scores.view(seqs, kv, blocks, size, group, size).float()
        ctx_seen, blk_seen = self._visible(distance, size)
        ctx_scores = ctx_scores.masked_fill(~ctx_seen[:, None, :, :, None], float("-inf"))
        if blk_seen is not None:
            blk_scores = blk_scores.masked_fill(~blk_seen[:, None], float("-inf"))
        weights = torch.softmax(torch.cat((ctx_scores, blk_scores), -1), -1).to(dtype)
        length = ctx_scores.shape[-1]
        from_ctx = weights[..., :length].reshape(seqs, kv, blocks * size * group, length) @ v_ctx
        from_blk = weights[..., length:].reshape(seqs, kv, blocks, size * group, size) @ v_blk
        out = from_ctx.view(seqs, kv, blocks, size, group, hd) + from_blk.view(seqs, kv, blocks, size, group, hd)
        return self.o_proj(out.permute(0, 2, 3, 1, 4, 5).reshape(seqs, blocks, size, -1), dtype)

    def _visible(self, distance: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
        """Masks ``[S, A, B or 1, L]`` over the context and ``[B, B]`` inside the block (None: all visible)."""
        seen = (distance > 0).unsqueeze(2)
        slot = torch.arange(size, device=distance.device)
        between = slot[:, None] - slot[None, :]
        block: Tensor | None = None
        if self.causal:
            block = between >= 0
        if self.window is not None:
            seen = seen & (distance.unsqueeze(2) + slot[None, None, :, None] < self.window)
            near = between.abs() < self.window
            block = near if block is None else block & near
        return seen, block


class MLP(nn.Module):
    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype)
        return self.down_proj(F.silu(self.gate_proj(x, dtype)) * self.up_proj(x, dtype), dtype)


class Layer(nn.Module):
    def __init__(self, c: DrafterConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, index)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)
        self.attention_conv, self.mlp_conv = _conv(c), _conv(c)

    def forward(
        self, x: Tensor, ctx: Tensor, ctx_rope: tuple[Tensor, Tensor], rope: tuple[Tensor, Tensor], distance: Tensor
    ) -> Tensor:
        def attend(h: Tensor) -> Tensor:
            return self.self_attn(h, ctx, ctx_rope, rope, distance)

        x = x + _around(self.attention_conv, attend, self.input_layernorm(x), ctx.dtype)
        return x + _around(self.mlp_conv, lambda h: self.mlp(h, ctx.dtype), self.post_attention_layernorm(x), ctx.dtype)


def _conv(c: DrafterConfig) -> LocalConv | None:
    return LocalConv(c.hidden_size, c.conv_kernel, c.conv_group) if c.conv_kernel else None


def _around(conv: LocalConv | None, sublayer: Callable[[Tensor], Tensor], h: Tensor, dtype: torch.dtype) -> Tensor:
    """The sublayer's output for normed rows ``h``, with its convolutions where it has any."""
    return sublayer(h) if conv is None else conv.around(sublayer, h, dtype)


class MarkovHead(nn.Module):
    """DSpark's vanilla Markov head: what a token adds to the logits of the next, ``W2 W1[token]``.

    ``W2`` starts at zero: the drafter then drafts what it drafts without the head.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """DSpark's confidence head: the logit of a draft's chance from its slot's hidden state and the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class Drafter(nn.Module):
    """Module names are the tensor names of a z-lab checkpoint, or of DeepSpec's for the heads of DSpark."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        taps = len(config.target_layer_ids)
        self.fc = Linear(taps * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        rank = config.markov_rank
        self.markov_head = MarkovHead(config.vocab_size, rank) if rank else None
        self.confidence_head = ConfidenceHead(config.hidden_size + rank) if config.confidence else None
        self.candidate_selector: CandidateSelector | None = None
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(
                config.vocab_size, config.hidden_size, config.selector_rank, config.selector_top_k
            )

    def added_parameters(self) -> list[nn.Parameter]:
        """What a DFlash drafter lacks: those of the heads of DSpark, of DFlash 2's selector and convolutions."""
        parts = (self.markov_head, self.confidence_head, self.candidate_selector, *self.convs())
        return [p for part in parts if part is not None for p in part.parameters()]

    def convs(self) -> list[LocalConv]:
        """The local convolutions of DFlash 2."""
        return [m for m in self.modules() if isinstance(m, LocalConv)]

    def freeze_backbone(self) -> None:
        """Leave only what a DFlash drafter lacks to be trained. Raises TrainError for a drafter that has no more."""
        mine = {id(p) for p in self.added_parameters()}
        if not mine:
            raise TrainError(
                "--freeze backbone leaves nothing to train: a drafter of the family dflash has no heads; add some, as "
                "with --markov-rank or --selector-rank"
            )
        for parameter in self.parameters():
            parameter.requires_grad_(id(parameter) in mine)

    def best_tokens(self, hidden: Tensor, logits: Tensor, before: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Greedy target ids ``[...]`` of slots ``hidden [..., H]`` behind the tokens ``before [...]``, given their
        ``logits [..., R]`` over the head's ``rows``."""
        if self.candidate_selector is not None:
            values, columns = logits.topk(min(self.candidate_selector.top_k, logits.shape[-1]))
            ids = rows[columns]
            best = self.candidate_selector.scores(values, ids, hidden, before, dtype).argmax(-1, keepdim=True)
            return ids.gather(-1, best).squeeze(-1)
        shift, _ = self.sequential(hidden, before, rows)
        return rows[(logits if shift is None else logits + shift).argmax(-1)]

    def sequential(self, hidden: Tensor, before: Tensor, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of slots ``hidden [..., H]`` behind the tokens ``before [...]``: the Markov correction ``[..., R]`` to the
        logits of the head's ``rows``, and confidence logits ``[...]``; None for a head that the drafter lacks."""
        given = None if self.markov_head is None else self.markov_head.markov_w1(before)
        shift = None
        if self.markov_head is not None and given is not None:
            shift = F.linear(given, self.markov_head.markov_w2.weight[rows])
        return shift, self.confidence(hidden, given)

    def confidence(self, hidden: Tensor, given: Tensor | None) -> Tensor | None:
        """Confidence logits ``[...]`` of slots ``hidden [..., H]`` with the Markov embedding ``given [..., r]``."""
        if self.confidence_head is None:
            return None
        inputs = hidden.float() if given is None else torch.cat((hidden.float(), given.float()), -1)
        return self.confidence_head.proj(inputs).squeeze(-1)

    def context(self, taps: Tensor, dtype: torch.dtype) -> Tensor:
        """``hidden_norm(fc(taps))``: ``[..., T*H]`` to ``[..., H]`` in ``dtype``; every layer reads the same."""
        return self.hidden_norm(self.fc(taps, dtype)).to(dtype)

    def forward(self, embeds: Tensor, anchors: Tensor, taps: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Hidden states ``[S, A, B, H]`` (fp32, after the final norm) of ``A`` blocks per sequence.

        ``embeds [S, A, B, H]``: target embedding rows of ``[anchor, mask, ...]``; ``anchors [S, A]``: absolute anchor
        positions; ``taps [S, L, T*H]``: target taps of positions ``0..L-1``. Rows at or after a block's anchor are not
        seen by it, so padding behind the sequence is harmless.
        """
        c = self.config
        slots = torch.arange(embeds.shape[2], device=embeds.device)
        positions = torch.arange(taps.shape[1], device=embeds.device)
        ctx_rope = rope_tables(positions, c.head_dim, c.rope_theta)
        rope = rope_tables(anchors.unsqueeze(-1) + slots, c.head_dim, c.rope_theta)
        distance = anchors.unsqueeze(-1) - positions
        ctx = self.context(taps, dtype)
        x = embeds.float()
        for layer in self.layers:
            x = layer(x, ctx, ctx_rope, rope, distance)
        return self.norm(x)
