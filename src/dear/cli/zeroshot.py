"""`dear zeroshot`: accuracy of the frozen model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dear.cli.audit import Examples, Way, removal_options
from dear.cli.common import (
    Backbone,
    Data,
    DataRoot,
    Device,
    Json,
    Split,
    Template,
    Unreadable,
    device_named,
    print_accuracy,
    print_json,
    print_unreadable,
    say,
    stages,
)

if TYPE_CHECKING:
    from dear.data.images import ImageSet


def zeroshot(
    data: Data,
    backbone: Backbone = "mini",
    data_root: DataRoot = None,
    split: Split = "test",
    template: Template = None,
    ensemble: Annotated[bool, typer.Option("--ensemble", help="Average several prompts per class.")] = False,
    half: Annotated[
        str, typer.Option("--half", help="all classes, or the base (first) or novel (second) half.")
    ] = "all",
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Concepts to remove, as measured on the training split."),
    ] = None,
    way: Way = "auto",
    examples: Examples = None,
    roles: Annotated[
        str | None, typer.Option("--roles", help="Role map of the backbone, for removal by heads.")
    ] = None,
    unreadable: Unreadable = "stop",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Accuracy of the frozen model, overall and for each class.

    Examples:

    `dear zeroshot --data world:textures`

    `dear zeroshot --data world:shortcut-place --without location`

    `dear zeroshot --backbone openai/clip-vit-base-patch16 --data photos/ --json`
    """
    from dear.clip.factory import load
    from dear.data import open_data
    from dear.errors import UsageError
    from dear.heads.without import remove
    from dear.methods import build_method
    from dear.workflows.evaluate import evaluate_run

    images = open_data(data, split, root=data_root, template=template)
    images = _half(images, half)
    removed = removal_options(without, way, examples)
    clip = load(backbone, device=device_named(device))
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


def _half(images: ImageSet, half: str) -> ImageSet:
    """The base or the novel half of the classes."""
    from dear.data import halves
    from dear.errors import UsageError

    if half == "all":
        return images
    base, novel = halves(images.classes)
    if half not in ("base", "novel"):
        raise UsageError(f"--half {half}: choose from all, base, novel")
    return images.select_classes(base if half == "base" else novel)
