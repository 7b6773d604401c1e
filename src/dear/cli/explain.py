"""`dear explain`: why a run answers as it does."""

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
    device_named,
    print_json,
    say,
    stages,
)

if TYPE_CHECKING:
    from dear._io.progress import Progress
    from dear.runs.explain import Explainer


def explain(
    run: Run,
    images: Annotated[
        list[str] | None,
        typer.Argument(help="Images, folders or patterns; leave out to explain --data.", show_default=False),
    ] = None,
    answer: Annotated[
        str | None, typer.Option("--class", help="The class to explain; else each image's answer.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="The class to compare with; else the runner-up.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="Alone: a labeled set to explain. Beside images: reference images, else the run's own.",
        ),
    ] = None,
    split: Annotated[
        str, typer.Option("--split", help="Of the set to explain: train, test, val or all.")
    ] = "test",
    out: Annotated[str | None, typer.Option("--out", "-o", help="The page to write.")] = None,
    roles: Roles = None,
    mode: Mode = None,
    data_root: DataRoot = None,
    backbone: OwnBackbone = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Say why: the score of an answer as a sum over heads and patches, and the answer without a role.

    With images: bars per role for the answer and the runner-up, heatmaps, the most telling heads, the most
    alike reference images, and what the answer would be without each role and concept. With --data alone:
    which roles carry right and wrong answers, and images answered for an unusual reason.

    Examples:

    `dear explain run photo.jpg --out why.html`

    `dear explain run photo.jpg --class dog --against wolf --json`

    `dear explain run --data photos/ --out why.html`
    """
    from dear.errors import UsageError
    from dear.runs.model import Model
    from dear.workflows.explain import check_question, explainer_of

    if not images and data is None:
        raise UsageError("name images to explain, or a labeled set with --data")
    model = Model.of(run, backbone, device_named(device))
    check_question(model, answer, against)
    if not images and (answer or against):
        raise UsageError("--class and --against are for single images; a set is explained by its answers")
    with stages() as progress:
        explainer = explainer_of(model, data if images else None, data_root, roles, mode, progress)
        if images:
            _images(explainer, images, answer, against, out, as_json, progress)
        else:
            _set(explainer, str(data), split, data_root, out, as_json, progress)
    if out is not None and not as_json:
        say(f"{out}: written")


def _images(
    explainer: Explainer,
    names: list[str],
    answer: str | None,
    against: str | None,
    out: str | None,
    as_json: bool,
    progress: Progress,
) -> None:
    from dear._io.image_file import find_images
    from dear.report.explain_page import write_explain_page
    from dear.workflows.explain import page_facts, read_images

    files = find_images(names)
    found = explainer.explain(files, answer, against, progress)
    if out is not None:
        write_explain_page(page_facts(explainer, found, read_images(files)), out)
    if as_json:
        print_json({"images": [one.facts() for one in found]})
        return
    for one in found:
        typer.echo(f"{shown(one.image)}: {shown(one.sentence)}")
    for notice in dict.fromkeys(notice for one in found for notice in one.notices):
        say(f"notice: {notice}")


def _set(
    explainer: Explainer,
    data: str,
    split: str,
    root: str | None,
    out: str | None,
    as_json: bool,
    progress: Progress,
) -> None:
    from dear.data.open import open_data
    from dear.report.explain_page import write_explain_page
    from dear.runs.explain_set import explain_set
    from dear.workflows.explain import set_facts

    images = open_data(data, split, root=root)
    found = explain_set(explainer, images, progress)
    facts = set_facts(explainer, found, images)
    if out is not None:
        write_explain_page(facts, out)
    if as_json:
        print_json(found.facts())
        return
    for row in facts.table.rows:
        typer.echo(shown(f"{row[0]}, {row[3]} images answered {row[1]}: mostly by {row[2]}"))
    for notice in found.notices:
        say(f"notice: {notice}")
