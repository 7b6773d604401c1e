"""Images per second from pixels on the device to features or answers: CLIP, DeAR, and other code's CLIP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import timer

from dear.clip.config import ClipConfig
from dear.clip.gpu import Recorder
from dear.clip.variant import matrix_dtype
from dear.runs.model import Model
from dear.serve import mixed_batch
from measure.clock import Clock, medians
from measure.task import SpeedTask

OTHERS = ("transformers", "timm", "timm compiled")  #: measured where the package is installed


def inference(
    task: SpeedTask,
    batches: Sequence[int],
    others: Sequence[str] = OTHERS,
    repeats: int = 10,
    clock: Clock = timer,
) -> list[dict[str, Any]]:
    """A row for each batch size and model; the models take turns.

    The text features of DeAR's classes are computed once, as for any CLIP; the scores of both its modes are
    part of the work.
    """
    clip, device = task.clip, task.device
    dtype = matrix_dtype(task.precision, device)
    plain = clip if dtype == torch.float32 else clip.cast(dtype)
    models: dict[str, Callable[[Tensor], object]] = {"dear, plain CLIP": plain.encode_image}
    for name in others:
        made = _other(name, clip.config, device, dtype)
        if made is not None:
            models[name] = made
    rows = []
    with torch.no_grad():
        models["dear, fused"] = task.model.all_logits
        if device.type == "cuda":  # small batches; the service runs adapters of many kinds in one pass
            run = Recorder()
            models["dear, plain CLIP recorded"] = lambda x: run(
                "image", lambda y: (plain.encode_image(y),), x
            )
            models["dear, as a run answers"] = Model(task.model).forward
            models["dear, as the service"] = lambda x: torch.stack(
                mixed_batch.logits([task.model] * len(x), x, run=run)
            )
        for batch in batches:
            size = clip.config.vision.image_size
            pixels = torch.randn(batch, 3, size, size, device=device)
            found = medians({n: _call(m, pixels) for n, m in models.items()}, repeats, clock=clock)
            base = found["dear, plain CLIP"]
            rows += [
                {
                    "model": name,
                    "batch": batch,
                    "precision": str(dtype).removeprefix("torch."),
                    "ms": round(1000 * value, 3),
                    "images_per_s": round(batch / value, 1),
                    "to_plain": round(base / value, 3),
                }
                for name, value in found.items()
            ]
    return rows


def _call(model: Callable[[Tensor], object], pixels: Tensor) -> Callable[[], object]:
    return lambda: model(pixels)


def _other(
    name: str, shape: ClipConfig, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], object] | None:
    """Another package's model of the same shape with random weights; None where it is not installed."""
    v = shape.vision
    try:
        if name == "transformers" and v.pool == "attention":
            import transformers

            pooled = transformers.SiglipVisionConfig(
                hidden_size=v.width,
                intermediate_size=v.mlp,
                num_hidden_layers=v.layers,
                num_attention_heads=v.heads,
                image_size=v.image_size,
                patch_size=v.patch_size,
                hidden_act="gelu_pytorch_tanh",
            )
            siglip: Any = transformers.SiglipVisionModel(pooled).to(device, dtype).eval()
            return lambda pixels: siglip(pixels.to(dtype)).pooler_output
        if name == "transformers":
            import transformers

            config = transformers.CLIPVisionConfig(
                hidden_size=v.width,
                intermediate_size=v.mlp,
                projection_dim=shape.embed_dim,
                num_hidden_layers=v.layers,
                num_attention_heads=v.heads,
                image_size=v.image_size,
                patch_size=v.patch_size,
                hidden_act=v.activation,
            )
            theirs: Any = transformers.CLIPVisionModelWithProjection(config)
            theirs = theirs.to(device, dtype).eval()
            return lambda pixels: theirs(pixels.to(dtype)).image_embeds
        if (v.width, v.pool) != (768, "class"):
            return None  # the name below is that of a ViT-B
        import timm  # type: ignore[import-not-found,unused-ignore]

        other = timm.create_model(
            f"vit_base_patch{v.patch_size}_clip_quickgelu_224",
            num_classes=shape.embed_dim,
        )
        other = other.to(device, dtype).eval()
        if name == "timm compiled":
            other = torch.compile(other)
        return lambda pixels: other(pixels.to(dtype))
    except ImportError:
        return None
