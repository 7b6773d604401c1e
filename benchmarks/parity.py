"""Features of every family compared with independent code, random weights, real sizes.

    python benchmarks/parity.py --with transformers
    python benchmarks/parity.py --with open_clip --models ViT-B-16-SigLIP2 PE-Core-B-16
    python benchmarks/parity.py --with perception --code PATH

Every tensor is made random, the model is written as its project writes it, read by `dear.load`, and both
compute features of the same random images and token ids. Prints the largest difference of unit features. PATH
is a copy of github.com/facebookresearch/perception_models.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from measure.script import parser_of
from torch import Tensor, nn

import dear

Features = Callable[[Tensor], Tensor]
OPEN_CLIP = ["ViT-B-16", "ViT-B-16-quickgelu", "ViT-B-16-SigLIP", "ViT-B-16-SigLIP2", "PE-Core-B-16"]
OPEN_CLIP += ["ViT-L-14-worldwide", "MobileCLIP2-L-14"]
IMAGES = {"SigLIP": ("squash", "bicubic", 0.5), "PE-": ("squash", "bilinear", 0.5)}


@torch.no_grad()
def randomize(model: nn.Module) -> nn.Module:
    """No zero bias or unit norm may hide a swapped name."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(noise * parameter.flatten(1).shape[1] ** -0.5)
    return model.eval()


@torch.no_grad()
def compare(
    name: str, folder: Path, image: Features, text: Features, end: int | None, offset: int = 3
) -> float:
    """The largest difference of image and text features; prints both."""
    clip = dear.load(folder)
    size, shape = clip.config.vision.image_size, clip.config.text
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, size, size, generator=generator)
    ids = torch.randint(offset, min(shape.vocab, 49000), (3, shape.context), generator=generator)
    if end is not None:
        for row, place in enumerate((3, 7, shape.context - 1)):
            ids[row, place] = end
            ids[row, place + 1 :] = 0 if end != 2 else 1
    pairs = ((clip.encode_image(pixels), image(pixels)), (clip.encode_text(ids), text(ids)))
    gaps = [float((F.normalize(a, dim=-1) - F.normalize(b, dim=-1)).abs().max()) for a, b in pairs]
    print(f"{name:28s} image {gaps[0]:.1e}  text {gaps[1]:.1e}", flush=True)
    return max(gaps)


def with_transformers(folder: Path) -> float:
    """SigLIP, SigLIP 2 (NaFlex's code at a square size), MetaCLIP 2 and CLIP at B/16."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    import families
    from families import BASE
    from transformers import CLIPConfig, CLIPModel

    vision = {**BASE, "image_size": 224, "patch_size": 16}
    words = {**BASE, "vocab_size": 32000, "max_position_embeddings": 64}
    small = {**words, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    small |= {"vocab_size": 901629, "max_position_embeddings": 77}
    plain = {**small, "vocab_size": 49408, "eos_token_id": 49407}
    config = CLIPConfig(vision_config=vision, text_config=plain, projection_dim=512)
    models = {
        "SigLIP B/16": (families.siglip(vision, words), None),
        "SigLIP 2 B/16": (families.siglip2(vision, {**words, "vocab_size": 256000}), None),
        "MetaCLIP 2 B/16": (families.metaclip2(vision, small, 512), 2),
        "CLIP B/16": (families.random_everywhere(CLIPModel(config)), 49407),
    }
    worst = []
    for number, (name, (model, end)) in enumerate(models.items()):
        target, siglip2 = folder / str(number), name.startswith("SigLIP 2")
        path = families.write_siglip2(model, target, 224) if siglip2 else families.write(model, target)

        def image(x: Tensor, model: Any = model, siglip2: bool = siglip2) -> Tensor:
            return (
                families.siglip2_features(model, x) if siglip2 else model.get_image_features(x).pooler_output
            )

        def text(x: Tensor, model: Any = model) -> Tensor:
            return model.get_text_features(x).pooler_output

        worst.append(compare(name, path, image, text, end))
    return max(worst)


def with_open_clip(folder: Path, names: list[str]) -> float:
    """OpenCLIP's own models, timm's image towers among them."""
    import open_clip

    worst = []
    for name in names:
        model = randomize(open_clip.create_model(name))
        target = folder / name
        target.mkdir()
        config: dict[str, object] = {"model_cfg": open_clip.get_model_config(name)}
        for word, (resize, filtered, mean) in IMAGES.items():
            if word in name:
                color = [mean] * 3
                config["preprocess_cfg"] = {
                    "mean": color, "std": color, "resize_mode": resize, "interpolation": filtered
                }  # fmt: skip
        (target / "open_clip_config.json").write_text(json.dumps(config))
        state = {key: t.contiguous() for key, t in model.state_dict().items()}
        safetensors.torch.save_file(state, target / "open_clip_model.safetensors")
        end = None if "SigLIP" in name else 2 if "worldwide" in name else 49407
        worst.append(compare(name, target, model.encode_image, model.encode_text, end))
        del model, state
    return max(worst)


def with_perception(folder: Path, code: Path) -> float:
    """Meta's own code; einops and timm must be installed."""
    sys.path.insert(0, str(code))
    from core.vision_encoder.pe import CLIP

    worst = []
    for name in ("PE-Core-B16-224", "PE-Core-L14-336"):
        model = randomize(CLIP.from_config(name))
        path = folder / f"{name}.pt"
        torch.save(model.state_dict(), path)
        worst.append(compare(name, path, model.encode_image, model.encode_text, 49407))
        path.unlink()
    return max(worst)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--with", dest="other", required=True, choices=["transformers", "open_clip", "perception"]
    )
    parser.add_argument("--models", nargs="+", default=OPEN_CLIP, help="names of OpenCLIP's models")
    parser.add_argument("--code", type=Path, help="a copy of perception_models")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.other == "transformers":
            worst = with_transformers(folder)
        elif options.other == "open_clip":
            worst = with_open_clip(folder, options.models)
        elif options.code is None:
            parser.error("--with perception needs --code")
        else:
            worst = with_perception(folder, options.code)
    print(f"largest difference {worst:.1e}")
    sys.exit(worst > 1e-4)


if __name__ == "__main__":
    main()
