"""The architecture of a CLIP-like model: everything a checkpoint decides except its weights.

It is read from Hugging Face's config.json and preprocessor_config.json here, each field checked and the file
named in every refusal; `config_openclip` and `config_shapes` read it from other layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dear._io.image_file import Size, View
from dear.errors import CheckpointError, UsageError

ACTIVATIONS = ("quick_gelu", "gelu", "gelu_tanh")  # the order is that of the GPU kernel
VISION_POOLS = ("class", "attention")
TEXT_POOLS = ("largest", "end", "last")
CLEANINGS = (
    "clip",
    "punctuation",
    "canonicalize",
    "lower",
    "whitespace",
    "none",
)  # "clip": CLIP's own byte pairs
RESIZES = ("crop", "squash")
INTERPOLATIONS = ("bicubic", "bilinear")
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_LIMIT = (
    65_536  # no dimension of a real checkpoint is larger; a hostile one is refused before memory is taken
)


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
class TowerConfig:
    """A pre-norm transformer: `layers` blocks of `heads` heads of `width` features per token."""

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
                f"{name} = {value!r} is not a size of a transformer (an integer from 1 to {_LIMIT:,})",
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
    """The image tower: a ViT that reads `image_size` pixels in patches of `patch_size`.

    The defaults are CLIP's. SigLIP has no class token, no norm before the first layer, a bias on its patches,
    attention pooling and no projection; PE-Core has rotary positions and attention pooling.
    """

    image_size: int = 224
    patch_size: int = 16
    class_token: bool = True  #: a learned token before the patches
    patch_bias: bool = False  #: the patch projection has a bias
    pre_norm: bool = True  #: a norm before the first layer
    rotary: bool = False  #: 2-D rotary positions in every layer, besides the learned ones
    pool: str = "class"  #: "class" reads the class token, "attention" asks all tokens with a learned probe
    pool_heads: int = 0  #: heads of the attention pooling; 0 means as many as in a layer
    projection: bool = True  #: a matrix from the width to the shared space; without it both have one size
    projection_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool_heads == 0:
            object.__setattr__(self, "pool_heads", self.heads)
        _check(self.pool in VISION_POOLS, f"pool {self.pool!r} is not known: {', '.join(VISION_POOLS)}")
        _check(self.pool != "class" or self.class_token, "reading the class token needs a class token")
        _check(
            0 < self.pool_heads <= _LIMIT and self.width % self.pool_heads == 0,
            f"{self.pool_heads} pooling heads do not divide the width {self.width}",
        )
        _check(
            not self.rotary or self.head_width % 4 == 0,
            f"rotary positions need heads of a multiple of 4; these are {self.head_width} wide",
        )
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
        """Class token, if there is one, and patches: the length of the original sequence."""
        return self.side**2 + int(self.class_token)


@dataclass(frozen=True)
class TextConfig(TowerConfig):
    """The text tower: a transformer over `context` tokens out of `vocab`.

    The defaults are CLIP's. SigLIP is not causal, reads the last position of the padded text and has a bias
    on its projection; MetaCLIP 2 reads the first end token.
    """

    context: int = 77
    vocab: int = 49_408
    causal: bool = True
    pool: str = "largest"  #: the row read: of the "largest" id, of the first "end" token, or the "last" one
    end: int = 49_407  #: the id that ends a text, where `pool` is "end"
    begins: bool = True  #: a text begins with a token that is no word
    clean: str = "clip"  #: what becomes of a text before it is tokenized, see `dear.clip.tokenizer_file`
    projection_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(isinstance(self.context, int) and 2 < self.context <= 4096, f"context = {self.context!r}")
        _check(isinstance(self.vocab, int) and 0 < self.vocab <= 10_000_000, f"vocab = {self.vocab!r}")
        _check(self.clean in CLEANINGS, f"clean {self.clean!r} is not known: {', '.join(CLEANINGS)}")
        _check(self.pool in TEXT_POOLS, f"text pool {self.pool!r} is not known: {', '.join(TEXT_POOLS)}")
        _check(
            self.pool != "end" or (isinstance(self.end, int) and 0 <= self.end < self.vocab),
            f"the end token {self.end!r} is not one of {self.vocab} tokens",
        )

    @property
    def needs_all_positions(self) -> bool:
        """Whether every position must be computed, padding included, because the read row sees it."""
        return not self.causal or self.pool == "last"


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
    resize: str = "crop"  #: "crop" (short side to the image size, center) or "squash" (both sides)
    interpolation: str = "bicubic"  #: or "bilinear"
    logit_bias: bool = False  #: pairs were trained one by one with a sigmoid, which needs a bias

    def __post_init__(self) -> None:
        _check(
            isinstance(self.embed_dim, int) and 0 < self.embed_dim <= _LIMIT,
            f"embed_dim = {self.embed_dim!r} is not the size of a feature",
        )
        _check(len(self.mean) == 3 and len(self.std) == 3, "mean and std must have three numbers each")
        _check(all(s > 1e-6 for s in self.std), f"std = {self.std!r} must be positive")
        _check(self.resize in RESIZES, f"resize {self.resize!r} is not known: {', '.join(RESIZES)}")
        _check(
            self.interpolation in INTERPOLATIONS,
            f"interpolation {self.interpolation!r} is not known: {', '.join(INTERPOLATIONS)}",
        )
        _check(
            self.vision.projection or self.embed_dim == self.vision.width,
            f"without a projection features have the width {self.vision.width}, not {self.embed_dim}",
        )

    @property
    def view(self) -> Size:
        """How an image becomes the square that the model reads: its side, where that says it all."""
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
            raise UsageError(f"no CLIP shape is called {name!r}; known are {', '.join(_NAMED)}") from None

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names that `ClipConfig.named` takes."""
        return tuple(_NAMED)


def _plain(vision: tuple[int, int, int, int, int], text: tuple[int, int, int], embed_dim: int) -> ClipConfig:
    """A CLIP of OpenAI's architecture: (width, layers, heads, patch, image), (width, layers, heads), E."""
    width, layers, heads, patch, image = vision
    mlp = int(width * 4.9231) if width == 1664 else 0  # bigG alone has another ratio
    tower = VisionConfig(width, layers, heads, mlp, patch_size=patch, image_size=image)
    return ClipConfig(tower, TextConfig(*text), embed_dim)


def _siglip(vision: tuple[int, int, int, int, int], mlp: int = 0, vocab: int = 32_000) -> ClipConfig:
    """A SigLIP: (width, layers, heads, patch, image); both towers have one size."""
    width, layers, heads, patch, image = vision
    usual: dict[str, Any] = {"width": width, "layers": layers, "heads": heads, "mlp": mlp}
    usual |= {"activation": "gelu_tanh", "eps": 1e-6}
    tower = VisionConfig(
        **usual, patch_size=patch, image_size=image, class_token=False, patch_bias=True,
        pre_norm=False, pool="attention", projection=False,
    )  # fmt: skip
    text = TextConfig(
        **usual, context=64, vocab=vocab, causal=False, pool="last", end=1, begins=False,
        clean="punctuation" if vocab < 100_000 else "lower", projection_bias=True,
    )  # fmt: skip
    half = (0.5, 0.5, 0.5)
    return ClipConfig(tower, text, width, half, half, resize="squash", logit_bias=True)


def _perception(vision: tuple[int, int, int, int, int]) -> ClipConfig:
    """A PE-Core: (width, layers, heads, patch, image)."""
    width, layers, heads, patch, image = vision
    tower = VisionConfig(
        width, layers, heads, activation="gelu", patch_size=patch, image_size=image, rotary=True,
        pool="attention", pool_heads=8,
    )  # fmt: skip
    text = TextConfig(width=1024, layers=24, heads=16, activation="gelu", context=32)
    half = (0.5, 0.5, 0.5)
    return ClipConfig(tower, text, 1024, half, half, resize="squash", interpolation="bilinear")


_NAMED: dict[str, ClipConfig] = {
    "ViT-B-32": _plain((768, 12, 12, 32, 224), (512, 12, 8), 512),
    "ViT-B-16": _plain((768, 12, 12, 16, 224), (512, 12, 8), 512),
    "ViT-L-14": _plain((1024, 24, 16, 14, 224), (768, 12, 12), 768),
    "ViT-L-14-336": _plain((1024, 24, 16, 14, 336), (768, 12, 12), 768),
    "ViT-H-14": _plain((1280, 32, 16, 14, 224), (1024, 24, 16), 1024),
    "ViT-bigG-14": _plain((1664, 48, 16, 14, 224), (1280, 32, 20), 1280),
    "ViT-B-16-SigLIP": _siglip((768, 12, 12, 16, 224)),
    "ViT-L-16-SigLIP-256": _siglip((1024, 24, 16, 16, 256)),
    "ViT-SO400M-14-SigLIP-384": _siglip((1152, 27, 16, 14, 384), mlp=4304),
    "ViT-B-16-SigLIP2": _siglip((768, 12, 12, 16, 224), vocab=256_000),
    "PE-Core-B-16": _perception((768, 12, 12, 16, 224)),
    "PE-Core-L-14-336": _perception((1024, 24, 16, 14, 336)),
}


Section = Mapping[str, Any]


def section(value: Any, source: str) -> Section:
    """An object of the file."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: is not the configuration of a CLIP (an object was expected)")
    return value


def integer(fields: Section, key: str, source: str) -> int:
    """An integer."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{source}: {key} = {value!r} must be an integer")
    return value


def real(fields: Section, key: str, source: str) -> float:
    """A positive number."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e4:
        raise CheckpointError(f"{source}: {key} = {value!r} must be a positive number")
    return float(value)


def flag(fields: Section, key: str, source: str, usual: bool = False) -> bool:
    """True or false."""
    value = fields.get(key, usual)
    need(isinstance(value, bool), source, f"{key} = {value!r}, which is neither true nor false")
    return bool(value)


def side(fields: Section, key: str, source: str) -> int:
    """An image's or patch's side; a pair must be square."""
    value = fields.get(key)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return integer({key: value}, key, source)


def color(value: Any, name: str) -> tuple[float, float, float]:
    """Three numbers, one per color."""
    if isinstance(value, list | tuple) and len(value) == 3:
        r, g, b = value
        if all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e6 for v in value):
            return float(r), float(g), float(b)
    raise CheckpointError(f"the {name} of the images must be three numbers, not {value!r}")


def need(condition: bool, source: str, fault: str) -> None:
    """Refuse what is not supported."""
    if not condition:
        raise CheckpointError(f"{source}: asks for {fault}, which is not supported")


def build_config(
    source: str, *, vision: dict[str, Any], text: dict[str, Any], embed_dim: int, images: dict[str, Any]
) -> ClipConfig:
    """A `ClipConfig`; errors about its values name the file."""
    try:
        images = {**images, "mean": color(images["mean"], "mean"), "std": color(images["std"], "std")}
        return ClipConfig(VisionConfig(**vision), TextConfig(**text), embed_dim, **images)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None


# What transformers assumes where config.json is silent; the published files list a few fields only.
_VISION: Section = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_TEXT: Section = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}
_SIGLIP: Section = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_SIGLIP_VISION: Section = {**_VISION, **_SIGLIP, "patch_size": 16}
_SIGLIP_TEXT: Section = {
    **_TEXT,
    **_SIGLIP,
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
}
_ACTIVATIONS = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_HALF = (0.5, 0.5, 0.5)
_SIGLIP_END = 1  # in both vocabularies, whatever the files' eos_token_id says
_GEMMA_VOCAB = 100_000  # SigLIP 2's vocabulary is larger, the first SigLIP's smaller
#: Model types that are refused, and why.
_REFUSED = {
    "siglip2": "takes images of any shape (NaFlex); take a SigLIP 2 of fixed size, such as "
    "google/siglip2-base-patch16-224",
    "chinese_clip": "has a BERT as its text tower; take MetaCLIP 2 or SigLIP 2 for other languages",
    "altclip": "has an XLM-RoBERTa as its text tower; take MetaCLIP 2 or SigLIP 2 for other languages",
    "align": "has an EfficientNet as its image tower, without attention heads; take a vision transformer",
}
KNOWN = ("clip", "metaclip_2", "siglip")  #: values of model_type that can be loaded


def from_huggingface(raw: Any, preprocessor: Any, source: str) -> ClipConfig:
    """Read config.json (and preprocessor_config.json, or None), with transformers' defaults."""
    top = section(raw, source)
    kind = str(top.get("model_type", "clip"))
    if kind in _REFUSED:
        raise CheckpointError(f"{source}: a model of type {kind!r} {_REFUSED[kind]}")
    if kind not in KNOWN:
        raise CheckpointError(
            f"{source}: describes a model of type {kind[:80]!r}; only {', '.join(KNOWN)} can be loaded"
        )
    siglip = kind == "siglip"
    vision = _tower(top, "vision", _SIGLIP_VISION if siglip else _VISION, source)
    text = _tower(top, "text", _SIGLIP_TEXT if siglip else _TEXT, source)
    need(vision["num_channels"] == 3, source, f"images of {vision['num_channels']!r} channels, not 3")
    parts = _siglip_parts(vision, text, source) if siglip else _clip_parts(top, text, kind, source)
    sizes = {key: side(vision, key, source) for key in ("image_size", "patch_size")}
    return build_config(
        source,
        vision={**_sizes(vision, source), **sizes, **parts["vision"]},
        text={
            **_sizes(text, source),
            "context": integer(text, "max_position_embeddings", source),
            "vocab": integer(text, "vocab_size", source),
            **parts["text"],
        },
        embed_dim=parts["embed_dim"],
        images={
            **_images(preprocessor, sizes["image_size"], siglip, source),
            **({"logit_bias": True} if siglip else {}),
        },
    )


def _clip_parts(top: Section, text: Section, kind: str, source: str) -> dict[str, Any]:
    """What CLIP and MetaCLIP 2 are made of."""
    end, vocab = text["eos_token_id"], integer(text, "vocab_size", source)
    parts: dict[str, Any] = {"vision": {}, "text": {}}
    if kind == "metaclip_2":
        parts["text"] = {"pool": "end", "end": integer(text, "eos_token_id", source), "clean": "none"}
    else:
        # Older files say 2 and mean the largest id in the text, which is where CLIP's own end token stands.
        need(end in (2, vocab - 1, 49407), source, f"texts that end with token {end!r}")
    parts["embed_dim"] = integer({"projection_dim": 512, **top}, "projection_dim", source)
    return parts


def _siglip_parts(vision: Section, text: Section, source: str) -> dict[str, Any]:
    """What SigLIP is made of."""
    need(vision.get("vision_use_head", True) is True, source, "a SigLIP without its pooling head")
    size = text.get("projection_size")
    vocab = integer(text, "vocab_size", source)
    return {
        "vision": {
            "class_token": False,
            "patch_bias": True,
            "pre_norm": False,
            "pool": "attention",
            "projection": False,
        },
        "text": {
            "causal": False,
            "pool": "last",
            "end": _SIGLIP_END,
            "begins": False,
            "clean": "lower" if vocab > _GEMMA_VOCAB else "punctuation",
            "projection_bias": True,
        },
        "embed_dim": integer(text, "hidden_size" if size is None else "projection_size", source),
    }


def _tower(top: Section, tower: str, defaults: Section, source: str) -> dict[str, Any]:
    """One tower's fields; a legacy `*_config_dict` replaces them all, as transformers does it."""
    legacy = top.get(f"{tower}_config_dict")
    given = top.get(f"{tower}_config") if legacy is None else legacy
    fields = {**defaults, **section(given if given is not None else {}, source)}
    if legacy is not None:
        plain = section(top.get(f"{tower}_config") or {}, source)
        fields = {**plain, **fields}
    return fields


def _sizes(tower: Section, source: str) -> dict[str, Any]:
    given = tower["hidden_act"]
    activation = _ACTIVATIONS.get(given) if isinstance(given, str) else None
    if activation is None:
        raise CheckpointError(
            f"{source}: hidden_act = {str(given)[:80]!r} is not known; known are {', '.join(_ACTIVATIONS)}"
        )
    return {
        "width": integer(tower, "hidden_size", source),
        "layers": integer(tower, "num_hidden_layers", source),
        "heads": integer(tower, "num_attention_heads", source),
        "mlp": integer(tower, "intermediate_size", source),
        "activation": activation,
        "eps": real(tower, "layer_norm_eps", source),
    }


def _images(preprocessor: Any, size: int, siglip: bool, source: str) -> dict[str, Any]:
    """How images are prepared: preprocessor_config.json, or what the family does without one."""
    fields = section(preprocessor if preprocessor is not None else {}, source)
    for key in ("do_normalize", "do_rescale", "do_resize"):
        need(fields.get(key, True) is True, source, f"images with {key} = {fields.get(key)!r}")
    sizes = fields.get("size", {"height": size, "width": size} if siglip else size)
    squash = isinstance(sizes, dict) and "height" in sizes
    given = list(sizes.values()) if isinstance(sizes, dict) else [sizes]
    fits = bool(given) and all(value == size for value in given)
    need(fits, source, f"images resized to {sizes!r} for a model of {size} pixels")
    resample = fields.get("resample", 3)
    need(resample in (2, 3), source, f"resample = {resample!r} (only 3, bicubic, and 2, bilinear)")
    return {
        "mean": fields.get("image_mean", _HALF if siglip else CLIP_MEAN),
        "std": fields.get("image_std", _HALF if siglip else CLIP_STD),
        "resize": "squash" if squash else "crop",
        "interpolation": "bicubic" if resample == 3 else "bilinear",
    }


def to_huggingface(config: ClipConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a plain CLIP: the reverse of `from_huggingface`."""
    vision, text = config.vision, config.text
    plain = vision.pool == "class" and vision.pre_norm and vision.projection and not vision.projection_bias
    if not plain or vision.rotary or text.pool != "largest" or text.projection_bias or not text.causal:
        raise UsageError("only plain CLIPs can be written in Hugging Face's layout")

    def tower(shape: VisionConfig | TextConfig) -> dict[str, Any]:
        return {
            "hidden_size": shape.width,
            "intermediate_size": shape.mlp,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "hidden_act": shape.activation,
            "layer_norm_eps": shape.eps,
            "projection_dim": config.embed_dim,
        }

    ends = {"bos_token_id": text.vocab - 2, "eos_token_id": text.vocab - 1, "pad_token_id": 0}
    images = {"image_size": vision.image_size, "patch_size": vision.patch_size, "num_channels": 3}
    words = {"max_position_embeddings": text.context, "vocab_size": text.vocab, **ends}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.embed_dim,
        "torch_dtype": dtype,
        "vision_config": {**tower(vision), **images},
        "text_config": {**tower(text), **words},
    }


def to_images(config: ClipConfig) -> dict[str, Any]:
    """The preprocessor_config.json that prepares images as `Clip.preprocess` does."""
    side = config.vision.image_size
    square, squash = {"height": side, "width": side}, config.resize == "squash"
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": square if squash else {"shortest_edge": side},
        "resample": 2 if config.interpolation == "bilinear" else 3,
        "do_center_crop": not squash,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": list(config.mean),
        "image_std": list(config.std),
    }
