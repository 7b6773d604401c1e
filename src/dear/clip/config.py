"""The architecture of a CLIP-like model: everything in a checkpoint except its weights.

`config_huggingface`, `config_openclip` and `config_shapes` read it from files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import Meta

from dear.errors import CheckpointError, UsageError
from dear.images.views import Size, View
from dear.utils.validation import Checked

Activation = Literal["quick_gelu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  # the order is that of the GPU kernel
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)  #: mean and standard deviation of SigLIP's and PE-Core's images

# Larger than in any real checkpoint; a hostile file is refused before memory is allocated.
Dimension = Annotated[int, Meta(ge=1, le=65_536)]
Side = Annotated[int, Meta(ge=1, le=4096)]
Head = tuple[int, int]  #: (layer counted from 1, head counted from 0)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise CheckpointError(message)


def last_third(layers: int) -> tuple[int, ...]:
    """The numbers of the last third of `layers` layers, counted from 1; at least one.

    >>> last_third(12), last_third(1)
    ((9, 10, 11, 12), (1,))
    """
    return tuple(range(layers - max(1, round(layers / 3)) + 1, layers + 1))


@dataclass(frozen=True)
class TowerConfig(Checked):
    """A pre-norm transformer: `layers` blocks of `heads` heads of `width` features per token."""

    error: ClassVar = CheckpointError
    width: Dimension
    layers: Dimension
    heads: Dimension
    mlp: Annotated[int, Meta(ge=0, le=65_536)] = 0  #: hidden width of the MLP; 0: four times the width
    activation: Activation = "quick_gelu"  #: OpenAI's; "gelu": most others'; "gelu_tanh": SigLIP's
    eps: Annotated[float, Meta(gt=0, lt=1)] = 1e-5  #: LayerNorm's epsilon

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlp == 0:
            object.__setattr__(self, "mlp", 4 * self.width)
        _check(self.width % self.heads == 0, f"{self.heads} heads do not divide the width {self.width}")

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def last_third(self) -> tuple[int, ...]:
        """The last third of the layers, see `last_third`."""
        return last_third(self.layers)

    def check_heads(self, heads: Iterable[Head]) -> tuple[Head, ...]:
        """The heads sorted and without repetitions.

        Raises:
            UsageError: the tower has no such head.
        """
        chosen = tuple(sorted(set(heads)))
        for layer, head in chosen:
            if not (1 <= layer <= self.layers and 0 <= head < self.heads):
                raise UsageError(
                    f"heads must be in layers 1 to {self.layers} and numbered 0 to {self.heads - 1}, got "
                    f"head {head} of layer {layer}"
                )
        return chosen


@dataclass(frozen=True)
class VisionConfig(TowerConfig):
    """The image tower: a ViT that reads `image_size` pixels in patches of `patch_size`.

    The defaults are CLIP's. SigLIP has no class token, no norm before the first layer, a bias on its patches,
    attention pooling and no projection; PE-Core has rotary positions and attention pooling.
    """

    image_size: Side = 224
    patch_size: Side = 16
    class_token: bool = True  #: a learned token before the patches
    patch_bias: bool = False  #: the patch projection has a bias
    pre_norm: bool = True  #: a norm before the first layer
    rotary: bool = False  #: 2-D rotary positions in every layer, besides the learned ones
    #: "class" reads the class token, "attention" pools all tokens with a learned query
    pool: Literal["class", "attention"] = "class"
    #: heads of the attention pooling; 0: as many as in a layer
    pool_heads: Annotated[int, Meta(ge=0, le=65_536)] = 0
    projection: bool = True  #: a matrix from the width to the shared space; without it both have one size
    projection_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool_heads == 0:
            object.__setattr__(self, "pool_heads", self.heads)
        _check(self.pool != "class" or self.class_token, 'pool = "class" needs class_token = true')
        _check(
            self.width % self.pool_heads == 0,
            f"{self.pool_heads} pooling heads do not divide the width {self.width}",
        )
        _check(
            not self.rotary or self.head_width % 4 == 0,
            f"rotary positions need a head width that is a multiple of 4, got {self.head_width}",
        )
        _check(
            self.image_size >= self.patch_size,
            f"image_size must be at least patch_size = {self.patch_size}, got {self.image_size}",
        )

    @property
    def side(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def positions(self) -> int:
        """Class token, if there is one, and patches: the length of the original sequence."""
        return self.side**2 + int(self.class_token)


@dataclass(frozen=True)
class TextConfig(TowerConfig):
    """The text tower: a transformer over `context` tokens out of `vocab`.

    The defaults are CLIP's. SigLIP is not causal, reads the last position of the padded text and has a bias
    on its projection; MetaCLIP 2 reads the first end token.
    """

    context: Annotated[int, Meta(ge=3, le=4096)] = 77
    vocab: Annotated[int, Meta(ge=1, le=10_000_000)] = 49_408
    causal: bool = True
    #: the row read: of the "largest" id, of the first "end" token, or the "last" one
    pool: Literal["largest", "end", "last"] = "largest"
    end: int = 49_407  #: the id that ends a text, where `pool` is "end"
    begins: bool = True  #: a text starts with a begin token
    #: how a text is cleaned before tokenizing (`dear.clip.tokenizer_file`); "clip": as CLIP does
    clean: Literal["clip", "punctuation", "canonicalize", "lower", "whitespace", "none"] = "clip"
    projection_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(
            self.pool != "end" or 0 <= self.end < self.vocab,
            f"the end token {self.end!r} is not one of {self.vocab} tokens",
        )

    @property
    def needs_all_positions(self) -> bool:
        """Whether every position must be computed, padding included, because the read row sees it."""
        return not self.causal or self.pool == "last"


@dataclass(frozen=True)
class ClipConfig(Checked):
    """Two towers and the space they share.

    Example:
        >>> ClipConfig.named("ViT-B-16").vision.heads
        12
    """

    error: ClassVar = CheckpointError
    vision: VisionConfig
    text: TextConfig
    embed_dim: Dimension
    mean: tuple[float, float, float] = field(default=CLIP_MEAN)
    std: tuple[float, float, float] = field(default=CLIP_STD)
    resize: Literal["crop", "squash"] = "crop"  #: short side to the image size and center, or both sides
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    logit_bias: bool = False  #: image-text pairs were trained with a sigmoid, which has a bias

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(all(s > 1e-6 for s in self.std), f"std = {self.std!r} must be positive")
        _check(
            self.vision.projection or self.embed_dim == self.vision.width,
            f"embed_dim without a projection must be the width {self.vision.width}, got {self.embed_dim}",
        )

    @property
    def view(self) -> Size:
        """How images are resized: a `View`, or just the side for a bicubic center crop."""
        view = View(self.vision.image_size, self.resize == "squash", self.interpolation == "bilinear")
        return view if view.squash or view.bilinear else view.size

    @staticmethod
    def named(name: str) -> ClipConfig:
        """The architecture of a public model by its usual name; plain CLIPs have OpenAI's activation.

        >>> ClipConfig.named("ViT-B/16") == ClipConfig.named("ViT-B-16")
        True
        """
        try:
            return _NAMED[name.replace("/", "-").replace("@336px", "-336")]
        except KeyError:
            raise UsageError(f"architecture must be one of {', '.join(_NAMED)}, got {name!r}") from None

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names that `ClipConfig.named` takes."""
        return tuple(_NAMED)


def _openai(vision: tuple[int, int, int, int, int], text: tuple[int, int, int], embed_dim: int) -> ClipConfig:
    """A CLIP of OpenAI's architecture: (width, layers, heads, patch, image), (width, layers, heads), E."""
    width, layers, heads, patch, image = vision
    mlp = int(width * 4.9231) if width == 1664 else 0  # only bigG has another ratio
    tower = VisionConfig(width, layers, heads, mlp, patch_size=patch, image_size=image)
    return ClipConfig(tower, TextConfig(*text), embed_dim)


def _siglip(vision: tuple[int, int, int, int, int], mlp: int = 0, vocab: int = 32_000) -> ClipConfig:
    """A SigLIP: (width, layers, heads, patch, image); both towers have one size."""
    width, layers, heads, patch, image = vision
    shared: dict[str, Any] = {"width": width, "layers": layers, "heads": heads, "mlp": mlp}
    shared |= {"activation": "gelu_tanh", "eps": 1e-6}
    tower = VisionConfig(
        **shared, patch_size=patch, image_size=image, class_token=False, patch_bias=True,
        pre_norm=False, pool="attention", projection=False,
    )  # fmt: skip
    text = TextConfig(
        **shared, context=64, vocab=vocab, causal=False, pool="last", end=1, begins=False,
        clean="punctuation" if vocab < 100_000 else "lower", projection_bias=True,
    )  # fmt: skip
    return ClipConfig(tower, text, width, HALF, HALF, resize="squash", logit_bias=True)


def _perception(vision: tuple[int, int, int, int, int]) -> ClipConfig:
    """A PE-Core: (width, layers, heads, patch, image)."""
    width, layers, heads, patch, image = vision
    tower = VisionConfig(
        width, layers, heads, activation="gelu", patch_size=patch, image_size=image, rotary=True,
        pool="attention", pool_heads=8,
    )  # fmt: skip
    text = TextConfig(width=1024, layers=24, heads=16, activation="gelu", context=32)
    return ClipConfig(tower, text, 1024, HALF, HALF, resize="squash", interpolation="bilinear")


_NAMED: dict[str, ClipConfig] = {
    "ViT-B-32": _openai((768, 12, 12, 32, 224), (512, 12, 8), 512),
    "ViT-B-16": _openai((768, 12, 12, 16, 224), (512, 12, 8), 512),
    "ViT-L-14": _openai((1024, 24, 16, 14, 224), (768, 12, 12), 768),
    "ViT-L-14-336": _openai((1024, 24, 16, 14, 336), (768, 12, 12), 768),
    "ViT-H-14": _openai((1280, 32, 16, 14, 224), (1024, 24, 16), 1024),
    "ViT-bigG-14": _openai((1664, 48, 16, 14, 224), (1280, 32, 20), 1280),
    "ViT-B-16-SigLIP": _siglip((768, 12, 12, 16, 224)),
    "ViT-L-16-SigLIP-256": _siglip((1024, 24, 16, 16, 256)),
    "ViT-SO400M-14-SigLIP-384": _siglip((1152, 27, 16, 14, 384), mlp=4304),
    "ViT-B-16-SigLIP2": _siglip((768, 12, 12, 16, 224), vocab=256_000),
    "PE-Core-B-16": _perception((768, 12, 12, 16, 224)),
    "PE-Core-L-14-336": _perception((1024, 24, 16, 14, 336)),
}
