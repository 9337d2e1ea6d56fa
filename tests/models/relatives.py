"""Tiny DSpark and DFlash 2 drafters on disk, and what they draft by their definitions (fp64, greedy)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .reference import DrafterReference
from .tiny import Draft, Shape, Tensors, drafter_config, drafter_tensors, write

PLAIN = Draft()
SLIDING = Draft(window=32, sliding=(0, 1), causal=False)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@dataclass(frozen=True, slots=True)
class Spark:
    """A DSpark drafter. packaging: DeepSpec, SpecForge, LiquidAI or speculators. reduced: rows of a reduced head."""

    draft: Draft = PLAIN
    rank: int = 6
    kind: str = "vanilla"
    confidence: bool = True
    with_markov: bool = True
    packaging: str = "DeepSpec"
    reduced: tuple[int, ...] = ()
    strength: float = 3.0


def spark_config(s: Shape, d: Spark) -> dict[str, Any]:
    config = drafter_config(s, d.draft)
    own = {**config.pop("dflash_config", {})}
    own = own or {k: config.pop(k) for k in ("mask_token_id", "target_layer_ids", "block_size")}
    heads = {
        "markov_rank": d.rank,
        "markov_head_type": d.kind,
        "enable_confidence_head": d.confidence,
        "confidence_head_with_markov": d.confidence and d.with_markov,
    }
    if d.packaging == "SpecForge":
        return config | {
            "architectures": ["DSparkDraftModel"],
            "dflash_config": {"projector_type": "dspark", **own, **heads},
        }
    if d.packaging == "LiquidAI":
        name = {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False, "model_type": "lfm2"}
        return config | own | heads | name
    if d.packaging == "speculators":
        taps = own.pop("target_layer_ids")
        return {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "transformer_layer_config": config,
            "aux_hidden_state_layer_ids": [i + 1 for i in taps],
            "draft_vocab_size": len(d.reduced) or s.vocab,
            **own,
            **heads,
        }
    return config | own | heads | {"architectures": ["Qwen3DSparkModel"]}


def spark_tensors(s: Shape, d: Spark) -> Tensors:
    rng = np.random.default_rng(d.draft.seed + 77)
    out, hidden, r = drafter_tensors(s, d.draft), s.hidden, d.rank

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0, scale, shape).astype(np.float32)

    if r:
        out["markov_head.markov_w1.weight"] = random(s.vocab, r)
        out["markov_head.markov_w2.weight"] = random(len(d.reduced) or s.vocab, r, scale=d.strength / r**0.5)
        if d.kind == "gated":
            out |= {
                "markov_head.gate_proj.weight": random(r, hidden + r, scale=0.5),
                "markov_head.gate_proj.bias": random(r),
            }
        if d.kind == "rnn":
            out |= {
                "markov_head.joint_proj.weight": random(3 * r, 2 * r + hidden, scale=0.5),
                "markov_head.joint_proj.bias": random(3 * r),
            }
    if d.confidence:
        width = hidden + (r if d.with_markov else 0)
        out |= {
            "confidence_head.proj.weight": random(1, width, scale=0.2),
            "confidence_head.proj.bias": random(1),
        }
    if d.reduced:
        marked = np.zeros(s.vocab, np.bool_)
        marked[list(d.reduced)] = True
        out |= {
            "lm_head.weight": random(len(d.reduced), hidden, scale=hidden**-0.5),
            "d2t": np.array(d.reduced, np.int64) - np.arange(len(d.reduced)),
            "t2d": marked,
        }
    return out


def write_spark(folder: Path, s: Shape, d: Spark) -> Path:
    return write(folder, spark_config(s, d), spark_tensors(s, d))


class SparkReference(DrafterReference):
    """Greedy drafts of a DSpark drafter; settings as in DeepSpec's packaging."""

    def __init__(self, s: Shape, d: Spark, target: Any) -> None:
        plain = Spark(d.draft, d.rank, d.kind, d.confidence, d.with_markov)
        config = spark_config(s, plain)
        if d.packaging == "LiquidAI":
            config["rope_is_neox_style"] = False
        super().__init__(config, spark_tensors(s, d), target)
        self.d = d
        self.ids = list(d.reduced) or list(range(s.vocab))

    def drafts(self, taps: np.ndarray, anchor: int, count: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """(tokens, logits [count, columns] with the bias, confidence [count])."""
        w, previous, state = self.w, anchor, np.zeros(self.d.rank)
        skip = 1 if self.settings.get("sample_from_anchor") is False else 0
        hidden = self.block(taps, anchor, count + skip)[skip:]
        tokens, confidence = [], []
        logits = self.head_logits(hidden)
        for k in range(count):
            h, e = hidden[k], np.zeros(0)
            if self.d.rank:
                e = w["markov_head.markov_w1.weight"][previous]
                z = e
                if self.d.kind == "gated":
                    z = sigmoid(self._affine("markov_head.gate_proj", h, e)) * e
                if self.d.kind == "rnn":
                    gate, candidate, output = np.split(self._affine("markov_head.joint_proj", state, e, h), 3)
                    state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
                    z = np.tanh(output)
                logits[k] = logits[k] + w["markov_head.markov_w2.weight"] @ z
            if self.d.confidence:
                parts = [h, e] if self.d.with_markov else [h]
                confidence.append(sigmoid(self._affine("confidence_head.proj", *parts))[0])
            previous = self.ids[int(logits[k].argmax())]
            tokens.append(previous)
        return tokens, logits, np.array(confidence)

    def _affine(self, name: str, *parts: np.ndarray) -> np.ndarray:
        return self.w[f"{name}.weight"] @ np.concatenate(parts) + self.w[f"{name}.bias"]


@dataclass(frozen=True, slots=True)
class Walk:
    """A DFlash 2 drafter. rows: head rows that it drafts from, in a file of their own."""

    draft: Draft = SLIDING
    kernel: int = 2
    group: int = 8
    rank: int = 5
    top_k: int = 6
    strength: float = 3.0
    rows: tuple[int, ...] = ()


def walk_config(s: Shape, d: Walk) -> dict[str, Any]:
    config = drafter_config(s, d.draft)
    own = {
        "conv_kernel_size": d.kernel,
        "conv_group_size": d.group,
        "selector_rank": d.rank,
        "selector_top_k": d.top_k,
    }
    config["architectures"] = ["DFlash2DraftModel"]
    if d.draft.nested:
        config["dflash_config"] = config["dflash_config"] | own
        return config
    return config | own


def walk_tensors(s: Shape, d: Walk) -> Tensors:
    rng = np.random.default_rng(d.draft.seed + 99)
    out, hidden = drafter_tensors(s, d.draft), s.hidden

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0, scale, shape).astype(np.float32)

    columns = 2 * d.kernel * (hidden // d.group)
    for i in range(d.draft.layers):
        for which in ("attention_conv", "mlp_conv"):
            base = random(2, d.kernel, hidden, scale=0.3)
            base[:, 0] += 1
            out[f"layers.{i}.{which}.base_kernel"] = base
            out[f"layers.{i}.{which}.kernel_projection.weight"] = random(columns, hidden, scale=0.3 / hidden**0.5)
    out["candidate_selector.hidden_projection.weight"] = random(d.rank, hidden, scale=hidden**-0.5)
    for which in ("predecessor", "successor"):
        out[f"candidate_selector.{which}_codebook"] = random(s.vocab, d.rank, scale=d.strength**0.5 / d.rank**0.25)
    return out


def write_walk(folder: Path, s: Shape, d: Walk) -> Path:
    written = write(folder, walk_config(s, d), walk_tensors(s, d))
    if d.rows:
        save_file({"head_rows": np.array(d.rows, np.int32)}, str(written / "head_rows.safetensors"))
    return written


class WalkReference(DrafterReference):
    """Greedy drafts of a DFlash 2 drafter."""

    def __init__(self, s: Shape, d: Walk, target: Any) -> None:
        super().__init__(walk_config(s, d), walk_tensors(s, d), target)
        self.d = d

    def _conv(self, y: np.ndarray, rows: np.ndarray, name: str, side: int) -> np.ndarray:
        d = self.d
        delta = (y @ self.w[f"{name}.kernel_projection.weight"].T).reshape(len(y), 2, d.kernel, -1)[:, side]
        kernel = self.w[f"{name}.base_kernel"][side] + np.repeat(delta, d.group, axis=2)  # [n, kernel, H]
        out = np.zeros_like(rows)
        for t in range(d.kernel):
            shifted = np.concatenate([np.zeros((t, rows.shape[1])), rows])[: len(rows)]
            out += kernel[:, t] * shifted
        return out

    def mix_input(self, y: np.ndarray, name: str) -> np.ndarray:
        return self._conv(y, y, name, 0)

    def mix_output(self, y: np.ndarray, out: np.ndarray, name: str) -> np.ndarray:
        return self._conv(y, out, name, 1)

    def scores(self, hidden: np.ndarray, logits: np.ndarray, previous: int) -> tuple[np.ndarray, np.ndarray]:
        """(candidate ids in increasing order, their scores) of one slot."""
        rows = np.array(self.d.rows or range(len(logits)))
        ids = np.sort(rows[np.argsort(-logits[rows], kind="stable")[: self.d.top_k]])
        g = self.w["candidate_selector.hidden_projection.weight"] @ hidden
        query = self.w["candidate_selector.predecessor_codebook"][previous] * g
        return ids, logits[ids] + self.w["candidate_selector.successor_codebook"][ids] @ query

    def drafts(self, taps: np.ndarray, anchor: int, count: int) -> tuple[list[int], list[np.ndarray]]:
        """(tokens, scores of the candidates of each slot)."""
        hidden = self.block(taps, anchor, count + 1)[1:]
        logits, previous, tokens, all_scores = self.head_logits(hidden), anchor, [], []
        for k in range(count):
            ids, scores = self.scores(hidden[k], logits[k], previous)
            previous = int(ids[scores.argmax()])
            tokens.append(previous)
            all_scores.append(scores)
        return tokens, all_scores
