"""`dear adapt`: train on a folder of images."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dear._io.text import duration
from dear.cli.audit import Examples, Way, removal_options
from dear.cli.common import (
    Backbone,
    Data,
    DataRoot,
    Device,
    Json,
    Template,
    TensorBoard,
    Unreadable,
    device_named,
    parse_pairs,
    print_json,
    read_recipe,
    say,
    stages,
)

if TYPE_CHECKING:
    from dear.data.images import ImageSet
    from dear.runs.model import Model
    from dear.train.estimate import Estimate
    from dear.train.prepare import Job
    from dear.workflows.evaluate import HeldOutAccuracy


def adapt(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to write.")],
    method: Annotated[
        str, typer.Option("--method", "-m", help="What is trained; `dear methods` lists them.")
    ] = "dear",
    backbone: Backbone = "mini",
    roles: Annotated[
        str | None,
        typer.Option(
            "--roles", help="Role map of this backbone, or table2; found on your images if left out."
        ),
    ] = None,
    allow_other_roles: Annotated[
        bool, typer.Option("--allow-other-roles", help="Use a role map that was made on other weights.")
    ] = False,
    shots: Annotated[
        int | None, typer.Option("--shots", help="Images per class to train on; all if left out or 0.")
    ] = None,
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
    balance: Annotated[
        bool, typer.Option("--balance/--no-balance", help="Repeat images of rare classes.")
    ] = True,
    unreadable: Unreadable = "stop",
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without", help='Concepts to remove before training: location,color or "lighting: day, night".'
        ),
    ] = None,
    way: Way = "auto",
    examples: Examples = None,
    focus: Annotated[
        str | None,
        typer.Option(
            "--focus",
            help="Learn with the heads of one role beside the whole feature (location, color), or auto.",
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Fit probabilities and the threshold of --reject by cross-validation after training.",
        ),
    ] = True,
    data_root: DataRoot = None,
    template: Template = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in --out.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Measure accuracy on held-out images at the end.")
    ] = True,
    tensorboard: TensorBoard = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Adapt a backbone to images, a few per class, and leave the result in a run folder.

    All training images are used unless --shots says otherwise. Of a folder without train/ and test/ a fifth
    is held out; at the end the accuracy on held-out images before and after training is shown.

    Examples:

    `dear adapt --data photos/ --backbone openai/clip-vit-base-patch16 --out run`

    `dear adapt --data world:textures --out run --shots 16 --seed 1`

    `dear adapt --data world:textures --out run --resume`

    `dear adapt --data photos/ --out run --without location`

    `dear adapt --data photos/ --out run --method linear-probe --focus auto`

    `dear adapt --data photos/ --out run --recipe lr=1e-4 --recipe precision=float32`
    """
    from dear.errors import DiskError, UsageError
    from dear.methods import find_method
    from dear.runs.folder import add_metrics, check_folder
    from dear.runs.spec import Spec
    from dear.train.estimate import estimate
    from dear.train.fit import fit
    from dear.train.prepare import prepare
    from dear.train.tensorboard import logged
    from dear.workflows.evaluate import held_out_accuracy, open_held_out

    if roles is not None and not find_method(method).uses_roles and not without and focus is None:
        raise UsageError(f"--roles: the method {method!r} uses no role map; leave it out")
    preset, changes = _recipe(recipe, epochs, batch)
    spec = Spec().changed(
        data=data,
        method=method,
        backbone=backbone,
        roles=roles,
        allow_other_roles=allow_other_roles,
        shots=shots,
        seed=seed,
        template=template,
        root=data_root,
        recipe=changes,
        preset=preset,
        options=parse_pairs(option, "--set"),
        balance=balance,
        unreadable=unreadable,
        calibrate=calibrate,
        focus=focus,
    )
    removed = removal_options(without, way, examples)
    check_folder(out, resume)
    held_out = open_held_out(data, data_root)
    with stages() as progress:
        job = prepare(spec, without=removed, device=device_named(device), progress=progress)
    _print_plan(job, held_out, None if resume else estimate(job))
    began = time.perf_counter()
    with stages() as progress, logged(tensorboard) as log:
        trained = fit(job, out, resume=resume, progress=progress, log=log)
        seconds = time.perf_counter() - began
        found = None
        if check and held_out is not None:
            found = held_out_accuracy(trained.method, held_out, progress)
            figures = {"accuracy": found.after, "zero_shot": found.before, "images": found.images}
            try:
                add_metrics(out, **{f"evaluation of {data} (held out)": figures})
            except DiskError as error:  # the run is complete; only this note in its folder is missing
                say(f"not added to the run's metrics: {error}")
    if as_json:
        print_json(_facts(job, trained, found, held_out, out))
        return
    _print_result(trained, found, out, seconds)
    labels = trained.metrics.get("labels")
    if labels and labels["look_wrong"]:
        say(f"labels: dear data check {data} --backbone {backbone} --out labels.html")
    say(f"next: dear evaluate {out} --data {data}")


def _recipe(
    recipe: list[str] | None, epochs: int | None, batch: int | None
) -> tuple[str | None, dict[str, Any]]:
    """The preset and the changes to the recipe of all options that change it."""
    from dear.errors import UsageError

    preset, changes = read_recipe(recipe)
    for name, value in (("epochs", epochs), ("batch", batch)):
        if value is None:
            continue
        if name in changes:
            raise UsageError(f"--{name} and --recipe {name}={changes[name]}: give one of them")
        changes[name] = value
    if changes.get("epochs") in (0, "0") or (epochs is not None and epochs < 1):
        raise UsageError(f"--epochs {changes['epochs']}: train for at least 1 epoch")
    return preset, changes


def _print_plan(job: Job, held_out: ImageSet | None, expected: Estimate | None) -> None:
    """What is about to be done, what to know before, and how long it will take."""
    for reason in job.unreadable:
        say(f"left out: {reason}")
    for notice in job.notices:
        say(f"notice: {notice}")
    used = len(job.images)
    rest = job.available - used - len(job.unreadable)
    left = f", {rest} of the training images are not used" if rest else ""
    tested = f", {len(held_out)} held out for testing" if held_out is not None else ", none held out"
    steps = f"{job.recipe.epochs} epochs, {job.steps} steps" if job.steps else "no training steps"
    say(
        f"training {job.method.title} on {used} images of {len(job.method.classes)} classes"
        f"{left}{tested}; {steps}"
    )
    if expected is not None:
        more = f", then calibration about {duration(expected.calibration)}" if expected.calibration else ""
        say(f"time, measured on the first batch: training about {duration(expected.training)}{more}")


def _print_result(trained: Model, found: HeldOutAccuracy | None, out: Path, seconds: float) -> None:
    """What came out."""
    method = trained.method
    say(
        f"{out}: {method.title}, {method.trainable_parameters:,} trained parameters, "
        f"{trained.steps} steps in {duration(seconds)}"
    )
    if trained.reference is not None:
        kept = trained.reference
        say(
            f"kept in the run: features of {len(kept.labels):,} training images ({kept.size / 1e3:,.0f} kB), "
            "to know images of no class"
        )
    if found is not None:
        which = f"{found.images} held-out images"
        if found.images < found.available:
            which += f" (of {found.available})"
        usual = method.pick_mode(None)
        others = [f"{mode} {value:.1%}" for mode, value in found.after.items() if mode != usual]
        mode = "" if usual == "default" else f" (mode {usual})"
        extra = f"; {', '.join(others)}" if others else ""
        say(f"accuracy on {which}: {found.before:.1%} before, {found.after[usual]:.1%} after{mode}{extra}")


def _facts(
    job: Job, trained: Model, found: HeldOutAccuracy | None, held_out: ImageSet | None, out: Path
) -> dict[str, Any]:
    """The same as plain values."""
    facts: dict[str, Any] = {
        "run": str(out),
        "steps": trained.steps,
        "seconds": round(trained.seconds, 3),
        "images": len(job.images),
        "held_out": 0 if held_out is None else len(held_out),
    }
    correction = trained.method.clip.correction
    if correction is not None:
        facts["removed"] = correction.note
    if job.focus is not None:
        facts["focus"] = asdict(job.focus)
    if found is not None:
        facts["accuracy"] = {"before": found.before, "after": found.after, "images": found.images}
    return facts
