"""The result of an audit: findings, the evidence behind them, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dear.clip.model import Clip
from dear.data.images import ImageSet, targets_of
from dear.heads.roles import RoleMap
from dear.runs.model import Model
from dear.shortcuts.removal import Removal
from dear.tasks.audit.findings import ConceptFinding, Finding, PropertyFinding
from dear.tasks.audit.properties import ImageCheck
from dear.tasks.audit.several_labels import members
from dear.tasks.explain.explanation import label_or_not
from dear.utils.files import PathLike
from dear.utils.progress import Progress, silent

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of an audit: one list of findings, and the evidence behind them."""

    findings: tuple[Finding, ...]  #: image properties and concepts, those to act on first
    images: ImageSet  #: the audited images
    clip: Clip | None = None  #: the backbone; None where only image properties were measured
    model: Model | None = None  #: the tested model; None for data alone
    roles: RoleMap | None = None  #: the role map, where there is one
    held_out: ImageSet | None = None  #: test images of the model; None: it was tested on the audited images
    #: the model's answers [m] for the test images; of several labels bool [m, C]
    answers: Tensor | None = None
    #: per concept finding, the answers [m] without it; of several labels whether its label is answered
    without: Mapping[str, Tensor] = field(default_factory=dict)
    #: per concept, the removal behind `without`
    removals: Mapping[str, Removal] = field(default_factory=dict)
    #: name and accuracy of the worst group of class and value among held-out images, where values are known
    worst_group: tuple[str, float] | None = None
    check: ImageCheck | None = None  #: properties of the images; None: not measured
    run: str | None = None  #: the run and the data by name, for `next_steps`
    data: str | None = None
    backbone: str | None = None

    def __repr__(self) -> str:
        return f"Audit({len(self.images)} images, {len(self.findings)} findings: {self.verdict})"

    @property
    def concepts(self) -> tuple[ConceptFinding, ...]:
        """The findings that are concepts."""
        return tuple(one for one in self.findings if isinstance(one, ConceptFinding))

    @property
    def properties(self) -> tuple[PropertyFinding, ...]:
        """The findings that are image properties."""
        return tuple(one for one in self.findings if isinstance(one, PropertyFinding))

    @property
    def suspects(self) -> tuple[Finding, ...]:
        """Suspected shortcuts; for data alone, what a model may learn as one."""
        return tuple(one for one in self.findings if one.suspected)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        names = ", ".join(one.name for one in self.suspects)
        if self.model is not None:
            return f"Suspected shortcuts: {names}." if names else "No shortcut is suspected."
        if names:
            several = len(self.suspects) > 1
            what, them = ("shortcuts", "them") if several else ("shortcut", "it")
            return f"Possible {what}: {names}. A model trained on these images may rely on {them}."
        measured = "image property" if self.clip is None else "image property or concept"
        return f"No {measured} is suspiciously associated with the labels."

    @property
    def removable(self) -> tuple[str, ...]:
        """What `--without` takes to remove the suspects."""
        return tuple(dict.fromkeys(one.removable for one in self.suspects if one.removable))

    @property
    def next_steps(self) -> dict[str, str]:
        """Commands that remove the suspects, by what they do."""
        several = targets_of(self.images) is not None  # `--without` and `repair` need one label per image
        if several or not self.removable or (self.run is None and self.data is None):
            return {}
        names = shlex.quote(",".join(self.removable))
        weights = "" if self.backbone is None else f" --backbone {shlex.quote(self.backbone)}"
        if self.run is None:
            data = shlex.quote(str(self.data))
            return {
                "Train with it removed:": f"dear adapt --data {data}{weights} --without {names} --out run"
            }
        target = shlex.quote(f"{self.run.rstrip('/')}-repaired")
        command = f"dear repair {shlex.quote(self.run)} --without {names}{weights} --out {target}"
        return {"Train the same model without it, and compare:": command}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        worst = self.worst_group
        return {
            "data": self.images.name,
            "images": len(self.images),
            "classes": list(self.images.classes),
            "held_out": None if self.held_out is None else len(self.held_out),
            "backbone": None if self.clip is None else self.clip.name,
            "method": None if self.model is None else self.model.method.name,
            "verdict": self.verdict,
            "suspected": [one.name for one in self.suspects],
            "findings": [one.to_dict() for one in self.findings],
            **({} if self.check is None else self.check.to_dict()),
            **({} if worst is None else {"worst_group": {"group": worst[0], "accuracy": worst[1]}}),
            "next": list(self.next_steps.values()),
        }

    def to_frame(self, per_image: bool = False) -> pd.DataFrame:
        """The findings as a table, or with `per_image` one row per image and issue.

        Issues are image properties (of every image of the class, with its value), near duplicates, and
        answers that change without a suspected concept. The column `image` is the image's key in its set.
        """
        import pandas as pd

        if not per_image:
            columns = ("kind", "name", "verdict", "suspected", "strength", "without", "sentence")
            rows = [
                (
                    "concept" if isinstance(one, ConceptFinding) else "property",
                    *(one.name, one.verdict, one.suspected, one.strength, one.removable, one.sentence),
                )
                for one in self.findings
            ]
            return pd.DataFrame(rows, columns=list(columns))
        return pd.DataFrame(self._issues(), columns=["image", "class", "issue", "finding", "detail"])

    def _issues(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for one in self.properties:
            values = None if self.check is None else self.check.measured.find_column(one.shortcut.name)
            rows += [
                (self.images.key(place), one.shortcut.class_name, "property", one.name,
                 "" if values is None else float(values[place]))
                for place in members(self.images, one.shortcut.label).nonzero()[:, 0].tolist()
            ]  # fmt: skip
        for pair in () if self.check is None else self.check.duplicates:
            rows.append((pair.first, "", "near duplicate", pair.where, pair.second))
        for concept in self.concepts:
            images, words = self.held_out or self.images, self.answer_words(concept)
            for place in self.changed_places(concept) if concept.suspected else ():
                truth, _, answer = words[place]
                rows.append((images.key(place), truth, "answer changes without", concept.name, answer))
        return rows

    def changed_places(self, finding: ConceptFinding) -> list[int]:
        """Indices of the tested images whose answer changes without a concept, wrong answers first."""
        words = self.answer_words(finding)
        changed = [place for place, (_, before, after) in enumerate(words) if before != after]
        return sorted(changed, key=lambda place: words[place][1] == words[place][0])

    def answer_words(self, finding: ConceptFinding) -> list[tuple[str, str, str]]:
        """Truth, answer, and answer without a concept of each tested image; empty where it was not tested.

        Of several labels, they say whether the image has the label of the finding.
        """
        after, label = self.without.get(finding.name), finding.association.label
        if after is None or self.answers is None or self.model is None:
            return []
        images = self.held_out or self.images
        if label:
            column = self.model.classes.index(label)
            parts = (members(images, images.classes.index(label)), self.answers[:, column], after)
            columns = [[label_or_not(label, has) for has in part.tolist()] for part in parts]
        else:
            truth = [images.classes[each] for each in images.labels.tolist()]
            both = [[self.model.classes[each] for each in part.tolist()] for part in (self.answers, after)]
            columns = [truth, *both]
        return list(zip(*columns, strict=True))

    def write_page(self, path: PathLike, progress: Progress | None = None) -> None:
        """Write the page with the evidence; for a model also a second page that explains changed answers."""
        from dear.tasks.audit.page import write_pages

        write_pages(self, path, progress or silent)

    def _repr_html_(self) -> str:
        """For notebooks."""
        from dear.tasks.audit.page import summary_html

        return summary_html(self)
