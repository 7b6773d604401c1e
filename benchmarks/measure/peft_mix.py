"""peft's way to mix adapters in a batch, on transformers' CLIP image tower."""

from __future__ import annotations

from typing import Any

import torch

from dear.clip.config import ClipConfig
from measure.clock import medians


def peft_batch_seconds(
    shape: ClipConfig, adapters: int, batch: int, device: torch.device, dtype: torch.dtype, repeats: int
) -> float:
    """Median seconds of a batch whose images take the adapters in turn (rank-4 LoRA of q and v)."""
    import peft
    import transformers

    v = shape.vision
    config = transformers.CLIPVisionConfig(
        hidden_size=v.width, intermediate_size=v.mlp, projection_dim=shape.embed_dim,
        num_hidden_layers=v.layers, num_attention_heads=v.heads, image_size=v.image_size,
        patch_size=v.patch_size, hidden_act=v.activation,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model: Any = peft.get_peft_model(transformers.CLIPVisionModelWithProjection(config), lora, "a0")
    for number in range(1, adapters):
        model.add_adapter(f"a{number}", lora)
    model = model.to(device, dtype).eval()
    pixels = torch.randn(batch, 3, v.image_size, v.image_size, device=device, dtype=dtype)
    names = [f"a{row % adapters}" for row in range(batch)]

    def answer() -> None:
        model(pixel_values=pixels, adapter_names=names).image_embeds.cpu()

    with torch.no_grad():
        return medians({"peft": answer}, repeats, warm_up=1)["peft"]
