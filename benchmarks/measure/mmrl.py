"""MMRL++'s own training step, from a copy of its repository that the user names; nothing of it is kept here.

Its model files and its trainer's `forward_backward` run as they are. What they import and a step does not
use (the training framework Dassl, downloads, tokenizing) is replaced by empty stand-ins while they are
loaded.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dear.clip.config import ClipConfig
from dear.errors import UsageError

_FILES = ("trainers/mmrlpp.py", "clip/model_mmrlpp.py", "clip/clip.py")
# configs/trainers/MMRLpp/vit_b16.yaml of the repository
_CONFIG = {
    "ALPHA": 0.7,
    "BETA": 0.9,
    "REG_WEIGHT": 1.0,
    "N_REP_TOKENS": 5,
    "REP_LAYERS": [6, 7, 8, 9, 10, 11, 12],
    "PREC": "amp",
    "REP_DIM": 512,
    "PROJ_LORA_DIM": 64,
    "RES_LORA_DIM": 4,
}


def check_copy(path: Path) -> None:
    """Look for the files that a step needs.

    Raises:
        UsageError: one is missing.
    """
    missing = [name for name in _FILES if not (path / name).is_file()]
    if missing:
        raise UsageError(f"{path}: {missing[0]} is missing; name a copy of github.com/yunncheng/MMRL")


def mmrlpp_step(
    path: Path, shape: ClipConfig, ids: Tensor, device: torch.device
) -> Callable[[Tensor, Tensor], Any]:
    """One training step of MMRL++ on random weights: (pixels, labels) -> its summary.

    Args:
        path: a copy of github.com/yunncheng/MMRL.
        shape: of the towers (a ViT).
        ids: token ids [C, 77] of the class prompts.
        device: where to run.

    Raises:
        UsageError: the folder does not hold that repository.
    """
    check_copy(path)
    torch.manual_seed(0)
    with _imported(path) as (trainer, models, clip):
        rows = iter(ids)
        clip.tokenize = lambda text: next(rows)[None]
        config = SimpleNamespace(
            TRAINER=SimpleNamespace(MMRLpp=SimpleNamespace(**_CONFIG)),
            INPUT=SimpleNamespace(SIZE=(shape.vision.image_size,) * 2),
            DATASET=SimpleNamespace(NAME="ImageNet"),
        )

        def tower(name: str) -> Any:
            details = {
                "model": name,
                "rep_tokens_layers": _CONFIG["REP_LAYERS"],
                "n_rep_tokens": _CONFIG["N_REP_TOKENS"],
                "proj_lora_dim": _CONFIG["PROJ_LORA_DIM"],
                "beta": _CONFIG["BETA"],
            }
            v, t = shape.vision, shape.text
            sizes = (shape.embed_dim, v.image_size, v.layers, v.width, v.patch_size)
            words = (t.context, t.vocab, t.width, t.heads, t.layers)
            with device:  # random weights are made where they are used
                return models.CLIP(*sizes, *words, details).float().eval().cpu()

        run: Any = trainer.MMRLpp.__new__(trainer.MMRLpp)
        adapted, frozen = tower("MMRLpp"), tower("CLIP")
        model = trainer.CustomCLIP(config, [f"class {i}" for i in range(len(ids))], adapted)
        learned = ("representation_learner", "image_encoder.proj_rep", "image_encoder.A", "image_encoder.B")
        for name, p in model.named_parameters():
            p.requires_grad_(any(part in name for part in learned))
        run.cfg, run.device, run.dtype = config, device, torch.float32
        run.model = model.to(device).train()
        run.image_encoder_clip = frozen.visual.to(device)
        with torch.no_grad():
            encoder = trainer.TextEncoder_CLIP(frozen).to(device)
            words = frozen.token_embedding.to(device)(ids.to(device))
            features = torch.cat(
                [encoder(w, i) for w, i in zip(words.split(64), ids.to(device).split(64), strict=True)]
            )
        run.text_features_clip = features / features.norm(dim=-1, keepdim=True)
        run.num_classes, run.batch_idx, run.num_batches = len(ids), 0, 10**9
        run.criterion = trainer.MMRLpp_Loss(reg_weight=_CONFIG["REG_WEIGHT"], alpha=_CONFIG["ALPHA"])
        run.optim = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], 1e-6, weight_decay=5e-4
        )
        run.scaler = trainer.GradScaler()

    def step(pixels: Tensor, labels: Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it uses the older names of autocast
            return run.forward_backward({"img": pixels, "label": labels})

    return step


@contextmanager
def _imported(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    """The repository's trainer, model and clip modules; afterwards Python knows none of their names."""
    before = dict(sys.modules)
    sys.path.insert(0, str(path))
    try:
        for name in ("clip", "trainers"):
            for known in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[known]
        sys.modules.update(_stand_ins())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = importlib.import_module("trainers.mmrlpp")
            models = importlib.import_module("clip.model_mmrlpp")
            clip = importlib.import_module("clip.clip")
            yield trainer, models, clip
    finally:
        sys.path.remove(str(path))
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("clip", "trainers", "dassl", "torchvision", "ftfy", "regex"):
                del sys.modules[name]
        for name in ("clip", "trainers", "torchvision", "torchvision.transforms", "ftfy", "regex"):
            if name in before:
                sys.modules[name] = before[name]


def _stand_ins() -> dict[str, types.ModuleType]:
    """Modules that its files import and whose work a step does not use."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        return made

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def accuracy(output: Tensor, target: Tensor) -> list[Tensor]:
        """What Dassl's function of that name computes for the best answer."""
        return [(output.argmax(1) == target).float().mean() * 100]

    registry = SimpleNamespace(register=lambda: lambda cls: cls)
    names = ("Compose", "Resize", "CenterCrop", "ToTensor", "Normalize")
    modes = SimpleNamespace(BICUBIC=3)
    return {
        "dassl": module("dassl"),
        "dassl.engine": module("dassl.engine", TRAINER_REGISTRY=registry, TrainerX=object),
        "dassl.metrics": module("dassl.metrics", compute_accuracy=accuracy),
        "dassl.utils": module("dassl.utils", load_pretrained_weights=nothing, load_checkpoint=nothing),
        "dassl.optim": module("dassl.optim", build_optimizer=nothing, build_lr_scheduler=nothing),
        "ftfy": module("ftfy", fix_text=str),
        "regex": module("regex", compile=nothing, IGNORECASE=0),
        "torchvision": module("torchvision"),
        "torchvision.transforms": module(
            "torchvision.transforms", InterpolationMode=modes, **dict.fromkeys(names, nothing)
        ),
    }
