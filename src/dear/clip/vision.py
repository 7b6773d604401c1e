"""The image tower: patches, positions, layers, pooling, projection, each chosen by the configuration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.clip.attention import Attention, attend_eager, attend_fused
from dear.clip.config import TowerConfig, VisionConfig
from dear.clip.correction import Head
from dear.clip.edit import Edit
from dear.clip.rotary import Turn, grid_turn
from dear.clip.tower import MLP, LayerNorm, Record, Tower
from dear.clip.without import norm_without_heads, without_heads
from dear.errors import InputError, UsageError


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


class Patches(nn.Module):
    """Cuts an image into patches and projects each: a convolution whose windows do not overlap."""

    bias: nn.Parameter | None

    def __init__(self, width: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 3, size, size))
        self.register_parameter("bias", nn.Parameter(torch.empty(width)) if bias else None)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, patches, D]; pixels beyond the last whole patch are not read."""
        return self.as_product(pixels) if pixels.is_cuda else self.as_convolution(pixels)

    def as_convolution(self, pixels: Tensor) -> Tensor:
        """The way that is faster on a CPU."""
        grid = F.conv2d(pixels.to(self.weight.dtype), self.weight, self.bias, stride=self.weight.shape[-1])
        return grid.flatten(2).transpose(1, 2)

    def as_product(self, pixels: Tensor) -> Tensor:
        """The same as one matrix product: a GPU's convolution kernels are made for overlapping windows."""
        side = self.weight.shape[-1]
        rows, columns = (pixels.shape[axis] // side * side for axis in (2, 3))
        cut = pixels[:, :, :rows, :columns].unflatten(3, (-1, side)).unflatten(2, (-1, side))
        cut = cut.permute(0, 2, 4, 1, 3, 5)  # [B, rows, columns, 3, P, P]
        cut = cut.to(self.weight.dtype, memory_format=torch.contiguous_format)
        return F.linear(cut.flatten(3).flatten(1, 2), self.weight.flatten(1), self.bias)


class VisionTower(Tower):
    """An image tower of any of the supported families, and a correction of its feature if it has one."""

    correction_matrix: Tensor | None
    correction_bias: Tensor | None
    class_token: nn.Parameter | None
    proj: nn.Parameter | None
    proj_bias: nn.Parameter | None

    def __init__(self, config: VisionConfig, embed_dim: int) -> None:
        super().__init__(config, causal=False)
        self.shape = config
        width = config.width
        self.patch = Patches(width, config.patch_size, config.patch_bias)
        self.register_parameter(
            "class_token", nn.Parameter(torch.empty(width)) if config.class_token else None
        )
        self.positions = nn.Parameter(torch.empty(config.positions, width))
        self.ln_pre = LayerNorm(width, config.eps) if config.pre_norm else None
        self.ln_post = LayerNorm(width, config.eps)
        self.pool = AttentionPool(config) if config.pool == "attention" else None
        matrix = nn.Parameter(torch.empty(width, embed_dim)) if config.projection else None
        self.register_parameter("proj", matrix)
        bias = config.projection and config.projection_bias
        self.register_parameter("proj_bias", nn.Parameter(torch.empty(embed_dim)) if bias else None)
        self._turn: Turn | None = None
        self.left_out: tuple[Head, ...] = ()  # heads whose terms the feature goes without
        # Not persistent: a correction is no weight of the backbone.
        self.register_buffer("correction_matrix", None, persistent=False)
        self.register_buffer("correction_bias", None, persistent=False)

    def embed(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [B, 3, S, S] to the input of layer 1, [B, N, D], the class token first."""
        size = self.shape.image_size
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, size, size):
            raise InputError(f"images must be [B, 3, {size}, {size}]; got {list(pixels.shape)}")
        x = self.patch(pixels)  # [B, patches, D]
        if self.class_token is not None:
            first = self.class_token.to(x.dtype).expand(x.shape[0], 1, -1)
            x = torch.cat([first, x], dim=1)
        return self.before(x + self.positions)

    def before(self, x: Tensor) -> Tensor:
        """The norm before layer 1, where the family has one: [..., D] -> [..., D]."""
        return x if self.ln_pre is None else self.ln_pre(x)

    def turn(self, edit: Edit | None, layer: int, device: torch.device) -> Turn | None:
        """Rotary angles of a layer's tokens; None where the family has none."""
        if not self.shape.rotary:
            return None
        if self._turn is None or self._turn.cos.device != device:
            self._turn = grid_turn(self.shape, device)
        if edit is None or edit.first is None or layer < edit.first:
            return self._turn
        return self._turn.with_still_rows(edit.count, edit.at)

    def run(
        self,
        x: Tensor,
        first: int = 1,
        last: int | None = None,
        edit: Edit | None = None,
        read: Tensor | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """As `Tower.run`; where heads are left out, rows of the last layer are what `norm_rows` expects."""
        last = self.config.layers if last is None else last
        if not self.left_out or last < self.config.layers:
            return super().run(x, first, last, edit, read, record)
        return without_heads(self, super().run, x, first, edit, read, record)

    def norm_rows(self, x: Tensor) -> Tensor:
        """Final norm of rows [..., D] that `run` returned for the last layer."""
        if not self.left_out:
            normed: Tensor = self.ln_post(x)
            return normed
        return norm_without_heads(self.ln_post.weight, self.ln_post.bias, x)

    def correct(self, features: Tensor) -> Tensor:
        """The affine part of the correction, on features [..., E]; without one they stay as they are."""
        if self.correction_matrix is None or self.correction_bias is None:
            return features
        return features @ self.correction_matrix.to(features.dtype) + self.correction_bias.to(features.dtype)

    def read_rows(self, extra: int = 0) -> Tensor | None:
        """The rows of the last layer that `pooled` needs with so many extra tokens at the end; None: all."""
        if self.pool is not None:
            return None
        device, length = self.positions.device, len(self.positions)
        own = torch.zeros(1, dtype=torch.long, device=device)
        return torch.cat([own, torch.arange(length, length + extra, device=device)])

    def pooled(self, x: Tensor, extra: int = 0) -> Tensor:
        """The image's vector and one per extra token, normed, before the projection: [B, 1 + extra, D].

        Args:
            x: the last layer's rows `read_rows(extra)`.
            extra: how many extra tokens stand at the end.

        With a class token these are the rows themselves. With attention pooling the probe asks the original
        tokens, and extra token t asks them too, with the query `probe + norm(x_t)`: each extra token gives a
        vector of the same space, and no extra token changes the image's own.
        """
        y = self.norm_rows(x)
        if self.pool is None:
            return y
        originals = y.shape[1] - extra
        own = y[:, originals:] + self.pool.probe.to(y.dtype) if extra else None
        pooled: Tensor = self.pool(y[:, :originals], own, self.fused)
        return pooled

    def into_space(self, pooled: Tensor) -> Tensor:
        """Pooled vectors [..., D] to features [..., E]."""
        if self.proj is None:
            return pooled
        features = pooled @ self.proj
        return features if self.proj_bias is None else features + self.proj_bias

    def features(self, x: Tensor) -> Tensor:
        """Image features [B, E] of the last layer's rows `read_rows()`, corrected."""
        return self.correct(self.into_space(self.pooled(x)[:, 0]))

    def project(self, x: Tensor) -> Tensor:
        """Final norm, projection and correction of single rows [..., D] to features [..., E].

        Raises:
            UsageError: the tower pools its tokens by attention, so single rows have no feature.
        """
        if self.pool is not None:
            raise UsageError("this image tower pools its tokens by attention: a single token has no feature")
        return self.correct(self.into_space(self.norm_rows(x)))

    def forward(self, pixels: Tensor, edit: Edit | None = None, record: Record | None = None) -> Tensor:
        """Images to features [B, E]."""
        return self.features_from(self.embed(pixels), edit=edit, record=record)

    def features_from(
        self, x: Tensor, first: int = 1, edit: Edit | None = None, record: Record | None = None
    ) -> Tensor:
        """The input of layer `first` [B, N, D] to image features [B, E], under `edit`."""
        x = self.run(x, first=first, edit=edit, read=self.read_rows(), record=record)
        if self.pool is not None and edit is not None and edit.count:
            x = _without(x, edit)
        return self.features(x)

    def prefix(self, pixels: Tensor, first: int = 1) -> Tensor:
        """The input of layer `first`, [B, N, D], for pixels [B, 3, S, S]; 1: the embedded patches.

        It is what the frozen and the edited pass share where nothing changes before `first`. Without
        gradient, unless the pixels themselves ask for one.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            return self.run(self.embed(pixels), last=first - 1)

    def frozen_features(self, prefix: Tensor, first: int = 1) -> Tensor:
        """Features [B, E] of the frozen tower from the input of layer `first`; without gradient."""
        with torch.no_grad():
            return self.features_from(prefix, first)

    def class_and_tokens(self, prefix: Tensor, first: int, edit: Edit) -> tuple[Tensor, Tensor]:
        """The pooled vectors of the image [B, D] and of the extra tokens [B, T, D] under `edit`.

        With a class token these are the last layer's rows, normed; see `pooled` for other towers.
        """
        x = self.run(prefix, first=first, edit=edit, read=self.read_rows(edit.count))
        pooled = self.pooled(x, edit.count)  # [B, 1 + T, D]
        return pooled[:, 0], pooled[:, 1:]

    def require_class_token(self, who: str) -> None:
        """Refuse, on behalf of a method called `who`, a tower whose image feature is not one token's.

        Raises:
            UsageError: the tower pools its tokens by attention, or has no projection.
        """
        if self.pool is not None or self.proj is None:
            raise UsageError(
                f"{who} works on the class token and its projection, which this backbone does not have (it "
                "pools its tokens by attention); take a plain CLIP or another method"
            )

    def space_matrix(self) -> Tensor:
        """The projection from pooled vectors to the shared space, [D, E]; identity where there is none."""
        if self.proj is not None:
            return self.proj
        return torch.eye(self.config.width, device=self.positions.device, dtype=self.positions.dtype)


def _without(x: Tensor, edit: Edit) -> Tensor:
    """The original tokens of a sequence [B, N + T, D] with extra tokens."""
    at = x.shape[1] - edit.count if edit.at is None else edit.at
    return torch.cat([x[:, :at], x[:, at + edit.count :]], dim=1)
