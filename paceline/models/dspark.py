"""DSpark (arXiv 2607.05147): a DFlash network whose slots are drawn one after the other, and that knows how sure it is.

Slot k predicts the token behind its own position, the anchor's slot included. A small Markov head corrects a slot's
logits by the token drawn before it, and a confidence head estimates the chance that the draft is kept. Both read the
slot's hidden state through linear maps; those run in the block's pass, for all slots at once, and what is left depends
on tokens alone (`native/markov_head.cpp`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline import _native
from paceline.models.dflash import DFlashDrafter
from paceline.models.network import Network, WeightLoader, packed_bytes

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
ONE_THREAD = 1 << 20  # elements of the Markov head's second matrix that one thread multiplies: 11 us for half as many
GATE, JOINT, CONFIDENCE = "markov_head.gate_proj", "markov_head.joint_proj", "confidence_head.proj"


class DSparkDrafter(DFlashDrafter):
    """features [rows, m]: what a slot's hidden state adds to the gate or joint projection (if any), then to the
    confidence (if any). head: None where the checkpoint has no Markov head."""

    head: _native.MarkovHead | None = None

    def _extra_bytes(self) -> int:
        rank = 0 if self.config.markov is None else self.config.markov.rank
        f32, hidden = self.target.f32, self.config.decoder.hidden_size
        if not rank:
            return packed_bytes(1, hidden, f32=f32)
        w2 = packed_bytes(self.draft_vocab, rank, f32=f32, quantised=self.quantization != "none")
        return w2 + packed_bytes(3 * rank + 1, hidden, f32=f32)

    def _load_extra(self, loader: WeightLoader) -> None:
        c, hidden = self.config, self.config.decoder.hidden_size
        rank, kind = (0, "vanilla") if c.markov is None else (c.markov.rank, c.markov.kind)
        side, biases = [], []  # what reads the hidden state
        inner = None
        if kind == "gated":  # input order: hidden state, token
            weight = loader.array(f"{GATE}.weight", (rank, hidden + rank))
            inner = np.ascontiguousarray(weight[:, hidden:])
            side.append(weight[:, :hidden])
            biases.append(loader.vector(f"{GATE}.bias", rank))
        elif kind == "rnn":  # input order: state, token, hidden state; output order: gate, candidate, output
            weight = loader.array(f"{JOINT}.weight", (3 * rank, 2 * rank + hidden))
            inner = np.ascontiguousarray(weight[:, : 2 * rank])
            side.append(weight[:, 2 * rank :])
            biases.append(loader.vector(f"{JOINT}.bias", 3 * rank))
        of_token = None
        if c.confidence is not None:
            weight = loader.array(f"{CONFIDENCE}.weight", (1, hidden + c.confidence))
            of_token = np.ascontiguousarray(weight[0, hidden:]) if c.confidence else None
            side.append(weight[:, :hidden])
            biases.append(loader.vector(f"{CONFIDENCE}.bias", 1))
        self.features_width = sum(len(part) for part in side)
        if side:
            self._side = loader.packed_array(np.concatenate(side))
            self._side_bias = np.concatenate(biases)
        if c.markov is not None:
            self.head = self._markov_head(loader, rank, inner, kind == "rnn", of_token)

    def _markov_head(
        self, loader: WeightLoader, rank: int, inner: np.ndarray | None, recurrent: bool, of_token: np.ndarray | None
    ) -> Any:
        target, vocab = self.target, self.target.vocab_size
        if self.head_order is not None:
            w2 = loader.packed_rows([(W2, self.draft_vocab, self.head_order)], rank)
        else:
            w2 = loader.packed_rows([(W2, vocab, self.head_rows)], rank)
        # it runs once for each slot: threads that meet so often cost more than they do of a small product
        alone = self.draft_vocab * rank <= ONE_THREAD
        return _native.MarkovHead(
            _native.ThreadPool(1) if alone else target.pool,
            target.isa,
            target.f32,
            loader.table(W1, vocab, rank),
            w2,
            inner=inner,
            recurrent=recurrent,
            confidence=of_token,
            has_confidence=self.config.confidence is not None,
            max_sequences=self.max_rows,
        )

    def _add_features(self, net: Network) -> None:
        eps = self.config.decoder.rms_norm_eps
        net.buffer("side", self.features_width)
        net.linear("x", "side", self._side, norm=self.weights.norm, eps=eps, bias=self._side_bias)
        net.copy("side", "features", self.features_width)
