"""A CLIP-like model, frozen: an image tower and a text tower that meet in one space.

The configuration chooses patches, positions, pooling and projection; `dear.clip.tower` has the layers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear._io.image_file import normalize, resize_crop
from dear.clip.config import ClipConfig, TextConfig, TowerConfig, VisionConfig
from dear.clip.correction import Correction, Head, carried, folded
from dear.clip.focus import check_focus, focused_features
from dear.clip.rotary import Turn, grid_turn
from dear.clip.tokenizer import ClipTokenizer, Tokenizer
from dear.clip.tower import (
    MLP,
    Attention,
    Block,
    Edit,
    LayerNorm,
    Linear,
    Record,
    Tower,
    attend_eager,
    attend_fused,
)
from dear.clip.without import norm_without_heads, without_heads
from dear.errors import InputError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image


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
    carried_matrix: Tensor | None
    carried_bias: Tensor | None
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
        self.register_buffer("carried_matrix", None, persistent=False)
        self.register_buffer("carried_bias", None, persistent=False)

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

    def carry_corrected(self, pooled: Tensor) -> Tensor:
        """Pooled vectors [..., D] that carry nothing but their corrected feature: `into_space` of them is it.

        A projection that is learned reads these: it could find elsewhere in the pooled vector what is taken
        from the feature behind it. Without a correction they stay as they are.
        """
        if self.carried_matrix is None or self.carried_bias is None:
            return pooled
        return pooled @ self.carried_matrix.to(pooled.dtype) + self.carried_bias.to(pooled.dtype)

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


class TextTower(Tower):
    """A text tower of any of the supported families."""

    rows: Tensor | None
    proj_bias: nn.Parameter | None

    def __init__(self, config: TextConfig, embed_dim: int, rows: int | None = None) -> None:
        super().__init__(config, causal=config.causal)
        self.shape = config
        self.tokens = nn.Parameter(torch.empty(rows or config.vocab, config.width))
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        self.ln_final = LayerNorm(config.width, config.eps)
        self.proj = nn.Parameter(torch.empty(config.width, embed_dim))
        bias = nn.Parameter(torch.empty(embed_dim)) if config.projection_bias else None
        self.register_parameter("proj_bias", bias)
        # A reduced vocabulary keeps the rows that training used and maps every other id to one shared row.
        self.register_buffer("rows", torch.zeros(config.vocab, dtype=torch.long) if rows else None)

    @property
    def first_word(self) -> int:
        """The position of a text's first word: 1 behind a begin token, else 0."""
        return int(self.shape.begins)

    def eot(self, ids: Tensor) -> Tensor:
        """The position that stands for each text: [N, T] -> [N]."""
        if self.shape.pool == "last":
            return ids.new_full((len(ids),), ids.shape[1] - 1)
        return self.end(ids)

    def end(self, ids: Tensor) -> Tensor:
        """The position of each text's end token: [N, T] -> [N]."""
        if self.shape.pool == "largest":  # CLIP's end token has the largest id there is
            return ids.argmax(dim=-1)
        return (ids == self.shape.end).int().argmax(dim=-1)

    def word_count(self, ids: Tensor) -> Tensor:
        """How many tokens each text has between its begin and end tokens: [N, T] -> [N]."""
        return self.end(ids) - self.first_word

    def cut(self, ids: Tensor) -> Tensor:
        """Drop the columns after the longest text's end, where they cannot reach the row that is read."""
        return ids if self.shape.whole else ids[:, : int(self.eot(ids).max()) + 1]

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N, T] to the input of layer 1, [N, T, D]."""
        if ids.ndim != 2 or ids.shape[1] > self.shape.context:
            raise InputError(f"token ids must be [N, at most {self.shape.context}]; got {list(ids.shape)}")
        rows = ids if self.rows is None else self.rows[ids]
        return self.tokens[rows] + self.positions[: ids.shape[1]]

    def project(self, x: Tensor) -> Tensor:
        """Final norm and projection of rows [..., D] to features [..., E]."""
        normed: Tensor = self.ln_final(x)
        features = normed @ self.proj
        return features if self.proj_bias is None else features + self.proj_bias

    def forward(self, ids: Tensor, edit: Edit | None = None, record: Record | None = None) -> Tensor:
        """Token ids [N, T] to features [N, E]."""
        ids = self.cut(ids)
        end = self.eot(ids)
        if edit is not None and edit.at is not None:
            end = end + edit.count
        return self.project(self.run(self.embed(ids), edit=edit, read=end[:, None], record=record)[:, 0])


_TEXTS_AT_ONCE = 256  # bounds the memory of long class lists
_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _reads_clip_tokens(config: ClipConfig) -> bool:
    """Whether texts are CLIP's own byte pairs, which need no file."""
    return config.text.clean == "clip"


def _span(ids: Tensor) -> str:
    return f"{int(ids.min())} to {int(ids.max())}"


class Clip(nn.Module):
    """A CLIP-like model of any supported family, frozen and in eval mode.

    `Clip(config)` has random weights; see `dear.load`.

    Example:
        >>> import dear
        >>> clip = dear.Clip(dear.ClipConfig.named("ViT-B-32"))
        >>> clip.encode_text(["a photo of a cat."]).shape
        torch.Size([1, 512])
    """

    def __init__(self, config: ClipConfig, name: str = "random", token_rows: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.source: str | None = None  #: absolute path of the weights, where they are files of the user
        self.visual = VisionTower(config.vision, config.embed_dim)
        self.text = TextTower(config.text, config.embed_dim, token_rows)
        self.log_scale = nn.Parameter(torch.empty(()))
        self.pair_bias: nn.Parameter | None
        self.register_parameter("pair_bias", nn.Parameter(torch.empty(())) if config.logit_bias else None)
        self.tokenizer: Tokenizer | None = ClipTokenizer() if _reads_clip_tokens(config) else None
        self._scale: tuple[int, int, float] | None = None
        self._correction: Correction | None = None
        self.focus: tuple[Head, ...] = ()  #: heads whose contribution stands beside the image feature
        self._plain: tuple[Clip, ...] = ()  # in a tuple: a Module attribute would be registered
        self._unfocused: tuple[Clip, ...] = ()
        if self.log_scale.device.type != "meta":
            initialize(self.visual, self.text)
            with torch.no_grad():
                self.log_scale.fill_(math.log(1 / 0.07))
                if self.pair_bias is not None:
                    self.pair_bias.fill_(-10.0)
        self.requires_grad_(False)
        self.eval()

    def copy(self) -> Clip:
        """The same model with tensors of its own: device, precision, settings and correction are the same."""
        rows = len(self.text.tokens) if self.text.rows is not None else None
        with torch.device("meta"):
            other = Clip(self.config, self.name, rows)
        other.load_state_dict({name: t.clone() for name, t in self.state_dict().items()}, assign=True)
        other.visual.fused, other.text.fused = self.visual.fused, self.text.fused
        other.tokenizer = self.tokenizer
        return other.requires_grad_(False).corrected(self.correction).focused(self.focus)

    def train(self, mode: bool = True) -> Clip:
        """A frozen model has one mode: it stays in eval."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.log_scale.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return self.visual.positions.dtype

    @property
    def logit_scale(self) -> float:
        """CLIP's temperature, exp(log_scale): what cosines are multiplied with.

        Kept while the tensor does not change: reading it makes the host wait for the device.
        """
        stamp = (self.log_scale.data_ptr(), self.log_scale._version)
        if self._scale is None or self._scale[:2] != stamp:
            self._scale = (*stamp, math.exp(float(self.log_scale.detach())))
        return self._scale[2]

    @cached_property
    def fingerprint(self) -> str:
        """`sha256:…` of the visual weights' values, whichever file they came from."""
        return fingerprint(self.visual)

    @cached_property
    def identity(self) -> str:
        """`sha256:…` of all that decides an answer: both towers, temperature, architecture, preprocessing.

        A correction is no part of it, nor are precision, device and the file's layout.
        """
        return identity(self.config, self.state_dict(), self.fingerprint)

    def stand_for(self, original: Clip) -> Clip:
        """Give this copy, whose values may be rounded, the fingerprint and identity of its original."""
        self.__dict__.update(fingerprint=original.fingerprint, identity=original.identity)
        return self

    @property
    def correction(self) -> Correction | None:
        """The change of the image feature that this backbone applies; None: it is the plain backbone."""
        return self._correction

    @property
    def feature_width(self) -> int:
        """How many values `encode_image` gives per image: E, or 2 E with a focus."""
        return self.config.embed_dim * (2 if self.focus else 1)

    @property
    def plain(self) -> Clip:
        """The backbone without correction or focus; objects that share weights share it."""
        return self._plain[0] if self._plain else self

    def corrected(self, correction: Correction | None) -> Clip:
        """The same weights with (another) correction of the image feature; this object stays as it is.

        Raises:
            UsageError: the correction does not fit the tower.

        Example:
            >>> from dear.clip.correction import Correction
            >>> clip = Clip(ClipConfig.named("ViT-B-32"))
            >>> half = clip.corrected(Correction(torch.eye(512) / 2, torch.zeros(512)))
            >>> pixels = torch.zeros(1, 3, 224, 224)
            >>> torch.equal(half.encode_image(pixels) * 2, clip.encode_image(pixels))
            True
        """
        if self.focus:
            return self.focused(()).corrected(correction).focused(self.focus)
        if correction is not None:
            vision = self.config.vision
            correction.check(vision.layers, vision.heads, self.config.embed_dim)
        other, visual = copy.copy(self), copy.copy(self.visual)
        other._modules = dict(self._modules)
        visual._buffers = dict(self.visual._buffers)
        other._modules["visual"] = visual
        other._correction = correction
        other._plain = () if correction is None else (self.plain,)
        visual.left_out = () if correction is None else tuple(sorted(correction.heads))
        matrix, bias = (None, None) if correction is None else (correction.matrix, correction.bias)
        visual.correction_matrix = None if matrix is None else matrix.to(self.device)
        visual.correction_bias = None if bias is None else bias.to(self.device)
        matrix, bias = (None, None) if correction is None else carried(self.visual, correction)
        visual.carried_matrix, visual.carried_bias = matrix, bias
        return other

    def focused(self, heads: Sequence[Head]) -> Clip:
        """The same weights with the contribution of some heads beside the image feature; () for none.

        `encode_image` then gives [B, 2 E]: the image feature, and the part of it that these heads add.
        The same heads give the same object, so that adapters share its work.

        Raises:
            UsageError: a head does not exist, or the tower has no class token.
        """
        chosen = check_focus(self.visual, heads)
        base = self._unfocused[0] if self._unfocused else self
        if not chosen:
            return base
        kept = _focused.setdefault(base, WeakValueDictionary())
        found = kept.get(chosen)
        if found is None:
            found = kept[chosen] = copy.copy(base)
            found._modules = dict(base._modules)
            found.focus, found._unfocused, found._plain = chosen, (base,), (base.plain,)
        return found

    def folded(self) -> Clip:
        """A plain CLIP of its own whose weights hold the correction.

        Raises:
            UsageError: the correction leaves out heads, which no weights can say, or this is no plain CLIP.
        """
        plain = copy.deepcopy(self.corrected(None))
        if self.correction is not None:
            plain.__dict__.pop("fingerprint", None)
            plain.__dict__.pop("identity", None)
            visual = plain.visual
            if visual.proj is None or visual.pool is not None or visual.proj_bias is not None:
                raise UsageError("only a plain CLIP can hold a correction in its weights")
            proj, bias = folded(visual.proj, visual.ln_post.weight, visual.ln_post.bias, self.correction)
            visual.proj.data, visual.ln_post.bias.data = proj, bias
        return plain

    def use_fused(self, fused: bool) -> Clip:
        """Switch both towers to the fused kernel (the default) or to the written-out attention."""
        self.visual.fused = self.text.fused = fused
        return self

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Texts to token ids [N, context].

        Raises:
            InputError: a text is empty, too long, not a text, or contains a special token.
            UsageError: the checkpoint came without a tokenizer.
        """
        if self.tokenizer is None:
            raise UsageError(
                f"{self.name}: there is no tokenizer file beside the weights; put tokenizer.json (or the "
                "sentencepiece model) of the checkpoint there, or give token ids"
            )
        return self.tokenizer(texts, self.config.text.context)

    def preprocess(self, image: Image) -> Tensor:
        """An image to normalized pixels [3, S, S], as the model was trained."""
        return normalize(resize_crop(image, self.config.view), self.config.mean, self.config.std)

    @torch.no_grad()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [B, 3, S, S] to image features [B, E], not of unit length; see also `focused`."""
        if self.focus:
            return focused_features(self.visual, pixels.to(self.device), (self.focus,))
        features: Tensor = self.visual(pixels.to(self.device))
        return features

    def _known(self, ids: Tensor) -> bool:
        """Whether all token ids have a row; on a GPU an unknown one would end the process's CUDA context."""
        return bool((ids >= 0).all()) and bool((ids < self.config.text.vocab).all())

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str] | Tensor) -> Tensor:
        """Texts, or their ids [N, T], to text features [N, E], not of unit length."""
        if isinstance(texts, str):
            texts = [texts]
        ids = texts if isinstance(texts, Tensor) else self.tokenize(texts)
        if isinstance(texts, Tensor) and ids.numel() and not self._known(ids):
            raise InputError(f"token ids must be 0 to {self.config.text.vocab - 1}; got {_span(ids)}")
        if len(ids) == 0:
            return torch.empty(0, self.config.embed_dim, device=self.device, dtype=self.dtype)
        return torch.cat([self.text(part.to(self.device)) for part in ids.split(_TEXTS_AT_ONCE)])


_Stamp = tuple[tuple[int, int], ...]
_focused: WeakKeyDictionary[Clip, WeakValueDictionary[tuple[Head, ...], Clip]] = WeakKeyDictionary()
_copies: WeakKeyDictionary[Clip, dict[torch.dtype, tuple[_Stamp, Clip]]] = WeakKeyDictionary()


def matrix_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The precision of the matrices that "auto" or a name means on a device.

    >>> matrix_dtype("auto", torch.device("cpu"))
    torch.float32
    """
    if precision == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    try:
        return _PRECISIONS[precision]
    except KeyError:
        raise UsageError(
            f"precision {precision!r} is not known; choose auto, {', '.join(_PRECISIONS)}"
        ) from None


def kept_cast(clip: Clip, dtype: torch.dtype) -> Clip:
    """`cast_backbone`, made once per backbone and precision; corrections of one backbone share it."""
    if clip.dtype == torch.float32 == dtype:
        return clip
    stamp = tuple((p.data_ptr(), p._version) for p in clip.parameters())
    kept = _copies.setdefault(clip, {})
    if dtype not in kept or kept[dtype][0] != stamp:
        plain = clip.plain
        cast = cast_backbone(clip, dtype) if plain is clip else kept_cast(plain, dtype)
        kept[dtype] = (stamp, cast if plain is clip else cast.corrected(clip.correction).focused(clip.focus))
    return kept[dtype][1]


def cast_backbone(clip: Clip, dtype: torch.dtype) -> Clip:
    """A copy of the backbone with its matrices in `dtype` and the rest in float32.

    Autocast would cast every frozen weight again at every use; here projections and MLPs, where the time
    goes, are cast once. What is in float32 already is shared with the original.

    Raises:
        UsageError: a weight is larger than `dtype` holds.
    """
    source = clip if clip.dtype == torch.float32 else copy.deepcopy(clip).float()
    matrices = {id(m.weight) for m in source.modules() if isinstance(m, Linear | Patches)}
    matrices |= {id(m.bias) for m in source.modules() if isinstance(m, Linear)}
    shared = {id(p): p for p in source.parameters() if id(p) not in matrices}
    other = copy.deepcopy(source, dict(shared))
    for name, module in other.named_modules():
        if isinstance(module, Linear | Patches):
            module.to(dtype)
            if dtype == torch.float16 and not all(bool(p.isfinite().all()) for p in module.parameters()):
                raise UsageError(
                    f"{clip.name}: a weight of {name} is larger than float16 holds; use bfloat16 or float32"
                )
    return other.stand_for(clip)


def fingerprint(visual: nn.Module | Mapping[str, Tensor]) -> str:
    """`sha256:…` of a vision tower's names, shapes and values.

    Values count as float32, so the same numbers stored in half precision, in another layout or on another
    device give the same answer.

    Args:
        visual: a `VisionTower`, or its state dict (names without the leading `visual.`).

    Example:
        >>> whole = {"proj": torch.tensor([[1.0, 0.5]])}
        >>> fingerprint(whole) == fingerprint({"proj": whole["proj"].half()})
        True
    """
    state = visual.state_dict() if isinstance(visual, nn.Module) else visual
    digest = hashlib.sha256()
    for name in sorted(state):
        values = state[name].detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(np.ascontiguousarray(values, dtype="<f4").reshape(-1).data)
    return f"sha256:{digest.hexdigest()}"


def identity(config: ClipConfig, state: Mapping[str, Tensor], visual: str) -> str:
    """`Clip.identity` of a configuration and a state dict; `visual` is the vision tower's fingerprint."""
    rest = fingerprint({name: t for name, t in state.items() if not name.startswith("visual.")})
    parts = json.dumps([visual, rest, asdict(config)], sort_keys=True)
    return f"sha256:{hashlib.sha256(parts.encode()).hexdigest()}"


def visual_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a model's state dict that is the vision tower's."""
    return {name.removeprefix("visual."): t for name, t in state.items() if name.startswith("visual.")}


@torch.no_grad()
def initialize(visual: VisionTower, text: TextTower) -> None:
    """Fill both towers: small at the residual stream, smaller the deeper the tower; biases 0."""
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
