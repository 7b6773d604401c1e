"""`dear pretrain`: train the embedded backbone again; `dear mini`: what it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, say


def pretrain(
    out: Annotated[Path, Option("--out", "-o", help="Folder for the checkpoint (Hugging Face layout).")],
    steps: Annotated[int | None, Option(help="Training steps (default: those of the recipe).")] = None,
    batch: Annotated[int | None, Option(help="Images per step.")] = None,
    seed: Annotated[int, Option(help="Seed of weights, images and captions.")] = 1,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Train the mini backbone from nothing on the attribute world (a GPU job of minutes).

    Examples:

    `dear pretrain --out mini --device cuda`

    `dear pretrain --out tiny-trial --steps 20 --batch 64`
    """
    from dear.tasks.mini.pretrain import pretrain_mini

    def report(line: dict[str, float]) -> None:
        speed = f"{line['images_per_s']:.0f} images/s"
        say(f"step {line['step']:.0f}/{line['steps']:.0f}  loss {line['loss']:.3f}  {speed}")

    pretrain_mini(out, steps=steps, batch=batch, seed=seed, device=device, report=report)
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
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Measure what the embedded backbone knows on compositions that its training never showed.

    Example: `dear mini`
    """
    from dear.tasks.mini.measure import measure_mini

    accuracies = measure_mini(backbone=backbone, number=number, truth=truth, roles=roles, device=device)
    if as_json:
        print_json({"backbone": backbone, "accuracy": accuracies})
        return
    for name, accuracy in accuracies.items():
        echo(f"{name:24} {accuracy:.3f}")
