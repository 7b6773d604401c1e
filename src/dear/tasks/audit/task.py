"""Auditing a dataset or a run: the images themselves, the concepts, and what a model relies on.

First the images: properties that tell a class without looking at what it shows. Then concepts, in the
features of a backbone. A model is tested on held-out images only: what it answers for images it was trained
on says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dear.clip.factory import load, pick_device
from dear.clip.model import Clip
from dear.data.images import FileImages, ImageSet, ListedImages
from dear.data.open import open_data, open_folder
from dear.data.shots import few_shot
from dear.errors import DataError, UsageError
from dear.heads.ablate import Collected, collect
from dear.heads.concept_words import Concept, find_concept, known_concepts, readable_words, value_features
from dear.heads.roles import RoleMap
from dear.images.names import find_images
from dear.methods.base import Method
from dear.runs.folder import load_run
from dear.runs.images import run_images
from dear.shortcuts.without import role_map, ways_to_remove
from dear.tasks.audit.concepts import (
    ABOUT_CLASSES,
    ASSOCIATED,
    EXPLAINED,
    NONE,
    SHORTCUT,
    UNUSED,
    Association,
    Finding,
    associate,
    explain_away,
    judge,
)
from dear.tasks.audit.photos import PhotoAudit, edit_tests, look_at_images
from dear.tasks.audit.reliance import HELD_OUT, INSIDE, HeldOutScores
from dear.utils.files import PathLike
from dear.utils.notices import note
from dear.utils.progress import Progress, silent
from dear.utils.text import fill_template

_ORDER = (SHORTCUT, ASSOCIATED, EXPLAINED, UNUSED, ABOUT_CLASSES, NONE)


@dataclass(frozen=True)
class AuditOptions:
    """What to audit, and how."""

    concepts: tuple[str, ...] = ()  #: in words; empty: the twelve
    #: folders of images that show a concept: one with a folder per value, or one folder per value
    examples: tuple[str, ...] = ()
    roles: PathLike | RoleMap | None = None  #: None: the backbone's own, where it has one
    backbone: PathLike | Clip | None = None  #: what `dear.load` takes; for a run: only if it moved
    shots: int | None = None  #: images per class; None or 0: all
    seed: int = 1  #: of the draw and of the permutations
    split: str = "train"  #: of the audited images; a model is tested on others
    template: str | None = None  #: prompt with `{}`; None: the dataset's
    root: PathLike | None = None  #: folder of the benchmarks, for the name of a benchmark
    mode: str | None = None  #: of a method with several; None: its usual one
    device: str = "auto"
    photos: bool = True  #: look at the images themselves

    def open(self, data: PathLike, split: str) -> ImageSet:
        """A split of the data."""
        return open_data(data, split, root=self.root, template=self.template)

    def load(self) -> Clip:
        """The backbone."""
        if isinstance(self.backbone, Clip):
            return self.backbone
        return load("mini" if self.backbone is None else self.backbone, device=pick_device(self.device))


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found."""

    findings: tuple[Finding, ...]  #: one per concept, suspected shortcuts first, then by association
    images: ImageSet  #: that were looked at
    clip: Clip | None  #: the backbone; None where the images alone were looked at
    method: Method | None = None  #: the model that was tested; None for data alone
    roles: RoleMap | None = None  #: the role map, where there is one
    held_out: ImageSet | None = None  #: what the model was tested on; None: its training images
    without: Mapping[str, Tensor] = field(default_factory=dict)  #: per concept, the answers [m] without it
    answers: Tensor | None = None  #: the model's answers [m] for the images it was tested on
    #: name and accuracy of the worst group of class and value among held-out images, where values are known
    worst_group: tuple[str, float] | None = None
    photos: PhotoAudit | None = None  #: what the images themselves show; None: not looked at

    @property
    def suspects(self) -> tuple[Finding, ...]:
        """Suspected shortcuts; for data alone, concepts that a model may learn as one."""
        wanted = (SHORTCUT,) if self.answers is not None else (SHORTCUT, ASSOCIATED)
        return tuple(finding for finding in self.findings if finding.verdict in wanted)

    @property
    def removable(self) -> tuple[str, ...]:
        """What can be removed of what was found: kinds of properties, then concepts."""
        photos = self.photos
        used = [] if photos is None else [one for one in photos.shortcuts if one.kind]
        if photos is not None and photos.causal:
            relied = {name for name, test in photos.causal.items() if test.relies}
            used = [one for one in used if one.class_name in relied]
        concepts = [one.association.concept.lower() for one in self.suspects]
        return tuple(dict.fromkeys([*(one.kind for one in used), *concepts]))

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
                    "natural": about.natural,
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
            "held_out": None if self.held_out is None else len(self.held_out),
            "backbone": None if self.clip is None else self.clip.name,
            "method": None if self.method is None else self.method.name,
            "suspected": [finding.association.concept for finding in self.suspects],
            "photos": None if self.photos is None else self.photos.report(),
            "concepts": rows,
            **({} if worst is None else {"worst_group": {"group": worst[0], "accuracy": worst[1]}}),
        }


def audit(
    data: PathLike | ImageSet,
    run: PathLike | Method | None = None,
    options: AuditOptions | None = None,
    progress: Progress | None = None,
    held_out: ImageSet | None = None,
) -> Audit:
    """Look at the images themselves, then ask for each concept whether it is a shortcut.

    Args:
        data: what `open_data` takes, or an image set: the training images.
        run: run folder or method to test; None: the data alone.
        options: which concepts, on which images.
        progress: called with (stage, done, total).
        held_out: images to test the model on; None: the test split of `data`, where that is a name.

    Raises:
        DearError: anything a user can correct, in one sentence.
    """
    options, progress = options or AuditOptions(), progress or silent
    wanted = [find_concept(text) for text in options.concepts]
    images = data if isinstance(data, ImageSet) else options.open(data, options.split)
    if held_out is None and not isinstance(data, ImageSet):
        held_out = _held_out(data, images, options)
    if options.shots:
        images = few_shot(images, options.shots, options.seed)
    if len(images.classes) < 2:
        raise UsageError(f"{images.name}: has one class; an audit needs at least two")
    method = run if run is None or isinstance(run, Method) else _load_run(run, options)
    if method is None and options.backbone is None and not _drawn(images):
        if wanted or options.examples:
            raise UsageError("concepts are seen by a backbone; name one", hint="backbone")
        photos = look_at_images(images, held_out, progress)
        return Audit((), images, None, held_out=held_out, photos=photos)
    clip = options.load() if method is None else method.clip
    _estimate(clip, images, held_out, method)
    return _audit(images, held_out, clip, method, wanted, options, progress)


def audit_run(run: str, options: AuditOptions | None = None, progress: Progress | None = None) -> Audit:
    """The audit of a run on the images it was trained on, tested on the test images of the same data."""
    options = options or AuditOptions()
    held_out = None
    if options.split == "train":
        try:
            held_out = run_images(run, "test")
        except DataError:
            note(f"{run}: its data has no test images")
    return audit(run_images(run, options.split), run, options, progress, held_out)


def _audit(
    images: ImageSet,
    held_out: ImageSet | None,
    clip: Clip,
    method: Method | None,
    wanted: list[Concept],
    options: AuditOptions,
    progress: Progress,
) -> Audit:
    """The audit with a backbone: every image runs through it once."""
    roles = role_map(options.roles, clip)
    layers = clip.config.vision.last_third if roles is None else roles.layers
    seen = collect(clip, images, layers, progress=lambda done: progress("images", done, len(images)))
    tested = None
    if method is not None:
        tested = HeldOutScores.of(method, held_out or images, layers, options.mode, progress)
    shown = _examples(options.examples)
    found = _associations(clip, images, seen, wanted, shown, options.seed)
    findings, without = [], {}
    for number, (concept, association, _) in enumerate(found):
        heads = () if roles is None or concept.role is None else roles.select(concept=concept.role)
        finding = judge(association, None, heads, len(found), images.classes)
        if tested is not None and (tested.quick or finding.verdict == ASSOCIATED):
            ways = ways_to_remove(clip, concept, seen, roles, None if concept.words else shown)
            used, without[concept.name] = tested.without(ways)
            finding = judge(association, used, heads, len(found), images.classes)
        findings.append(finding)
        progress("concepts", number + 1, len(found))
    spans = {concept.name: directions for concept, _, directions in found}
    judged = explain_away(findings, spans, seen.features, images.labels, options.seed)
    order = sorted(judged, key=lambda one: (_ORDER.index(one.verdict), -one.association.excess))
    photos = None
    if options.photos and not _drawn(images):
        photos = look_at_images(images, held_out, progress)
        if tested is not None and held_out is not None and photos.shortcuts:
            causal = edit_tests(photos, tested.model, images, held_out, options.mode, progress)
            photos = replace(photos, causal=causal)
    result = Audit(tuple(order), images, clip, None, roles, held_out, without, photos=photos)
    if tested is None:
        return result
    result = replace(result, method=tested.model.method, answers=tested.answers)
    if held_out is None:
        return result
    return replace(result, held_out=tested.images, worst_group=tested.worst_group)


def _associations(
    clip: Clip, images: ImageSet, seen: Collected, wanted: list[Concept], shown: ImageSet | None, seed: int
) -> list[tuple[Concept, Association, Tensor]]:
    """Every concept with its association and the features of its values; that of `shown` has no words."""
    texts = clip.encode_text([fill_template(images.template, name) for name in images.classes]).float().cpu()
    concepts = wanted
    if not wanted and shown is None:
        concepts = [one for one in known_concepts().values() if len(readable_words(clip, one.words)) > 1]
    found = []
    for concept in concepts:
        words, values = value_features(clip, concept)
        association = associate(concept.name, words, values, seen.features, images.labels, texts, seed=seed)
        found.append((concept, association, values))
    if shown is not None:
        features = collect(clip, shown, clip.config.vision.last_third[-1:]).features
        center = features.mean(dim=0)
        means = [features[shown.labels == value].mean(dim=0) for value in shown.labels.unique()]
        values, centered = torch.stack(means) - center, seen.features - center
        association = associate("examples", shown.classes, values, centered, images.labels, texts, seed=seed)
        found.append((Concept("examples", ()), association, values))
    return found


def _examples(folders: Sequence[str]) -> ImageSet | None:
    """Images by value: from one folder with a folder per value, or from one folder per value."""
    if not folders:
        return None
    for folder in folders:
        if not Path(folder).is_dir():
            raise UsageError(f"{folder}: no such folder of examples")
    if len(folders) == 1:
        return open_folder(folders[0], "all")
    files = [(path, value) for value, folder in enumerate(folders) for path in find_images([folder])]
    names = tuple(Path(folder).name or str(folder) for folder in folders)
    labels = torch.tensor([value for _, value in files])
    return ListedImages(tuple(path for path, _ in files), labels, names, name="examples")


def _estimate(clip: Clip, images: ImageSet, held_out: ImageSet | None, method: Method | None) -> None:
    """Say how long the audit takes about, where that is more than a few seconds."""
    few = images.subset(range(min(8, len(images))))
    start = time.perf_counter()
    collect(clip, few, clip.config.vision.last_third)
    each = (time.perf_counter() - start) / len(few)
    count = len(images)
    if method is not None and held_out is not None:
        count += min(HELD_OUT, len(held_out))
    if method is not None and method.cut != "feature":
        count += 3 * INSIDE
    if count * each > 5:
        note(f"{count} images to run through {clip.name}: about {count * each:.0f} s")


def _held_out(data: PathLike, images: ImageSet, options: AuditOptions) -> ImageSet | None:
    """The test split of the data, where it has one that is not audited itself."""
    if options.split != "train":
        return None
    try:
        found = options.open(data, "test")
    except DataError:
        return None
    same = tuple(found.classes) == tuple(images.classes)
    return found if len(found) and same else None


def _load_run(run: PathLike, options: AuditOptions) -> Method:
    return load_run(run, options.backbone, pick_device(options.device))


def _drawn(images: ImageSet) -> bool:
    """Whether these are the world's images, which the embedded backbone sees."""
    return not isinstance(images, FileImages) and images.name.startswith("world:")
