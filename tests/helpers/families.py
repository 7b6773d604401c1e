"""Tiny models of every family from transformers, with every tensor random, written as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers import (
    MetaClip2Config,
    MetaClip2Model,
    Siglip2Config,
    Siglip2Model,
    SiglipConfig,
    SiglipModel,
)

ODD_VISION = {
    "hidden_size": 40,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "image_size": 26,  # not a multiple of the patch size
    "patch_size": 8,
}
ODD_TEXT = {
    "hidden_size": 40,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 120,
    "max_position_embeddings": 11,
}
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


def random_everywhere(model: nn.Module, seed: int = 0) -> nn.Module:
    """No zero bias or unit norm may hide a swapped name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(parameter + noise if parameter.dim() < 2 else noise)
    return model.eval()


def siglip(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None) -> SiglipModel:
    config = SiglipConfig(vision_config=vision or ODD_VISION, text_config=text or ODD_TEXT)
    return random_everywhere(SiglipModel(config))


def siglip2(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None) -> Siglip2Model:
    """NaFlex's model, run at one square size it does what the fixed-size model does."""
    vision = dict(vision or ODD_VISION)
    side = vision.pop("image_size") // vision["patch_size"]
    config = Siglip2Config(vision_config={**vision, "num_patches": side**2}, text_config=text or ODD_TEXT)
    return random_everywhere(Siglip2Model(config))


def metaclip2(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, space: int = 24):
    text = {"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1, **(text or ODD_TEXT)}
    config = MetaClip2Config(
        vision_config={**(vision or ODD_VISION), "projection_dim": space},
        text_config={**text, "projection_dim": space},
        projection_dim=space,
    )
    return random_everywhere(MetaClip2Model(config))


def write(model: nn.Module, folder: Path, **config: Any) -> Path:
    """A checkpoint in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), **config}))
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def write_siglip2(model: Siglip2Model, folder: Path, image_size: int) -> Path:
    """A fixed-size checkpoint of NaFlex's weights: its patches are a matrix over (row, column, color)."""
    patch = model.config.vision_config.patch_size
    write(model, folder, model_type="siglip")
    raw = json.loads((folder / "config.json").read_text())
    raw["vision_config"]["image_size"] = image_size
    (folder / "config.json").write_text(json.dumps(raw))
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = "vision_model.embeddings.patch_embedding.weight"
    weight = tensors[name].view(-1, patch, patch, 3).permute(0, 3, 1, 2)
    safetensors.torch.save_file({**tensors, name: weight.contiguous()}, path)
    return folder


def siglip2_features(model: Siglip2Model, pixels: torch.Tensor) -> torch.Tensor:
    """Image features of square images through NaFlex's input: flattened patches and their grid."""
    patch = model.config.vision_config.patch_size
    side = pixels.shape[-1] // patch
    cut = pixels[:, :, : side * patch, : side * patch].unflatten(3, (side, patch)).unflatten(2, (side, patch))
    flat = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # [B, side^2, patch * patch * 3]
    return model.get_image_features(
        pixel_values=flat,
        pixel_attention_mask=torch.ones(flat.shape[:2], dtype=torch.long),
        spatial_shapes=torch.tensor([[side, side]] * len(flat)),
    ).pooler_output
