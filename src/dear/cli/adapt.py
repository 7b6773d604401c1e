"""`dear adapt`: train on a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dear.cli.common import (
    Backbone,
    Data,
    DataRoot,
    Device,
    Json,
    Template,
    TensorBoard,
    device_named,
    parse_pairs,
    print_json,
    read_recipe,
    say,
    training_bar,
)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("adapt")(adapt)


def adapt(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to write.")],
    method: Annotated[
        str, typer.Option("--method", "-m", help="dear, purify, coop, maple, mmrl, …")
    ] = "dear",
    backbone: Backbone = "mini",
    roles: Annotated[
        str | None,
        typer.Option("--roles", help="Role map of this backbone (dear roles discover), or table2."),
    ] = None,
    allow_other_roles: Annotated[
        bool, typer.Option("--allow-other-roles", help="Use a role map that was made on other weights.")
    ] = False,
    shots: Annotated[int, typer.Option("--shots", help="Images per class to train on; 0 takes all.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw of images and of training.")] = 1,
    epochs: Annotated[
        int | None, typer.Option("--epochs", help="Passes over the images; at least 1.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Images per step; the method's own value if left out.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="Option of the method, NAME=VALUE (beta=0.8).")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe", help="A preset of the method by name, or a value of the recipe, NAME=VALUE (lr=1e-4)."
        ),
    ] = None,
    data_root: DataRoot = None,
    template: Template = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in --out.")] = False,
    tensorboard: TensorBoard = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Adapt a backbone to images, a few per class, and leave the result in a run folder.

    Examples:

    `dear adapt --data photos/ --backbone openai/clip-vit-base-patch16 --out run`

    `dear adapt --data world:textures --out run --shots 16 --seed 1`

    `dear adapt --data world:textures --out run --resume`

    `dear adapt --data photos/ --out run --recipe lr=1e-4 --recipe precision=float32`
    """
    from dear.errors import UsageError
    from dear.methods import find_method
    from dear.train.tensorboard import logged
    from dear.workflows import adapt as path

    if roles is not None and not find_method(method).uses_roles:
        raise UsageError(f"--roles: the method {method!r} uses no role map; leave it out")
    if epochs is not None and epochs < 1:
        raise UsageError(f"--epochs {epochs}: train for at least 1 epoch")
    preset, plan = read_recipe(recipe)
    for name, value in (("epochs", epochs), ("batch", batch)):
        if value is None:
            continue
        if name in plan:
            raise UsageError(f"--{name} and --recipe {name}={plan[name]}: give one of them")
        plan[name] = value
    with training_bar() as bar, logged(tensorboard, bar) as told:
        trained = path.adapt(
            data,
            out,
            method=method,
            backbone=backbone,
            roles=roles,
            shots=shots,
            seed=seed,
            template=template,
            root=data_root,
            device=device_named(device),
            resume=resume,
            recipe=plan,
            preset=preset,
            options=parse_pairs(option, "--set"),
            allow_other_roles=allow_other_roles,
            progress=told,
        )
    if as_json:
        print_json({"run": str(out), "steps": trained.steps, "seconds": round(trained.seconds, 3)})
        return
    say(
        f"{out}: {trained.method.title}, {trained.method.trainable_parameters:,} trained parameters, "
        f"{trained.steps} steps in {trained.seconds:.1f} s; next: dear evaluate {out} --data {data}",
    )
