"""`Clip`: a frozen image tower and text tower with one feature space."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from PIL.Image import Image
from torch import Tensor, nn

from dear.clip.config import ClipConfig, Head
from dear.clip.correction import Correction, folded
from dear.clip.gpu import BUCKETS, Recorder
from dear.clip.identity import WeightDigests, identity
from dear.clip.sharing import map_tensors
from dear.clip.tokenizer import Tokenizer, tokenize
from dear.clip.towers import TextTower, VisionTower, initialize
from dear.clip.variant import ImageParts, Variant, as_variant, cast
from dear.errors import InputError, UsageError
from dear.images.views import Source, normalize, read_views, resize_crop

_TEXTS_AT_ONCE = 256  # bounds the memory of long class lists
_IMAGES_AT_ONCE = 64


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
        self.checkpoint_stamp = ""  #: changes with the files that the weights were read from
        self.digests: WeightDigests | None = None  #: of the weights, where they are known
        self.visual = VisionTower(config.vision, config.embed_dim)
        self.text = TextTower(config.text, config.embed_dim, token_rows)
        self.log_scale = nn.Parameter(torch.empty(()))
        self.pair_bias = nn.Parameter(torch.empty(())) if config.logit_bias else None
        self.tokenizer: Tokenizer | None = tokenize if config.text.clean == "clip" else None
        self._scale: tuple[int, int, float] | None = None
        self.recorder = Recorder(BUCKETS[:7])  #: of inference in small batches on a GPU; variants share it
        self.variant = Variant()  #: how this object differs from the backbone that was loaded
        self._plain: tuple[Clip, ...] = ()  # in a tuple: a Module attribute would be registered
        if self.log_scale.device.type != "meta":
            initialize(self.visual, self.text)
            with torch.no_grad():
                self.log_scale.fill_(math.log(1 / 0.07))
                if self.pair_bias is not None:
                    self.pair_bias.fill_(-10.0)
        self.requires_grad_(False)
        self.eval()

    def __repr__(self) -> str:
        vision, size = self.config.vision, sum(p.numel() for p in self.parameters())
        tower = f"{vision.layers} layers of {vision.heads} heads, {vision.image_size} pixels"
        return f"Clip({self.name}: {tower}, {size / 1e6:.1f} million parameters)"

    def copy(self) -> Clip:
        """The same model with its own tensors; device, precision, correction and focus are the same."""
        other = map_tensors(self.plain, lambda owner, tensor: tensor.clone())
        other.digests, other.source, other.checkpoint_stamp = None, None, ""  # its weights may be changed
        other.recorder = Recorder(self.recorder.buckets)
        return as_variant(other, self.variant)

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
        """CLIP's temperature, exp(log_scale), by which cosines are multiplied.

        Cached while the tensor does not change: reading it makes the host wait for the device.
        """
        stamp = (self.log_scale.data_ptr(), self.log_scale._version)
        if self._scale is None or self._scale[:2] != stamp:
            self._scale = (*stamp, math.exp(float(self.log_scale.detach())))
        return self._scale[2]

    def weight_digests(self) -> WeightDigests:
        """Digests of the weights, computed once: those of the checkpoint, before any rounding."""
        if self.digests is None:
            plain = self.plain
            self.digests = plain.digests or WeightDigests.of(plain.state_dict())
            plain.digests = self.digests
        return self.digests

    @property
    def fingerprint(self) -> str:
        """`sha256:…` of the visual weights' values, whichever file they came from."""
        return self.weight_digests().visual

    @property
    def identity(self) -> str:
        """`sha256:…` of everything that decides an answer: towers, temperature, architecture, preprocessing.

        Correction, precision, device and the file's layout are not part of it.
        """
        return identity(self.config, self.weight_digests())

    @property
    def correction(self) -> Correction | None:
        """The change of the image feature that this backbone applies; None for the plain backbone."""
        return self.variant.correction

    @property
    def focus(self) -> tuple[Head, ...]:
        """Heads whose terms are returned next to the image feature."""
        return self.variant.focus

    @property
    def feature_width(self) -> int:
        """Number of values that `encode_image` returns per image: E, or 2 E with a focus."""
        return self.config.embed_dim * (2 if self.focus else 1)

    @property
    def plain(self) -> Clip:
        """The backbone without correction or focus; objects that share weights share it."""
        return self._plain[0] if self._plain else self

    def corrected(self, correction: Correction | None) -> Clip:
        """The same weights with (another) correction of the image feature; this object stays as it is.

        The same correction returns the same object, so that adapters share its work.

        Example:
            >>> from dear.clip.correction import Correction
            >>> clip = Clip(ClipConfig.named("ViT-B-32"))
            >>> half = clip.corrected(Correction(torch.eye(512) / 2, torch.zeros(512)))
            >>> pixels = torch.zeros(1, 3, 224, 224)
            >>> torch.equal(half.encode_image(pixels) * 2, clip.encode_image(pixels))
            True
        """
        return as_variant(self, Variant(correction, self.focus))

    def focused(self, heads: Sequence[Head]) -> Clip:
        """The same weights with the terms of some heads next to the image feature; () for none.

        `encode_image` then returns rows [B, 2 E]; `parts` returns the feature and what these heads add to it.
        The same heads return the same object, so that adapters share its work.
        """
        return as_variant(self, Variant(self.correction, tuple(sorted(set(heads)))))

    def cast(self, dtype: torch.dtype) -> Clip:
        """The same variant with its matrices in `dtype`, norms and residual stream in float32; made once."""
        return cast(self, dtype)

    def folded(self) -> Clip:
        """A plain CLIP with its own tensors whose weights contain the correction."""
        plain = self.plain.copy()
        if self.correction is not None:
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
        """Texts to token ids [N, context]."""
        if self.tokenizer is None:
            raise UsageError(
                f"{self.name}: no tokenizer file next to the weights; put tokenizer.json (or the "
                "sentencepiece model) of the checkpoint there, or give token ids"
            )
        return self.tokenizer(texts, self.config.text.context)

    def preprocess(self, image: Image) -> Tensor:
        """An image to normalized pixels [3, S, S], as the model was trained."""
        return normalize(resize_crop(image, self.config.view), self.config.mean, self.config.std)

    def encode_image(self, images: Tensor | Source | Sequence[Source]) -> Tensor:
        """Image features [B, E], not of unit length; see also `focused`.

        Args:
            images: normalized pixels [B, 3, S, S] as `preprocess` returns them, or one or several images:
                paths, bytes of image files, or Pillow images.

        Raises:
            InputError: an image cannot be read, or the pixels have another shape.

        Example:
            >>> from PIL import Image
            >>> clip = Clip(ClipConfig.named("ViT-B-32"))
            >>> clip.encode_image([Image.new("RGB", (300, 200)), Image.new("RGB", (50, 50))]).shape
            torch.Size([2, 512])
        """
        if isinstance(images, Tensor):
            return self._encode_pixels(images.to(self.device))
        sources = [images] if isinstance(images, str | bytes | os.PathLike | Image) else list(images)
        parts = [
            self._encode_pixels(self._read(sources[start : start + _IMAGES_AT_ONCE]))
            for start in range(0, len(sources), _IMAGES_AT_ONCE)
        ]
        if not parts:
            return torch.empty(0, self.feature_width, device=self.device, dtype=self.dtype)
        return torch.cat(parts)

    def _read(self, sources: Sequence[Source]) -> Tensor:
        """Normalized pixels [b, 3, S, S] of images."""
        views = read_views(sources, self.config.view, self.device).to(self.device)
        return normalize(views, self.config.mean, self.config.std)

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        with torch.no_grad():
            visual = self.visual
            if not self.focus:
                features: Tensor = visual(pixels)
                return features
            features, terms = visual.features_and_terms(visual.embed(pixels), 1, (self.focus,))
        return ImageParts(features, *terms).joined()

    def parts(self, rows: Tensor) -> ImageParts:
        """The parts of rows [..., W] that `encode_image` returned, by name."""
        if not self.focus:
            return ImageParts(rows)
        return ImageParts(*rows.split(self.config.embed_dim, dim=-1))

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str] | Tensor) -> Tensor:
        """Texts, or their ids [N, T], to text features [N, E], not of unit length."""
        if isinstance(texts, str):
            texts = [texts]
        ids = texts if isinstance(texts, Tensor) else self.tokenize(texts)
        if isinstance(texts, Tensor) and ids.numel():
            low, high = int(ids.min()), int(ids.max())  # an unknown id would end a GPU's CUDA context
            if not 0 <= low <= high < self.config.text.vocab:
                raise InputError(f"token ids must be 0 to {self.config.text.vocab - 1}; got {low} to {high}")
        if len(ids) == 0:
            return torch.empty(0, self.config.embed_dim, device=self.device, dtype=self.dtype)
        return torch.cat([self.text(part.to(self.device)) for part in ids.split(_TEXTS_AT_ONCE)])
