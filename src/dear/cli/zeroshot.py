"""`dear zeroshot`: what the frozen model answers."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import print_accuracy, print_answers, print_json, print_unreadable, stages


def zeroshot(
    data: Annotated[
        str,
        Option(
            "--data",
            "-d",
            help="Labeled images: a folder of class folders, a table, a benchmark name, or world:NAME; with "
            "--classes any image or folder.",
        ),
    ],
    classes: Annotated[
        str | None, Option(help="Comma-separated class names to choose from; no labels are needed.")
    ] = None,
    backbone: opt.Backbone = "mini",
    data_root: opt.DataRoot = None,
    margin: opt.Margin = 0.0,
    split: opt.Split = "test",
    template: opt.Template = None,
    texts: opt.Texts = None,
    ensemble: Annotated[bool, Option("--ensemble", help="Average several prompts per class.")] = False,
    half: Annotated[
        str, Option(help="Classes to use: all, base (first half), or novel (second half).")
    ] = "all",
    without: Annotated[
        list[str] | None, Option(help="Concepts to remove, found in the training split.")
    ] = None,
    way: opt.Way = "auto",
    examples: opt.Examples = None,
    roles: Annotated[str | None, Option(help="Role map of the backbone, for --way heads.")] = None,
    unreadable: opt.Unreadable = "stop",
    top: Annotated[int, Option(help="Classes per image, with --classes.")] = 5,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Measure the accuracy of the frozen model, overall and per class; with --classes, answer any images.

    Examples:

    `dear zeroshot --data world:textures`

    `dear zeroshot --data world:shortcut-place --without location`

    `dear zeroshot --backbone openai/clip-vit-base-patch16 --data photos/ --json`

    `dear zeroshot --data photos/ --texts texts.json`

    `dear zeroshot --data photo.jpg --classes "tabby cat, red fox"`
    """
    from dear.runs.predictions import Predictions
    from dear.tasks.evaluate import zeroshot as answer

    with stages() as progress:
        result = answer(
            data,
            classes,
            backbone=backbone,
            data_root=data_root,
            margin=margin,
            split=split,
            template=template,
            texts=texts,
            ensemble=ensemble,
            half=half,
            without=without or None,
            way=way,
            examples=examples or None,
            roles=roles,
            unreadable=unreadable,
            top=top,
            device=device,
            progress=progress,
        )
    if isinstance(result, Predictions):
        print_answers(result, as_json)
        return
    print_unreadable(result)
    if as_json:
        print_json({"backbone": backbone, "data": data, "title": result.title, **result.to_dict()})
    else:
        print_accuracy(result, result.title)
