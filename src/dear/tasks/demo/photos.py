"""The demo on a user's own photos: audit, adaptation, explanations, and what the heads do; one page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dear.clip.model import Clip
from dear.data.images import ImageSet, even_subset
from dear.data.open import open_data
from dear.errors import DataError
from dear.heads.roles import RoleMap
from dear.report.head_map import head_map, kind_meanings
from dear.report.page import Table, percent, render
from dear.runs.model import Model
from dear.tasks.adapt import adapt
from dear.tasks.audit.page import summary_html
from dear.tasks.audit.result import Audit
from dear.tasks.audit.task import audit
from dear.tasks.demo.parts import PrintLine, TimedParts
from dear.tasks.evaluate import open_held_out
from dear.tasks.explain.explanation import Explanations
from dear.tasks.explain.page import explanation_values
from dear.tasks.explain.task import explainer_of
from dear.tasks.load import load_backbone
from dear.tasks.roles.evidence import measure_heads
from dear.tasks.roles.page import write_roles_page
from dear.tasks.roles.quality import specialization_notice
from dear.tasks.run_report.examine import examine
from dear.tasks.run_report.facts import RunFacts
from dear.tasks.run_report.page import gallery, spread_rows
from dear.train.setup.roles import roles_for
from dear.utils.files import PathLike, check_output, write_atomic, write_json

METHODS = ("proker", "linear-probe")  #: seconds each; the second is decomposed exactly, so it is explained
SHOTS, SEED = 16, 1
TERMS = {
    "zero-shot": "the frozen backbone, before adaptation: it compares an image with a prompt for each class",
    "accuracy": "the share of test images with the right answer; points are differences in percent",
    "shortcut": "something other than the class that is associated with the labels, and that the model uses",
    "head": "one of the parallel attention units of a layer; each adds a vector to the image feature",
    "MLPs": "the parts of the layers outside the heads",
}
_TEST_IMAGES, _SHOWN_IMAGES, _CHANGED = 500, 300, 6


@dataclass(frozen=True)
class PhotoDemo:
    """What the demo measured on photos."""

    data: str
    backbone: str
    runs: Mapping[str, RunFacts]  #: by method
    audit: Audit
    explained: Explanations  #: one right and one wrong answer, where there are both
    roles: RoleMap
    seconds: Mapping[str, float] = field(default_factory=dict)  #: per part of the demo
    next_steps: Mapping[str, str] = field(default_factory=dict)  #: what to do next -> the command

    @property
    def best(self) -> RunFacts:
        """The run with the highest accuracy."""
        return max(self.runs.values(), key=lambda run: run.trained.accuracies()[run.trained.mode])

    def results(self) -> dict[str, Any]:
        """Every figure of the page, as plain values."""
        return {
            "data": self.data,
            "backbone": self.backbone,
            "seconds": dict(self.seconds),
            "accuracy": {name: run.trained.accuracies() for name, run in self.runs.items()},
            "audit": self.audit.to_dict(),
            "explained": self.explained.to_dict(),
            "roles": {"counts": self.roles.counts(), "caveat": self.roles.caveat()},
        }


def photo_demo(
    out: PathLike,
    data: PathLike,
    backbone: PathLike | Clip,
    *,
    root: PathLike | None = None,
    device: str = "auto",
    progress: PrintLine = print,
) -> PhotoDemo:
    """The demo on photos; `out` then has run folders, pages, `results.json` and `index.html`.

    Args:
        out: folder for everything. A second demo in the same folder uses the runs of the first.
        data: labeled photos, what `open_data` takes, with held-out images.
        backbone: what `load` takes, or a loaded backbone.
        root: folder of the benchmarks, for the name of one.
        device: "auto", "cpu", "cuda", …
        progress: called with lines for the reader.

    Raises:
        DataError: no images are held out for testing.
    """
    check_output(out, folder=True)
    folder, timed = Path(out), TimedParts()
    train, test = open_data(data, "train", root=root), open_held_out(data, root)
    if test is None:
        raise DataError(f"{data}: has no held-out images; the demo needs two images or more per class")
    test = even_subset(test, _TEST_IMAGES)
    clip = load_backbone(backbone, device)
    sizes = f"{len(train)} training and {len(test)} test images of {len(train.classes)} classes"
    progress(f"{train.name}: {sizes}")

    progress(f"1. Adaptation, {SHOTS} images per class at most")
    with timed("adaptation"):
        models = {
            name: adapt(
                data,
                folder / f"run-{name}",
                method=name,
                backbone=clip,
                shots=SHOTS,
                seed=SEED,
                data_root=root,
                unreadable="skip",
                check=False,
                resume=True,
            )
            for name in METHODS
        }
        runs = {name: examine(model, test) for name, model in models.items()}
    for run in runs.values():
        accuracy = run.trained.accuracies()
        progress(
            f"   {run.method:14} {accuracy[run.trained.mode]:6.1%}   zero-shot {accuracy['zero-shot']:6.1%}"
        )
    probe = models["linear-probe"]
    progress("2. What the heads do")
    with timed("roles"):
        roles, _ = roles_for(clip, train, None)
    progress(f"   {_roles_sentence(roles)}")
    progress("3. Shortcuts in the images, and whether the linear probe uses them")
    with timed("audit"):
        audited = audit(
            probe, data, roles=roles, shots=SHOTS, seed=SEED, data_root=root, backbone=clip, held_out=test
        )
    audited = replace(audited, run=str(folder / "run-linear-probe"))  # what `next_steps` repairs
    progress(f"   {audited.verdict}")
    progress("4. Why this answer")
    with timed("explanations"):
        explained = _explain(probe, test, runs["linear-probe"], roles)
    for one in explained:
        progress(f"   {one.image}: {one.sentence}")
    photos, weights = shlex.quote(str(data)), shlex.quote(str(clip.name if clip is backbone else backbone))
    first = shlex.quote(str(folder / f"run-{METHODS[0]}"))
    steps = {
        "Answer new images:": f"dear predict {first} image.jpg",
        "Measure accuracy per class:": f"dear evaluate {first} --data {photos}",
        "Compare more methods on your images:": f"dear choose --data {photos} --backbone {weights}",
        "List labels that look wrong:": f"dear data check {photos} --backbone {weights}",
    }
    result = PhotoDemo(train.name, clip.name, runs, audited, explained, roles, timed.seconds, steps)
    progress("5. Pages")
    with timed("pages"):
        _write_pages(result, folder, clip, test)
    write_json(folder / "results.json", result.results())
    return result


def _explain(model: Model, test: ImageSet, run: RunFacts, roles: RoleMap) -> Explanations:
    """The first right answer, and the most confident wrong one."""
    compared = run.trained
    right = (compared.answers == compared.labels).nonzero()[:1, 0].tolist()
    rows = [*right, *compared.most_wrong(1)]
    return explainer_of(model, roles=roles).explain(compared.images.subset(rows))


def _roles_sentence(roles: RoleMap) -> str:
    counts = ", ".join(f"{number} {kind}" for kind, number in roles.counts().items())
    notice = specialization_notice(roles)
    return f"{notice} The heads of this backbone are hardly specialized." if notice else counts


def _write_pages(demo: PhotoDemo, folder: Path, clip: Clip, test: ImageSet) -> None:
    """The page of the demo, and a page in full per part."""
    demo.audit.write_page(folder / "audit.html")
    demo.explained.write_page(folder / "why.html")
    demo.best.write_page(folder / "report.html")
    evidence = measure_heads(demo.roles, clip, even_subset(test, _SHOWN_IMAGES), allow_other=True)
    write_roles_page(demo.roles, folder / "heads.html", evidence)
    write_atomic(folder / "index.html", photo_page(demo))


def photo_page(demo: PhotoDemo) -> str:
    """The page as HTML text."""
    best, rows, marks = demo.best, [], []
    for run in demo.runs.values():
        accuracy = run.trained.accuracies()
        rows.append((run.method, percent(accuracy[run.trained.mode]), percent(accuracy["zero-shot"])))
        marks.append("best" if run is best else "")
    compared, groups = best.trained, best.trained.changes()
    accuracy = compared.accuracies()
    gain = 100 * (accuracy[compared.mode] - accuracy["zero-shot"])
    caveat = specialization_notice(demo.roles)
    suspects = len(demo.audit.suspects)
    return render(
        "demo_photos.html",
        title=f"dear on {demo.data}",
        demo=demo,
        seconds=sum(demo.seconds.values()),
        tiles=[
            (percent(accuracy[compared.mode]), f"accuracy of {best.method} from {SHOTS} images per class"),
            (f"{gain:+.1f}", f"points compared with zero-shot’s {percent(accuracy['zero-shot'])}"),
            (str(suspects), f"suspected shortcut{'s' * (suspects != 1)}"),
            (str(len(compared.labels)), "test images"),
        ],
        accuracies=Table(("method", "accuracy", "zero-shot"), tuple(rows), classes=tuple(marks)),
        fixed=gallery(compared, spread_rows(groups["fixed"], _CHANGED), "before"),
        wrong=gallery(compared, compared.most_wrong(_CHANGED)),
        audit_html=summary_html(demo.audit),
        explained=[explanation_values(one) for one in demo.explained],
        caveat=caveat,
        terms=TERMS,
        map=None if demo.roles.caveat() else head_map(demo.roles),
        kinds=kind_meanings(),
    )
