"""Pretraining of the embedded backbone `mini` on the attribute world, from random weights, with one call.

Images and caption ids are made on the training device, batch by batch; nothing is read from disk. The world
knows which caption is true of which image, so a caption counts as a positive of every image it is true of
(captions that read the same are positives of each other as a special case), never as a false negative.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dear import world
from dear.clip.checkpoint import save_hf
from dear.clip.config import ClipConfig, TextConfig, VisionConfig
from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.errors import TrainingError, UsageError
from dear.images.views import normalize
from dear.utils.files import PathLike, check_output, write_json
from dear.world.captions import BOT, EOT, PAD

CONTEXT = 24  # no caption of the world is longer; the columns after it would be padding

MINI = ClipConfig(
    VisionConfig(width=192, layers=12, heads=12, activation="gelu", image_size=64, patch_size=8),
    TextConfig(width=112, layers=12, heads=7, activation="gelu"),
    embed_dim=128,
)


@dataclass(frozen=True)
class PretrainRecipe:
    """How `mini` is trained. The defaults are those the embedded file was made with."""

    steps: int = 1710
    batch: int = 4096  #: images per step
    captions: int = 2  #: captions per image
    lr: float = 2e-3
    warmup: int = 500  #: steps of linear warm-up; cosine to zero after them
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    max_scale: float = 100.0  #: CLIP's limit on the temperature
    seed: int = 1
    compile: bool = True  #: compile the towers on a GPU

    def rate(self, step: int) -> float:
        """The learning rate at a step (counted from 0)."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def contrastive_loss(images: Tensor, texts: Tensor, true: Tensor, scale: Tensor) -> Tensor:
    """Both directions of CLIP's loss with every true pair as a positive.

    A caption's target is spread evenly over the images it is true of. An image's target is spread over the
    captions true of it, each weighted by how few images it is true of, so that specific captions count more.

    Args:
        images: [B, E] features.
        texts: [C, E] features.
        true: bool [B, C], caption c is true of image b; no row or column is empty.
        scale: the temperature's factor.
    """
    logits = scale * F.normalize(images, dim=-1).float() @ F.normalize(texts, dim=-1).float().T  # [B, C]
    share = true.float()
    share = share / share.sum(0, keepdim=True)  # [B, C], columns sum to 1
    to_image = -(share * logits.log_softmax(dim=0)).sum(0).mean()
    target = share / share.sum(1, keepdim=True)
    to_text = -(target * logits.log_softmax(dim=1)).sum(1).mean()
    return (to_image + to_text) / 2


def new_mini(table: world.CaptionTable) -> Clip:
    """An untrained mini; its text tower has a row for every BPE id of the world and one for all others."""
    known = torch.cat([table.ids.flatten(), torch.tensor([BOT, EOT])]).unique()
    known = known[known != PAD]
    clip = Clip(MINI, name="mini", token_rows=len(known) + 1)
    assert clip.text.rows is not None
    clip.text.rows[known] = torch.arange(1, len(known) + 1)  # row 0 is shared by all other ids
    return clip


def pretrain_mini(
    out: PathLike,
    *,
    steps: int | None = None,
    batch: int | None = None,
    seed: int = 1,
    device: str = "auto",
    report: Callable[[dict[str, float]], None] | None = None,
) -> Clip:
    """Train a mini and write it as a checkpoint, with its recipe and log in `pretrain.json`.

    Args:
        out: folder of the checkpoint (Hugging Face layout).
        steps: training steps; None: those of the recipe.
        batch: images per step; None: those of the recipe.
        seed: of weights, images and captions.
        device: "auto", "cpu", "cuda", …
        report: called ten times or more, with step, loss, temperature and images per second.
    """
    for name, number in (("steps", steps), ("batch", batch)):
        if number is not None and number < 1:
            raise UsageError(f"{name} must be at least 1, got {number}")
    check_output(out, folder=True)
    recipe = replace(PretrainRecipe(), seed=seed)
    if steps is not None:
        recipe = replace(recipe, steps=steps, warmup=min(recipe.warmup, max(1, steps // 3)))
    if batch is not None:
        recipe = replace(recipe, batch=batch)
    log: list[dict[str, float]] = []

    def keep(line: dict[str, float]) -> None:
        log.append(line)
        if report is not None:
            report({**line, "steps": recipe.steps})

    every = min(100, max(1, recipe.steps // 10))
    clip = pretrain(recipe, world.CaptionTable.build(), pick_device(device), keep, every)
    save_hf(clip.cpu(), Path(out), torch.float16)
    write_json(Path(out) / "pretrain.json", {"recipe": asdict(recipe), "log": log})
    return clip


def pretrain(
    recipe: PretrainRecipe,
    table: world.CaptionTable,
    device: str = "cpu",
    report: Callable[[dict[str, float]], None] | None = None,
    every: int = 100,
) -> Clip:
    """Train a mini from random weights.

    Args:
        recipe: sizes, rates and the seed.
        table: the captions as token ids.
        device: where to render and train.
        report: called every `every` steps with step, loss, temperature and images per second.
        every: steps between reports.
    """
    torch.manual_seed(recipe.seed)
    clip = new_mini(table).to(device)
    clip.requires_grad_(True)
    table = table.to(device)
    rng = torch.Generator(device=device).manual_seed(recipe.seed)
    cuda = torch.device(device).type == "cuda"
    optimizer = _optimizer(clip, recipe, fused=cuda)
    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _Encoder(clip)
    if cuda and recipe.compile:
        encode = torch.compile(encode)
    started, last = time.perf_counter(), 0
    for step in range(recipe.steps):
        pixels, ids, true = _batch(recipe, table, rng)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=cuda):
            images, texts = encode(pixels, ids)
        loss = contrastive_loss(images, texts, true, clip.log_scale.exp())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clip.parameters(), recipe.clip_norm)
        optimizer.step()
        with torch.no_grad():
            clip.log_scale.clamp_(max=math.log(recipe.max_scale))
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            value = float(loss.detach())
            if not math.isfinite(value):
                raise TrainingError(f"pretraining stopped at step {step + 1}: the loss is {value}")
            if report is not None:
                seconds = time.perf_counter() - started
                rate = (step + 1 - last) * recipe.batch / seconds
                report({"step": step + 1, "loss": value, "scale": clip.logit_scale, "images_per_s": rate})
            started, last = time.perf_counter(), step + 1
    clip.requires_grad_(False)
    return clip


def _optimizer(clip: Clip, recipe: PretrainRecipe, fused: bool) -> torch.optim.AdamW:
    """AdamW; gains and biases do not decay."""
    decay = [p for p in clip.parameters() if p.ndim >= 2]
    plain = [p for p in clip.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=recipe.lr,
        betas=(0.9, 0.98),
        fused=fused,
    )


@torch.no_grad()
def _batch(
    recipe: PretrainRecipe, table: world.CaptionTable, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalized pixels [B, 3, S, S], token ids [C, T], and which caption is true of which image [B, C]."""
    scenes = world.sample(recipe.batch, rng, table.ids.device)
    pixels = normalize(world.render(scenes), MINI.mean, MINI.std)
    written = [table.captions(scenes, rng) for _ in range(recipe.captions)]
    ids = torch.cat([captions.ids for captions in written])[:, :CONTEXT]  # [C, T]
    mask = torch.cat([captions.mask for captions in written])  # [C, F]
    factors = scenes.factors()  # [B, F]
    return pixels, ids, world.matching_captions(factors, factors.repeat(recipe.captions, 1), mask)


class _Encoder(torch.nn.Module):
    """Both towers in one call, so that one compilation serves both."""

    def __init__(self, clip: Clip) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, pixels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels [B, 3, S, S] and ids [C, T] to features [B, E] and [C, E]."""
        text = self.clip.text
        rows = text.run(text.embed(ids), read=text.eot(ids)[:, None])
        return self.clip.visual(pixels), text.project(rows[:, 0])
