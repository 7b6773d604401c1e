"""`dear explain`: why a run answers as it does."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from dear.cli.options import DataRoot, Device, Json, Mode, OwnBackbone, Roles, Run, Threads, device_named
from dear.cli.printing import echo, print_json, say, stages
from dear.errors import UsageError


def explain(
    run: Run,
    images: Annotated[
        list[str] | None,
        Argument(help="Images, folders or patterns; leave out to explain --data.", show_default=False),
    ] = None,
    answer: Annotated[
        str | None, Option("--class", help="The class to explain; else each image's answer.")
    ] = None,
    against: Annotated[str | None, Option(help="The class to compare with; else the runner-up.")] = None,
    data: Annotated[
        str | None,
        Option(
            "--data",
            "-d",
            help="Alone: a labeled set to explain. Beside images: reference images, else the run's own.",
        ),
    ] = None,
    split: Annotated[str, Option(help="Of the set to explain: train, test, val or all.")] = "test",
    out: Annotated[str | None, Option("--out", "-o", help="The page to write.")] = None,
    roles: Roles = None,
    mode: Mode = None,
    data_root: DataRoot = None,
    backbone: OwnBackbone = None,
    device: Device = "auto",
    threads: Threads = None,
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
    from dear.data.open import open_data
    from dear.images.views import find_images, open_image
    from dear.runs.model import Model
    from dear.tasks.explain.dataset import explain_set
    from dear.tasks.explain.page import write_explain_page
    from dear.tasks.explain.task import check_question, explainer_of, page_facts, set_facts

    if not images and data is None:
        raise UsageError("name images to explain, or a labeled set with --data")
    model = Model.of(run, backbone, device_named(device))
    check_question(model, answer, against)
    if not images and (answer or against):
        raise UsageError("--class and --against are for single images; a set is explained by its answers")
    with stages() as progress:
        explainer = explainer_of(model, data if images else None, data_root, roles, mode, progress)
        if images:
            files = find_images(images)
            found = explainer.explain(files, answer, against, progress)
            if out is not None:
                write_explain_page(page_facts(explainer, found, [open_image(name) for name in files]), out)
            facts: dict[str, object] = {"images": [one.facts() for one in found]}
            lines = [f"{one.image}: {one.sentence}" for one in found]
            notices = dict.fromkeys(notice for one in found for notice in one.notices)
        else:
            labeled = open_data(str(data), split, root=data_root)
            whole = explain_set(explainer, labeled, progress)
            page = set_facts(explainer, whole, labeled)
            if out is not None:
                write_explain_page(page, out)
            facts = whole.facts()
            lines = [
                f"{name}, {count} images answered {right}: mostly by {part}"
                for name, right, part, count, *_ in page.table.rows
            ]
            notices = dict.fromkeys(whole.notices)
    if as_json:
        print_json(facts)
        return
    for line in lines:
        echo(line)
    for notice in notices:
        say(f"notice: {notice}")
    if out is not None:
        say(f"{out}: written")
