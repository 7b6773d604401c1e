"""A SigLIP exports too: same scores, and images squashed as the model was trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from other_families import NAMES, SIGLIP, model
from PIL import Image
from tiny import mixed_roles

pytest.importorskip("onnxruntime")


def test_a_siglip_in_one_file(tmp_path: Path) -> None:
    from dear.export.onnx import export_onnx
    from dear.export.runtime import OnnxModel
    from dear.methods import build_method

    clip = model(SIGLIP, torch.float32)
    method = build_method("dear", clip, NAMES, roles=mixed_roles())
    exported = export_onnx(method, tmp_path / "model.onnx")
    assert exported.difference < 1e-4
    pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    found = OnnxModel(tmp_path / "model.onnx").preprocess(image)
    np.testing.assert_allclose(found, clip.preprocess(image).numpy(), atol=1e-5)
