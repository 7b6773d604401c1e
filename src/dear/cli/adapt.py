"""`dear adapt`: train on labeled images."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from dear.cli import options as opt
from dear.cli.printing import print_json, say, stages
from dear.errors import UsageError
from dear.utils.text import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from dear.runs.model import Model

#: options that `--extend` takes as well
EXTEND_OPTIONS = {
    *("data", "out", "extend", "texts", "unreadable", "backbone", "data_root", "margin"),
    *("device", "threads", "as_json"),
}


def adapt(
    context: Context,
    data: opt.Data,
    out: opt.RunOut,
    method: Annotated[str, Option("--method", "-m", help="Method to train (see `dear methods`).")] = "dear",
    backbone: opt.Backbone = "mini",
    roles: Annotated[
        str | None, Option(help="Role map of this backbone, or table2 (default: discovered on your images).")
    ] = None,
    allow_other_roles: opt.AllowOtherRoles = False,
    shots: Annotated[int | None, Option(help="Images per class to train on (default and 0: all).")] = None,
    seed: Annotated[int, Option(help="Seed of the draw of images and of training.")] = 1,
    epochs: Annotated[
        int | None, Option(help="Passes over the images, at least 1 (default: set by the method).")
    ] = None,
    batch: Annotated[int | None, Option(help="Images per step (default: set by the method).")] = None,
    options: Annotated[
        list[str] | None, Option("--set", help="Option of the method, NAME=VALUE (beta=0.8); repeatable.")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        Option(help="Preset of the method (strong), or a value of the recipe (lr=1e-4); repeatable."),
    ] = None,
    balance: Annotated[bool, Option(help="Repeat images of rare classes.")] = True,
    unlabeled: Annotated[
        str | None,
        Option(
            help="Images without labels to learn from as well: folder, table, dataset, or rest (what --shots "
            "leaves out)."
        ),
    ] = None,
    unlabeled_weight: Annotated[
        float | None,
        Option(
            help="Weight of an unlabeled image relative to a labeled one, 0 to 1 (default: cross-validation "
            "decides whether they are used)."
        ),
    ] = None,
    unreadable: opt.Unreadable = "stop",
    without: Annotated[
        list[str] | None,
        Option(
            help="Concepts or image properties to remove before training: location,color or "
            '"lighting: day, night".'
        ),
    ] = None,
    way: opt.Way = "auto",
    examples: opt.Examples = None,
    focus: Annotated[
        str | None,
        Option(help="Role whose heads to learn with in addition to the whole feature (location), or auto."),
    ] = None,
    calibrate: Annotated[
        bool,
        Option(help="Fit probabilities and the threshold of --reject by cross-validation after training."),
    ] = True,
    data_root: opt.DataRoot = None,
    margin: opt.Margin = 0.0,
    template: opt.Template = None,
    texts: opt.Texts = None,
    tree: Annotated[
        str | None,
        Option(help='Tree of the classes, JSON: {"cat": ["siamese"]} or {"siamese": "cat"}; see predict.'),
    ] = None,
    extend: Annotated[
        Path | None,
        Option(
            help="Add the classes of --data to this run from a few photos, without training (methods with "
            "open classes). With it: --texts, --unreadable, --backbone, --data-root, --box-margin, --device.",
            **opt.RUN_OPTIONS,
        ),
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted run in --out.")] = False,
    check: Annotated[bool, Option(help="Measure accuracy on held-out images at the end.")] = True,
    log: opt.Log = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Adapt a backbone to labeled images, a few per class, and write a run folder.

    All training images are used unless --shots limits them. A fifth of a folder without train/ and test/ is
    held out; at the end the accuracy on held-out images before and after training is printed.

    Examples:

    `dear adapt --data photos/ --backbone openai/clip-vit-base-patch16 --out run`

    `dear adapt --data world:textures --out run --shots 16 --seed 1`

    `dear adapt --data world:textures --out run --resume`

    `dear adapt --data photos/ --unlabeled pool/ --out run`

    `dear adapt --data photos/ --texts texts.json --out run`

    `dear adapt --data photos/ --out run --without location`

    `dear adapt --data photos/ --out run --method linear-probe --focus auto`

    `dear adapt --extend run --data new/zebra --out run-with-zebra`

    `dear adapt --data photos/ --out run --recipe lr=1e-4 --recipe precision=float32`
    """
    if extend is not None:
        sources = {param: context.get_parameter_source(param.name or "") for param in context.command.params}
        named = [param for param, source in sources.items() if source and source.name == "COMMANDLINE"]
        other = next((param for param in named if param.name not in EXTEND_OPTIONS), None)
        if other is not None:
            raise UsageError(
                f"{other.opts[0]} has no effect with --extend, which trains nothing; leave it out"
            )
        moved = backbone if any(param.name == "backbone" for param in named) else None
        _extend(
            extend, data, out, as_json,
            texts=texts, unreadable=unreadable, backbone=moved, data_root=data_root, margin=margin,
            device=device,
        )  # fmt: skip
        return
    from dear.tasks.adapt import HELD_OUT
    from dear.tasks.adapt import adapt as train

    with stages() as progress:
        model = train(
            data,
            out,
            method=method,
            backbone=backbone,
            roles=roles,
            allow_other_roles=allow_other_roles,
            shots=shots,
            seed=seed,
            epochs=epochs,
            batch=batch,
            options=options,
            recipe=recipe,
            balance=balance,
            unlabeled=unlabeled,
            unlabeled_weight=unlabeled_weight,
            unreadable=unreadable,
            without=without or None,
            way=way,
            examples=examples or None,
            focus=focus,
            calibrate=calibrate,
            data_root=data_root,
            margin=margin,
            template=template,
            texts=texts,
            tree=tree,
            resume=resume,
            check=check,
            log=log,
            device=device,
            progress=progress,
        )
    accuracy = model.metrics.get(HELD_OUT.format(data))
    if as_json:
        print_json(_plain(model, out, accuracy))
        return
    _print(model, out, accuracy)
    labels = model.metrics.get("labels")
    if labels and labels["look_wrong"]:
        source, weights = shlex.quote(data), shlex.quote(backbone)
        say(f"check labels: dear label start {source} --data {source} --backbone {weights} --out labels.csv")
    say(f"next: dear evaluate {shlex.quote(str(out))} --data {shlex.quote(data)}")


def _extend(run: Path, data: str, out: Path, as_json: bool, **settings: Any) -> None:
    """Add classes to a run."""
    from dear.tasks.extend import extend

    model = extend(run, data, out, **settings)
    added = {} if model.spec is None else model.spec.extended
    if as_json:
        print_json({"run": str(out), "classes": len(model.classes), "extended": added})
        return
    listed = ", ".join(f"{name} ({count} images)" for name, count in added.items())
    say(f"{out}: {len(model.classes)} classes, added without training: {listed}")


def _print(model: Model, out: Path, accuracy: dict[str, Any] | None) -> None:
    """The run, and its accuracy on held-out images."""
    method, reference = model.method, model.reference
    parameters = f"{method.learned_parameters:,} learned parameters"
    steps = f"{format_count(model.steps, 'step')} in {format_duration(model.seconds)}"
    say(f"{out}: {method.title}, {parameters}, {steps}")
    if reference is not None:
        size = format_bytes(reference.size)
        say(f"stored {len(reference.labels):,} training features ({size}) for out-of-class detection")
    if accuracy is None:
        return
    usual = method.pick_mode(None)
    mode = "" if usual == "default" else f" (mode {usual})"
    others = "".join(f"; {name} {value:.1%}" for name, value in accuracy["accuracy"].items() if name != usual)
    images = f"{accuracy['images']:,} held-out images"
    if accuracy["images"] < accuracy["available"]:
        images += f" (a sample of {accuracy['available']:,}; dear evaluate uses all)"
    elif copies := accuracy.get("copies", 0):
        images += f" (without {format_count(copies, 'copy', 'copies')})"
    before, after = accuracy["zero_shot"], accuracy["accuracy"][usual]
    measure = accuracy.get("measure", "accuracy")
    say(f"{measure} on {images}: {before:.1%} before, {after:.1%} after{mode}{others}")


def _plain(model: Model, out: Path, accuracy: dict[str, Any] | None) -> dict[str, Any]:
    """The same as plain values."""
    facts: dict[str, Any] = {
        "run": str(out),
        "steps": model.steps,
        "seconds": round(model.seconds, 3),
        "images": 0 if model.spec is None else model.spec.images,
        "held_out": 0 if accuracy is None else accuracy["available"],
    }
    if model.clip.correction is not None:
        facts["removed"] = model.clip.correction.note
    if "focus" in model.metrics:
        facts["focus"] = model.metrics["focus"]
    if accuracy is not None:
        facts["accuracy"] = {
            "before": accuracy["zero_shot"],
            "after": accuracy["accuracy"],
            "images": accuracy["images"],
        }
    return facts
