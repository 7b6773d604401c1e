"""The shape of a CLIP: everything a checkpoint decides except the numbers in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dear.errors import CheckpointError, UsageError

ACTIVATIONS = ("quick_gelu", "gelu", "gelu_tanh")  # the order is that of the GPU kernel
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_LIMIT = (
    65_536  # no dimension of a real checkpoint is larger; a hostile one is refused before memory is taken
)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise CheckpointError(message)


def last_third(layers: int) -> tuple[int, ...]:
    """The last third of so many layers, counted from 1; at least one.

    >>> last_third(12), last_third(1)
    ((9, 10, 11, 12), (1,))
    """
    return tuple(range(layers - max(1, round(layers / 3)) + 1, layers + 1))


@dataclass(frozen=True)
class TowerConfig:
    """A pre-norm transformer: `layers` blocks of `heads` heads on `width` numbers a token."""

    width: int
    layers: int
    heads: int
    mlp: int = 0  #: hidden width of the MLP; 0 means four times the width
    activation: str = "quick_gelu"  #: "quick_gelu" (OpenAI), "gelu" (most others) or "gelu_tanh" (SigLIP)
    eps: float = 1e-5  #: LayerNorm's epsilon

    def __post_init__(self) -> None:
        if self.mlp == 0:
            object.__setattr__(self, "mlp", 4 * self.width)
        for name in ("width", "layers", "heads", "mlp"):
            value = getattr(self, name)
            _check(
                isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LIMIT,
                f"{name} = {value!r} is not a size of a transformer (a whole number from 1 to {_LIMIT:,})",
            )
        _check(self.width % self.heads == 0, f"{self.heads} heads do not divide the width {self.width}")
        _check(
            self.activation in ACTIVATIONS,
            f"activation {self.activation!r} is not known; known are {', '.join(ACTIVATIONS)}",
        )
        _check(0 < self.eps < 1, f"LayerNorm epsilon {self.eps!r} is not between 0 and 1")

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def last_third(self) -> tuple[int, ...]:
        """The last third of the layers, see `last_third`."""
        return last_third(self.layers)


@dataclass(frozen=True)
class VisionConfig(TowerConfig):
    """The image tower: a ViT that reads `image_size` pixels in patches of `patch_size`."""

    image_size: int = 224
    patch_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            _check(isinstance(value, int) and 0 < value <= 4096, f"{name} = {value!r} is not an image size")
        _check(
            self.image_size >= self.patch_size,
            f"an image of {self.image_size} pixels has no patch of {self.patch_size}",
        )

    @property
    def side(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def positions(self) -> int:
        """Class token and patches: the length of the original sequence."""
        return self.side**2 + 1


@dataclass(frozen=True)
class TextConfig(TowerConfig):
    """The text tower: a causal transformer over `context` BPE tokens out of `vocab`."""

    context: int = 77
    vocab: int = 49_408

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(isinstance(self.context, int) and 2 < self.context <= 4096, f"context = {self.context!r}")
        _check(isinstance(self.vocab, int) and 0 < self.vocab <= 10_000_000, f"vocab = {self.vocab!r}")


@dataclass(frozen=True)
class ClipConfig:
    """Two towers and the space they share.

    Example:
        >>> ClipConfig.named("ViT-B-16").vision.heads
        12
    """

    vision: VisionConfig
    text: TextConfig
    embed_dim: int
    mean: tuple[float, float, float] = field(default=CLIP_MEAN)
    std: tuple[float, float, float] = field(default=CLIP_STD)

    def __post_init__(self) -> None:
        _check(
            isinstance(self.embed_dim, int) and 0 < self.embed_dim <= _LIMIT,
            f"embed_dim = {self.embed_dim!r} is not the size of a feature",
        )
        _check(len(self.mean) == 3 and len(self.std) == 3, "mean and std must have three numbers each")
        _check(all(s > 1e-6 for s in self.std), f"std = {self.std!r} must be positive")

    @staticmethod
    def named(name: str) -> ClipConfig:
        """The shape of a public CLIP ViT by its usual name, with OpenAI's activation.

        Raises:
            UsageError: the name is not one of `ClipConfig.names()`, nor OpenAI's way to write one.

        >>> ClipConfig.named("ViT-B/16") == ClipConfig.named("ViT-B-16")
        True
        """
        try:
            vision, text, embed_dim = _NAMED[name.replace("/", "-").replace("@336px", "-336")]
        except KeyError:
            raise UsageError(f"no CLIP shape is called {name!r}; known are {', '.join(_NAMED)}") from None
        return ClipConfig(vision, text, embed_dim)

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names that `ClipConfig.named` takes."""
        return tuple(_NAMED)


_B_TEXT = TextConfig(width=512, layers=12, heads=8)
_L_TEXT = TextConfig(width=768, layers=12, heads=12)
_NAMED: dict[str, tuple[VisionConfig, TextConfig, int]] = {
    "ViT-B-32": (VisionConfig(width=768, layers=12, heads=12, patch_size=32), _B_TEXT, 512),
    "ViT-B-16": (VisionConfig(width=768, layers=12, heads=12, patch_size=16), _B_TEXT, 512),
    "ViT-L-14": (VisionConfig(width=1024, layers=24, heads=16, patch_size=14), _L_TEXT, 768),
    "ViT-L-14-336": (
        VisionConfig(width=1024, layers=24, heads=16, patch_size=14, image_size=336),
        _L_TEXT,
        768,
    ),
}
