"""`dear adapt`: train on a folder of images."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import print_json, say, stages
from dear.errors import DiskError, UsageError
from dear.utils.text import duration

if TYPE_CHECKING:
    from dear.data.images import ImageSet
    from dear.runs.model import Model
    from dear.tasks.evaluate import HeldOutAccuracy
    from dear.train.setup.estimate import Estimate
    from dear.train.setup.prepare import Job


def adapt(
    data: opt.Data,
    out: opt.RunOut,
    method: Annotated[
        str, Option("--method", "-m", help="What is trained; `dear methods` lists them.")
    ] = "dear",
    backbone: opt.Backbone = "mini",
    roles: Annotated[
        str | None, Option(help="Role map of this backbone, or table2; found on your images if left out.")
    ] = None,
    allow_other_roles: opt.AllowOtherRoles = False,
    shots: Annotated[int | None, Option(help="Images per class to train on; all if left out or 0.")] = None,
    seed: Annotated[int, Option(help="Of the draw of images and of training.")] = 1,
    epochs: Annotated[int | None, Option(help="Passes over the images; at least 1.")] = None,
    batch: Annotated[int | None, Option(help="Images per step; the method's own value if left out.")] = None,
    option: Annotated[
        list[str] | None, Option("--set", help="Option of the method, NAME=VALUE (beta=0.8).")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        Option(help="A preset of the method by name, or a value of the recipe, NAME=VALUE (lr=1e-4)."),
    ] = None,
    balance: Annotated[bool, Option(help="Repeat images of rare classes.")] = True,
    unreadable: opt.Unreadable = "stop",
    without: Annotated[
        list[str] | None,
        Option(help='Concepts to remove before training: location,color or "lighting: day, night".'),
    ] = None,
    way: opt.Way = "auto",
    examples: opt.Examples = None,
    focus: Annotated[
        str | None,
        Option(help="Learn with the heads of one role beside the whole feature (location, color), or auto."),
    ] = None,
    calibrate: Annotated[
        bool,
        Option(help="Fit probabilities and the threshold of --reject by cross-validation after training."),
    ] = True,
    data_root: opt.DataRoot = None,
    template: opt.Template = None,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted run in --out.")] = False,
    check: Annotated[bool, Option(help="Measure accuracy on held-out images at the end.")] = True,
    tensorboard: opt.TensorBoard = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
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
    from dear.methods import find_method
    from dear.runs.folder import add_metrics, check_folder
    from dear.runs.spec import Spec
    from dear.tasks.evaluate import held_out_accuracy, open_held_out
    from dear.train.fit import fit
    from dear.train.setup.estimate import estimate
    from dear.train.setup.prepare import check_held_out, open_training, prepare
    from dear.train.tensorboard import logged

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
        options=opt.parse_pairs(option, "--set"),
        balance=balance,
        unreadable=unreadable,
        calibrate=calibrate,
        focus=focus,
    )
    removed = opt.read_removal(without, way, examples)
    check_folder(out, resume)
    held_out = open_held_out(data, data_root)
    if held_out is not None:
        check_held_out(open_training(spec), held_out)
    with stages() as progress:
        job = prepare(spec, without=removed, device=opt.device_named(device), progress=progress)
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
    preset, changes = opt.read_recipe(recipe)
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
    classes = len(job.method.classes)
    say(f"training {job.method.title} on {used} images of {classes} classes{left}{tested}; {steps}")
    if expected is not None:
        more = f", then calibration about {duration(expected.calibration)}" if expected.calibration else ""
        say(f"time, measured on the first batch: training about {duration(expected.training)}{more}")


def _print_result(trained: Model, found: HeldOutAccuracy | None, out: Path, seconds: float) -> None:
    """What came out."""
    method, kept = trained.method, trained.reference
    parameters = f"{method.learned_parameters:,} trained parameters"
    say(f"{out}: {method.title}, {parameters}, {trained.steps} steps in {duration(seconds)}")
    if kept is not None:
        say(
            f"kept in the run: features of {len(kept.labels):,} training images ({kept.size / 1e3:,.0f} kB), "
            "to know images of no class"
        )
    if found is not None:
        some = f" (of {found.available})" if found.images < found.available else ""
        usual = method.pick_mode(None)
        mode = "" if usual == "default" else f" (mode {usual})"
        others = ", ".join(f"{name} {value:.1%}" for name, value in found.after.items() if name != usual)
        say(
            f"accuracy on {found.images} held-out images{some}: {found.before:.1%} before, "
            f"{found.after[usual]:.1%} after{mode}{'; ' * bool(others)}{others}"
        )


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
    if trained.clip.correction is not None:
        facts["removed"] = trained.clip.correction.note
    if job.focus is not None:
        facts["focus"] = asdict(job.focus)
    if found is not None:
        facts["accuracy"] = {"before": found.before, "after": found.after, "images": found.images}
    return facts
