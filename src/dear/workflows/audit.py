"""Auditing a dataset or a run: the images themselves, the concepts, and what a model relies on.

First the images: properties by which a class is told without looking at what it shows. Then concepts, in the
features of a backbone. A model is asked about held-out images only: what it answers for images it was trained
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

from dear._io.files import PathLike
from dear._io.notes import note
from dear._io.progress import Progress, silent
from dear._io.text import fill_template
from dear.clip.factory import load, pick_device
from dear.clip.model import Clip
from dear.data.images import FileImages, ImageSet, group_names
from dear.data.open import open_data, open_folder
from dear.data.shots import few_shot
from dear.errors import DataError, UsageError
from dear.heads.ablate import Collected, collect
from dear.heads.audit import (
    ABOUT_CLASSES,
    ASSOCIATED,
    EXPLAINED,
    NONE,
    SHORTCUT,
    UNUSED,
    Association,
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
from dear.workflows.audit_photos import PhotoAudit, edit_tests, look_at_images
from dear.workflows.evaluate import run_images

HELD_OUT = 300  #: held-out images that a model is asked about at most
ASKED = 96  #: the same for a method that learns inside the tower, which answers anew for every concept
COMPARED = 2000  #: held-out images that are compared with the training images at most
_ORDER = (SHORTCUT, ASSOCIATED, EXPLAINED, UNUSED, ABOUT_CLASSES, NONE)


@dataclass(frozen=True)
class AuditOptions:
    """What to audit, and how."""

    #: concepts in words; empty: the twelve
    concepts: tuple[str, ...] = ()
    #: folders of images that show a concept: one with a folder per value, or one folder per value
    examples: tuple[str, ...] = ()
    #: role map of the backbone or its file; None: the backbone's own, where it has one
    roles: PathLike | RoleMap | None = None
    #: what `dear.load` takes; for a run: only if it moved
    backbone: PathLike | Clip | None = None
    #: images per class; None or 0: all
    shots: int | None = None
    #: of the draw and of the permutations
    seed: int = 1
    #: which images are audited; those that a model is asked about are held out from them
    split: str = "train"
    #: prompt with `{}`; None: the dataset's
    template: str | None = None
    #: folder of the benchmarks, for the name of a benchmark
    root: PathLike | None = None
    #: of a method with several; None: its usual one
    mode: str | None = None
    #: "auto", "cpu", "cuda", …
    device: str = "auto"
    #: look at the images themselves
    photos: bool = True


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found."""

    #: one per concept, suspected shortcuts first, then by association
    findings: tuple[Finding, ...]
    #: the images that were looked at
    images: ImageSet
    #: the backbone; None where the images alone were looked at
    clip: Clip | None
    #: the model that was asked; None for data alone
    method: Method | None = None
    #: the role map, where there is one
    roles: RoleMap | None = None
    #: the images that the model was asked about; None: there are none beside the training images
    held_out: ImageSet | None = None
    #: per concept the model's answers [m] with the concept removed
    without: Mapping[str, Tensor] = field(default_factory=dict)
    #: the model's answers [m] for the images it was asked about
    answers: Tensor | None = None
    #: name and accuracy of the worst group of class and value among held-out images, where values are known
    worst_group: tuple[str, float] | None = None
    #: what the images themselves tell; None: not asked
    photos: PhotoAudit | None = None

    @property
    def suspects(self) -> tuple[Finding, ...]:
        """Suspected shortcuts; for data alone, concepts that a model may learn as one."""
        wanted = (SHORTCUT,) if self.answers is not None else (SHORTCUT, ASSOCIATED)
        return tuple(finding for finding in self.findings if finding.verdict in wanted)

    @property
    def removable(self) -> tuple[str, ...]:
        """What `--without` takes to remove what was found: kinds of properties, then concepts."""
        used = () if self.photos is None else self.photos.shortcuts
        if self.photos is not None and self.photos.causal:
            used = tuple(
                one
                for one in used
                if (test := self.photos.causal.get(one.class_name)) is not None and test.relies
            )
        kinds = [one.kind for one in used if one.kind]
        return tuple(dict.fromkeys((*kinds, *(one.association.concept.lower() for one in self.suspects))))

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
        run: run folder or method to ask; None: the data alone.
        options: which concepts, on which images.
        progress: called with (stage, done, total).
        held_out: images to ask the model about; None: the test split of `data`, where that is a name.

    Raises:
        DearError: anything a user can correct, in one sentence.
    """
    options = options or AuditOptions()
    wanted = [find_concept(text) for text in options.concepts]
    images = data if isinstance(data, ImageSet) else _open(data, options.split, options)
    if held_out is None:
        held_out = _held_out(data, images, options)
    if options.shots:
        images = few_shot(images, options.shots, options.seed)
    if len(images.classes) < 2:
        raise UsageError(f"{images.name}: has one class; an audit needs at least two")
    method = _method(run, options)
    photos_alone = method is None and options.backbone is None and not _drawn(images)
    if photos_alone and (wanted or options.examples):
        raise UsageError("concepts are seen by a backbone; name one", hint="backbone")
    if photos_alone:
        return Audit(
            (), images, None, held_out=held_out, photos=look_at_images(images, held_out, None, progress)
        )
    clip = method.clip if method is not None else _backbone(options)
    _estimate(clip, images, held_out, method)
    return _audit(images, held_out, clip, method, wanted, options, progress or silent)


def audit_run(run: str, options: AuditOptions | None = None, progress: Progress | None = None) -> Audit:
    """The audit of a run on the images it was trained on, asked about the test images of the same data."""
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
    asked = None if method is None else _Asked.of(method, held_out or images, layers, options.mode, progress)
    found = _associations(clip, images, seen, wanted, options)
    findings, without, spans = [], {}, {}
    for number, (concept, association, directions) in enumerate(found):
        spans[concept.name] = directions
        heads = () if roles is None or concept.role is None else roles.select(concept=concept.role)
        finding = judge(association, None, heads, len(found), images.classes)
        if asked is not None and (asked.quick or finding.verdict == ASSOCIATED):
            ways = ways_to_remove(clip, concept, seen, roles, _shown(concept, options))
            used, without[concept.name] = asked.without(ways)
            finding = judge(association, used, heads, len(found), images.classes)
        findings.append(finding)
        progress("concepts", number + 1, len(found))
    told = explain_away(findings, spans, seen.features, images.labels, options.seed)
    order = sorted(told, key=lambda one: (_ORDER.index(one.verdict), -one.association.excess))
    photos = None
    if options.photos and not _drawn(images):
        photos = look_at_images(images, held_out, None, progress)
        if asked is not None and held_out is not None and photos.shortcuts:
            causal = edit_tests(photos, asked.model, images, held_out, options.mode, progress)
            photos = replace(photos, causal=causal)
    answers = None if asked is None else asked.scores.argmax(dim=1)
    worst = None
    if asked is not None and held_out is not None and answers is not None:
        worst = _worst(asked.images, answers == asked.labels)
    held = held_out if asked is None or held_out is None else asked.images
    shown_method = None if asked is None else asked.model.method
    return Audit(tuple(order), images, clip, shown_method, roles, held, without, answers, worst, photos)


def _associations(
    clip: Clip, images: ImageSet, seen: Collected, wanted: list[Concept], options: AuditOptions
) -> list[tuple[Concept, Association, Tensor]]:
    """Every concept with its association and the features of its values."""
    texts = clip.encode_text([fill_template(images.template, name) for name in images.classes]).float().cpu()
    concepts = wanted
    if not wanted and not options.examples:
        concepts = [one for one in known_concepts().values() if len(readable_words(clip, one.words)) > 1]
    found = []
    for concept in concepts:
        words, directions = value_features(clip, concept)
        association = associate(
            concept.name, words, directions, seen.features, images.labels, texts, seed=options.seed
        )
        found.append((concept, association, directions))
    shown = _examples(options.examples)
    if shown is not None:
        features = collect(clip, shown, clip.config.vision.last_third[-1:]).features
        center = features.mean(dim=0)
        means = torch.stack([features[shown.labels == value].mean(dim=0) for value in shown.labels.unique()])
        association = associate(
            "examples",
            shown.classes,
            means - center,
            seen.features - center,
            images.labels,
            texts,
            seed=options.seed,
        )
        found.append((Concept("examples", ()), association, means - center))
    return found


def _shown(concept: Concept, options: AuditOptions) -> ImageSet | None:
    return _examples(options.examples) if concept.name == "examples" and not concept.words else None


def _examples(folders: Sequence[str]) -> ImageSet | None:
    """Images by value: from one folder with a folder per value, or from one folder per value."""
    if not folders:
        return None
    for folder in folders:
        if not Path(folder).is_dir():
            raise UsageError(f"{folder}: no such folder of examples")
    if len(folders) == 1:
        return open_folder(folders[0], "all")
    from dear._io.image_file import find_images
    from dear.data.images import ListedImages

    files = [(path, value) for value, folder in enumerate(folders) for path in find_images([folder])]
    names = tuple(Path(folder).name or str(folder) for folder in folders)
    labels = torch.tensor([value for _, value in files])
    return ListedImages(tuple(path for path, _ in files), labels, names, name="examples")


@dataclass(frozen=True, eq=False)
class _Asked:
    """A model and its scores for the images it is asked about."""

    model: Model
    images: ImageSet
    labels: Tensor
    scores: Tensor  # [m, C]
    collected: Collected | None  # of these images, where the method reads the feature alone
    mode: str | None

    @classmethod
    def of(
        cls, method: Method, images: ImageSet, layers: Sequence[int], mode: str | None, progress: Progress
    ) -> _Asked:
        quick = method.cut == "feature" and method.clip.correction is None and not method.clip.focus
        images = _some(images, HELD_OUT if quick else ASKED)
        model, labels = Model(method).for_labels(images)
        collected = None
        if quick:
            collected = collect(
                method.clip,
                images,
                layers,
                progress=lambda done: progress("held-out images", done, len(images)),
            )
            scores = _from_features(model, collected.features, mode)
        else:
            scores = model.logits(images, progress=progress)[model.pick_mode(mode)]
        return cls(model, images, labels, scores, collected, mode)

    @property
    def quick(self) -> bool:
        """Whether a removal costs nothing but a product."""
        return self.collected is not None

    def without(self, ways: Mapping[str, Repair]) -> tuple[Reliance, Tensor]:
        """The largest effect of some ways to remove a concept, and the answers without it."""
        found = []
        for way, repair in ways.items():
            if way == "leace":
                continue
            if self.collected is not None:
                scores = _from_features(self.model, repair.apply(self.collected), self.mode)
            else:
                scores = scores_of(without(self.model.method, repair), self.images, self.mode)
            found.append((reliance(self.scores, scores, self.labels, way), scores.argmax(dim=1)))
        return max(found, key=lambda pair: max(pair[0].lost, pair[0].changed))


@torch.no_grad()
def _from_features(model: Model, features: Tensor, mode: str | None) -> Tensor:
    logits = model.method.logits_from_frozen((features.to(model.clip.device),))
    return logits[model.pick_mode(mode)].float().cpu()


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
        count += 3 * ASKED
    if count * each > 5:
        note(f"{count} images to run through {clip.name}: about {count * each:.0f} s")


def _held_out(data: PathLike | ImageSet, images: ImageSet, options: AuditOptions) -> ImageSet | None:
    """The test split of named data, where it has one that is not audited itself."""
    if isinstance(data, ImageSet) or options.split != "train":
        return None
    try:
        found = _open(data, "test", options)
    except DataError:
        return None
    same = tuple(found.classes) == tuple(images.classes)
    return _some(found, COMPARED) if len(found) and same else None


def _some(images: ImageSet, most: int) -> ImageSet:
    """At most so many images, evenly from the whole set."""
    if len(images) <= most:
        return images
    return images.subset(torch.linspace(0, len(images) - 1, most).long().tolist())


def _drawn(images: ImageSet) -> bool:
    """Whether these are the world's images, which the embedded backbone sees."""
    return not isinstance(images, FileImages) and images.name.startswith("world:")


def _open(data: PathLike, split: str, options: AuditOptions) -> ImageSet:
    return open_data(data, split, root=options.root, template=options.template)


def _method(run: PathLike | Method | None, options: AuditOptions) -> Method | None:
    if run is None or isinstance(run, Method):
        return run
    return load_run(run, options.backbone, pick_device(options.device))


def _backbone(options: AuditOptions) -> Clip:
    if isinstance(options.backbone, Clip):
        return options.backbone
    return load("mini" if options.backbone is None else options.backbone, device=pick_device(options.device))


def scores_of(method: Method, images: ImageSet, mode: str | None = None) -> Tensor:
    """A method's scores [n, C] of all images of a set, on the CPU."""
    model = Model(method)
    return model.logits(images)[model.pick_mode(mode)]


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
