"""`dear zeroshot`: accuracy of the frozen model."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import print_accuracy, print_json, print_unreadable, say, stages
from dear.errors import UsageError


def zeroshot(
    data: opt.Data,
    backbone: opt.Backbone = "mini",
    data_root: opt.DataRoot = None,
    split: opt.Split = "test",
    template: opt.Template = None,
    ensemble: Annotated[bool, Option("--ensemble", help="Average several prompts per class.")] = False,
    half: Annotated[str, Option(help="all classes, or the base (first) or novel (second) half.")] = "all",
    without: Annotated[
        list[str] | None, Option(help="Concepts to remove, as measured on the training split.")
    ] = None,
    way: opt.Way = "auto",
    examples: opt.Examples = None,
    roles: Annotated[str | None, Option(help="Role map of the backbone, for removal by heads.")] = None,
    unreadable: opt.Unreadable = "stop",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Accuracy of the frozen model, overall and for each class.

    Examples:

    `dear zeroshot --data world:textures`

    `dear zeroshot --data world:shortcut-place --without location`

    `dear zeroshot --backbone openai/clip-vit-base-patch16 --data photos/ --json`
    """
    from dear.clip.factory import load
    from dear.data import halves, open_data
    from dear.methods import build_method
    from dear.shortcuts.without import remove
    from dear.tasks.evaluate import evaluate_run

    images = open_data(data, split, root=data_root, template=template)
    if half in ("base", "novel"):
        images = images.select_classes(halves(images.classes)[half == "novel"])
    elif half != "all":
        raise UsageError(f"--half {half}: choose from all, base, novel")
    removed = opt.read_removal(without, way, examples)
    clip = load(backbone, device=opt.device_named(device))
    if removed is not None:
        training = open_data(data, "train", root=data_root, template=template)
        clip = remove(clip, training, removed, roles).clip
    elif roles is not None:
        raise UsageError("--roles: the frozen model uses no role map; it is for --without")
    method = build_method("zeroshot", clip, images.classes, template=images.template, ensemble=ensemble)
    with stages() as progress:
        found = evaluate_run(method, images, unreadable=unreadable, progress=progress)
    print_unreadable(found)
    gone = {} if clip.correction is None else {"removed": clip.correction.note}
    if as_json:
        print_json({**gone, "backbone": clip.name, "data": images.name, **found.report()})
        return
    if clip.correction is not None:
        say(f"removed: {clip.correction.note}")
    print_accuracy(found, f"{clip.name} on {images.name}, zero-shot")
