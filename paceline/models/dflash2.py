"""DFlash 2: a DFlash network with local convolutions in the block, and a selector that walks through candidates.

Every sublayer of the block mixes each row with the rows just before it, once on its normed input and once on its
output, with kernels that depend on the input (`native/local_conv.cpp`). Each slot's best tokens are candidates; a walk
from the left picks one per slot, by its logit and by how well it follows the one before
(`native/candidate_selector.cpp`). Context keys and values are those of DFlash.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline import _native
from paceline.models.decoder import add_heads
from paceline.models.dflash import DFlashDrafter
from paceline.models.network import Network, WeightLoader, packed_bytes

SELECTOR = "candidate_selector"


@dataclass(slots=True)
class Conv:
    """base [2, kernel, H]: of the input side, of the output side. projection [2 * kernel * groups, H]."""

    base: np.ndarray
    projection: Any


class DFlash2Drafter(DFlashDrafter):
    """features [rows, r]: the slot's projected hidden state, which the selector reads.

    A checkpoint has convolutions and a selector, even where only one of them was trained. Those that are without
    effect, all of them the identity or a selector that projects to zero, are left out: selector is None, then.
    """

    selector: _native.CandidateSelector | None = None

    def _extra_bytes(self) -> int:
        s, d, f32 = self.config.selector, self.config.decoder, self.target.f32
        assert s is not None
        columns = 2 * s.kernel * (d.hidden_size // s.group)
        size = functools.partial(packed_bytes, k=d.hidden_size, f32=f32, quantised=self.quantization != "none")
        return 2 * d.num_layers * size(columns) + size(s.rank)

    def _load_extra(self, loader: WeightLoader) -> None:
        s, d, vocab = self.config.selector, self.config.decoder, self.target.vocab_size
        assert s is not None
        self._columns = 2 * s.kernel * (d.hidden_size // s.group)

        def conv(prefix: str) -> Conv:
            projection = loader.packed([(f"{prefix}.kernel_projection.weight", self._columns)], d.hidden_size)
            return Conv(loader.array(f"{prefix}.base_kernel", (2, s.kernel, d.hidden_size)), projection)

        def codebook(which: str) -> np.ndarray:
            name = f"{SELECTOR}.{which}_codebook"  # published without ".weight"; an embedding's name has it
            return loader.table(name if name in loader.checkpoint else f"{name}.weight", vocab, s.rank)

        names = [f"layers.{i}.{which}_conv" for i in range(d.num_layers) for which in ("attention", "mlp")]
        convs = [conv(name) for name in names]
        mixing = any(_mixes(loader, name, c) for name, c in zip(names, convs, strict=True))
        self._convs = convs if mixing else []
        projection = f"{SELECTOR}.hidden_projection.weight"
        self._hidden_projection = loader.packed([(projection, s.rank)], d.hidden_size)
        selector = _native.CandidateSelector(codebook("predecessor"), codebook("successor"), s.top_k)
        if loader.checkpoint.load(projection, "float32").any():
            self.selector, self.features_width = selector, s.rank

    def _add_layer(self, net: Network, index: int) -> None:
        if not self._convs:
            super()._add_layer(net, index)
            return
        c, d, w = self.config, self.config.decoder, self.weights.layers[index]
        for_attention, for_mlp = self._convs[2 * index : 2 * index + 2]
        net.buffer("conv", d.hidden_size)
        net.buffer("update", d.hidden_size)
        net.buffer("delta", self._columns)
        self._before(net, for_attention, w.input_norm)
        net.linear("conv", "qkv", w.qkv, convert=True, bias=w.qkv_bias)
        add_heads(net, d, w, index, causal=c.causal[index], window=d.windows[index])
        net.linear("mix", "update", w.output, bias=w.output_bias)
        self._after(net, for_attention)
        self._before(net, for_mlp, w.post_norm)
        net.linear("conv", "act", w.gate_up, epilogue="SWIGLU", convert=True, bias=w.gate_up_bias)
        net.linear("act", "update", w.down, bias=w.down_bias)
        self._after(net, for_mlp)

    def _before(self, net: Network, conv: Conv, norm: np.ndarray) -> None:
        """conv = convolution of norm(x); delta = both sides' changes of its kernel, from the same normed rows."""
        s, eps = self.config.selector, self.config.decoder.rms_norm_eps
        assert s is not None
        net.linear("x", "delta", conv.projection, norm=norm, eps=eps)
        net.local_conv("x", "conv", "delta", base=conv.base[0], group=s.group, norm=norm, eps=eps)

    def _after(self, net: Network, conv: Conv) -> None:
        """x += convolution of the sublayer's output."""
        s = self.config.selector
        assert s is not None
        net.local_conv("update", "x", "delta", base=conv.base[1], group=s.group, offset=self._columns // 2, add=True)

    def _add_features(self, net: Network) -> None:
        net.buffer("projected", self.features_width)
        eps = self.config.decoder.rms_norm_eps
        net.linear("x", "projected", self._hidden_projection, norm=self.weights.norm, eps=eps)
        net.copy("projected", "features", self.features_width)


def _mixes(loader: WeightLoader, name: str, conv: Conv) -> bool:
    """Whether a convolution is anything but the identity."""
    start = np.zeros_like(conv.base)
    start[:, 0] = 1
    projection = loader.checkpoint.load(f"{name}.kernel_projection.weight", "float32")
    return bool(projection.any()) or not np.array_equal(conv.base, start)
