"""The image tower and the text tower of every supported family.

The configuration chooses patches, positions, pooling and projection; `dear.clip.tower` has the layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.clip.config import Head, TextConfig, TowerConfig, VisionConfig
from dear.clip.correction import AppliedCorrection, Correction, apply_to
from dear.clip.edit import Edit, Record
from dear.clip.rotary import RotaryAngles, grid_angles
from dear.clip.rows import (
    ClassRow,
    Rows,
    direct_term,
    final_norm,
    head_sum,
    rows_without_heads,
    spread_of,
)
from dear.clip.sharing import replace
from dear.clip.tower import (
    MLP,
    Attention,
    Block,
    LayerNorm,
    LayerRange,
    Linear,
    Tower,
    attend_eager,
    attend_fused,
)
from dear.errors import InputError, UsageError


class AttentionPool(nn.Module):
    """Attention pooling with one learned query; the pooled z becomes z + MLP(norm(z))."""

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
        """Pool normed tokens [B, N, D] with the probe and further queries [B, Q, D]: [B, 1 + Q, D]."""
        z, _ = self.read(tokens, queries, fused)
        return self.finish(self.attn.merge(z))

    def read(
        self, tokens: Tensor, queries: Tensor | None = None, fused: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Each pooling head's output [B, H, 1 + Q, d], and its pattern [B, H, 1 + Q, N] if not fused."""
        attn = self.attn
        probes = self.probe.to(tokens.dtype).expand(tokens.shape[0], 1, -1)  # [B, 1, D]
        if queries is not None:
            probes = torch.cat([probes, queries.to(tokens.dtype)], dim=1)
        q, k, v = attn.split(attn.q(probes)), attn.split(attn.k(tokens)), attn.split(attn.v(tokens))
        if fused:
            return attend_fused(q, k, v, None, causal=False), None
        return attend_eager(q, k, v, None)

    def finish(self, z: Tensor) -> Tensor:
        """The residual MLP after the attention, on rows [..., D]."""
        out: Tensor = z + self.mlp(self.norm(z))
        return out


class Patches(nn.Module):
    """Cuts an image into patches and projects each: a convolution whose windows do not overlap."""

    bias: nn.Parameter | None

    def __init__(self, width: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 3, size, size))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, patches, D]; pixels beyond the last whole patch are not read."""
        return self.as_product(pixels) if pixels.is_cuda else self.as_convolution(pixels)

    def as_convolution(self, pixels: Tensor) -> Tensor:
        """The implementation that is faster on a CPU."""
        grid = F.conv2d(pixels.to(self.weight.dtype), self.weight, self.bias, stride=self.weight.shape[-1])
        return grid.flatten(2).transpose(1, 2)  # [B, D, rows, columns] -> [B, patches, D]

    def as_product(self, pixels: Tensor) -> Tensor:
        """The same as one matrix product, faster on a GPU, whose convolutions expect overlapping windows."""
        side = self.weight.shape[-1]
        rows, columns = (pixels.shape[axis] // side * side for axis in (2, 3))
        # [B, 3, r*P, c*P] -> [B, 3, r, P, c, P]
        patches = pixels[:, :, :rows, :columns].unflatten(3, (-1, side)).unflatten(2, (-1, side))
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # [B, 3, r, P, c, P] -> [B, r, c, 3, P, P]
        patches = patches.to(self.weight.dtype, memory_format=torch.contiguous_format)
        return F.linear(patches.flatten(3).flatten(1, 2), self.weight.flatten(1), self.bias)  # [B, r*c, D]


class VisionTower(Tower):
    """An image tower of any supported family, with an optional correction of its feature."""

    class_token: nn.Parameter | None
    proj: nn.Parameter | None
    proj_bias: nn.Parameter | None

    def __init__(self, config: VisionConfig, embed_dim: int) -> None:
        super().__init__(config, causal=False)
        self.shape = config
        width = config.width
        self.patch = Patches(width, config.patch_size, config.patch_bias)
        self.class_token = nn.Parameter(torch.empty(width)) if config.class_token else None
        self.positions = nn.Parameter(torch.empty(config.positions, width))
        self.ln_pre = LayerNorm(width, config.eps) if config.pre_norm else None
        self.ln_post = LayerNorm(width, config.eps)
        self.pool = AttentionPool(config) if config.pool == "attention" else None
        self.proj = nn.Parameter(torch.empty(width, embed_dim)) if config.projection else None
        bias = config.projection and config.projection_bias
        self.proj_bias = nn.Parameter(torch.empty(embed_dim)) if bias else None
        self._angles: RotaryAngles | None = None
        self.correction: AppliedCorrection | None = None  #: of the feature; not part of the weights

    def with_correction(self, correction: Correction | None) -> VisionTower:
        """A tower on the same weights with (another) correction of its feature, or none."""
        applied = None if correction is None else apply_to(self, correction)
        return replace(self, type(self), correction=applied)

    @property
    def removed_heads(self) -> tuple[Head, ...]:
        """Heads whose terms are left out of the feature."""
        return () if self.correction is None else self.correction.heads

    def embed(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [B, 3, S, S] to the input of layer 1, [B, N, D], the class token first."""
        size = self.shape.image_size
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, size, size):
            raise InputError(f"images must be [B, 3, {size}, {size}], got {list(pixels.shape)}")
        x = self.patch(pixels)  # [B, patches, D]
        if self.class_token is not None:
            first = self.class_token.to(x.dtype).expand(x.shape[0], 1, -1)
            x = torch.cat([first, x], dim=1)
        return self.norm_input(x + self.positions)

    def norm_input(self, x: Tensor) -> Tensor:
        """The norm before layer 1, where the family has one: [..., D] -> [..., D]."""
        return x if self.ln_pre is None else self.ln_pre(x)

    def rotary_angles(self, edit: Edit | None, layer: int, device: torch.device) -> RotaryAngles | None:
        """Rotary angles of a layer's tokens; None where the family has none."""
        if not self.shape.rotary:
            return None
        if self._angles is None or self._angles.cos.device != device:
            self._angles = grid_angles(self.shape, device)
        if edit is None or edit.first is None or layer < edit.first:
            return self._angles
        return self._angles.with_unrotated_rows(edit.count, edit.at)

    def final_rows(
        self,
        x: Tensor,
        first: int = 1,
        edit: Edit | None = None,
        read: Tensor | None = None,
        record: Record | None = None,
    ) -> Rows:
        """Run layers `first` to the last on x [B, N, D]; the input of the final norm at the rows `read`."""
        return self.run_to_rows(LayerRange(x, first, self.config.layers, edit, read, record))

    def run_to_rows(self, layers: LayerRange) -> Rows:
        """See `final_rows`; towers that trace or replay a run override this."""
        if self.removed_heads:
            return rows_without_heads(self, layers)
        return Rows(self.run(*layers))

    def norm_rows(self, rows: Rows) -> Tensor:
        """Final norm of rows [B, R, D] of the last layer."""
        norm = self.ln_post
        return final_norm(rows, norm.weight, norm.bias, norm.eps).to(rows.x.dtype)

    def correct(self, features: Tensor) -> Tensor:
        """Features [..., E] after the affine part of the correction, if there is one."""
        return features if self.correction is None else self.correction.feature(features)

    def correct_pooled(self, pooled: Tensor) -> Tensor:
        """Pooled vectors [..., D] reduced to their corrected feature, to which `project_pooled` maps them.

        Learned projections read these: the full pooled vector still contains what the correction removes from
        the feature. Without a correction they are unchanged.
        """
        return pooled if self.correction is None else self.correction.pooled(pooled)

    def output_rows(self, extra: int = 0) -> Tensor | None:
        """Rows of the last layer that `pooled` reads, with `extra` tokens at the end; None: all."""
        if self.pool is not None:
            return None
        device, length = self.positions.device, len(self.positions)
        first = torch.zeros(1, dtype=torch.long, device=device)
        return torch.cat([first, torch.arange(length, length + extra, device=device)])

    def pooled(self, rows: Rows, extra: int = 0) -> Tensor:
        """Pooled vectors of the image and of each extra token, before the projection: [B, 1 + extra, D].

        Args:
            rows: the last layer's rows `output_rows(extra)`.
            extra: number of extra tokens, at the end of the sequence.

        With a class token these are the normed rows. With attention pooling, the probe and each extra token
        t, as the query `probe + norm(x_t)`, read the original tokens; extra tokens do not change the image's
        vector.
        """
        y = self.norm_rows(rows)
        if self.pool is None:
            return y
        originals = y.shape[1] - extra
        queries = y[:, originals:] + self.pool.probe.to(y.dtype) if extra else None
        pooled: Tensor = self.pool(y[:, :originals], queries, self.fused)
        return pooled

    def image_vector(self, rows: Rows) -> Tensor:
        """The image's pooled vector [B, D], before the projection, from the last layer's `output_rows()`."""
        return self.pooled(rows)[:, 0]

    def project_pooled(self, pooled: Tensor) -> Tensor:
        """Pooled vectors [..., D] to features [..., E]."""
        if self.proj is None:
            return pooled
        features = pooled @ self.proj
        return features if self.proj_bias is None else features + self.proj_bias

    def features(self, rows: Rows) -> Tensor:
        """Image features [B, E] of the last layer's rows `output_rows()`, corrected."""
        return self.correct(self.project_pooled(self.image_vector(rows)))

    def project(self, rows: Rows) -> Tensor:
        """Final norm, projection and correction of single rows [B, R, D] to features [B, R, E]."""
        if self.pool is not None:
            raise UsageError("features of single tokens need a tower with a class token; this one pools")
        return self.correct(self.project_pooled(self.norm_rows(rows)))

    def features_and_terms(
        self, x: Tensor, first: int, groups: Sequence[Sequence[Head]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Image features [B, E], and the sum of the terms of each group of heads, [B, E] each.

        Args:
            x: [B, N, D], the input of layer `first`.
            first: number of that layer; heads of the groups are in this layer or later ones.
            groups: (layer, head) pairs of each group.

        A correction of the feature applies to the terms as well: removed heads contribute nothing, and its
        matrix maps the contributions of the others.
        """
        layers = [layer for heads in (*groups, self.removed_heads) for layer, _ in heads]
        start, record = max(first, min(layers)), ClassRow()
        x = self.run(x, first, start - 1)
        rows = self.final_rows(x, start, read=self.output_rows(), record=record)  # [B, 1, D]
        return self.features(rows), self.head_terms(rows, record, groups)

    def head_terms(self, rows: Rows, record: Record, groups: Sequence[Sequence[Head]]) -> list[Tensor]:
        """The sum of the terms of each group of heads, [B, E], from the class token's row and record."""
        x = rows.x[:, 0].float()  # [B, D]
        spread = spread_of(x, self.ln_post.eps) if rows.spread is None else rows.spread[:, 0].float()
        terms = []
        for heads in groups:
            present = [head for head in heads if head not in self.removed_heads]
            term = direct_term(self, head_sum(self, record, present, x), spread)
            if self.correction is not None:
                term = term @ self.correction.matrix.to(term)
            terms.append(term.to(rows.x.dtype))
        return terms

    def forward(self, pixels: Tensor, edit: Edit | None = None, record: Record | None = None) -> Tensor:
        """Images to features [B, E]."""
        return self.features_from(self.embed(pixels), edit=edit, record=record)

    def features_from(
        self, x: Tensor, first: int = 1, edit: Edit | None = None, record: Record | None = None
    ) -> Tensor:
        """Image features [B, E] from the input x [B, N, D] of layer `first`, under `edit`."""
        rows = self.final_rows(x, first, edit, self.output_rows(), record)
        if self.pool is not None and edit is not None and edit.count:
            rows = rows._replace(x=_original_tokens(rows.x, edit))
        return self.features(rows)

    def prefix(self, pixels: Tensor, first: int = 1) -> Tensor:
        """The input of layer `first`, [B, N, D], for pixels [B, 3, S, S]; 1: the embedded patches.

        The frozen and the edited pass share it if no layer before `first` is edited. Without gradient, unless
        the pixels require one.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
            return self.run(self.embed(pixels), last=first - 1)

    @torch.no_grad()
    def pooled_image(self, pixels: Tensor) -> Tensor:
        """The image's pooled vector [B, D], before the projection, of pixels [B, 3, S, S]; no gradient."""
        return self.image_vector(self.final_rows(self.embed(pixels), read=self.output_rows()))

    def frozen_features(self, prefix: Tensor, first: int = 1) -> Tensor:
        """Features [B, E] of the frozen tower from the input of layer `first`; without gradient."""
        with torch.no_grad():
            return self.features_from(prefix, first)

    def class_and_tokens(self, prefix: Tensor, first: int, edit: Edit) -> tuple[Tensor, Tensor]:
        """The pooled vectors of the image [B, D] and of the extra tokens [B, T, D] under `edit`.

        With a class token these are the last layer's rows, normed; see `pooled` for other towers.
        """
        rows = self.final_rows(prefix, first, edit, self.output_rows(edit.count))
        pooled = self.pooled(rows, edit.count)  # [B, 1 + T, D]
        return pooled[:, 0], pooled[:, 1:]

    def require_class_token(self, who: str) -> None:
        """Refuse a tower without class token or projection; `who` names the method that needs them."""
        if self.pool is not None or self.proj is None:
            raise UsageError(
                f"{who} needs a class token and its projection; this backbone pools its tokens by attention: "
                "use a plain CLIP or another method"
            )

    def projection_matrix(self) -> Tensor:
        """The projection from pooled vectors to the shared space, [D, E]; identity where there is none."""
        if self.proj is not None:
            return self.proj
        return torch.eye(self.config.width, device=self.positions.device, dtype=self.positions.dtype)


def _original_tokens(x: Tensor, edit: Edit) -> Tensor:
    """The original tokens of a sequence [B, N + T, D] with extra tokens."""
    at = x.shape[1] - edit.count if edit.at is None else edit.at
    return torch.cat([x[:, :at], x[:, at + edit.count :]], dim=1)


class TextTower(Tower):
    """A text tower of any supported family."""

    rows: Tensor | None
    proj_bias: nn.Parameter | None

    def __init__(self, config: TextConfig, embed_dim: int, rows: int | None = None) -> None:
        super().__init__(config, causal=config.causal)
        self.shape = config
        self.tokens = nn.Parameter(torch.empty(rows or config.vocab, config.width))
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        self.ln_final = LayerNorm(config.width, config.eps)
        self.proj = nn.Parameter(torch.empty(config.width, embed_dim))
        self.proj_bias = nn.Parameter(torch.empty(embed_dim)) if config.projection_bias else None
        # A reduced vocabulary keeps the rows that training used and maps every other id to one shared row.
        if rows:
            self.register_buffer("rows", torch.zeros(config.vocab, dtype=torch.long))
        else:
            self.rows = None

    @property
    def first_word(self) -> int:
        """The position of a text's first word: 1 after a begin token, else 0."""
        return int(self.shape.begins)

    def eot(self, ids: Tensor) -> Tensor:
        """The position whose output is the text feature: [N, T] -> [N]."""
        if self.shape.pool == "last":
            return ids.new_full((len(ids),), ids.shape[1] - 1)
        return self.end(ids)

    def end(self, ids: Tensor) -> Tensor:
        """The position of each text's end token: [N, T] -> [N]."""
        if self.shape.pool == "largest":  # CLIP's end token has the largest id
            return ids.argmax(dim=-1)
        return (ids == self.shape.end).int().argmax(dim=-1)

    def word_count(self, ids: Tensor) -> Tensor:
        """Number of tokens between the begin and the end token of each text: [N, T] -> [N]."""
        return self.end(ids) - self.first_word

    def trim_padding(self, ids: Tensor) -> Tensor:
        """Drop the columns after the longest text's end, unless the row that is read depends on them."""
        return ids if self.shape.needs_all_positions else ids[:, : int(self.eot(ids).max()) + 1]

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N, T] to the input of layer 1, [N, T, D]."""
        if ids.ndim != 2 or ids.shape[1] > self.shape.context:
            raise InputError(f"token ids must be [N, at most {self.shape.context}], got {list(ids.shape)}")
        rows = ids if self.rows is None else self.rows[ids]
        return self.tokens[rows] + self.positions[: ids.shape[1]]

    def project(self, x: Tensor) -> Tensor:
        """Final norm and projection of rows [..., D] to features [..., E]."""
        normed: Tensor = self.ln_final(x)
        features = normed @ self.proj
        return features if self.proj_bias is None else features + self.proj_bias

    def forward(self, ids: Tensor, edit: Edit | None = None, record: Record | None = None) -> Tensor:
        """Token ids [N, T] to features [N, E]."""
        ids = self.trim_padding(ids)
        end = self.eot(ids)
        if edit is not None and edit.at is not None:
            end = end + edit.count
        return self.project(self.run(self.embed(ids), edit=edit, read=end[:, None], record=record)[:, 0])


@torch.no_grad()
def initialize(visual: VisionTower, text: TextTower) -> None:
    """Initialize both towers as CLIP does: normal weights, smaller in deeper towers, biases 0."""
    for tower in (visual, text):
        for block in tower.blocks:
            assert isinstance(block, Block)
            _initialize_layer(tower, block.attn, block.mlp)
        if tower.proj is not None:
            nn.init.normal_(tower.proj, std=tower.config.width**-0.5)
        if tower.proj_bias is not None:
            nn.init.zeros_(tower.proj_bias)
    _initialize_image_ends(visual)
    nn.init.normal_(text.tokens, std=0.02)
    nn.init.normal_(text.positions, std=0.01)


def _initialize_layer(tower: Tower, attn: Attention, mlp: MLP) -> None:
    width, depth = tower.config.width, tower.config.layers
    narrow = width**-0.5
    deep = narrow * (2 * depth) ** -0.5
    scales: dict[Linear, float] = {attn.q: narrow, attn.k: narrow, attn.v: narrow, attn.o: deep}
    scales |= {mlp.up: (2 * width) ** -0.5, mlp.down: deep}
    for linear, scale in scales.items():
        nn.init.normal_(linear.weight, std=scale)
        nn.init.zeros_(linear.bias)


def _initialize_image_ends(visual: VisionTower) -> None:
    """Everything of the image tower but its layers and its projection."""
    narrow = visual.config.width**-0.5
    nn.init.normal_(visual.patch.weight, std=(3 * visual.shape.patch_size**2) ** -0.5)
    if visual.patch.bias is not None:
        nn.init.zeros_(visual.patch.bias)
    if visual.class_token is not None:
        nn.init.normal_(visual.class_token, std=narrow)
    nn.init.normal_(visual.positions, std=narrow)
    if visual.pool is not None:
        nn.init.normal_(visual.pool.probe)
        _initialize_layer(visual, visual.pool.attn, visual.pool.mlp)
