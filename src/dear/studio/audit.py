"""The Audit tab: whether a concept predicts the labels, whether the model uses it, answers without it."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.report.page import Thumbnail, render, thumbnail
from dear.runs.answer import NONE_OF_THESE, Answer
from dear.runs.model import Model
from dear.studio.state import StudioState
from dear.tasks.audit.held_out import without
from dear.tasks.audit.page import AuditPage
from dear.tasks.audit.result import Audit
from dear.tasks.audit.task import audit
from dear.utils.progress import Progress

SHOTS = 16  #: images per class


class Auditor:
    """Audits the model of the studio."""

    def __init__(self, state: StudioState) -> None:
        self.state = state
        self._last: tuple[tuple[str, str, int], Audit] | None = None

    def data(self, data: str, model: Model) -> str | ImageSet | None:
        """The visitor's data; else None, for the training images of the model; else the studio's images."""
        name = data.strip()
        if name:
            if not self.state.local and not name.startswith("world:"):
                raise UsageError(f"{name}: an open studio audits its own images and world:NAME only")
            return name
        if model.spec is not None and model.spec.data is not None:
            return None
        known = [each for each in self.state.images.classes if each in set(model.classes)]
        if len(known) < 2:
            raise UsageError(
                f"{self.state.images.name}: must have at least 2 classes of the model, got {len(known)}; "
                "name the training images of the model"
            )
        return self.state.images.select_classes(known)

    def find(self, concept: str, data: str = "", progress: Progress | None = None) -> Audit:
        """The audit of one concept."""
        model = self.state.model
        key = (concept, data.strip(), self.state.version)
        if self._last is None or self._last[0] != key:
            result = audit(
                model,
                self.data(data, model),
                concept=concept,
                shots=SHOTS,
                roles=self.state.roles,
                progress=progress,
            )
            self._last = (key, result)
        return self._last[1]

    def answers(
        self,
        images: Sequence[tuple[str, Image.Image]],
        concept: str,
        data: str = "",
        progress: Progress | None = None,
        without_it: bool = True,
    ) -> list[Thumbnail]:
        """The model's answers for uploaded images, with and optionally without the concept."""
        model = self.state.model
        opened = [image for _, image in images]
        models = [model]
        if without_it:
            models.append(self._without(model, concept, data, progress))
        shown = []
        answers = [each.answers(opened, top=1) for each in models]
        for (name, image), *rows in zip(images, *answers, strict=True):
            words = [_words(answer) for answer in rows]
            lines = [("name", name), ("soft", f"with: {words[0][0]}{words[0][1]}")]
            if without_it:
                same = words[0][0] == words[1][0]
                line = f"without: {words[1][0]}{words[1][1]}{'' if same else ' (changed)'}"
                lines.append(("soft" if same else "wrong", line))
            shown.append(Thumbnail(thumbnail(image), name, tuple(lines)))
        return shown

    def _without(self, model: Model, concept: str, data: str, progress: Progress | None) -> Model:
        """The model with the concept removed, as in the audit; nothing is trained."""
        removals = self.find(concept, data, progress).removals
        if not removals:
            raise UsageError(
                f"{concept}: cannot be removed; the backbone knows no word of it and no head has this role"
            )
        return without(model, next(iter(removals.values())))


def _words(answer: Answer) -> tuple[str, str]:
    """The answer in words, and its probability; of several labels all answered ones."""
    if answer.labels is not None:
        return ", ".join(answer.labels) or NONE_OF_THESE, ""
    name, probability = answer.classes[0]
    return name, f" {probability:.1%}"


def audit_html(result: Audit) -> str:
    """The verdict and its evidence."""
    page = AuditPage(result, {})
    return render("studio/audit.html", audit=result, page=page, finding=result.concepts[0])


def answers_html(concept: str, images: Sequence[Thumbnail], without_it: bool = True) -> str:
    """Answers with and optionally without a concept."""
    title = f"Answers for your images with and without {concept}" if without_it else "Answers for your images"
    return render("studio/gallery.html", title=title, images=images)
