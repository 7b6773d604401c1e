"""`dear audit` and `dear repair`: shortcuts found and removed."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from dear._io.text import shown
from dear.cli.common import (
    DataRoot,
    Device,
    Json,
    Mode,
    OwnBackbone,
    Roles,
    Run,
    Split,
    Template,
    device_named,
    print_json,
    say,
    stages,
)

if TYPE_CHECKING:
    from dear.heads.without import Without
    from dear.workflows.audit import Audit
    from dear.workflows.repair import Repaired

Way = Annotated[
    str,
    typer.Option(
        "--way",
        help="auto; of concepts words, heads, examples, leace, or several (heads+words); of properties "
        "directions, heads, copies.",
    ),
]
Examples = Annotated[
    list[str] | None,
    typer.Option(
        "--examples", help="Folder with one folder of images per value; CONCEPT=FOLDER for several concepts."
    ),
]
ConceptNames = Annotated[
    list[str],
    typer.Option(
        "--without",
        help="What to remove: a concept (location), a property of the images (brightness, frame, mark), or "
        'your own, "background: lab bench, outdoors".',
    ),
]


def audit(
    run: Annotated[
        str | None, typer.Argument(help="A run folder; leave it out to audit data alone.", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="Images with labels; else the images the run was trained on."),
    ] = None,
    concept: Annotated[
        list[str] | None,
        typer.Option("--concept", "-c", help='A concept; or your own: "background: lab bench, outdoors".'),
    ] = None,
    examples: Annotated[
        list[str] | None,
        typer.Option("--examples", help="Folder of images that show a value of a concept; once per value."),
    ] = None,
    roles: Roles = None,
    split: Split = "train",
    shots: Annotated[int, typer.Option("--shots", help="Images per class; 0 takes all.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw and of the permutations.")] = 1,
    mode: Mode = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="The page with the evidence.")] = None,
    data_root: DataRoot = None,
    template: Template = None,
    backbone: OwnBackbone = None,
    device: Device = "auto",
    as_json: Json = False,
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
    from dear.errors import UsageError
    from dear.workflows.audit import AuditOptions
    from dear.workflows.audit import audit as examine

    if run is None and data is None:
        raise UsageError("name a run folder, or images with --data")
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
        device=device_named(device),
    )
    with stages() as progress:
        if data is not None:
            found = examine(data, run, options, progress)
        else:
            from dear.workflows.audit import audit_run

            found = audit_run(str(run), options, progress)
    steps = _next_steps(found, run, data, backbone)
    if out is not None:
        from dear.report.audit_page import write_audit_page
        from dear.workflows.audit_evidence import evidence
        from dear.workflows.audit_why import write_why_page

        with stages() as progress:
            why = write_why_page(found, out, progress)
        write_audit_page(evidence(found, steps, why), out)
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
    if found.photos is not None:
        _print_photos(found)
    if found.findings:
        _print_concepts(found)
    for finding in found.suspects:
        typer.echo(shown(finding.sentence))
    if found.findings and not found.suspects:
        typer.echo("No shortcut is suspected among these concepts.")
    if found.clip is None:
        typer.echo("Concepts were not looked at: they are seen by a backbone, which --backbone names.")
    if found.method is not None and found.held_out is None:
        typer.echo("The model was tested on the images it was trained on: there are no others.")
    if found.worst_group is not None:
        typer.echo(f"worst group (held out): {shown(found.worst_group[0])}, {found.worst_group[1]:.1%}")
    for command in steps.values():
        typer.echo(f"Next: {shown(command)}")


def _print_photos(found: Audit) -> None:
    """Classes that stand out by their images, and images that are nearly the same."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dear.workflows.audit_evidence import photo_table

    facts, photos = photo_table(found), found.photos
    assert photos is not None
    title = f"{found.images.name}: {len(found.images)} images of {len(found.images.classes)} classes"
    if facts.rows:
        table = Table(title=Text(title), header_style="bold")
        for column in facts.columns:
            table.add_column(column, justify="right" if column == "score" else "left")
        for row in facts.rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
    else:
        typer.echo(f"{shown(title)}: no class stands out by its images.")
    relied = [test for test in photos.causal.values() if test.relies]
    for test in relied[:5]:
        typer.echo(shown(f"The model uses it: {test.sentence}"))
    if photos.causal and not relied:
        typer.echo("The model does not use what these classes stand out by: edits hardly move its answers.")
    if photos.too_few:
        typer.echo(f"Too few images to judge: {shown(', '.join(photos.too_few[:8]))}.")
    for pair in photos.duplicates[:5]:
        typer.echo(f"nearly the same in {pair.where}: {shown(pair.first)} and {shown(pair.second)}")
    if len(photos.duplicates) > 5:
        typer.echo(f"{len(photos.duplicates) - 5} more pairs of nearly the same images are on the page.")


def _print_concepts(found: Audit) -> None:
    """One row per concept."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dear.workflows.audit_evidence import overview

    facts = overview(found)
    model = "" if found.method is None else f", as {found.method.title} uses them"
    table = Table(title=Text(f"concepts in {found.images.name}{model}"), header_style="bold")
    for place, column in enumerate(facts.columns):
        table.add_column(column, justify="left" if place < facts.labels else "right")
    for row in facts.rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def read_examples(examples: list[str] | None, concepts: list[str]) -> dict[str, str]:
    """`--examples FOLDER` or `CONCEPT=FOLDER` as a mapping."""
    from dear.errors import UsageError

    found: dict[str, str] = {}
    for item in examples or ():
        name, sign, folder = item.partition("=")
        if sign and name in concepts:
            found[name] = folder
        elif len(concepts) == 1:
            found[concepts[0]] = item
        else:
            raise UsageError(f"--examples {item}: write CONCEPT=FOLDER, the concept as after --without")
    return found


def concept_names(without: list[str]) -> list[str]:
    """What stands after `--without`: names with commas, or one concept with its own values."""
    names: list[str] = []
    for item in without:
        names += [item.strip()] if ":" in item else [name.strip() for name in item.split(",") if name.strip()]
    return list(dict.fromkeys(names))


def removal_options(
    without: list[str] | None, way: str = "auto", examples: list[str] | None = None
) -> Without | None:
    """What `--without`, `--way` and `--examples` say together; None without the first."""
    from dear.errors import UsageError
    from dear.heads.values import find_concept
    from dear.heads.without import Without
    from dear.photos.edits import KINDS

    if not without:
        if examples or way != "auto":
            raise UsageError("--way and --examples say how to remove a concept; name it with --without")
        return None
    names = concept_names(without)
    found = read_examples(examples, names)
    for name in names:
        if name not in found and name not in KINDS:
            find_concept(name)
    return Without(tuple(names), way, found)


def repair(
    run: Run,
    without: ConceptNames,
    out: Annotated[str, typer.Option("--out", "-o", help="The run folder to write.")],
    way: Way = "auto",
    examples: Examples = None,
    roles: Roles = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="The training images, if the run does not find them.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare",
            help="Compare with the untouched model and with random removals on test images.",
        ),
    ] = True,
    backbone: OwnBackbone = None,
    device: Device = "auto",
    as_json: Json = False,
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
    from dear.workflows.repair import repair_run

    wanted = removal_options(without, way, examples)
    assert wanted is not None
    with stages() as progress:
        done = repair_run(
            str(run),
            wanted,
            out,
            data=data,
            roles=roles,
            backbone=backbone,
            device=device_named(device),
            compared=compare,
            progress=progress,
        )
    if as_json:
        print_json({"run": out, **done.report()})
        return
    _print_repair(done, out)


def _print_repair(done: Repaired, out: str) -> None:
    typer.echo(f"removed: {shown(done.title)}")
    for notice in done.notices:
        say(f"notice: {notice}")
    if done.comparison is not None:
        found, mean = done.comparison, done.comparison.random_mean
        for key in found.untouched:
            beside = f"; at random {mean[key]:.1%}" if key in mean else ""
            words = shown(key.replace("_", " "))
            typer.echo(f"{words}: {found.untouched[key]:.1%} -> {found.repaired[key]:.1%}{beside}")
        typer.echo(f"answers changed: {found.changed:.1%}")
        typer.echo(shown(found.verdict))
    spec = done.trained.spec
    where = None if spec is None or spec.data is None else shlex.quote(str(spec.data))
    step = f"evaluate {shlex.quote(out)} --data {where}" if where else f"audit {shlex.quote(out)}"
    say(f"{out}: written; next: dear {step}")
