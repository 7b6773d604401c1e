"""Measures an adapted model against the frozen one, for reports and the studio."""

from __future__ import annotations

from dear.data.images import ImageSet
from dear.errors import DataError
from dear.methods.zeroshot import ZeroShot
from dear.runs.model import Model, Run
from dear.tasks.run_report.facts import Compared, NewClasses, RunFacts
from dear.utils.progress import Progress


def examine(
    run: Run,
    images: ImageSet,
    other: ImageSet | None = None,
    mode: str | None = None,
    progress: Progress | None = None,
    among_all: bool = True,
) -> RunFacts:
    """Measure an adapted model against the frozen one.

    Args:
        run: run folder, method or model.
        images: labeled test images; classes among them that the model was not trained on count as new.
        other: another set, all of whose classes count as new.
        mode: the mode to report on; None for the usual one.
        progress: called with ("images", images done, images in all).
        among_all: also measure new classes among the trained ones, which reads their images again.

    Raises:
        DataError: no image is of a class the model was trained on.
    """
    model = Model.of(run)
    method, mode = model.method, model.pick_mode(mode)
    trained_names = set(method.classes)
    known = [name for name in images.classes if name in trained_names]
    others = [name for name in images.classes if name not in trained_names]
    if not known:
        raise DataError(
            f"{images.name}: has none of the classes the model was trained on "
            f"({', '.join(method.classes[:3])}…); name images of those classes",
            hint="report-data",
        )
    trained_images = images if not others else images.select_classes(known)
    new_images = other if other is not None else (images.select_classes(others) if others else None)
    passes = 4 if among_all else 2
    total = _TotalProgress(
        progress, 2 * len(trained_images) + passes * (len(new_images) if new_images else 0)
    )
    new, why = None, ""
    trained = _compare(model, trained_images, mode, total)
    if new_images is None or len(new_images) == 0:
        why = "not measured: the test images show none"
    elif not method.open_classes:
        why = f"not measured: {method.title} answers with the classes that it was trained on only"
    else:
        new = _new_classes(model, new_images, mode, total, among_all)
    weights = method.learned_values().get("fusion_weights", {})
    gates = dict(method.named_buffers()).get("history")
    return RunFacts(
        method=method.title,
        classes=method.classes,
        backbone=f"{method.clip.name} ({method.clip.fingerprint[:19]}…)",
        template=method.template,
        parameters=method.learned_parameters,
        trained=trained,
        new=new,
        why_no_new=why,
        fusion_weights={str(name): float(value) for name, value in weights.items()},
        gates=gates.detach().cpu().clone() if gates is not None and gates.numel() else None,
        zero_shot=isinstance(method, ZeroShot),
    )


class _TotalProgress:
    """Adds up the progress of several evaluations."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.before = progress, total, 0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if self.progress is not None:
            self.progress(stage, min(self.before + done, self.total), self.total)
        if done == total:
            self.before += done


def _compare(model: Model, images: ImageSet, mode: str, progress: Progress) -> Compared:
    fitting, _ = model.for_labels(images)
    adapted = fitting.evaluate(images, progress=progress)
    return Compared(images, adapted, fitting.zero_shot().evaluate(images, progress=progress), mode)


def _new_classes(
    model: Model, images: ImageSet, mode: str, progress: Progress, among_all: bool
) -> NewClasses:
    """New classes among themselves, and, if wanted, among the trained ones where no name is both."""
    alone = _compare(model.with_classes(images.classes, images.template), images, mode, progress)
    if not among_all or set(model.classes) & set(images.classes):
        return NewClasses(alone, None, 0)
    every = model.with_classes(images.classes, add=True)
    return NewClasses(alone, _compare(every, images, mode, progress), len(model.classes))
