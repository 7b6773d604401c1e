"""OpenCLIP's open_clip_config.json: its vision transformers, and the supported ones of timm."""

from __future__ import annotations

import re
from typing import Any

from dear.clip.config import CLIP_MEAN, CLIP_STD, ClipConfig
from dear.clip.config_fields import Fields, build_config
from dear.clip.config_huggingface import SIGLIP_VISION
from dear.errors import CheckpointError

# OpenCLIP's defaults; every other key must have the value that turns its feature off.
_VISION = {
    "layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16, "image_size": 224,
}  # fmt: skip
_TEXT = {
    "context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0,
}  # fmt: skip
_IGNORED = {  # used in training or for intermediate outputs only
    *("patch_dropout", "output_tokens", "hf_proj_type", "hf_pooler_type", "hf_model_pretrained"),
    *("timm_model_pretrained", "timm_drop", "timm_drop_path", "attn_pooler_queries", "attn_pooler_heads"),
    *("pad_id", "eos_id", "hf_tokenizer_name", "tokenizer_kwargs"),
}
_ACCEPTED = {"pos_embed_type": ("learnable",), "proj_type": ("linear",), "pool_type": ("tok",)}
_TEXT_POOLS = {"argmax": "largest", "eos": "end", "last": "last"}
_CLEANINGS = ("canonicalize", "lower", "whitespace")

# Sizes in timm's names: (width, layers, heads, mlp), the same for every image size.
_SIGLIP_SIZES = {
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
    "so400m": (1152, 27, 16, 4304),
    "giantopt": (1536, 40, 16, 6144),
}
_PERCEPTION_SIZES = {
    "tiny": (192, 12, 3, 768),
    "small": (384, 12, 6, 1536),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
}
_CLIP_SIZES = {"base": (768, 12, 12, 3072), "large": (1024, 24, 16, 4096), "huge": (1280, 32, 16, 5120)}
_SIGLIP = re.compile(r"vit_(base|large|so400m|giantopt)_patch(\d+)_siglip_\d+")
_PERCEPTION = re.compile(r"vit_pe_core_(tiny|small|base|large)_patch(\d+)_\d+")
_CLIP = re.compile(r"vit_(base|large|huge)_patch(\d+)_clip_(quickgelu_)?\d+")
_REMEDY = "use a vision transformer, such as ViT-B-16 of DataComp or SigLIP 2"
_WITHOUT_HEADS = ("convnext", "resnet", "fastvit", "mobile", "efficient", "mci", "vitamin", "swin", "naflex")


def from_openclip(raw: Any, source: str) -> ClipConfig:
    """Read open_clip_config.json: `model_cfg` and, where present, `preprocess_cfg`."""
    top = Fields(raw, source)
    model = Fields(top.get("model_cfg"), source)
    vision, text = Fields(model.get("vision_cfg"), source), Fields(model.get("text_cfg"), source)
    known = {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "cast_dtype", "init_logit_scale"}
    _check_options(model, known | {"custom_text", "init_logit_bias"}, "model_cfg")
    activation = "quick_gelu" if model.flag("quick_gelu") else "gelu"
    timm = vision.get("timm_model_name") is not None
    return build_config(
        source,
        vision=_timm_vision(vision) if timm else _openclip_vision(vision, activation),
        text=_text(text, activation),
        embed_dim=model.integer("embed_dim"),
        images={
            **_images(top.section("preprocess_cfg")),
            "logit_bias": model.get("init_logit_bias") is not None,
        },
    )


def _openclip_vision(section: Fields, activation: str) -> dict[str, Any]:
    """OpenCLIP's vision transformer."""
    if isinstance(section.get("layers"), list):
        raise CheckpointError(f"{section.source}: a ResNet has no attention heads; {_REMEDY}")
    _check_options(section, set(_VISION), "vision_cfg")
    vision = section.with_defaults(_VISION)
    width, head_width = vision.integer("width"), vision.integer("head_width")
    fits = head_width > 0 and width % head_width == 0
    vision.require(fits, f"a width of {width} that heads of {head_width} do not divide")
    return {
        "width": width,
        "layers": vision.integer("layers"),
        "heads": width // head_width,
        "mlp": int(width * vision.real("mlp_ratio")),
        "activation": activation,
        "image_size": vision.side("image_size"),
        "patch_size": vision.side("patch_size"),
    }


def _timm_vision(vision: Fields) -> dict[str, Any]:
    """A vision transformer of timm by its name."""
    name = vision["timm_model_name"]
    vision.require(isinstance(name, str), f"timm_model_name = {name!r}")
    pool, proj = vision.get("timm_pool"), vision.get("timm_proj")
    _check_options(vision, {"timm_model_name", "timm_pool", "timm_proj", "image_size"}, "vision_cfg")
    size = {"image_size": vision.with_defaults({"image_size": 224}).side("image_size")}
    if match := _SIGLIP.fullmatch(name):
        vision.require((pool, proj) == ("map", "none"), f"{name} with pool {pool!r} and projection {proj!r}")
        tanh = (match[1] in ("so400m", "giantopt") and match[2] == "16") or match[2] == "32"
        sizes = _sizes(_SIGLIP_SIZES, match, "gelu_tanh" if tanh else "gelu")
        return {**sizes, **size, "eps": 1e-6, **SIGLIP_VISION}
    vision.require(proj in (None, ""), f"{name} with the projection {proj!r}")
    if match := _PERCEPTION.fullmatch(name):
        vision.require(pool == "map", f"{name} with the pooling {pool!r}")
        parts = {"rotary": True, "pool": "attention", "pool_heads": 8, "projection_bias": True}
        return {**_sizes(_PERCEPTION_SIZES, match, "gelu"), **size, **parts}
    if match := _CLIP.fullmatch(name):
        vision.require(pool == "token", f"{name} with the pooling {pool!r}")
        activation = "quick_gelu" if match[3] else "gelu"
        return {**_sizes(_CLIP_SIZES, match, activation), **size, "projection_bias": True}
    if any(word in name for word in _WITHOUT_HEADS):
        raise CheckpointError(
            f"{vision.source}: the image tower {name[:80]} is not a plain transformer with attention heads; "
            f"{_REMEDY}"
        )
    raise CheckpointError(f"{vision.source}: the image tower {name[:80]!r} is not known; {_REMEDY}")


def _sizes(
    table: dict[str, tuple[int, int, int, int]], match: re.Match[str], activation: str
) -> dict[str, Any]:
    width, layers, heads, mlp = table[match[1]]
    shape = {"width": width, "layers": layers, "heads": heads, "mlp": mlp}
    return {**shape, "patch_size": int(match[2]), "activation": activation}


def _text(section: Fields, activation: str) -> dict[str, Any]:
    """OpenCLIP's text transformer."""
    if section.get("hf_model_name"):
        raise CheckpointError(
            f"{section.source}: language models of transformers are not supported as text towers; use "
            "MetaCLIP 2 or SigLIP 2 for other languages"
        )
    optional = {"no_causal_mask", "proj_bias", "pool_type", "norm_kwargs", "act_kwargs"}
    _check_options(section, set(_TEXT) | optional, "text_cfg")
    text = section.with_defaults(_TEXT)
    pool = text.get("pool_type", "argmax")
    text.require(pool in tuple(_TEXT_POOLS), f"text_cfg.pool_type = {pool!r}")
    norm, act = text.section("norm_kwargs"), text.section("act_kwargs")
    text.require(set(norm) <= {"eps"} and set(act) <= {"approximate"}, f"text_cfg: {norm | act}")
    if act.get("approximate", "none") == "tanh":
        text.require(activation == "gelu", "a tanh approximation of QuickGELU")
        activation = "gelu_tanh"
    width, ends = text.integer("width"), dict[str, Any]()
    if pool == "last":
        ends = {"end": 1, "begins": False}
    elif pool == "eos":
        ends = {"end": text.with_defaults({"eos_id": 2}).integer("eos_id")}
    return {
        "width": width,
        "layers": text.integer("layers"),
        "heads": text.integer("heads"),
        "mlp": int(width * text.real("mlp_ratio")),
        "activation": activation,
        "eps": norm.with_defaults({"eps": 1e-5}).real("eps"),
        "context": text.integer("context_length"),
        "vocab": text.integer("vocab_size"),
        "causal": not text.flag("no_causal_mask"),
        "pool": _TEXT_POOLS[pool],
        "projection_bias": text.flag("proj_bias"),
        "clean": _cleaning(text, pool),
        **ends,
    }


def _cleaning(text: Fields, pool: str) -> str:
    """How texts are cleaned for the tokenizer."""
    name = text.get("hf_tokenizer_name")
    if not name:
        text.require(pool == "argmax", f"the text pooling {pool!r} without a tokenizer")
        return "clip"
    text.require(pool != "argmax", f"the tokenizer {str(name)[:80]!r} with CLIP's text pooling")
    options = text.section("tokenizer_kwargs")
    clean = options.get("clean", "whitespace")
    text.require(set(options) <= {"clean"} and clean in _CLEANINGS, f"tokenizer_kwargs = {dict(options)}")
    return str(clean)


def _images(images: Fields) -> dict[str, Any]:
    """How images are prepared."""
    resize, interpolation = images.get("resize_mode", "shortest"), images.get("interpolation", "bicubic")
    for name, value, known in (
        ("mode", images.get("mode", "RGB"), ("RGB",)),
        ("resize_mode", resize, ("shortest", "squash")),
        ("interpolation", interpolation, ("bicubic", "bilinear")),
    ):
        images.require(value in known, f"preprocess_cfg.{name} = {value!r}")
    return {
        "mean": images.get("mean") or CLIP_MEAN,
        "std": images.get("std") or CLIP_STD,
        "resize": "squash" if resize == "squash" else "crop",
        "interpolation": interpolation,
    }


def _check_options(section: Fields, known: set[str], name: str) -> None:
    """Refuse options that change the towers and are not known, unless they are off."""
    for key, value in section.items():
        off = value is None or value is False or value == 0 or value in ({}, [], "")
        if key in known or key in _IGNORED or off or value in _ACCEPTED.get(key, ()):
            continue
        raise CheckpointError(
            f"{section.source}: {name}.{key} = {value!r} is not supported; only plain vision transformers "
            "and text towers of CLIP can be loaded"
        )
