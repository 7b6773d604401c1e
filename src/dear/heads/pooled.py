"""What heads add to the feature of a tower with attention pooling (SigLIP, PE-Core).

Row n of the last layer is a sum of terms; the final norm divides it by s_n; pooling head g weighs row n with
p_{g,n} and applies V_g and W_g; then an MLP adds `MLP(norm(o))` to the pooled vector o. With s_n and p_{g,n}
read off the real image, o is linear in the terms: head h adds
`sum_g u_{h,g} M_{h,g}`, with `u_{h,g} = sum_n (p_{g,n} / s_n) z_{h,n}` [d] and
`M_{h,g} = center(W_h) diag(w) V_g W_g P` [d, E], a map that depends on the weights alone. So the pieces have
the form of the class token's, with G·d values per head instead of d.

What passes the pooling MLP is not linear and belongs to no head. The share of the feature that the linear
path explains is measured per batch and must be told with every result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dear.clip.edit import Record
from dear.clip.model import Clip
from dear.clip.tower import Block
from dear.clip.towers import AttentionPool


def _pool(clip: Clip) -> AttentionPool:
    pool = clip.visual.pool
    assert pool is not None
    return pool


def _pool_maps(clip: Clip) -> Tensor:
    """From a normed row to what each pooling head adds to the feature, [G, D, E]: V_g W_g P."""
    attn, space = _pool(clip).attn, clip.visual.space_matrix().float()
    value = attn.v.weight.float().unflatten(0, (attn.heads, -1))  # [G, d_g, D]
    out = attn.o.weight.float().T.unflatten(0, (attn.heads, -1))  # [G, d_g, D]
    return torch.einsum("gkw,gkv->gwv", value, out) @ space


@torch.no_grad()
def pooled_maps(clip: Clip, layers: Sequence[int]) -> Tensor:
    """M of each head, [L, H, G·d, E] in float32."""
    heads, scale, further = clip.config.vision.heads, clip.visual.ln_post.weight.float(), _pool_maps(clip)
    maps = []
    for layer in layers:
        block = clip.visual.blocks[layer - 1]
        assert isinstance(block, Block)
        out = block.attn.o.weight.float().T  # [D, D]: rows of head h are h·d to (h+1)·d
        out = (out - out.mean(dim=1, keepdim=True)) * scale
        each = torch.einsum("hdw,gwe->hgde", out.unflatten(0, (heads, -1)), further)
        maps.append(each.flatten(1, 2))  # [H, G·d, E]
    return torch.stack(maps)


class PooledRun:
    """A run through the tower that keeps what `pooled_maps` is multiplied with.

    Args:
        clip: the backbone, without a correction.
        batch: normalized pixels [B, 3, S, S].
        layers: the layers whose heads are wanted.

    Attributes:
        features: [B, E].
        linear: [B, E], the part of the features that reached them past the pooling MLP.
        outputs: [B, L, H, G·d].
        own: [B, G, E], what each pooling head adds, its bias left out.
    """

    @torch.no_grad()
    def __init__(self, clip: Clip, batch: Tensor, layers: Sequence[int]) -> None:
        visual, pool = clip.visual, _pool(clip)
        record = Record(slice(None))
        x = visual.run(visual.embed(batch.to(clip.device)), record=record)  # [B, N, D]
        rows = visual.ln_post(x)
        z, pattern = pool.read(rows, fused=False)  # [B, G, 1, d_g], [B, G, 1, N]
        assert pattern is not None
        pooled = pool.attn.merge(z)[:, 0]  # [B, D]
        spread = (x.float().var(dim=-1, unbiased=False) + visual.ln_post.eps).sqrt()  # [B, N]
        weight = pattern[:, :, 0].float() / spread[:, None]  # [B, G, N]
        outputs = [
            torch.einsum("bgn,bhnd->bhgd", weight, record[f"blocks.{layer}.attn.heads"].float()).flatten(2)
            for layer in layers
        ]
        space = visual.space_matrix().float()
        out = pool.attn.o.weight.float().T.unflatten(0, (pool.attn.heads, -1))  # [G, d_g, D]
        self.features = visual.into_space(pool.finish(pooled)).float()
        self.linear = visual.into_space(pooled).float()
        self.outputs = torch.stack(outputs, dim=1)
        self.own = torch.einsum("bgk,gkw->bgw", z[:, :, 0].float(), out) @ space

    def explained(self) -> Tensor:
        """`linear · feature / |feature|^2` per image, [B]: the share that came past the MLP."""
        return (self.linear * self.features).sum(-1) / self.features.square().sum(-1)


class LinearShare:
    """The mean share of the features that the linear path explains, read off the first batch of a stream.

    Attributes:
        value: None before a batch came, and for towers without attention pooling, whose split is exact.
    """

    def __init__(self, clip: Clip) -> None:
        self.clip = clip
        self.value: float | None = None

    def watch(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The batches as they come."""
        for batch in batches:
            if self.value is None and self.clip.visual.pool is not None:
                self.value = float(PooledRun(self.clip, batch, (1,)).explained().mean())
            yield batch
