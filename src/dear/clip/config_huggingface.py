"""The architecture from Hugging Face's config.json and preprocessor_config.json, and back."""

from __future__ import annotations

import math
from typing import Any

from dear.clip.config import CLIP_MEAN, CLIP_STD, HALF, ClipConfig, TextConfig, VisionConfig
from dear.clip.config_fields import Fields, build_config
from dear.errors import CheckpointError, UsageError

# The defaults of transformers; published config.json files contain only a few fields.
_TOWER: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
_VISION = {**_TOWER, "num_channels": 3, "image_size": 224, "patch_size": 32}
_TEXT = {
    **_TOWER, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8,
    "vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407,
}  # fmt: skip
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_SIGLIP_VISION = {**_VISION, **_SIGLIP, "patch_size": 16}
_SIGLIP_TEXT = {**_TEXT, **_TOWER, **_SIGLIP, "vocab_size": 32000, "max_position_embeddings": 64}
_ACTIVATIONS = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_SIGLIP_END = 1  # in both vocabularies; eos_token_id in the files is wrong
_GEMMA_VOCAB = 100_000  # SigLIP 2's vocabulary is larger, the first SigLIP's smaller
#: Model types that are refused, and why.
_REFUSED = {
    "siglip2": "takes images of any shape (NaFlex); take a SigLIP 2 of fixed size, such as "
    "google/siglip2-base-patch16-224",
    "chinese_clip": "has a BERT as its text tower; take MetaCLIP 2 or SigLIP 2 for other languages",
    "altclip": "has an XLM-RoBERTa as its text tower; take MetaCLIP 2 or SigLIP 2 for other languages",
    "align": "has an EfficientNet as its image tower, without attention heads; take a vision transformer",
}
SIGLIP_VISION: dict[str, Any] = {
    "class_token": False, "patch_bias": True, "pre_norm": False, "pool": "attention", "projection": False,
}  # fmt: skip
"""Settings of the image tower of every SigLIP."""
MODEL_TYPES = ("clip", "metaclip_2", "siglip")  #: values of model_type that can be loaded


def from_huggingface(raw: Any, preprocessor: Any, source: str) -> ClipConfig:
    """Read config.json (and preprocessor_config.json, or None), with transformers' defaults."""
    top = Fields(raw, source)
    kind = str(top.get("model_type", "clip"))
    if kind in _REFUSED:
        raise CheckpointError(f"{source}: a model of type {kind!r} {_REFUSED[kind]}")
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"{source}: model_type must be one of {', '.join(MODEL_TYPES)}, got {kind[:80]!r}"
        )
    siglip = kind == "siglip"
    vision = _tower(top, "vision", _SIGLIP_VISION if siglip else _VISION)
    text = _tower(top, "text", _SIGLIP_TEXT if siglip else _TEXT)
    vision.require(vision["num_channels"] == 3, f"num_channels = {vision['num_channels']!r} (only 3)")
    parts = _siglip_parts(vision, text) if siglip else _clip_parts(top, text, kind)
    sizes = {key: vision.side(key) for key in ("image_size", "patch_size")}
    words = {"context": text.integer("max_position_embeddings"), "vocab": text.integer("vocab_size")}
    return build_config(
        source,
        vision={**_sizes(vision), **sizes, **parts["vision"]},
        text={**_sizes(text), **words, **parts["text"]},
        embed_dim=parts["embed_dim"],
        images={**_images(preprocessor, sizes["image_size"], siglip, source), "logit_bias": siglip},
    )


def _clip_parts(top: Fields, text: Fields, kind: str) -> dict[str, Any]:
    """Settings of CLIP and MetaCLIP 2."""
    end, vocab, words = text["eos_token_id"], text.integer("vocab_size"), dict[str, Any]()
    if kind == "metaclip_2":
        words = {"pool": "end", "end": text.integer("eos_token_id"), "clean": "none"}
    else:
        # Older files contain 2 for the largest id, which is CLIP's end token.
        text.require(end in (2, vocab - 1, 49407), f"eos_token_id = {end!r}")
    embed_dim = top.with_defaults({"projection_dim": 512}).integer("projection_dim")
    return {"vision": {}, "text": words, "embed_dim": embed_dim}


def _siglip_parts(vision: Fields, text: Fields) -> dict[str, Any]:
    """Settings of SigLIP."""
    vision.require(vision.get("vision_use_head", True) is True, "a SigLIP without its pooling head")
    clean = "lower" if text.integer("vocab_size") > _GEMMA_VOCAB else "punctuation"
    return {
        "vision": SIGLIP_VISION,
        "text": {
            "causal": False,
            "pool": "last",
            "end": _SIGLIP_END,
            "begins": False,
            "clean": clean,
            "projection_bias": True,
        },
        "embed_dim": text.integer(
            "hidden_size" if text.get("projection_size") is None else "projection_size"
        ),
    }


def _tower(top: Fields, tower: str, defaults: dict[str, Any]) -> Fields:
    """One tower's fields; a legacy `*_config_dict` takes precedence, as in transformers."""
    current, legacy = f"{tower}_config", f"{tower}_config_dict"
    if top.get(legacy) is None:
        return top.section(current).with_defaults(defaults)
    return top.section(legacy).with_defaults(defaults).with_defaults(top.section(current))


def _sizes(tower: Fields) -> dict[str, Any]:
    name = tower["hidden_act"]
    activation = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        raise CheckpointError(
            f"{tower.source}: hidden_act must be one of {', '.join(_ACTIVATIONS)}, got {str(name)[:80]!r}"
        )
    return {
        "width": tower.integer("hidden_size"),
        "layers": tower.integer("num_hidden_layers"),
        "heads": tower.integer("num_attention_heads"),
        "mlp": tower.integer("intermediate_size"),
        "activation": activation,
        "eps": tower.real("layer_norm_eps"),
    }


def _images(preprocessor: Any, size: int, siglip: bool, source: str) -> dict[str, Any]:
    """How images are prepared: preprocessor_config.json, or what the family does without one."""
    fields = Fields({} if preprocessor is None else preprocessor, source)
    for key in ("do_normalize", "do_rescale", "do_resize"):
        fields.require(fields.get(key, True) is True, f"{key} = {fields.get(key)!r}")
    factor = fields.get("rescale_factor", 1 / 255)
    fits = isinstance(factor, float) and math.isclose(factor, 1 / 255, rel_tol=1e-6)
    fields.require(fits, f"rescale_factor = {factor!r} (only 1/255)")
    sizes = fields.get("size", {"height": size, "width": size} if siglip else size)
    squash = isinstance(sizes, dict) and "height" in sizes
    sides = list(sizes.values()) if isinstance(sizes, dict) else [sizes]
    fits = bool(sides) and all(side == size for side in sides)
    fields.require(fits, f"size = {sizes!r} with image_size = {size}")
    resample = fields.get("resample", 3)
    fields.require(resample in (2, 3), f"resample = {resample!r} (only 3, bicubic, and 2, bilinear)")
    return {
        "mean": fields.get("image_mean", HALF if siglip else CLIP_MEAN),
        "std": fields.get("image_std", HALF if siglip else CLIP_STD),
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
