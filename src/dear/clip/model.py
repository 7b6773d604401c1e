"""A CLIP-like model: an image tower and a text tower that meet in one space, frozen."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.clip.attention import Linear
from dear.clip.config import ClipConfig
from dear.clip.correction import Correction, folded
from dear.clip.initialize import initialize
from dear.clip.text import TextTower
from dear.clip.tokenizer import ClipTokenizer, Tokenizer
from dear.clip.vision import Patches, VisionTower
from dear.errors import InputError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

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
        self._plain: tuple[Clip, ...] = ()  # in a tuple: a Module attribute would be registered
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
        return other.requires_grad_(False).corrected(self.correction)

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

    @property
    def logit_bias(self) -> float:
        """What is added to a pair's logit; 0 where the model was trained with a softmax."""
        return 0.0 if self.pair_bias is None else float(self.pair_bias.detach())

    @cached_property
    def fingerprint(self) -> str:
        """`sha256:…` of the visual weights' values, whichever file they came from."""
        return fingerprint(self.visual)

    @property
    def correction(self) -> Correction | None:
        """The change of the image feature that this backbone applies; None: it is the plain backbone."""
        return self._correction

    @property
    def plain(self) -> Clip:
        """The backbone without a correction, on the same weights; objects that share weights share it."""
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
        return other

    def folded(self) -> Clip:
        """A plain CLIP of its own whose weights hold the correction.

        Raises:
            UsageError: the correction leaves out heads, which no weights can say, or this is no plain CLIP.
        """
        plain = copy.deepcopy(self.corrected(None))
        plain.__dict__.pop("fingerprint", None)
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
        from dear.clip.images import preprocess

        return preprocess(image, self.config.view, self.config.mean, self.config.std)

    @torch.no_grad()
    def encode_image(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [B, 3, S, S] to image features [B, E], not of unit length."""
        features: Tensor = self.visual(pixels.to(self.device))
        return features

    def pair_logits(self, images: Tensor, texts: Tensor) -> Tensor:
        """Logits [B, C] of features [B, E] and [C, E]: scale times cosine, plus the bias of a sigmoid model.

        Softmax over the texts compares them; `pair_logits(...).sigmoid()` is the probability that an image
        and a text belong together, which only means something for a model trained so (`logit_bias`).
        """
        cosines = F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T
        return self.logit_scale * cosines + self.logit_bias

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
        kept[dtype] = (stamp, cast if plain is clip else cast.corrected(clip.correction))
    return kept[dtype][1]


def cast_backbone(clip: Clip, dtype: torch.dtype) -> Clip:
    """A copy of the backbone with its matrices in `dtype` and the rest in float32.

    Autocast would cast every frozen weight again at every use; here projections and MLPs, where the time
    goes, are cast once. What is in float32 already is shared with the original.

    Raises:
        UsageError: a weight is larger than `dtype` holds.
    """
    fingerprint = clip.fingerprint  # of the original: the copy stands for it
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
    other.__dict__["fingerprint"] = fingerprint
    return other


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
