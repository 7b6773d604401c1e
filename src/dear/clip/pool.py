"""Attention pooling, SigLIP's and PE-Core's way to one vector: learned queries read all tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dear.clip.attention import Attention, attend_eager, attend_fused
from dear.clip.config import TowerConfig, VisionConfig
from dear.clip.norm import LayerNorm
from dear.clip.tower import MLP


class AttentionPool(nn.Module):
    """One learned probe that asks all tokens; its answer z becomes z + MLP(norm(z))."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        shape = TowerConfig(
            config.width, 1, config.pool_heads, config.mlp, activation=config.activation, eps=config.eps
        )
        self.probe = nn.Parameter(torch.empty(config.width))
        self.attn = Attention(shape, causal=False)
        self.norm = LayerNorm(config.width, config.eps)
        self.mlp = MLP(shape)

    def forward(self, tokens: Tensor, queries: Tensor | None = None, fused: bool = True) -> Tensor:
        """Normed tokens [B, N, D], read by the probe and by further queries [B, Q, D]: [B, 1 + Q, D]."""
        z, _ = self.read(tokens, queries, fused)
        return self.finish(self.attn.merge(z))

    def read(
        self, tokens: Tensor, queries: Tensor | None = None, fused: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Each pooling head's output [B, H, 1 + Q, d], and its pattern [B, H, 1 + Q, N] if not fused."""
        attn = self.attn
        asked = self.probe.to(tokens.dtype).expand(tokens.shape[0], 1, -1)
        if queries is not None:
            asked = torch.cat([asked, queries.to(tokens.dtype)], dim=1)
        q, k, v = attn.split(attn.q(asked)), attn.split(attn.k(tokens)), attn.split(attn.v(tokens))
        if fused:
            return attend_fused(q, k, v, None, causal=False), None
        return attend_eager(q, k, v, None)

    def finish(self, z: Tensor) -> Tensor:
        """What follows the attention, on rows [..., D]."""
        out: Tensor = z + self.mlp(self.norm(z))
        return out
