"""`dear audit` and `dear repair`: shortcuts found and removed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, print_table, say, stages

if TYPE_CHECKING:
    from dear.tasks.audit.properties import ImageCheck
    from dear.tasks.audit.result import Audit
    from dear.tasks.repair import Repaired


def audit(
    run: Annotated[
        Path | None,
        Argument(
            help="Run folder, archive or hf://owner/name; leave it out to audit data alone.",
            **opt.RUN_OPTIONS,
        ),
    ] = None,
    data: Annotated[
        str | None, Option("--data", "-d", help="Labeled images; default: those the run was trained on.")
    ] = None,
    concept: Annotated[
        list[str] | None,
        Option("--concept", "-c", help='A known concept, or your own: "background: lab bench, outdoors".'),
    ] = None,
    examples: Annotated[
        list[str] | None, Option(help="Folder of images that show one value of a concept; once per value.")
    ] = None,
    roles: opt.Roles = None,
    split: opt.Split = "train",
    shots: Annotated[int, Option(help="Images per class; 0: all.")] = 0,
    seed: Annotated[int, Option(help="Seed of the draw of images and of the permutation tests.")] = 1,
    mode: opt.Mode = None,
    out: Annotated[str | None, Option("--out", "-o", help="Write a page with the evidence.")] = None,
    data_root: opt.DataRoot = None,
    template: opt.Template = None,
    backbone: Annotated[
        str | None,
        Option("--backbone", "-b", help="Backbone that sees concepts; for a run, only if it moved."),
    ] = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Find shortcuts: image properties and concepts that are associated with the labels.

    Image properties need no model: light, color, tint, sharpness, compression, frames, marks, sizes and file
    facts, each class against the rest. Concepts need a backbone. A run is tested on held-out images: images
    of other classes are edited to have the property of a class, and concepts are removed from the features.
    No group labels are needed; with a column `group` or `domain`, accuracy in the worst group is measured.

    Examples:

    `dear audit --data photos/`

    `dear audit --data photos/ --backbone openai/clip-vit-base-patch16 --out audit.html`

    `dear audit run --concept "background: lab bench, outdoors, conveyor belt" --json`

    `dear audit run --examples with_flash/ --examples without_flash/`
    """
    from dear.tasks.audit.task import audit as run_audit

    with stages() as progress:
        result = run_audit(
            run,
            data,
            concept=concept or (),
            examples=examples or (),
            roles=roles,
            split=split,
            shots=shots,
            seed=seed,
            mode=mode,
            out=out,
            data_root=data_root,
            template=template,
            backbone=backbone,
            device=device,
            progress=progress,
        )
    if as_json:
        print_json(result.to_dict())
        return
    _print(result)
    if out is not None:
        say(f"{out}: written")


def _print(result: Audit) -> None:
    """A table of findings, one sentence per suspected shortcut, the next command."""
    from dear.tasks.audit.page import finding_table

    title = f"{result.images.name}: {len(result.images)} images of {len(result.images.classes)} classes"
    table = finding_table(result, result.findings)
    if table.rows:
        model = "" if result.model is None else f", tested with {result.model.method.title}"
        print_table(table.columns, table.rows, title + model, table.labels)
    else:
        echo(title)
    echo(result.verdict)
    for finding in result.suspects:
        echo(finding.sentence)
    for finding in result.properties:
        if not finding.suspected:
            echo(finding.sentence)
    if result.check is not None:
        _print_check(result.check)
    if result.clip is None:
        echo("Concept checks skipped: they need a backbone (pass --backbone).")
    if result.model is not None and result.held_out is None:
        echo("The model was tested on the audited images: there are no held-out images.")
    if result.worst_group is not None:
        echo(f"worst group (held out): {result.worst_group[0]}, {result.worst_group[1]:.1%}")
    for command in result.next_steps.values():
        echo(f"Next: {command}")


def _print_check(check: ImageCheck) -> None:
    """The closest property below the limit, classes with too few images, and near duplicates."""
    if check.closest:
        echo(check.closest)
    if check.too_few:
        echo(f"Too few images to compare: {', '.join(check.too_few[:8])}.")
    for pair in check.duplicates[:5]:
        echo(f"near duplicates in {pair.where}: {pair.first} and {pair.second}")
    if len(check.duplicates) > 5:
        echo(f"{len(check.duplicates) - 5} more pairs of near duplicates are on the page (--out).")


def repair(
    run: opt.Run,
    without: Annotated[
        list[str],
        Option(
            help="What to remove: a concept (location), a property of the images (brightness, frame, mark), "
            'or your own, "background: lab bench, outdoors".'
        ),
    ],
    out: Annotated[
        Path | None,
        Option("--out", "-o", help="The run folder to write (default: RUN-repaired in this folder)."),
    ] = None,
    way: opt.Way = "auto",
    examples: opt.Examples = None,
    roles: opt.Roles = None,
    data: Annotated[
        str | None, Option("--data", "-d", help="The training images, if the run does not find them.")
    ] = None,
    compare: Annotated[
        bool, Option(help="Compare with the untouched model and with random removals on test images.")
    ] = True,
    backbone: opt.RunBackbone = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Train a run again, on the same images and in the same way, with a concept or a property removed.

    An image property (brightness, contrast, saturation, cast, vignette, sharpness, edge, frame, mark,
    compression, size, aspect) is removed by edits: edited copies of the training images join the training, or
    the directions along which edits move the feature are removed, or the contributions of heads that respond
    to the edit. The comparison edits test images of other classes to have the property of a class, and counts
    how many are then predicted as that class.

    Examples:

    `dear repair run --without location`

    `dear repair run --without brightness --out repaired`

    `dear repair run --without lighting --examples lightings/ --out repaired`
    """
    from dear.tasks.repair import repair as repair_run

    out = Path(f"{run.resolve().name}-repaired") if out is None else out
    with stages() as progress:
        result = repair_run(
            run,
            without,
            out,
            way=way,
            examples=examples or None,
            roles=roles,
            data=data,
            compare=compare,
            backbone=backbone,
            device=device,
            progress=progress,
        )
    if as_json:
        print_json({"run": str(out), **result.to_dict()})
        return
    _print_repair(result)
    quoted, spec = shlex.quote(str(out)), result.trained.spec
    where = None if spec is None else spec.data
    step = f"evaluate {quoted} --data {shlex.quote(where)}" if where else f"audit {quoted}"
    say(f"{out}: written; next: dear {step}")


def _print_repair(result: Repaired) -> None:
    echo(f"removed: {result.title}")
    for notice in result.notices:
        say(f"notice: {notice}")
    if result.comparison is None:
        return
    compared, mean = result.comparison, result.comparison.random_mean
    for key in compared.untouched:
        random = f"; random removals {mean[key]:.1%}" if key in mean else ""
        words = key.replace("_", " ")
        echo(f"{words}: {compared.untouched[key]:.1%} → {compared.repaired[key]:.1%}{random}")
    echo(f"answers changed: {compared.changed:.1%}")
    echo(compared.verdict)
