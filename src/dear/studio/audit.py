"""The Audit tab: how a concept goes with the labels, how the model relies on it, and answers without it."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.report.page import Thumbnail, render, thumbnail
from dear.runs.model import Model
from dear.studio.state import StudioState
from dear.tasks.audit.page import AuditPage
from dear.tasks.audit.reliance import without
from dear.tasks.audit.task import Audit, audit
from dear.utils.progress import Progress

SHOTS = 16  #: images per class that are looked at


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
                raise UsageError(
                    "this studio is open to other computers, so its folders cannot be named here"
                )
            return name
        if model.spec is not None and model.spec.data is not None:
            return None
        known = [each for each in self.state.images.classes if each in set(model.classes)]
        if len(known) < 2:
            raise UsageError("name the images that the model was trained on: a folder, a table or world:NAME")
        return self.state.images.select_classes(known)

    def find(self, concept: str, data: str = "", progress: Progress | None = None) -> Audit:
        """The audit of one concept."""
        model = self.state.find_model(progress)
        key = (concept, data.strip(), self.state.version)
        if self._last is None or self._last[0] != key:
            found = audit(
                model,
                self.data(data, model),
                concept=concept,
                shots=SHOTS,
                roles=self.state.roles,
                progress=progress,
            )
            self._last = (key, found)
        return self._last[1]

    def answers(
        self,
        images: Sequence[tuple[str, Image.Image]],
        concept: str,
        data: str = "",
        progress: Progress | None = None,
        without_it: bool = True,
    ) -> list[Thumbnail]:
        """The model's answers for a visitor's images, and if wanted those without the concept."""
        model = self.state.find_model(progress)
        opened = [image for _, image in images]
        answers = [model.probabilities(opened)]
        if without_it:
            answers.append(self._without(model, concept, data, progress).probabilities(opened))
        shown = []
        for (name, image), *rows in zip(images, *answers, strict=True):
            best = [(model.classes[int(row.argmax())], float(row.max())) for row in rows]
            lines = [("name", name), ("soft", f"with: {best[0][0]} {best[0][1]:.1%}")]
            if without_it:
                same = best[0][0] == best[1][0]
                line = f"without: {best[1][0]} {best[1][1]:.1%}{'' if same else ' (changed)'}"
                lines.append(("soft" if same else "wrong", line))
            shown.append(Thumbnail(thumbnail(image), name, tuple(lines)))
        return shown

    def _without(self, model: Model, concept: str, data: str, progress: Progress | None) -> Model:
        """The model with the concept removed, as the audit removes it; nothing is trained."""
        removals = self.find(concept, data, progress).removals
        if not removals:
            raise UsageError(f"{concept}: this backbone reads none of its words, and no head has that role")
        return without(model, next(iter(removals.values())))


def audit_html(result: Audit) -> str:
    """The verdict and its evidence."""
    page = AuditPage(result, {})
    return render("studio/audit.html", audit=result, page=page, finding=result.concepts[0])


def answers_html(concept: str, images: Sequence[Thumbnail], without_it: bool = True) -> str:
    """Answers with a concept, and without it if they are wanted."""
    title = f"Your images with and without {concept}" if without_it else "Your images as the model answers"
    return render("studio/gallery.html", title=title, images=images)
