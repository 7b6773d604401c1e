"""`Clip`: a frozen image tower and text tower with one feature space."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from dear.clip.config import ClipConfig
from dear.clip.correction import Correction, fold_correction
from dear.clip.gpu import BUCKETS, Recorder
from dear.clip.identity import WeightDigests, identity
from dear.clip.sharing import map_tensors, tensor_stamp
from dear.clip.tokenizer import Tokenizer, tokenize
from dear.clip.towers import TextTower, VisionTower, initialize
from dear.clip.variant import cast, with_correction
from dear.errors import InputError, UsageError
from dear.images.arrays import from_array
from dear.images.open import ImageLike
from dear.images.views import normalize, read_views, resize_crop

AnyImage = ImageLike | np.ndarray[Any, Any]
ImagesOrPixels = Tensor | AnyImage | Sequence[AnyImage]  #: normalized pixels [B, 3, S, S], or images
_TEXTS_AT_ONCE = 256  # bounds the memory of long class lists
_IMAGES_AT_ONCE = 64
#: what people look for on a backbone -> the function that does it
_ALTERNATIVES = {
    "classify": "dear.zeroshot(images, classes, backbone=clip)",
    "encode": "clip.encode_image(images), or clip.encode_text(texts)",
    "embed": "clip.encode_image(images), or dear.embed(images, backbone=clip)",
    "predict": "dear.zeroshot(images, classes, backbone=clip)",
    "roles": "dear.discover_roles(clip, images), or dear.RoleMap.load(path)",
    "zero_shot": "dear.zeroshot(images, classes, backbone=clip)",
    "zeroshot": "dear.zeroshot(images, classes, backbone=clip)",
}


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
        if not isinstance(config, ClipConfig):
            raise UsageError(
                f"Clip takes a ClipConfig and starts with random weights, got {config!r}; use dear.load for "
                "trained ones"
            )
        self.config = config
        self.name = name
        self.source: str | None = None  #: absolute path of the weights, if they are files of the user
        self.checkpoint_stamp = ""  #: cache key of the checkpoint files; see `dear.clip.digest_cache`
        self.digests: WeightDigests | None = None  #: of the weights, if known
        self.visual = VisionTower(config.vision, config.embed_dim)
        self.text = TextTower(config.text, config.embed_dim, token_rows)
        self.log_scale = nn.Parameter(torch.empty(()))
        self.pair_bias = nn.Parameter(torch.empty(())) if config.logit_bias else None
        self.tokenizer: Tokenizer | None = tokenize if config.text.clean == "clip" else None
        self._scale: tuple[Any, float] | None = None
        self.recorder = Recorder(BUCKETS[:7])  #: of inference in small batches on a GPU; variants share it
        self.correction: Correction | None = None  #: of the image feature; None for the plain backbone
        self._plain: tuple[Clip, ...] = ()  # a tuple, because nn.Module would register a module
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

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if name in _ALTERNATIVES:
            raise AttributeError(f"a backbone has no {name!r}; use {_ALTERNATIVES[name]}")
        return super().__getattr__(name)

    def copy(self) -> Clip:
        """The same model with its own tensors; device, precision, and correction are the same."""
        other = map_tensors(self.plain, lambda owner, tensor: tensor.clone())
        other.digests, other.source, other.checkpoint_stamp = None, None, ""  # its weights may be changed
        other.recorder = Recorder(self.recorder.buckets)
        return with_correction(other, self.correction)

    def train(self, mode: bool = True) -> Clip:
        """Stay in eval mode: the model is frozen."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.log_scale.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self.visual.positions.dtype

    @property
    def logit_scale(self) -> float:
        """CLIP's temperature, exp(log_scale), by which cosines are multiplied.

        Cached until the tensor changes: reading it synchronizes with the device.
        """
        stamp = tensor_stamp([self.log_scale])
        if self._scale is None or self._scale[0] != stamp:
            self._scale = (stamp, math.exp(float(self.log_scale.detach())))
        return self._scale[1]

    def weight_digests(self) -> WeightDigests:
        """Digests of the checkpoint's weights, before any rounding; computed once."""
        if self.digests is None:
            plain = self.plain
            self.digests = plain.digests or WeightDigests.of(plain.state_dict())
            plain.digests = self.digests
        return self.digests

    @property
    def fingerprint(self) -> str:
        """`sha256:…` of the visual weights' values, independent of the file format."""
        return self.weight_digests().visual

    @property
    def identity(self) -> str:
        """`sha256:…` of everything that determines predictions: weights, architecture, preprocessing.

        Correction, precision, device and file format are not part of it.
        """
        return identity(self.config, self.weight_digests())

    @property
    def plain(self) -> Clip:
        """The backbone without correction, shared by all objects with the same weights."""
        return self._plain[0] if self._plain else self

    def with_correction(self, correction: Correction | None) -> Clip:
        """A backbone on the same weights with this correction of the image feature, or none.

        The same correction returns the same object, so that adapters share its work.

        Example:
            >>> from dear.clip.correction import Correction
            >>> clip = Clip(ClipConfig.named("ViT-B-32"))
            >>> half = clip.with_correction(Correction(torch.eye(512) / 2, torch.zeros(512)))
            >>> pixels = torch.zeros(1, 3, 224, 224)
            >>> torch.equal(half.encode_image(pixels) * 2, clip.encode_image(pixels))
            True
        """
        return with_correction(self, correction)

    def cast(self, dtype: torch.dtype) -> Clip:
        """The same backbone with its matrices in `dtype`, norms and residual stream in float32; cached."""
        return cast(self, dtype)

    def fold_correction(self) -> Clip:
        """A plain CLIP with its own tensors whose weights contain the correction."""
        plain = self.plain.copy()
        if self.correction is not None:
            visual = plain.visual
            if visual.proj is None or visual.pool is not None or visual.proj_bias is not None:
                raise UsageError("folding a correction needs a plain CLIP: a class token and a projection")
            proj, bias = fold_correction(
                visual.proj, visual.ln_post.weight, visual.ln_post.bias, self.correction
            )
            visual.proj.data, visual.ln_post.bias.data = proj, bias
        return plain

    def use_fused(self, fused: bool) -> Clip:
        """Switch both towers to the fused attention (the default) or to the eager one."""
        self.visual.fused = self.text.fused = fused
        return self

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Texts to token ids [N, context]."""
        if self.tokenizer is None:
            raise UsageError(
                f"{self.name}: no tokenizer file next to the weights; put the checkpoint's tokenizer.json or "
                "sentencepiece model there, or pass token ids"
            )
        return self.tokenizer(texts, self.config.text.context)

    def preprocess(self, image: Image) -> Tensor:
        """Normalized pixels [3, S, S] of an image, resized and cropped as in the model's training."""
        return normalize(resize_crop(image, self.config.view), self.config.mean, self.config.std)

    def pixels(self, images: ImagesOrPixels) -> Tensor:
        """Normalized pixels [B, 3, S, S] of one or several images; pixels are moved to the device.

        Raises:
            InputError: an image cannot be read, or the pixels are not floating-point numbers.
        """
        if isinstance(images, Tensor):
            if not images.is_floating_point():
                raise InputError(
                    f"pixels must be normalized floats [B, 3, S, S], got {images.dtype}; pass a list of "
                    "images, or the result of preprocess"
                )
            return images.to(self.device)
        sources = _sources(images)
        if not sources:
            size = self.config.vision.image_size
            return torch.empty(0, 3, size, size, device=self.device)
        views = read_views(sources, self.config.view, self.device).to(self.device)
        return normalize(views, self.config.mean, self.config.std)

    def encode_image(self, images: ImagesOrPixels) -> Tensor:
        """Image features [B, E], not of unit length.

        Args:
            images: normalized pixels [B, 3, S, S] as `preprocess` returns them, or one or several images:
                paths, bytes of image files, Pillow images, or arrays.

        Raises:
            InputError: an image cannot be read, or the pixels have another shape or type.

        Example:
            >>> from PIL import Image
            >>> clip = Clip(ClipConfig.named("ViT-B-32"))
            >>> clip.encode_image([Image.new("RGB", (300, 200)), Image.new("RGB", (50, 50))]).shape
            torch.Size([2, 512])
        """
        if isinstance(images, Tensor):
            return self._encode_pixels(self.pixels(images))
        sources = _sources(images)
        parts = [
            self._encode_pixels(self.pixels(sources[start : start + _IMAGES_AT_ONCE]))
            for start in range(0, len(sources), _IMAGES_AT_ONCE)
        ]
        if not parts:
            return torch.empty(0, self.config.embed_dim, device=self.device, dtype=self.dtype)
        return torch.cat(parts)

    def forward(self, images: ImagesOrPixels) -> Tensor:
        """Image features [B, E]; the same as `encode_image`."""
        return self.encode_image(images)

    @torch.no_grad()
    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.visual(pixels)
        return features

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str] | Tensor) -> Tensor:
        """Text features [N, E], not of unit length, of texts or token ids [N, T]."""
        if isinstance(texts, str):
            texts = [texts]
        ids = texts if isinstance(texts, Tensor) else self.tokenize(texts)
        if ids.ndim != 2 or ids.is_floating_point():
            raise InputError(f"token ids must be whole numbers [N, T], got {ids.dtype} {list(ids.shape)}")
        if isinstance(texts, Tensor) and ids.numel():
            low, high = int(ids.min()), int(ids.max())  # an id out of range would break the CUDA context
            if not 0 <= low <= high < self.config.text.vocab:
                raise InputError(f"token ids must be 0 to {self.config.text.vocab - 1}, got {low} to {high}")
        if len(ids) == 0:
            return torch.empty(0, self.config.embed_dim, device=self.device, dtype=self.dtype)
        return torch.cat([self.text(part.to(self.device)) for part in ids.split(_TEXTS_AT_ONCE)])


def require_clip(clip: Any) -> Clip:
    """`clip` if it is a loaded backbone; the error names the call that loads one."""
    if not isinstance(clip, Clip):
        raise UsageError(f"clip must be a loaded backbone, got {clip!r}; load one with dear.load")
    return clip


def _sources(images: AnyImage | Sequence[AnyImage]) -> list[ImageLike]:
    """One or several images as a list; arrays become Pillow images."""
    is_single = isinstance(images, str | bytes | os.PathLike | Image)
    if isinstance(images, np.ndarray) and images.ndim in (2, 3):
        is_single = True
    items = [images] if is_single else list(images)  # type: ignore[arg-type]
    return [
        from_array(item, f"image {index}") if isinstance(item, np.ndarray) else item  # type: ignore[misc]
        for index, item in enumerate(items)
    ]
