"""`dear roles`: discover, show and report what each head does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, print_table, say, stages

if TYPE_CHECKING:
    from dear.heads.roles import RoleMap

group = typer.Typer(no_args_is_help=True, help="Find out, show, or report what each attention head does.")
File = Annotated[Path, Argument(help="A role map, roles.json; or the name table2.", show_default=False)]


@group.command("discover")
def discover(
    images: Annotated[
        str | None,
        Option("--images", "-i", help="Images in any form that --data takes; labels are not used."),
    ] = None,
    out: Annotated[Path, Option("--out", "-o", help="The role map to write.")] = Path("roles.json"),
    backbone: opt.Backbone = "mini",
    data_root: opt.DataRoot = None,
    split: Annotated[
        str | None,
        Option(help="Part of the data: train, test, val, or all (default: train, or the named folder)."),
    ] = None,
    source: Annotated[
        str, Option("--from", help="Find roles from images, or from weights alone.")
    ] = "images",
    rule: Annotated[
        str, Option(help="dominant: by share of a concept; quantile: by entropy; table2: the paper's.")
    ] = "dominant",
    value: Annotated[
        float | None, Option(help="Threshold of the rule: tau (dominant, 0.35) or q (quantile, 0.20).")
    ] = None,
    layers: Annotated[
        str | None, Option(help="Layers from 1, as 9-12 or 9,11 (default: the last third).")
    ] = None,
    corpus: Annotated[
        str | None, Option(help="Phrases to pick from: general, world, or a .txt/.jsonl file.")
    ] = None,
    phrases: Annotated[
        int | None, Option(help="Phrases per head (default: 20 for heads of width 64).")
    ] = None,
    concepts: Annotated[
        str, Option(help="How phrases become concepts: clusters (HDBSCAN), fixed (twelve names), or tags.")
    ] = "clusters",
    sentences: Annotated[str | None, Option(help="A sentence-transformers model or folder.")] = None,
    batch: Annotated[int, Option(help="Images at once.")] = 64,
    unreadable: opt.Unreadable = "stop",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Find the role of every head of the last layers, for this checkpoint.

    After an interruption the same command continues where it was.

    Examples:

    `dear roles discover --backbone mini --images world:mixed --out roles.json`

    `dear roles discover --backbone mini --from weights --concepts tags --out roles.json`

    `dear roles discover --backbone openai/clip-vit-base-patch16 --images photos/ --rule quantile`
    """
    from dear.tasks.roles.task import discover as discover_map

    with stages() as progress:
        role_map = discover_map(
            images,
            out,
            backbone=backbone,
            data_root=data_root,
            split=split,
            source=source,
            rule=rule,
            value=value,
            layers=layers,
            corpus=corpus,
            phrases=phrases,
            concepts=concepts,
            sentences=sentences,
            batch=batch,
            unreadable=unreadable,
            device=device,
            progress=progress,
        )
    say(f"{out}: {len(role_map)} heads, {_counts(role_map)}")
    _print_quality(role_map)


@group.command("show")
def show(
    file: File,
    phrases: Annotated[int, Option(help="Phrases to show per head.")] = 3,
    masks: Annotated[
        bool, Option("--masks", help="Show DeAR's attention masks that follow from the roles.")
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Print a role map as a table, or the masks that DeAR derives from it.

    Examples:

    `dear roles show roles.json`

    `dear roles show table2 --masks`
    """
    from dear.heads.known_roles import read_roles
    from dear.tasks.roles.task import role_report

    roles = read_roles(file)
    if as_json:
        print_json(role_report(roles))
        return
    if masks:
        from dear.methods.role_masks import draw_mask, layer_mask

        for layer in roles.layers:
            echo(f"layer {layer}   rows read columns; or = class token and patches, # seen, · hidden")
            echo(draw_mask(layer_mask(roles, layer, roles.core), roles.core))
        return
    _table(roles, phrases)


@group.command("report")
def report(
    file: File,
    out: opt.PageOut = Path("roles.html"),
    images: Annotated[
        str | None, Option("--images", "-i", help="Images to show what activates each head.")
    ] = None,
    backbone: Annotated[
        str | None, Option("--backbone", "-b", help="Backbone (default: the one that the map was made on).")
    ] = None,
    data_root: opt.DataRoot = None,
    limit: Annotated[int, Option(help="Largest number of images to use.")] = 1000,
    allow_other_roles: Annotated[
        bool, Option("--allow-other-roles", help="Show a role map that was made on other weights.")
    ] = False,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Write one page about the heads; with images it shows what activates each head and where it looks.

    Example: `dear roles report roles.json --images world:mixed --out page.html`
    """
    from dear.tasks.roles.task import report as write_page

    with stages() as progress:
        page = write_page(
            file,
            out,
            images=images,
            backbone=backbone,
            data_root=data_root,
            limit=limit,
            allow_other_roles=allow_other_roles,
            device=device,
            progress=progress,
        )
    say(f"{page}: written")


def _print_quality(roles: RoleMap) -> None:
    """The stability of a new map, and warnings about it."""
    from dear.heads.stability import role_map_warnings

    stability = roles.evidence.get("stability")
    if isinstance(stability, dict):
        say(
            f"stability: {stability['share']:.1%} of the heads keep their role when the "
            f"{stability.get('over', 'images')} are drawn again ({stability['chance']:.1%} by chance)"
        )
    share = roles.evidence.get("linear_share")
    if isinstance(share, float):
        say(
            f"attention pooling: {share:.1%} of the image feature is split among heads; the rest passes the "
            "pooling MLP and belongs to none"
        )
    for sentence in role_map_warnings(roles) if roles.evidence else []:
        say(f"notice: {sentence}")


def _table(roles: RoleMap, phrases: int) -> None:
    from rich.text import Text

    if caveat := roles.caveat():
        say(f"notice: {caveat} Roles and concepts are not shown; --json has them.")
        entropies = [
            (f"{layer:5}", f"{head:4}", f"{role.entropy or 0:7.2f}") for (layer, head), role in roles
        ]
        print_table(("layer", "head", "entropy"), entropies, roles.backbone)
        return
    colors = {"core": "green", "other": "cyan", "generalization": "magenta", "mixed": "yellow"}
    rows = [
        (
            f"{layer:5}",
            f"{head:4}",
            Text(role.kind, style=colors[role.kind]),
            role.concept or "",
            "" if role.entropy is None else f"{role.entropy:7.2f}",
            "; ".join(role.phrases[:phrases]),
        )
        for (layer, head), role in roles
    ]
    columns = ("layer", "head", "role", "concept", "entropy", "phrases")
    print_table(columns, rows, f"{roles.backbone or 'any backbone'}, rule {roles.rule}", labels=6)
    echo(f"{len(roles)} heads: {_counts(roles)}")


def _counts(roles: RoleMap) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in roles.counts().items())
