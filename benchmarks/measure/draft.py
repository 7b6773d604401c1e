"""What decoding a JPEG at a reduced scale changes in image features."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from dear.clip.model import Clip
from dear.images.views import normalize, open_image, resize_crop


def draft_effect(
    clip: Clip, images: Sequence[Image.Image], sides: Sequence[int], scales: Sequence[int] = (1, 2, 4)
) -> list[dict[str, Any]]:
    """Rows per JPEG size and scale: cosine with the feature of the whole decoding, and seconds per image.

    Args:
        clip: the model.
        images: are enlarged to the sides and saved as JPEG.
        sides: of the JPEG files.
        scales: the decoder leaves at least this many times the model's side.
    """
    size = clip.config.vision.image_size
    rows = []
    for side in sides:
        files = [_jpeg(image, side) for image in images]
        whole, slow = _features(clip, files, None)
        between = 1 - (whole @ whole.T)[~torch.eye(len(files), dtype=torch.bool)].median()
        for scale in scales:
            reduced, fast = _features(clip, files, scale * size)
            apart = 1 - (whole * reduced).sum(-1)
            rows.append(
                {
                    "model": clip.name, "jpeg_side": side, "scale": scale,
                    "mean_distance": f"{float(apart.mean()):.2e}",
                    "max_distance": f"{float(apart.max()):.2e}",
                    "median_distance_of_images": f"{float(between):.2e}",
                    "ms": round(1000 * fast, 2), "ms_whole": round(1000 * slow, 2),
                }
            )  # fmt: skip
    return rows


def _jpeg(image: Image.Image, side: int) -> bytes:
    file = io.BytesIO()
    image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=92)
    return file.getvalue()


@torch.inference_mode()
def _features(clip: Clip, files: Sequence[bytes], at_least: int | None) -> tuple[torch.Tensor, float]:
    size, views, began = clip.config.vision.image_size, [], time.perf_counter()
    for content in files:
        with Image.open(io.BytesIO(content)) as image:
            if at_least is not None:
                image.draft("RGB", (at_least, at_least))
            views.append(resize_crop(open_image(image), size))
    seconds = (time.perf_counter() - began) / len(files)
    pixels = normalize(torch.stack(views), clip.config.mean, clip.config.std)
    return F.normalize(clip.encode_image(pixels.to(clip.device)).float().cpu(), dim=-1), seconds
