"""The shape of a published checkpoint: from its configuration file, or from its own tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dear.clip.config import CLIP_MEAN, CLIP_STD, ClipConfig, TextConfig, VisionConfig
from dear.errors import CheckpointError

Section = Mapping[str, Any]

# What transformers assumes where config.json is silent; OpenAI's own files list a few fields only.
_HF_VISION: Section = {
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
_HF_TEXT: Section = {
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

# What OpenCLIP assumes; a key that is not here must have the value that switches its feature off.
_OPEN_VISION: Section = {
    "layers": 12,
    "width": 768,
    "head_width": 64,
    "mlp_ratio": 4.0,
    "patch_size": 16,
    "image_size": 224,
}
_OPEN_TEXT: Section = {
    "context_length": 77,
    "vocab_size": 49408,
    "width": 512,
    "heads": 8,
    "layers": 12,
    "mlp_ratio": 4.0,
}
_OPEN_IGNORED = {  # matter in training, to the tokenizer, or to intermediate outputs only
    *("patch_dropout", "output_tokens", "hf_tokenizer_name", "tokenizer_kwargs", "hf_proj_type"),
    *("hf_pooler_type", "hf_model_pretrained", "timm_model_pretrained", "timm_pool", "timm_proj"),
    *("timm_proj_bias", "timm_drop", "timm_drop_path", "attn_pooler_queries", "attn_pooler_heads", "pad_id"),
}
_OPEN_USUAL: Section = {
    "pool_type": ("tok", "argmax"),
    "pos_embed_type": ("learnable",),
    "proj_type": ("linear",),
}


def from_huggingface(raw: Any, preprocessor: Any, source: str) -> ClipConfig:
    """Read a `CLIPModel`'s config.json (and preprocessor_config.json, or None), with transformers' defaults.

    Raises:
        CheckpointError: not a CLIP, or sizes that make no sense.
    """
    top = _section(raw, source)
    kind = top.get("model_type", "clip")
    if kind != "clip":
        raise CheckpointError(f"{source}: describes a model of type {kind!r}; only 'clip' can be loaded")
    vision, text = _hf_tower(top, "vision", _HF_VISION, source), _hf_tower(top, "text", _HF_TEXT, source)
    _need(vision["num_channels"] == 3, source, f"images of {vision['num_channels']!r} channels, not 3")
    vocab = _whole(text, "vocab_size", source)
    # Older files say 2 and mean the largest id in the text, which is where CLIP's own end token stands.
    ends = (2, vocab - 1, 49407)
    _need(text["eos_token_id"] in ends, source, f"texts that end with token {text['eos_token_id']!r}")
    images = _section(preprocessor if preprocessor is not None else {}, source)
    return _build(
        source,
        vision={
            **_hf_sizes(vision, source),
            "image_size": _side(vision, "image_size", source),
            "patch_size": _side(vision, "patch_size", source),
        },
        text={
            **_hf_sizes(text, source),
            "context": _whole(text, "max_position_embeddings", source),
            "vocab": vocab,
        },
        embed_dim=_whole({"projection_dim": 512, **top}, "projection_dim", source),
        mean=images.get("image_mean", CLIP_MEAN),
        std=images.get("image_std", CLIP_STD),
    )


def _hf_tower(top: Section, tower: str, defaults: Section, source: str) -> dict[str, Any]:
    """One tower's fields; a legacy `*_config_dict` replaces them all, as transformers does it."""
    legacy = top.get(f"{tower}_config_dict")
    given = top.get(f"{tower}_config") if legacy is None else legacy
    fields = {**defaults, **_section(given if given is not None else {}, source)}
    if legacy is not None:
        plain = _section(top.get(f"{tower}_config") or {}, source)
        fields = {**plain, **fields}
    return fields


def _hf_sizes(tower: Section, source: str) -> dict[str, Any]:
    return {
        "width": _whole(tower, "hidden_size", source),
        "layers": _whole(tower, "num_hidden_layers", source),
        "heads": _whole(tower, "num_attention_heads", source),
        "mlp": _whole(tower, "intermediate_size", source),
        "activation": tower["hidden_act"],
        "eps": _real(tower, "layer_norm_eps", source),
    }


def _side(tower: Section, key: str, source: str) -> int:
    """An image's or patch's side; a pair must be square."""
    value = tower[key]
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return _whole({key: value}, key, source)


def to_huggingface(config: ClipConfig, dtype: str) -> dict[str, Any]:
    """The config.json of this shape: the reverse of `from_huggingface`."""

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

    vision, text = config.vision, config.text
    ends = {"bos_token_id": text.vocab - 2, "eos_token_id": text.vocab - 1, "pad_token_id": 0}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.embed_dim,
        "torch_dtype": dtype,
        "vision_config": {
            **tower(vision),
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "num_channels": 3,
        },
        "text_config": {
            **tower(text),
            "max_position_embeddings": text.context,
            "vocab_size": text.vocab,
            **ends,
        },
    }


def to_images(config: ClipConfig) -> dict[str, Any]:
    """The preprocessor_config.json that prepares images as `Clip.preprocess` does."""
    size = config.vision.image_size
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": list(config.mean),
        "image_std": list(config.std),
    }


def from_openclip(raw: Any, source: str) -> ClipConfig:
    """Read open_clip_config.json: `model_cfg` and, where present, `preprocess_cfg`.

    Raises:
        CheckpointError: a part of OpenCLIP that CLIP's own towers do not have, or sizes that make no sense.
    """
    top = _section(raw, source)
    model = _section(top.get("model_cfg"), source)
    images = _section(top.get("preprocess_cfg") or {}, source)
    vision, text = _section(model.get("vision_cfg"), source), _section(model.get("text_cfg"), source)
    _need("embed_dim" in model, source, "no model_cfg.embed_dim")
    known = {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "cast_dtype", "init_logit_scale"}
    _plain(model, known, "model_cfg", source)
    _plain(vision, set(_OPEN_VISION), "vision_cfg", source)
    _plain(text, set(_OPEN_TEXT), "text_cfg", source)
    for key, usual in (("interpolation", "bicubic"), ("resize_mode", "shortest"), ("mode", "RGB")):
        given = images.get(key, usual)
        _need(given == usual, source, f"preprocess_cfg.{key} = {given!r} (only {usual!r} is supported)")
    vision, text = {**_OPEN_VISION, **vision}, {**_OPEN_TEXT, **text}
    width, head_width = _whole(vision, "width", source), _whole(vision, "head_width", source)
    _need(width % head_width == 0, source, f"a width of {width} that heads of {head_width} do not divide")
    quick = model.get("quick_gelu", False)
    _need(isinstance(quick, bool), source, f"quick_gelu = {quick!r}, which is neither true nor false")
    activation = "quick_gelu" if quick else "gelu"
    return _build(
        source,
        vision={
            "width": width,
            "layers": _whole(vision, "layers", source),
            "heads": width // head_width,
            "mlp": int(width * _real(vision, "mlp_ratio", source)),
            "activation": activation,
            "image_size": _side(vision, "image_size", source),
            "patch_size": _side(vision, "patch_size", source),
        },
        text={
            "width": _whole(text, "width", source),
            "layers": _whole(text, "layers", source),
            "heads": _whole(text, "heads", source),
            "mlp": int(_whole(text, "width", source) * _real(text, "mlp_ratio", source)),
            "activation": activation,
            "context": _whole(text, "context_length", source),
            "vocab": _whole(text, "vocab_size", source),
        },
        embed_dim=_whole(model, "embed_dim", source),
        mean=images.get("mean") or CLIP_MEAN,
        std=images.get("std") or CLIP_STD,
    )


def _plain(section: Section, known: set[str], name: str, source: str) -> None:
    """Refuse what changes the towers: an unknown option may stand there only switched off."""
    for key, value in section.items():
        off = value is None or value is False or value == 0 or value in ({}, [], "")
        if key in known or key in _OPEN_IGNORED or off or value in _OPEN_USUAL.get(key, ()):
            continue
        raise CheckpointError(
            f"{source}: {name}.{key} = {value!r} is a part of OpenCLIP that is not supported; "
            "only CLIP's own vision transformers and text towers can be loaded"
        )


def from_shapes(tensors: Mapping[str, Tensor], activation: str, source: str) -> ClipConfig:
    """The sizes of an OpenAI state dict, read off its tensors; in that format a head is 64 wide.

    Raises:
        CheckpointError: a tensor that tells a size is missing or of the wrong rank.
    """

    def shape(name: str, rank: int) -> tuple[int, ...]:
        if name not in tensors:
            raise CheckpointError(f"{source}: the tensors do not fit this CLIP: missing {name}")
        if tensors[name].dim() != rank:
            raise CheckpointError(
                f"{source}: {name} is {list(tensors[name].shape)}, expected {rank} numbers of shape"
            )
        return tuple(tensors[name].shape)

    def tower(prefix: str, width: int) -> dict[str, Any]:
        start = f"{prefix}transformer.resblocks."
        indices = {name[len(start) :].split(".")[0] for name in tensors if name.startswith(start)}
        _need(
            width % 64 == 0,
            source,
            f"a width of {width}, not a multiple of 64, without naming its heads",
        )
        mlp = shape(f"{start}0.mlp.c_fc.weight", 2)[0]
        return {
            "width": width,
            "layers": len(indices),
            "heads": width // 64,
            "mlp": mlp,
            "activation": activation,
        }

    width, _, patch, _ = shape("visual.conv1.weight", 4)
    positions = shape("visual.positional_embedding", 2)[0]
    side = math.isqrt(max(positions - 1, 0))
    vocab, text_width = shape("token_embedding.weight", 2)
    return _build(
        source,
        vision={**tower("visual.", width), "image_size": side * patch, "patch_size": patch},
        text={**tower("", text_width), "context": shape("positional_embedding", 2)[0], "vocab": vocab},
        embed_dim=shape("visual.proj", 2)[1],
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


def _build(
    source: str, *, vision: dict[str, Any], text: dict[str, Any], embed_dim: int, mean: Any, std: Any
) -> ClipConfig:
    """A `ClipConfig`, with the file's name put before whatever it refuses."""
    try:
        return ClipConfig(
            VisionConfig(**vision),
            TextConfig(**text),
            embed_dim,
            _color(mean, "mean"),
            _color(std, "std"),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _color(value: Any, name: str) -> tuple[float, float, float]:
    """Three numbers, one a channel."""
    if isinstance(value, list | tuple) and len(value) == 3:
        r, g, b = value
        if all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e6 for v in value):
            return float(r), float(g), float(b)
    raise CheckpointError(f"the {name} of the images must be three numbers, not {value!r}")


def _section(value: Any, source: str) -> Section:
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: is not the configuration of a CLIP (an object was expected)")
    return value


def _whole(section: Section, key: str, source: str) -> int:
    value = section[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{source}: {key} = {value!r} must be a whole number")
    return value


def _real(section: Section, key: str, source: str) -> float:
    value = section[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e4:
        raise CheckpointError(f"{source}: {key} = {value!r} must be a positive number")
    return float(value)


def _need(condition: bool, source: str, fault: str) -> None:
    if not condition:
        raise CheckpointError(f"{source}: asks for {fault}, which is not supported")
