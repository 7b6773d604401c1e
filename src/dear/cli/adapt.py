"""`dear adapt`, `dear evaluate`, `dear predict`: from a folder of photos to answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dear._io.printable import shown
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
    print_accuracy,
    print_json,
    progress,
    say,
    training_bar,
)

Run = Annotated[Path, typer.Argument(help="The run folder that `dear adapt` wrote.", show_default=False)]
OwnBackbone = Annotated[
    str | None, typer.Option("--backbone", "-b", help="The backbone, if it moved since training.")
]
Mode = Annotated[
    str | None, typer.Option("--mode", help="fused or decoupled (DeAR); the usual one if left out.")
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("adapt")(adapt)
    app.command("evaluate")(evaluate)
    app.command("predict")(predict)


def adapt(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to write.")],
    method: Annotated[
        str, typer.Option("--method", "-m", help="dear, purify, coop, maple, mmrl, …")
    ] = "dear",
    backbone: Backbone = "mini",
    roles: Annotated[
        str | None, typer.Option("--roles", help="Role map of this backbone (dear roles discover).")
    ] = None,
    allow_other_roles: Annotated[
        bool, typer.Option("--allow-other-roles", help="Use a role map that was made on other weights.")
    ] = False,
    shots: Annotated[int, typer.Option("--shots", help="Images a class to learn from; 0 takes all.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw, the start, the order and the views.")] = 1,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the images.")] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Images a step; the method's own number if left out.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="Option of the method, NAME=VALUE (beta=0.8).")
    ] = None,
    data_root: DataRoot = None,
    template: Template = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in --out.")] = False,
    tensorboard: TensorBoard = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Adapt a backbone to images, a few a class, and leave the result in a run folder.

    Examples:

    `dear adapt --data photos/ --backbone openai/clip-vit-base-patch16 --out run`

    `dear adapt --data world:textures --out run --shots 16 --seed 1`

    `dear adapt --data world:textures --out run --resume`
    """
    from dear.errors import UsageError
    from dear.methods import find_method
    from dear.train.tensorboard import logged
    from dear.workflows import adapt as path

    if roles is not None and not find_method(method).uses_roles:
        raise UsageError(f"--roles: the method {method!r} uses no role map; leave it out")
    changes = {"epochs": epochs, "batch": batch}
    recipe = {name: value for name, value in changes.items() if value is not None}
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
            recipe=recipe,
            options=parse_pairs(option, "--set"),
            allow_other_roles=allow_other_roles,
            progress=told,
        )
    if trained.method.notice:
        say(trained.method.notice)
    if as_json:
        print_json({"run": str(out), "steps": trained.steps, "seconds": round(trained.seconds, 3)})
        return
    say(
        f"{out}: {trained.method.title}, {trained.method.trainable_parameters:,} learned numbers, "
        f"{trained.steps} steps in {trained.seconds:.1f} s; next: dear evaluate {out} --data {data}",
    )


def evaluate(
    run: Run,
    data: Data,
    mode: Mode = None,
    data_root: DataRoot = None,
    split: Annotated[str, typer.Option("--split", help="test, train, val or all.")] = "test",
    backbone: OwnBackbone = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Accuracy of a run on labeled images, overall and for each class; classes may be new ones.

    Examples:

    `dear evaluate run --data photos/`

    `dear evaluate run --data world:textures --mode decoupled --json`
    """
    from dear.train import add_metrics
    from dear.workflows.adapt import evaluate_run

    with progress("looking") as told:
        found = evaluate_run(
            str(run),
            data,
            split=split,
            backbone=backbone,
            root=data_root,
            device=device_named(device),
            progress=told,
        )
    report = found.report(mode)
    figures = {"accuracy": report["modes"], "images": report["images"]}
    add_metrics(run, **{f"evaluation of {data} ({split})": figures})
    if as_json:
        print_json({"run": str(run), "data": data, **report})
        return
    print_accuracy(found, f"{run} on {data}", mode)


def predict(
    run: Annotated[
        Path | None, typer.Argument(help="The run folder; leave out with --onnx.", show_default=False)
    ] = None,
    images: Annotated[list[Path] | None, typer.Argument(help="Images.", show_default=False)] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="Other class names, comma-separated (novel ones too).")
    ] = None,
    template: Template = None,
    top: Annotated[int, typer.Option("--top", help="Answers an image.")] = 5,
    mode: Mode = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", help="An exported model instead of a run folder.")
    ] = None,
    backbone: OwnBackbone = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Answers for images, likeliest first, with probabilities.

    Examples:

    `dear predict run a.jpg b.jpg --top 3`

    `dear predict run a.jpg --classes "tabby cat, red fox"`

    `dear predict --onnx model.onnx a.jpg`
    """
    from dear.errors import UsageError

    paths = [str(path) for path in (images or [])]
    answers: list[tuple[str, tuple[tuple[str, float], ...]]]
    if onnx is not None:
        from dear.export import runtime

        paths = [
            *([] if run is None else [str(run)]),
            *paths,
        ]  # without a run, the first one is an image
        if classes is not None:
            raise UsageError("--classes: an exported model has its classes built in; use the run folder")
        if not paths:
            raise UsageError("name at least one image: dear predict --onnx model.onnx a.jpg")
        answers = [(found.image, found.top) for found in runtime.predict(onnx, paths, top, mode)]
    else:
        from dear.workflows.adapt import predict_run

        if run is None or not paths:
            raise UsageError("name a run folder and at least one image: dear predict run a.jpg")
        names = None if classes is None else [name.strip() for name in classes.split(",") if name.strip()]
        if names == []:
            raise UsageError("--classes names no class; give names with commas between")
        said = predict_run(
            str(run),
            paths,
            classes=names,
            template=template,
            top=top,
            mode=mode,
            backbone=backbone,
            device=device_named(device),
        )
        answers = [(found.image, found.classes) for found in said]
    if as_json:
        rows = [
            {"image": image, "classes": [{"name": n, "probability": p} for n, p in found]}
            for image, found in answers
        ]
        print_json({"predictions": rows})
        return
    for image, found in answers:
        typer.echo(shown(image))
        for name, probability in found:
            typer.echo(f"  {probability:6.1%}  {name}")
