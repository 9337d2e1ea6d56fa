"""What a family's decoder does beyond Llama's: values that the shared blocks in `decoder.py` read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.models.config import Rope

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Experts:
    """Sparse layers: each row goes to `per_token` of `count` MLPs of width `inner`. layers[i]: whether layer i is one.

    normalise: the router's weights of the chosen experts sum to one.
    """

    count: int
    per_token: int
    inner: int
    normalise: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Traits:
    """The defaults are Llama's.

    attention_scale: of q k^T; None: head_dim ** -0.5. attention_softcap, logit_softcap: cap * tanh(x / cap); 0: none.
    embedding_scale: of token embeddings; embedding_norm: they pass an RMSNorm without a weight. norm_offset: what is
    added to the stored weights of norms. branch_norm_eps: the outputs of attention and MLP pass norms of their own,
    with this eps, before they are added; None: they do not. head_norm_scale: q and k heads pass an RMSNorm without
    weights, and q is multiplied by this; None: they do not. final_norm_weight: whether the last norm has a weight.
    attention_gate: attention's output is multiplied by sigmoid(gate_proj(x)). local_rope: of layers with a window;
    None: they rotate as the others do. unrotated[i]: layer i does not rotate at all.
    """

    activation: Activation = "silu"
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    norm_offset: float = 0.0
    branch_norm_eps: float | None = None
    head_norm_scale: float | None = None
    final_norm_weight: bool = True
    attention_gate: bool = False
    local_rope: Rope | None = None
    unrotated: tuple[bool, ...] = ()
    experts: Experts | None = None

    def is_sparse(self, layer: int | None) -> bool:
        """Whether a layer's MLP is a mixture of experts; None: a layer of another network, a drafter's."""
        return layer is not None and self.experts is not None and self.experts.layers[layer]
