"""Auditing a dataset or a run: which concepts go with the labels, and which of them a model relies on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear._io.text import fill_template
from dear.clip.factory import load, pick_device
from dear.clip.model import Clip
from dear.data.images import ImageSet, group_names
from dear.data.open import open_data
from dear.data.shots import few_shot
from dear.errors import UsageError
from dear.heads.ablate import Collected, collect
from dear.heads.audit import (
    ABOUT_CLASSES,
    ASSOCIATED,
    EXPLAINED,
    NONE,
    SHORTCUT,
    UNUSED,
    Finding,
    Reliance,
    associate,
    judge,
    reliance,
)
from dear.heads.explain_away import explain_away
from dear.heads.repair import Repair
from dear.heads.roles import RoleMap
from dear.heads.values import Concept, find_concept, known_concepts, readable_words, value_features
from dear.heads.without import role_map, ways_to_remove
from dear.methods.base import Method
from dear.runs.folder import load_run
from dear.runs.model import Model


@dataclass(frozen=True)
class AuditOptions:
    """What to audit, and how.

    Attributes:
        concepts: concepts in words; empty: the twelve.
        roles: role map of the backbone or its file; None: the backbone's own, where it has one.
        backbone: what `dear.load` takes; for a run: only if it moved.
        shots: images per class; None or 0: all.
        seed: of the draw and of the permutations.
        split: which images.
        template: prompt with `{}`; None: the dataset's.
        root: folder of the benchmarks, for the name of a benchmark.
        mode: of a method with several; None: its usual one.
        device: "auto", "cpu", "cuda", …
    """

    concepts: tuple[str, ...] = ()
    roles: PathLike | RoleMap | None = None
    backbone: PathLike | Clip | None = None
    shots: int | None = None
    seed: int = 1
    split: str = "train"
    template: str | None = None
    root: PathLike | None = None
    mode: str | None = None
    device: str = "auto"


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found.

    Attributes:
        findings: one per concept, suspected shortcuts first, then by association.
        images: the images that were looked at.
        clip: the backbone.
        method: the model that was asked; None for data alone.
        roles: the role map, where there is one.
        without: per concept the model's answers [n] with the concept removed; empty for data alone.
        answers: the model's answers [n]; None for data alone.
        worst_group: name and accuracy of the worst group of class and value, where values are known.
    """

    findings: tuple[Finding, ...]
    images: ImageSet
    clip: Clip
    method: Method | None
    roles: RoleMap | None
    without: dict[str, Tensor]
    answers: Tensor | None
    worst_group: tuple[str, float] | None = None

    @property
    def suspects(self) -> tuple[Finding, ...]:
        """Suspected shortcuts; for data alone, concepts that a model may learn as one."""
        wanted = (SHORTCUT,) if self.method is not None else (SHORTCUT, ASSOCIATED)
        return tuple(finding for finding in self.findings if finding.verdict in wanted)

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = []
        for finding in self.findings:
            about, used = finding.association, finding.reliance
            rows.append(
                {
                    "concept": about.concept,
                    "verdict": finding.verdict,
                    "sentence": finding.sentence,
                    "explained_by": finding.explained_by or None,
                    "information": about.information,
                    "expected": about.expected,
                    "p_value": about.p_value,
                    "about_the_classes": about.about,
                    "values": list(about.words),
                    "images": dict(zip(self.images.classes, about.table.tolist(), strict=True)),
                    "heads": [list(head) for head in finding.heads],
                    "answers_changed": None if used is None else used.changed,
                    "margin": None if used is None else used.margin,
                    "margin_without": None if used is None else used.margin_without,
                }
            )
        worst = self.worst_group
        return {
            "data": self.images.name,
            "images": len(self.images),
            "backbone": self.clip.name,
            "method": None if self.method is None else self.method.name,
            "suspected": [finding.association.concept for finding in self.suspects],
            "concepts": rows,
            **({} if worst is None else {"worst_group": {"group": worst[0], "accuracy": worst[1]}}),
        }


def audit(
    data: PathLike | ImageSet,
    run: PathLike | Method | None = None,
    options: AuditOptions | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Ask for each concept whether it goes with the labels, and whether a model relies on it.

    Args:
        data: what `open_data` takes, or an image set.
        run: run folder or method to ask; None: the data alone.
        options: which concepts, on which images.
        progress: told (stage, done, total).

    Raises:
        DearError: anything a user can correct, in one sentence.
    """
    asked = options or AuditOptions()
    concepts = [find_concept(text) for text in asked.concepts] or list(known_concepts().values())
    images = data if isinstance(data, ImageSet) else _open(data, asked)
    if asked.shots:
        images = few_shot(images, asked.shots, asked.seed)
    if len(images.classes) < 2:
        raise UsageError(f"{images.name}: has one class; an audit needs at least two")
    method = _method(run, asked)
    labels = images.labels
    if method is not None:
        model, labels = Model(method).for_labels(images)
        method = model.method
    clip = method.clip if method is not None else _backbone(asked)
    roles = role_map(asked.roles, clip)
    seen = _collected(clip, images, roles, progress)
    own = None if method is None else scores_of(method, images, asked.mode)
    texts = clip.encode_text([fill_template(images.template, name) for name in images.classes]).float().cpu()
    findings: list[Finding] = []
    without: dict[str, Tensor] = {}
    spans: dict[str, Tensor] = {}
    chosen = [concept for concept in concepts if asked.concepts or _readable(clip, concept)]
    for number, concept in enumerate(chosen):
        words, directions = value_features(clip, concept)
        spans[concept.name] = directions
        found = associate(
            concept.name, words, directions, seen.features, images.labels, texts, seed=asked.seed
        )
        used = None
        if method is not None and own is not None:
            used, changed = _reliance(method, images, labels, own, asked.mode, concept, seen, roles)
            without[concept.name] = changed
        heads = () if roles is None or concept.role is None else roles.select(concept=concept.role)
        findings.append(judge(found, used, heads, len(chosen)))
        if progress is not None:
            progress("concepts", number + 1, len(chosen))
    told = explain_away(findings, spans, seen.features, images.labels, asked.seed)
    rank = (SHORTCUT, ASSOCIATED, EXPLAINED, UNUSED, ABOUT_CLASSES, NONE)
    order = sorted(told, key=lambda f: (rank.index(f.verdict), -f.association.excess))
    answers = None if own is None else own.argmax(dim=1)
    worst = None if answers is None else _worst(images, answers == labels)
    return Audit(tuple(order), images, clip, method, roles, without, answers, worst)


def _readable(clip: Clip, concept: Concept) -> bool:
    return len(readable_words(clip, concept.words)) > 1


def _open(data: PathLike, asked: AuditOptions) -> ImageSet:
    return open_data(data, asked.split, root=asked.root, template=asked.template)


def _method(run: PathLike | Method | None, asked: AuditOptions) -> Method | None:
    if run is None or isinstance(run, Method):
        return run
    return load_run(run, asked.backbone, pick_device(asked.device))


def _backbone(asked: AuditOptions) -> Clip:
    if isinstance(asked.backbone, Clip):
        return asked.backbone
    return load("mini" if asked.backbone is None else asked.backbone, device=pick_device(asked.device))


def _collected(clip: Clip, images: ImageSet, roles: RoleMap | None, progress: Progress | None) -> Collected:
    layers = clip.config.vision.last_third if roles is None else roles.layers
    told: Callable[[int], None] | None = None
    if progress is not None:
        report, total = progress, len(images)

        def told(done: int) -> None:
            report("images", done, total)

    return collect(clip, images, layers, progress=told)


def scores_of(method: Method, images: ImageSet, mode: str | None = None) -> Tensor:
    """A method's scores [n, C] of all images of a set, on the CPU."""
    model = Model(method)
    return model.logits(images)[model.pick_mode(mode)]


def _reliance(
    method: Method,
    images: ImageSet,
    labels: Tensor,
    own: Tensor,
    mode: str | None,
    concept: Concept,
    seen: Collected,
    roles: RoleMap | None,
) -> tuple[Reliance, Tensor]:
    """The larger effect of removing a concept by words or by heads, and the answers without it."""
    found: list[tuple[Reliance, Tensor]] = []
    for way, repair in ways_to_remove(method.clip, concept, seen, roles).items():
        scores = scores_of(without(method, repair), images, mode)
        found.append((reliance(own, scores, labels, way), scores.argmax(dim=1)))
    return max(found, key=lambda pair: max(pair[0].lost, pair[0].changed))


def without(method: Method, repair: Repair) -> Method:
    """A trained method with something removed from its image feature, as it is: nothing is trained again."""
    return method.bound(method.clip.corrected(repair.correction(after=method.clip.correction)))


def _worst(images: ImageSet, right: Tensor) -> tuple[str, float] | None:
    """The group of class and value with the fewest right answers."""
    names = group_names(images)
    if names is None:
        return None
    found: dict[str, list[bool]] = {}
    for name, hit in zip(names, right.tolist(), strict=True):
        found.setdefault(name, []).append(hit)
    share = {name: sum(hits) / len(hits) for name, hits in found.items()}
    worst = min(share, key=share.__getitem__)
    return worst, share[worst]
