"""Does a recipe depend on the scale of a backbone's residual streams? Base-to-novel at scales 0.1, 1, and 10.

    python research/accuracy/backbone_scale.py --backbone FOLDER --roles roles.json \
        --data pets/index.csv dtd/index.csv --csv benchmarks/results/backbone_scale.csv

`FOLDER` is a `CLIPModel` of transformers with `model.safetensors`. The checkpoints compute the same
function: what enters the residual stream (the norm before the first layer of the image tower, the
embeddings of the text tower, the output projections of attention and MLP) is multiplied by the scale, and
every layer begins with a norm. What a method adds to the stream (tokens, prompts) meets another scale each
time.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from measure.script import arguments, record
from safetensors.torch import load_file, save_file

from dear import bench

ENTERS = (
    "vision_model.pre_layrnorm.",
    "text_model.embeddings.token_embedding.",
    "text_model.embeddings.position_embedding.",
    ".self_attn.out_proj.",
    ".mlp.fc2.",
)  #: parts of the names of what enters a residual stream


def scale_checkpoint(folder: Path, out: Path, scale: float) -> Path:
    """A copy of a checkpoint whose residual streams are `scale` times as large, in float32."""
    out.mkdir(parents=True)
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in weights.items():
        if any(part in name for part in ENTERS):
            weights[name] = scale * tensor
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", out)
    return out


def main() -> None:
    options = arguments(
        __doc__,
        backbone=Path,
        roles=(str, "role map of the backbone"),
        data=["world:textures"],
        methods="dear,mmrl,coop",
        scales=[0.1, 1.0, 10.0],
        seeds="1,2",
        device="cpu",
        workers=1,
        csv=Path,
    )
    with tempfile.TemporaryDirectory() as folder:
        for scale in options.scales:
            place = scale_checkpoint(options.backbone, Path(folder) / f"scale-{scale:g}", scale)
            results = bench.run(
                "base-to-novel",
                Path(folder) / f"grid-{scale:g}",
                backbone=str(place),
                roles=options.roles,
                methods=options.methods,
                datasets=options.data,
                seeds=options.seeds,
                device=options.device,
                workers=options.workers,
            )
            for cell, result in results.grid.documents():
                for mode, values in result["modes"].items():
                    figures = {
                        name: round(100 * values[name], 2) for name in ("base", "novel", "hm", "joint")
                    }
                    about = {"scale": scale, "method": cell.method, "mode": mode, "seed": cell.seed}
                    about["dataset"] = Path(cell.dataset).parent.name or cell.dataset
                    record(options.csv, [{**about, **figures}], torch.device(options.device))


if __name__ == "__main__":
    main()
