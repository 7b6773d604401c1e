"""Measures an adapted model against the frozen one, for reports and the studio."""

from __future__ import annotations

from dear._io.progress import Progress
from dear.data.images import ImageSet
from dear.errors import DataError
from dear.methods.base import Method
from dear.methods.zeroshot import ZeroShot
from dear.report.run_facts import Compared, NewClasses, RunFacts
from dear.runs.evaluate import evaluate


def examine(
    method: Method,
    images: ImageSet,
    other: ImageSet | None = None,
    mode: str | None = None,
    progress: Progress | None = None,
) -> RunFacts:
    """Measure an adapted model against the frozen one.

    Args:
        method: the adapted model.
        images: labeled test images; classes among them that the model was not trained on count as new.
        other: another set, all of whose classes count as new.
        mode: the mode to report on; None for the recommended one.
        progress: called with ("images", images done, images in all).

    Raises:
        DataError: no image is of a class the model was trained on.
    """
    mode, new_mode = recommended_modes(method) if mode is None else (method.pick_mode(mode),) * 2
    known = [name for name in images.classes if name in set(method.classes)]
    others = [name for name in images.classes if name not in set(method.classes)]
    if not known:
        raise DataError(
            f"{images.name}: has none of the classes the model was trained on "
            f"({', '.join(method.classes[:3])}…); give images of those classes",
            hint="report-data",
        )
    trained_images = images if not others else images.select_classes(known)
    new_images = other if other is not None else (images.select_classes(others) if others else None)
    told = _TotalProgress(progress, 2 * len(trained_images) + 4 * (len(new_images) if new_images else 0))
    new, why = None, ""
    if new_images is None or len(new_images) == 0:
        why = "The test images show no new class, so nothing was measured here."
    elif not method.open_classes:
        why = f"{method.title} learns its classes themselves: it cannot name new ones."
    trained = _compare(method, trained_images, mode, told)
    if new_images is not None and not why:
        new = _new_classes(method, new_images, new_mode, told)
    weights = method.facts().get("fusion_weights", {})
    gates = dict(method.named_buffers()).get("history")
    return RunFacts(
        method=method.title,
        classes=method.classes,
        backbone=f"{method.clip.name} ({method.clip.fingerprint[:19]}…)",
        template=method.template,
        parameters=method.trainable_parameters,
        trained=trained,
        new=new,
        why_no_new=why,
        fusion_weights={str(name): float(value) for name, value in weights.items()},
        gates=gates.detach().cpu().clone() if gates is not None and gates.numel() else None,
    )


def recommended_modes(method: Method) -> tuple[str, str]:
    """The recommended modes for trained and for new classes."""
    usual = method.pick_mode(None)
    return usual, usual


class _TotalProgress:
    """Adds up the progress of several evaluations."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.before = progress, total, 0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if self.progress is not None:
            self.progress(stage, min(self.before + done, self.total), self.total)
        if done == total:
            self.before += done


def _compare(method: Method, images: ImageSet, mode: str, told: _TotalProgress) -> Compared:
    adapted = evaluate(method, images, progress=told)
    same = tuple(adapted.classes) == method.classes
    words = method.prompts.given if same else None  # ids that were given stand for the method's own classes
    template = method.template if same else images.template
    frozen = ZeroShot(method.clip, adapted.classes, template=template, ids=words)
    return Compared(images, adapted, evaluate(frozen, images, progress=told), mode)


def _new_classes(method: Method, images: ImageSet, mode: str, told: _TotalProgress) -> NewClasses:
    alone = _compare(method.with_classes(images.classes, images.template), images, mode, told)
    shared = set(method.classes) & set(images.classes)
    if shared:
        return NewClasses(alone, None, 0)
    every = method.with_classes([*method.classes, *images.classes], method.template)
    return NewClasses(alone, _compare(every, images, mode, told), len(method.classes))
