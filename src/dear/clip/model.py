"""CLIP: an image tower and a text tower that meet in one space, frozen."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.clip.config import ClipConfig, TextConfig, VisionConfig
from dear.clip.correction import Correction, Head, folded
from dear.clip.edit import Edit
from dear.clip.tower import Block, LayerNorm, Record, Tower
from dear.clip.without import norm_without_heads, without_heads
from dear.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_TEXTS_AT_ONCE = 256  # bounds the memory of long class lists


class Patches(nn.Module):
    """Cuts an image into patches and projects each: CLIP's first convolution, which has no bias."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 3, size, size))

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, patches, D]; pixels beyond the last whole patch are not read."""
        return self.as_product(pixels) if pixels.is_cuda else self.as_convolution(pixels)

    def as_convolution(self, pixels: Tensor) -> Tensor:
        """The way that is faster on a CPU."""
        grid = F.conv2d(pixels.to(self.weight.dtype), self.weight, stride=self.weight.shape[-1])
        return grid.flatten(2).transpose(1, 2)

    def as_product(self, pixels: Tensor) -> Tensor:
        """The same as one matrix product: a GPU's convolution kernels are made for overlapping windows."""
        side = self.weight.shape[-1]
        rows, columns = (pixels.shape[axis] // side * side for axis in (2, 3))
        cut = pixels[:, :, :rows, :columns].unflatten(3, (-1, side)).unflatten(2, (-1, side))
        cut = cut.permute(0, 2, 4, 1, 3, 5)  # [B, rows, columns, 3, P, P]
        cut = cut.to(self.weight.dtype, memory_format=torch.contiguous_format)
        return F.linear(cut.flatten(3).flatten(1, 2), self.weight.flatten(1))


class VisionTower(Tower):
    """The image tower: patches, positions, blocks, final norm, projection, and a correction if it has one."""

    correction_matrix: Tensor | None
    correction_bias: Tensor | None

    def __init__(self, config: VisionConfig, embed_dim: int) -> None:
        super().__init__(config, causal=False)
        self.shape = config
        self.patch = Patches(config.width, config.patch_size)
        self.class_token = nn.Parameter(torch.empty(config.width))
        self.positions = nn.Parameter(torch.empty(config.positions, config.width))
        self.ln_pre = LayerNorm(config.width, config.eps)
        self.ln_post = LayerNorm(config.width, config.eps)
        self.proj = nn.Parameter(torch.empty(config.width, embed_dim))
        self.left_out: tuple[Head, ...] = ()  # heads whose terms the feature goes without
        # Not persistent: a correction is no weight of the backbone.
        self.register_buffer("correction_matrix", None, persistent=False)
        self.register_buffer("correction_bias", None, persistent=False)

    def embed(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [B, 3, S, S] to the input of layer 1, [B, N, D], class token first."""
        size = self.shape.image_size
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, size, size):
            raise InputError(f"images must be [B, 3, {size}, {size}]; got {list(pixels.shape)}")
        patches = self.patch(pixels)  # [B, N - 1, D]
        first = self.class_token.to(patches.dtype).expand(patches.shape[0], 1, -1)
        x: Tensor = self.ln_pre(torch.cat([first, patches], dim=1) + self.positions)
        return x

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
        return norm_without_heads(self.ln_post, x)

    def correct(self, features: Tensor) -> Tensor:
        """The affine part of the correction, on features [..., E]; without one they stay as they are."""
        if self.correction_matrix is None or self.correction_bias is None:
            return features
        return features @ self.correction_matrix.to(features.dtype) + self.correction_bias.to(features.dtype)

    def project(self, x: Tensor) -> Tensor:
        """Final norm, projection and correction of rows [..., D] to features [..., E]."""
        return self.correct(self.norm_rows(x) @ self.proj)

    def forward(self, pixels: Tensor, edit: Edit | None = None, record: Record | None = None) -> Tensor:
        """Images to features [B, E]: the class token's last state, normed and projected."""
        read = torch.zeros(1, dtype=torch.long, device=pixels.device)
        return self.project(self.run(self.embed(pixels), edit=edit, read=read, record=record)[:, 0])


class TextTower(Tower):
    """The text tower: token rows, positions, causal blocks, final norm, projection at EOT."""

    rows: Tensor | None

    def __init__(self, config: TextConfig, embed_dim: int, rows: int | None = None) -> None:
        super().__init__(config, causal=True)
        self.shape = config
        self.tokens = nn.Parameter(torch.empty(rows or config.vocab, config.width))
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        self.ln_final = LayerNorm(config.width, config.eps)
        self.proj = nn.Parameter(torch.empty(config.width, embed_dim))
        # A reduced vocabulary keeps the rows that training used and maps every other id to one shared row.
        self.register_buffer("rows", torch.zeros(config.vocab, dtype=torch.long) if rows else None)

    @staticmethod
    def eot(ids: Tensor) -> Tensor:
        """Where each text ends: the position of EOT, the largest id there is. [N, T] -> [N]."""
        return ids.argmax(dim=-1)

    @staticmethod
    def cut(ids: Tensor) -> Tensor:
        """Drop the columns after the longest text's EOT: under the causal mask they cannot reach it."""
        return ids[:, : int(ids.argmax(dim=-1).max()) + 1]

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [N, T] to the input of layer 1, [N, T, D]."""
        if ids.ndim != 2 or ids.shape[1] > self.shape.context:
            raise InputError(f"token ids must be [N, at most {self.shape.context}]; got {list(ids.shape)}")
        rows = ids if self.rows is None else self.rows[ids]
        return self.tokens[rows] + self.positions[: ids.shape[1]]

    def project(self, x: Tensor) -> Tensor:
        """Final norm and projection of rows [..., D] to features [..., E]."""
        normed: Tensor = self.ln_final(x)
        return normed @ self.proj

    def forward(self, ids: Tensor, edit: Edit | None = None, record: Record | None = None) -> Tensor:
        """Token ids [N, T] to features [N, E]: EOT's last state, normed and projected."""
        ids = self.cut(ids)
        end = self.eot(ids)
        if edit is not None and edit.at is not None:
            end = end + edit.count
        return self.project(self.run(self.embed(ids), edit=edit, read=end[:, None], record=record)[:, 0])


def _span(ids: Tensor) -> str:
    return f"{int(ids.min())} to {int(ids.max())}"


class Clip(nn.Module):
    """A CLIP of any shape, frozen and in eval mode. `Clip(config)` has random weights; see `dear.load`.

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
        self.visual = VisionTower(config.vision, config.embed_dim)
        self.text = TextTower(config.text, config.embed_dim, token_rows)
        self.log_scale = nn.Parameter(torch.empty(()))
        self._scale: tuple[int, int, float] | None = None
        self._correction: Correction | None = None
        if self.log_scale.device.type != "meta":
            self._start()
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def _start(self) -> None:
        """Random weights at CLIP's scales: small at the residual stream, smaller the deeper the tower."""
        for tower in (self.visual, self.text):
            width, depth = tower.config.width, tower.config.layers
            narrow = width**-0.5
            for block in tower.blocks:
                assert isinstance(block, Block)
                attn, mlp = block.attn, block.mlp
                deep = narrow * (2 * depth) ** -0.5
                scales = {attn.q: narrow, attn.k: narrow, attn.v: narrow, attn.o: deep}
                scales |= {mlp.up: (2 * width) ** -0.5, mlp.down: deep}
                for linear, scale in scales.items():
                    nn.init.normal_(linear.weight, std=scale)
                    nn.init.zeros_(linear.bias)
            nn.init.normal_(tower.proj, std=narrow)
        nn.init.normal_(self.visual.patch.weight, std=(3 * self.config.vision.patch_size**2) ** -0.5)
        nn.init.normal_(self.visual.class_token, std=self.config.vision.width**-0.5)
        nn.init.normal_(self.visual.positions, std=self.config.vision.width**-0.5)
        nn.init.normal_(self.text.tokens, std=0.02)
        nn.init.normal_(self.text.positions, std=0.01)
        self.log_scale.fill_(math.log(1 / 0.07))

    def copy(self) -> Clip:
        """The same model with tensors of its own: same device, precision of every tensor, and settings."""
        rows = len(self.text.tokens) if self.text.rows is not None else None
        with torch.device("meta"):
            other = Clip(self.config, self.name, rows)
        other.load_state_dict({name: t.clone() for name, t in self.state_dict().items()}, assign=True)
        other.visual.fused, other.text.fused = self.visual.fused, self.text.fused
        return other.requires_grad_(False)

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
        return self.visual.proj.dtype

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
        from dear.clip.fingerprint import fingerprint

        return fingerprint(self.visual)

    @property
    def correction(self) -> Correction | None:
        """The change of the image feature that this backbone applies; None: it is the plain backbone."""
        return self._correction

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
        if correction is not None:
            vision = self.config.vision
            correction.check(vision.layers, vision.heads, self.config.embed_dim)
        other, visual = copy.copy(self), copy.copy(self.visual)
        other._modules = dict(self._modules)
        visual._buffers = dict(self.visual._buffers)
        other._modules["visual"] = visual
        other._correction = correction
        visual.left_out = () if correction is None else tuple(sorted(correction.heads))
        matrix, bias = (None, None) if correction is None else (correction.matrix, correction.bias)
        visual.correction_matrix = None if matrix is None else matrix.to(self.device)
        visual.correction_bias = None if bias is None else bias.to(self.device)
        return other

    def folded(self) -> Clip:
        """A plain CLIP of its own whose weights hold the correction.

        Raises:
            UsageError: the correction leaves out heads, which no weights can say.
        """
        plain = copy.deepcopy(self.corrected(None))
        plain.__dict__.pop("fingerprint", None)
        if self.correction is not None:
            visual = plain.visual
            proj, bias = folded(visual.proj, visual.ln_post.weight, visual.ln_post.bias, self.correction)
            visual.proj.data, visual.ln_post.bias.data = proj, bias
        return plain

    def use_fused(self, fused: bool) -> Clip:
        """Switch both towers to the fused kernel (the default) or to the written-out attention."""
        self.visual.fused = self.text.fused = fused
        return self

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Texts to BPE ids [N, context]."""
        from dear.clip.tokenizer import tokenize

        return tokenize(texts, self.config.text.context)

    def preprocess(self, image: Image) -> Tensor:
        """An image to normalized pixels [3, S, S], as CLIP was trained."""
        from dear.clip.images import preprocess

        return preprocess(image, self.config.vision.image_size, self.config.mean, self.config.std)

    @torch.no_grad()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [B, 3, S, S] to image features [B, E], not of unit length."""
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
