"""The frozen parts of a target that a drafter borrows: its embedding, and rows of its output head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Heads:
    """Embedding ``[V, H]``, the head's ``rows [R, H]`` in ascending order, and ``row_of [V]`` (-1: not among them)."""

    def __init__(self, embed: Tensor, head: Tensor, rows: Sequence[int], mask_token_id: int) -> None:
        self.embed = embed
        self.rows = torch.tensor(sorted(rows), device=head.device)
        self.head = head[self.rows].contiguous()
        self.row_of = torch.full((head.shape[0],), -1, dtype=torch.long, device=head.device)
        self.row_of[self.rows] = torch.arange(len(rows), device=head.device)
        self.mask_token_id = mask_token_id

    def block_embeds(self, anchor_tokens: Tensor, block_size: int) -> Tensor:
        """``[..., B, H]`` fp32: the anchor's embedding row, then the mask token's."""
        ids = torch.full((*anchor_tokens.shape, block_size), self.mask_token_id, device=anchor_tokens.device)
        ids[..., 0] = anchor_tokens
        return F.embedding(ids, self.embed).float()
