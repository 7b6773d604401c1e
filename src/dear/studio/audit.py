"""The Audit tab: how a concept goes with the labels, how the model relies on it, and answers without it."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.data.shots import few_shot
from dear.errors import UsageError
from dear.heads.ablate import collect
from dear.heads.concept_words import find_concept
from dear.report.page import Thumbnail, render, thumbnail
from dear.runs.model import Model
from dear.shortcuts.without import role_map, ways_to_remove
from dear.studio.state import EXAMPLE, StudioState
from dear.tasks.audit.evidence import evidence
from dear.tasks.audit.reliance import without
from dear.tasks.audit.task import Audit, AuditOptions, audit
from dear.utils.progress import Progress

SHOTS = 16  #: images per class that are looked at


class Auditor:
    """Audits the model of the studio."""

    def __init__(self, state: StudioState) -> None:
        self.state = state

    def images(self, data: str, model: Model) -> ImageSet:
        """The images to audit: named by the visitor, else those of the studio that it has classes of."""
        name = data.strip()
        if name:
            if not self.state.local and not name.startswith("world:"):
                raise UsageError(
                    "this studio is open to other computers, so its folders cannot be named here"
                )
            return open_data(name, "train")
        if self.state.example:
            return open_data(EXAMPLE, "train").select_classes(model.classes)
        known = [each for each in self.state.images.classes if each in set(model.classes)]
        if len(known) < 2:
            raise UsageError("name the images that the model was trained on: a folder, a table or world:NAME")
        return self.state.images.select_classes(known)

    def find(self, concept: str, data: str = "", progress: Progress | None = None) -> Audit:
        """The audit of one concept."""
        model = self.state.find_model(progress)
        find_concept(concept)
        options = AuditOptions(concepts=(concept,), shots=SHOTS, roles=self.state.roles)
        return audit(self.images(data, model), model.method, options, progress)

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
        training = few_shot(self.images(data, model), SHOTS, AuditOptions().seed)
        roles = role_map(self.state.roles, model.clip)
        layers = model.clip.config.vision.last_third if roles is None else roles.layers

        def images_done(done: int) -> None:
            if progress is not None:
                progress("images", done, len(training))

        seen = collect(model.clip, training, layers, progress=images_done)
        ways = ways_to_remove(model.clip, find_concept(concept), seen, roles)
        if not ways:
            raise UsageError(f"{concept}: this backbone reads none of its words, and no head has that role")
        return without(model, next(iter(ways.values())))


def audit_html(found: Audit) -> str:
    """The verdict and its evidence."""
    facts = evidence(found)
    return render("studio/audit.html", facts=facts, concept=facts.concepts[0])


def answers_html(concept: str, images: Sequence[Thumbnail], without_it: bool = True) -> str:
    """Answers with a concept, and without it if they are wanted."""
    title = f"Your images with and without {concept}" if without_it else "Your images as the model answers"
    return render("studio/gallery.html", title=title, images=images)
