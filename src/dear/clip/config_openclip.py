"""OpenCLIP's open_clip_config.json: its own vision transformers, and those of timm that are supported."""

from __future__ import annotations

import re
from typing import Any

from dear.clip.config import CLIP_MEAN, CLIP_STD, ClipConfig
from dear.clip.config_fields import Section, build_config, flag, integer, need, real, section, side
from dear.errors import CheckpointError

# What OpenCLIP assumes; a key that is not here must have the value that switches its feature off.
_VISION: Section = {
    "layers": 12,
    "width": 768,
    "head_width": 64,
    "mlp_ratio": 4.0,
    "patch_size": 16,
    "image_size": 224,
}
_TEXT: Section = {
    "context_length": 77,
    "vocab_size": 49408,
    "width": 512,
    "heads": 8,
    "layers": 12,
    "mlp_ratio": 4.0,
}
_IGNORED = {  # matter in training, or to intermediate outputs only
    *("patch_dropout", "output_tokens", "hf_proj_type", "hf_pooler_type", "hf_model_pretrained"),
    *("timm_model_pretrained", "timm_drop", "timm_drop_path", "attn_pooler_queries", "attn_pooler_heads"),
    *("pad_id", "eos_id", "hf_tokenizer_name", "tokenizer_kwargs"),
}
_USUAL: Section = {"pos_embed_type": ("learnable",), "proj_type": ("linear",), "pool_type": ("tok",)}
_TEXT_POOLS = {"argmax": "largest", "eos": "end", "last": "last"}
_CLEANINGS = ("canonicalize", "lower", "whitespace")

# timm's names: (width, layers, heads, mlp). SigLIP's of one width share them at every image size.
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
_INSTEAD = "take a vision transformer, such as ViT-B-16 of DataComp or SigLIP 2"
_WITHOUT_HEADS = ("convnext", "resnet", "fastvit", "mobile", "efficient", "mci", "vitamin", "swin", "naflex")


def from_openclip(raw: Any, source: str) -> ClipConfig:
    """Read open_clip_config.json: `model_cfg` and, where present, `preprocess_cfg`."""
    top = section(raw, source)
    model = section(top.get("model_cfg"), source)
    vision, text = section(model.get("vision_cfg"), source), section(model.get("text_cfg"), source)
    need("embed_dim" in model, source, "no model_cfg.embed_dim")
    known = {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "cast_dtype", "init_logit_scale"}
    _plain(model, known | {"custom_text", "init_logit_bias"}, "model_cfg", source)
    quick = flag(model, "quick_gelu", source)
    trunk = vision.get("timm_model_name")
    activation = "quick_gelu" if quick else "gelu"
    image = _own_vision(vision, activation, source) if trunk is None else _timm_vision(vision, source)
    return build_config(
        source,
        vision=image,
        text=_text(text, activation, source),
        embed_dim=integer(model, "embed_dim", source),
        images={
            **_images(section(top.get("preprocess_cfg") or {}, source), source),
            "logit_bias": model.get("init_logit_bias") is not None,
        },
    )


def _own_vision(given: Section, activation: str, source: str) -> dict[str, Any]:
    """OpenCLIP's own vision transformer."""
    if isinstance(given.get("layers"), list):
        raise CheckpointError(f"{source}: is a ResNet, which has no attention heads; {_INSTEAD}")
    _plain(given, set(_VISION), "vision_cfg", source)
    vision = {**_VISION, **given}
    width, head_width = integer(vision, "width", source), integer(vision, "head_width", source)
    need(
        head_width > 0 and width % head_width == 0,
        source,
        f"a width of {width} that heads of {head_width} do not divide",
    )
    return {
        "width": width,
        "layers": integer(vision, "layers", source),
        "heads": width // head_width,
        "mlp": int(width * real(vision, "mlp_ratio", source)),
        "activation": activation,
        "image_size": side(vision, "image_size", source),
        "patch_size": side(vision, "patch_size", source),
    }


def _timm_vision(vision: Section, source: str) -> dict[str, Any]:
    """A vision transformer of timm by its name."""
    name = vision["timm_model_name"]
    need(isinstance(name, str), source, f"timm_model_name = {name!r}")
    pool, proj = vision.get("timm_pool"), vision.get("timm_proj")
    usual = {"timm_model_name", "timm_pool", "timm_proj", "image_size"}
    _plain(vision, usual, "vision_cfg", source)
    size = {"image_size": side({"image_size": 224, **vision}, "image_size", source)}
    if found := _SIGLIP.fullmatch(name):
        need((pool, proj) == ("map", "none"), source, f"{name} with pool {pool!r} and projection {proj!r}")
        tanh = (found[1] in ("so400m", "giantopt") and found[2] == "16") or found[2] == "32"
        return {
            **_sizes(_SIGLIP_SIZES, found, "gelu_tanh" if tanh else "gelu"),
            **size,
            "eps": 1e-6,
            "class_token": False,
            "patch_bias": True,
            "pre_norm": False,
            "pool": "attention",
            "projection": False,
        }
    need(proj in (None, ""), source, f"{name} with the projection {proj!r}")
    if found := _PERCEPTION.fullmatch(name):
        need(pool == "map", source, f"{name} with the pooling {pool!r}")
        parts = {"rotary": True, "pool": "attention", "pool_heads": 8, "projection_bias": True}
        return {**_sizes(_PERCEPTION_SIZES, found, "gelu"), **size, **parts}
    if found := _CLIP.fullmatch(name):
        need(pool == "token", source, f"{name} with the pooling {pool!r}")
        activation = "quick_gelu" if found[3] else "gelu"
        return {**_sizes(_CLIP_SIZES, found, activation), **size, "projection_bias": True}
    if any(word in name for word in _WITHOUT_HEADS):
        raise CheckpointError(
            f"{source}: the image tower {name[:80]} is no plain transformer with attention heads; {_INSTEAD}"
        )
    raise CheckpointError(f"{source}: the image tower {name[:80]!r} is not known; {_INSTEAD}")


def _sizes(table: dict[str, tuple[int, int, int, int]], found: re.Match[str], activation: str) -> Section:
    width, layers, heads, mlp = table[found[1]]
    shape = {"width": width, "layers": layers, "heads": heads, "mlp": mlp}
    return {**shape, "patch_size": int(found[2]), "activation": activation}


def _text(given: Section, activation: str, source: str) -> dict[str, Any]:
    """OpenCLIP's own text transformer."""
    if given.get("hf_model_name"):
        raise CheckpointError(
            f"{source}: has a language model of transformers as its text tower; take MetaCLIP 2 or SigLIP 2 "
            "for other languages"
        )
    own = {"no_causal_mask", "proj_bias", "pool_type", "norm_kwargs", "act_kwargs"}
    _plain(given, set(_TEXT) | own, "text_cfg", source)
    text = {**_TEXT, **given}
    pool = text.get("pool_type", "argmax")
    need(pool in tuple(_TEXT_POOLS), source, f"text_cfg.pool_type = {pool!r}")
    norm, act = section(text.get("norm_kwargs") or {}, source), section(text.get("act_kwargs") or {}, source)
    need(set(norm) <= {"eps"} and set(act) <= {"approximate"}, source, f"text parts {dict(norm) | dict(act)}")
    if act.get("approximate", "none") == "tanh":
        need(activation == "gelu", source, "a tanh approximation of QuickGELU")
        activation = "gelu_tanh"
    width = integer(text, "width", source)
    ends: dict[str, Any] = {}
    if pool == "last":
        ends = {"end": 1, "begins": False}
    elif pool == "eos":
        ends = {"end": integer({"eos_id": 2, **text}, "eos_id", source)}
    return {
        "width": width,
        "layers": integer(text, "layers", source),
        "heads": integer(text, "heads", source),
        "mlp": int(width * real(text, "mlp_ratio", source)),
        "activation": activation,
        "eps": real({"eps": 1e-5, **norm}, "eps", source),
        "context": integer(text, "context_length", source),
        "vocab": integer(text, "vocab_size", source),
        "causal": not flag(text, "no_causal_mask", source),
        "pool": _TEXT_POOLS[pool],
        "projection_bias": flag(text, "proj_bias", source),
        "clean": _cleaning(text, pool, source),
        **ends,
    }


def _cleaning(text: Section, pool: str, source: str) -> str:
    """How texts are cleaned for the tokenizer."""
    name = text.get("hf_tokenizer_name")
    if not name:
        need(pool == "argmax", source, f"the text pooling {pool!r} without a tokenizer of its own")
        return "clip"
    need(pool != "argmax", source, f"the tokenizer {str(name)[:80]!r} with CLIP's text pooling")
    options = section(text.get("tokenizer_kwargs") or {}, source)
    clean = options.get("clean", "whitespace")
    need(set(options) <= {"clean"} and clean in _CLEANINGS, source, f"tokenizer_kwargs = {dict(options)}")
    return str(clean)


def _images(images: Section, source: str) -> dict[str, Any]:
    """How images are prepared."""
    resize, interpolation = images.get("resize_mode", "shortest"), images.get("interpolation", "bicubic")
    need(images.get("mode", "RGB") == "RGB", source, f"preprocess_cfg.mode = {images.get('mode')!r}")
    need(resize in ("shortest", "squash"), source, f"preprocess_cfg.resize_mode = {resize!r}")
    need(
        interpolation in ("bicubic", "bilinear"), source, f"preprocess_cfg.interpolation = {interpolation!r}"
    )
    return {
        "mean": images.get("mean") or CLIP_MEAN,
        "std": images.get("std") or CLIP_STD,
        "resize": "squash" if resize == "squash" else "crop",
        "interpolation": interpolation,
    }


def _plain(given: Section, known: set[str], name: str, source: str) -> None:
    """Refuse what changes the towers: an unknown option may stand there only switched off."""
    for key, value in given.items():
        off = value is None or value is False or value == 0 or value in ({}, [], "")
        if key in known or key in _IGNORED or off or value in _USUAL.get(key, ()):
            continue
        raise CheckpointError(
            f"{source}: {name}.{key} = {value!r} is a part of OpenCLIP that is not supported; "
            "only CLIP's own vision transformers and text towers can be loaded"
        )
