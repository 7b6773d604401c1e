"""`Clip`: an image tower and a text tower that meet in one space, frozen."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from PIL.Image import Image
from torch import Tensor, nn

from dear.clip.config import ClipConfig, Head
from dear.clip.correction import Correction, folded
from dear.clip.focus import focused_features
from dear.clip.identity import fingerprint, identity, other_state
from dear.clip.tokenizer import Tokenizer, tokenize
from dear.clip.tower import shared_copy
from dear.clip.towers import TextTower, VisionTower, initialize
from dear.errors import InputError, UsageError
from dear.images.views import normalize, resize_crop

_TEXTS_AT_ONCE = 256  # bounds the memory of long class lists


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
        self.files = ""  #: changes with the files that the weights were read from
        self.visual = VisionTower(config.vision, config.embed_dim)
        self.text = TextTower(config.text, config.embed_dim, token_rows)
        self.log_scale = nn.Parameter(torch.empty(()))
        self.pair_bias: nn.Parameter | None
        self.register_parameter("pair_bias", nn.Parameter(torch.empty(())) if config.logit_bias else None)
        self.tokenizer: Tokenizer | None = tokenize if config.text.clean == "clip" else None
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
    def rest_fingerprint(self) -> str:
        """The same of all other weights."""
        return fingerprint(other_state(self.state_dict()))

    @cached_property
    def identity(self) -> str:
        """`sha256:…` of all that decides an answer: both towers, temperature, architecture, preprocessing.

        A correction is no part of it, nor are precision, device and the file's layout.
        """
        return identity(self.config, self.fingerprint, self.rest_fingerprint)

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
            self.config.vision.check_heads(correction.heads)
            own, width = correction.bias.numel(), self.config.embed_dim
            if own != width:
                raise UsageError(f"the correction is for features of width {own}, not {width}")
        other = shared_copy(self, type(self))
        other.visual, other._correction = self.visual.with_correction(correction), correction
        other._plain = () if correction is None else (self.plain,)
        return other

    def focused(self, heads: Sequence[Head]) -> Clip:
        """The same weights with the contribution of some heads beside the image feature; () for none.

        `encode_image` then gives [B, 2 E]: the image feature, and the part of it that these heads add.
        The same heads give the same object, so that adapters share its work.
        """
        chosen = self.config.vision.check_heads(heads)
        base = self._unfocused[0] if self._unfocused else self
        if not chosen:
            return base
        self.visual.require_class_token("a focus on heads")
        cached = _focused.setdefault(base, WeakValueDictionary())
        found = cached.get(chosen)
        if found is None:
            found = cached[chosen] = shared_copy(base, type(base))
            found.focus, found._unfocused, found._plain = chosen, (base,), (base.plain,)
        return found

    def folded(self) -> Clip:
        """A plain CLIP of its own whose weights hold the correction."""
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
        """Texts to token ids [N, context]."""
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


_focused: WeakKeyDictionary[Clip, WeakValueDictionary[tuple[Head, ...], Clip]] = WeakKeyDictionary()
