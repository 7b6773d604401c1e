"""`dear audit` and `dear repair`: shortcuts found and removed."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, print_table, say, stages
from dear.errors import UsageError

if TYPE_CHECKING:
    from dear.tasks.audit.photos import PhotoAudit
    from dear.tasks.audit.task import Audit
    from dear.tasks.repair import Repaired


def audit(
    run: Annotated[
        str | None, Argument(help="A run folder; leave it out to audit data alone.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, Option("--data", "-d", help="Images with labels; else the images the run was trained on.")
    ] = None,
    concept: Annotated[
        list[str] | None,
        Option("--concept", "-c", help='A concept; or your own: "background: lab bench, outdoors".'),
    ] = None,
    examples: Annotated[
        list[str] | None, Option(help="Folder of images that show a value of a concept; once per value.")
    ] = None,
    roles: opt.Roles = None,
    split: opt.Split = "train",
    shots: Annotated[int, Option(help="Images per class; 0 takes all.")] = 0,
    seed: Annotated[int, Option(help="Of the draw and of the permutations.")] = 1,
    mode: opt.Mode = None,
    out: Annotated[str | None, Option("--out", "-o", help="The page with the evidence.")] = None,
    data_root: opt.DataRoot = None,
    template: opt.Template = None,
    backbone: opt.OwnBackbone = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Find shortcuts: classes that stand out by their images, and concepts that go with the labels.

    The images are looked at first, without any model: light, color, sharpness, compression, frames, marks,
    sizes and facts of the files, each class against the rest. Concepts need a backbone. A run is tested on
    held-out images: by edits that give other classes what one class has, and with concepts removed. No group
    labels are needed; with a column `group` or `domain`, accuracy in the worst group is measured, too.

    Examples:

    `dear audit --data photos/`

    `dear audit --data photos/ --backbone ViT-B-16 --out audit.html`

    `dear audit run --concept "background: lab bench, outdoors, conveyor belt" --json`

    `dear audit run --examples with_flash/ --examples without_flash/`
    """
    from dear.tasks.audit.task import AuditOptions, audit_run
    from dear.tasks.audit.task import audit as find_shortcuts

    options = AuditOptions(
        concepts=tuple(concept or ()),
        examples=tuple(examples or ()),
        roles=roles,
        backbone=backbone,
        shots=shots,
        seed=seed,
        split=split,
        template=template,
        root=data_root,
        mode=mode,
        device=opt.device_named(device),
    )
    with stages() as progress:
        if data is not None:
            found = find_shortcuts(data, run, options, progress)
        elif run is not None:
            found = audit_run(run, options, progress)
        else:
            raise UsageError("name a run folder, or images with --data")
    steps = _next_steps(found, run, data, backbone)
    if out is not None:
        from dear.tasks.audit.evidence import write_pages

        with stages() as progress:
            write_pages(found, out, steps, progress)
    if as_json:
        print_json({**found.report(), "next": list(steps.values())})
        return
    _print(found, steps)
    if out is not None:
        say(f"{out}: written")


def _next_steps(found: Audit, run: str | None, data: str | None, backbone: str | None) -> dict[str, str]:
    """Commands that remove what is suspected, as they can be run."""
    if not found.removable:
        return {}
    names = shlex.quote(",".join(found.removable))
    weights = "" if backbone is None else f" --backbone {shlex.quote(backbone)}"
    if run is None:
        command = f"dear adapt --data {shlex.quote(str(data))}{weights} --without {names} --out run"
        return {"Train with it removed:": command}
    target = shlex.quote(f"{run.rstrip('/')}-repaired")
    command = f"dear repair {shlex.quote(run)} --without {names}{weights} --out {target}"
    return {"Train the same model again without it, and compare:": command}


def _print(found: Audit, steps: dict[str, str]) -> None:
    """What the images tell, a table of concepts, one sentence per suspected shortcut, the next command."""
    from dear.tasks.audit.evidence import concept_table

    if found.photos is not None:
        _print_photos(found, found.photos)
    if found.findings:
        model = "" if found.method is None else f", as {found.method.title} uses them"
        table = concept_table(found)
        print_table(table.columns, table.rows, f"concepts in {found.images.name}{model}", table.labels)
    for finding in found.suspects:
        echo(finding.sentence)
    if found.findings and not found.suspects:
        echo("No shortcut is suspected among these concepts.")
    if found.clip is None:
        echo("Concepts were not looked at: they are seen by a backbone, which --backbone names.")
    if found.method is not None and found.held_out is None:
        echo("The model was tested on the images it was trained on: there are no others.")
    if found.worst_group is not None:
        echo(f"worst group (held out): {found.worst_group[0]}, {found.worst_group[1]:.1%}")
    for command in steps.values():
        echo(f"Next: {command}")


def _print_photos(found: Audit, photos: PhotoAudit) -> None:
    """Classes that stand out by their images, and images that are nearly the same."""
    from dear.tasks.audit.evidence import photo_table

    table = photo_table(photos)
    title = f"{found.images.name}: {len(found.images)} images of {len(found.images.classes)} classes"
    if table.rows:
        print_table(table.columns, table.rows, title, table.labels)
    else:
        echo(f"{title}: no class stands out by its images.")
    relied = [test for test in photos.causal.values() if test.relies]
    for test in relied[:5]:
        echo(f"The model uses it: {test.sentence}")
    if photos.causal and not relied:
        echo("The model does not use what these classes stand out by: edits hardly move its answers.")
    if photos.too_few:
        echo(f"Too few images to judge: {', '.join(photos.too_few[:8])}.")
    for pair in photos.duplicates[:5]:
        echo(f"nearly the same in {pair.where}: {pair.first} and {pair.second}")
    if len(photos.duplicates) > 5:
        echo(f"{len(photos.duplicates) - 5} more pairs of nearly the same images are on the page.")


def repair(
    run: opt.Run,
    without: Annotated[
        list[str],
        Option(
            help="What to remove: a concept (location), a property of the images (brightness, frame, mark), "
            'or your own, "background: lab bench, outdoors".'
        ),
    ],
    out: opt.RunOut,
    way: opt.Way = "auto",
    examples: opt.Examples = None,
    roles: opt.Roles = None,
    data: Annotated[
        str | None, Option("--data", "-d", help="The training images, if the run does not find them.")
    ] = None,
    compare: Annotated[
        bool, Option(help="Compare with the untouched model and with random removals on test images.")
    ] = True,
    backbone: opt.OwnBackbone = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Train a run again, on the same images and in the same way, with a concept or a property removed.

    A property of the images (brightness, contrast, saturation, cast, sharpness, edge, frame, mark,
    compression, size, aspect) is removed by edits: copies of the training images with it changed join the
    training, or the directions along which such edits move the feature are removed, or what the heads add
    that react to them. The comparison gives test images of other classes what a class has and counts how
    many are then called by its name.

    Examples:

    `dear repair run --without location --out repaired`

    `dear repair run --without brightness --out repaired`

    `dear repair run --without lighting --examples lightings/ --out repaired`
    """
    from dear.tasks.repair import repair_run

    with stages() as progress:
        done = repair_run(
            run,
            opt.read_removal(without, way, examples),
            out,
            data=data,
            roles=roles,
            backbone=backbone,
            device=opt.device_named(device),
            compared=compare,
            progress=progress,
        )
    if as_json:
        print_json({"run": str(out), **done.report()})
        return
    _print_repair(done)
    quoted, spec = shlex.quote(str(out)), done.trained.spec
    where = None if spec is None else spec.data
    step = f"evaluate {quoted} --data {shlex.quote(where)}" if where else f"audit {quoted}"
    say(f"{out}: written; next: dear {step}")


def _print_repair(done: Repaired) -> None:
    echo(f"removed: {done.title}")
    for notice in done.notices:
        say(f"notice: {notice}")
    if done.comparison is None:
        return
    found, mean = done.comparison, done.comparison.random_mean
    for key in found.untouched:
        beside = f"; at random {mean[key]:.1%}" if key in mean else ""
        words = key.replace("_", " ")
        echo(f"{words}: {found.untouched[key]:.1%} -> {found.repaired[key]:.1%}{beside}")
    echo(f"answers changed: {found.changed:.1%}")
    echo(found.verdict)
