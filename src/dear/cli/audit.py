"""`dear audit` and `dear repair`: shortcuts found and removed."""

from __future__ import annotations

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
        "--way", help="auto, words, heads, examples, leace, or several with a plus sign (heads+words)."
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
        help='Concepts to remove: location,color or your own, "background: lab bench, outdoors".',
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("audit")(audit)
    app.command("repair")(repair)


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
    """Find concepts that go with the labels and that a model relies on: suspected shortcuts.

    No group labels are needed. With a column `group` or `domain` in the table, accuracy in the worst group of
    class and value is measured, too.

    Examples:

    `dear audit --data world:shortcut-place@0.95 --backbone mini`

    `dear audit run --out audit.html`

    `dear audit run --concept "background: lab bench, outdoors, conveyor belt" --json`
    """
    from dear.errors import UsageError
    from dear.workflows.audit import AuditOptions
    from dear.workflows.audit import audit as examine
    from dear.workflows.evaluate import run_images

    if run is None and data is None:
        raise UsageError("name a run folder, or images with --data")
    images = data if data is not None else run_images(str(run), split)
    asked = AuditOptions(
        concepts=tuple(concept or ()),
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
    with stages() as told:
        found = examine(images, run, asked, told)
    if out is not None:
        from dear.report.audit_page import write_audit_page
        from dear.workflows.audit_evidence import evidence

        write_audit_page(evidence(found, _next_steps(found, run)), out)
    if as_json:
        print_json(found.report())
        return
    _print(found)
    if out is not None:
        say(f"{out}: written")


def _next_steps(found: Audit, run: str | None) -> dict[str, str]:
    """Commands that remove what is suspected."""
    names = ",".join(finding.association.concept.lower() for finding in found.suspects)
    if not names:
        return {}
    if run is None:
        command = f"dear adapt --data {found.images.name} --without {names} --out run"
        return {"Train with the concept removed from the image feature:": command}
    command = f"dear repair {run} --without {names} --out {run}-repaired"
    return {"Train the same model again without it, and compare with random heads:": command}


def _print(found: Audit) -> None:
    """A table of concepts, then one sentence per suspected shortcut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    model = "" if found.method is None else f" and {found.method.title}"
    table = Table(title=Text(f"{found.images.name}{model}: {len(found.images)} images"), header_style="bold")
    for name in ("concept", "verdict"):
        table.add_column(name)
    columns = ("information", "by chance", "p", "answers changed", "margin lost")
    for name in columns if found.method is not None else columns[:3]:
        table.add_column(name, justify="right")
    for finding in found.findings:
        about, used = finding.association, finding.reliance
        told = () if used is None else (f"{used.changed:.0%}", f"{used.lost:.0%}")
        table.add_row(
            Text(about.concept),
            Text(finding.title),
            f"{about.information:.2f}",
            f"{about.expected:.2f}",
            f"{about.p_value:.3f}",
            *told,
        )
    Console().print(table)
    for finding in found.suspects:
        typer.echo(shown(finding.sentence))
    if not found.suspects:
        typer.echo("No shortcut is suspected among these concepts.")
    elif found.method is None:
        names = ",".join(finding.association.concept.lower() for finding in found.suspects)
        typer.echo(f"Next: dear adapt --data {found.images.name} --without {shown(names)} --out run")
    if found.worst_group is not None:
        typer.echo(f"worst group: {shown(found.worst_group[0])}, {found.worst_group[1]:.1%}")


def read_examples(examples: list[str] | None, concepts: list[str]) -> dict[str, str]:
    """`--examples FOLDER` or `CONCEPT=FOLDER` as a mapping.

    Raises:
        UsageError: several concepts and a folder without a concept.
    """
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


def asked_without(
    without: list[str] | None, way: str = "auto", examples: list[str] | None = None
) -> Without | None:
    """What `--without`, `--way` and `--examples` say together; None without the first.

    Raises:
        UsageError: --way or --examples stand alone, or do not fit.
    """
    from dear.errors import UsageError
    from dear.heads.values import find_concept
    from dear.heads.without import Without

    if not without:
        if examples or way != "auto":
            raise UsageError("--way and --examples say how to remove a concept; name it with --without")
        return None
    names = concept_names(without)
    found = read_examples(examples, names)
    for name in names:
        if name not in found:
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
    prove: Annotated[
        bool,
        typer.Option(
            "--prove/--no-prove",
            help="Compare with the untouched model and with random heads on test images.",
        ),
    ] = True,
    backbone: OwnBackbone = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a run again, on the same images and in the same way, with a concept removed.

    Examples:

    `dear repair run --without location --out repaired`

    `dear repair run --without lighting --examples lightings/ --out repaired`
    """
    from dear.workflows.repair import repair_run

    asked = asked_without(without, way, examples)
    assert asked is not None
    with stages() as told:
        done = repair_run(
            str(run),
            asked,
            out,
            data=data,
            roles=roles,
            backbone=backbone,
            device=device_named(device),
            prove=prove,
            progress=told,
        )
    assert done.removal is not None
    if as_json:
        proof = {} if done.proof is None else done.proof.report()
        print_json({"run": out, **done.removal.facts(), **proof})
        return
    _print_repair(done, out)


def _print_repair(done: Repaired, out: str) -> None:
    assert done.removal is not None
    typer.echo(f"removed: {shown(done.removal.repair.title)}")
    for notice in done.removal.notices:
        say(f"notice: {notice}")
    if done.proof is not None:
        proof = done.proof.report()
        for key, words in (("accuracy", "accuracy"), ("worst_group", "worst group")):
            if key in proof["untouched"]:
                mean = proof["random_heads"]["mean"].get(key)
                beside = "" if mean is None else f"; without as many random heads {mean:.1%}"
                typer.echo(f"{words}: {proof['untouched'][key]:.1%} -> {proof['repaired'][key]:.1%}{beside}")
        typer.echo(f"answers changed: {proof['answers_changed']:.1%}")
    say(f"{out}: written; next: dear evaluate {out} --data …")
