"""What DFlash 2 has besides DFlash's network: local convolutions of a block's rows, and a candidate selector."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Linear


class LocalConv(nn.Module):
    """Mixes each row of a block with the rows just before it, on a sublayer's normed input and on its output.

    The kernel of a channel is ``base_kernel [2 sides, kernel, H]`` plus what ``kernel_projection`` reads from the
    normed row for the channel's group. Rows before the block's first are zeros. It starts as the identity.
    """

    def __init__(self, hidden_size: int, kernel: int, group: int) -> None:
        super().__init__()
        self.kernel, self.groups = kernel, hidden_size // group
        base = torch.zeros(2, kernel, hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = Linear(hidden_size, 2 * kernel * self.groups, std=0.0)

    def around(self, sublayer: Callable[[Tensor], Tensor], y: Tensor, dtype: torch.dtype) -> Tensor:
        """``conv(sublayer(conv(y)))`` (fp32) of normed block rows ``y [..., B, H]``."""
        changes = self.kernel_projection(y, dtype).unflatten(-1, (2, self.kernel, self.groups))
        out = sublayer(self._mix(y, changes[..., 0, :, :], self.base_kernel[0]))
        return self._mix(out.float(), changes[..., 1, :, :], self.base_kernel[1])

    def _mix(self, rows: Tensor, changes: Tensor, base: Tensor) -> Tensor:
        """``rows [..., B, H]`` with ``changes [..., B, kernel, G]`` to the kernel ``base [kernel, H]``."""
        rows = rows.unflatten(-1, (self.groups, -1))
        kernels = base.unflatten(-1, (self.groups, -1))
        out = torch.zeros_like(rows)
        for tap in range(min(self.kernel, rows.shape[-3])):
            shifted = F.pad(rows[..., : rows.shape[-3] - tap, :, :], (0, 0, 0, 0, tap, 0)) if tap else rows
            out = out + (kernels[tap] + changes[..., tap, :, None].float()) * shifted
        return out.flatten(-2)

    def without_effect(self) -> bool:
        """Whether it is the identity."""
        start = torch.zeros_like(self.base_kernel)
        start[:, 0] = 1.0
        return torch.equal(self.base_kernel, start) and not self.kernel_projection.weight.any()


class CandidateSelector(nn.Module):
    """Scores each slot's best tokens by their logit and by how well they follow the token before.

    ``S(a, b) = U(b) + <A[a] * g, C[b]>`` with ``g`` the slot's projected hidden state. ``A`` starts at zero: the
    drafter then drafts what it drafts without the selector, and so it stays behind tokens that training never shows.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.hidden_projection = Linear(hidden_size, rank)
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.randn(vocab_size, rank))

    def scores(self, values: Tensor, ids: Tensor, hidden: Tensor, before: Tensor, dtype: torch.dtype) -> Tensor:
        """``[..., K]`` of the candidates ``ids [..., K]`` with logits ``values``, given the slots' hidden states
        ``[..., H]`` and the tokens ``before [...]`` them."""
        query = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(hidden, dtype).float()
        return values + (F.embedding(ids, self.successor_codebook) @ query.unsqueeze(-1)).squeeze(-1)

    def clear(self) -> None:
        """All zeros: a selector that stands for none."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def cleared(self) -> bool:
        return not any(p.any() for p in self.parameters())
