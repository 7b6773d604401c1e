"""`dear pretrain`: train the embedded backbone again; `dear mini`: what it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from dear.cli.options import Device, Json, Threads
from dear.cli.printing import echo, print_json, say
from dear.errors import UsageError


def pretrain(
    out: Annotated[Path, Option("--out", "-o", help="Folder for the checkpoint (Hugging Face layout).")],
    steps: Annotated[int | None, Option(help="Training steps (default: those of the recipe).")] = None,
    batch: Annotated[int | None, Option(help="Images per step.")] = None,
    seed: Annotated[int, Option(help="Seed of weights, images and captions.")] = 1,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train the mini backbone from nothing on the attribute world (a GPU job of minutes).

    Examples:

    `dear pretrain --out mini --device cuda`

    `dear pretrain --out tiny-trial --steps 20 --batch 64`
    """
    from dataclasses import asdict, replace

    import torch

    from dear import world
    from dear.clip.checkpoint import save_hf
    from dear.clip.factory import pick_device
    from dear.tasks.mini.pretrain import PretrainRecipe, pretrain
    from dear.utils.files import write_json

    for name, number in (("--steps", steps), ("--batch", batch)):
        if number is not None and number < 1:
            raise UsageError(f"{name} must be at least 1, got {number}")
    recipe = replace(PretrainRecipe(), seed=seed)
    if steps is not None:
        recipe = replace(recipe, steps=steps, warmup=min(recipe.warmup, max(1, steps // 3)))
    if batch is not None:
        recipe = replace(recipe, batch=batch)
    log: list[dict[str, float]] = []

    def report(line: dict[str, float]) -> None:
        log.append(line)
        speed = f"{line['images_per_s']:.0f} images/s"
        say(f"step {line['step']:.0f}/{recipe.steps}  loss {line['loss']:.3f}  {speed}")

    every = min(100, max(1, recipe.steps // 10))
    clip = pretrain(recipe, world.CaptionTable.build(), pick_device(device), report, every)
    save_hf(clip.cpu(), out, torch.float16)
    write_json(out / "pretrain.json", {"recipe": asdict(recipe), "log": log})
    say(f"{out}: written; load it with dear.load({str(out)!r})")


def mini(
    backbone: Annotated[
        str, Option("--backbone", "-b", help="A backbone trained on the attribute world.")
    ] = "mini",
    number: Annotated[int, Option("--images", min=1, help="Images per factor.")] = 4000,
    truth: Annotated[
        Path | None, Option(help="Also write what explains each head's variance to this file.")
    ] = None,
    roles: Annotated[Path | None, Option(help="Also write its role map to this file.")] = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure what the embedded backbone knows on compositions that its training never showed.

    Example: `dear mini`
    """
    from dear.tasks.load import load_backbone
    from dear.tasks.mini import measure

    clip = load_backbone(backbone, device)
    accuracies = measure.factor_accuracies(clip, number)
    accuracies["compositions (100-way)"] = measure.composition_accuracy(clip)
    if truth is not None:
        measure.write_head_truth(truth, clip, clip.config.vision.last_third)
    if roles is not None:
        measure.mini_roles(clip).save(roles)
    if as_json:
        print_json({"backbone": clip.name, "accuracy": accuracies})
        return
    for name, accuracy in accuracies.items():
        echo(f"{name:24} {accuracy:.3f}")
