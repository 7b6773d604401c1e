"""`dear audit`: image properties and concepts associated with the labels, and what a model relies on.

Image properties need no model. Concepts are measured in the features of a backbone. A model is tested on
held-out images only: its answers for training images do not show what it relies on.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.duplicates import find_duplicates
from dear.data.images import FileImages, ImageSet, ListedImages, targets_of
from dear.data.open import HELD_OUT_SPLIT, open_data, open_folder
from dear.data.shots import few_shot
from dear.errors import DataError, UsageError
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.concept_words import Concept, find_concept, known_concepts, readable_words, value_features
from dear.heads.known_roles import resolve_roles
from dear.heads.roles import RoleMap
from dear.images.names import find_images
from dear.methods.base import Method
from dear.runs.images import run_images, training_images
from dear.runs.model import Model
from dear.shortcuts.find import MIN_IMAGES
from dear.shortcuts.removal import Removal
from dear.shortcuts.without import possible_removals
from dear.tasks.audit.association import PERMUTATIONS, Association, associate
from dear.tasks.audit.findings import (
    ASSOCIATED,
    NOT_ASSOCIATED,
    ConceptFinding,
    Finding,
    PropertyFinding,
    sort_findings,
)
from dear.tasks.audit.held_out import HELD_OUT, INSIDE, HeldOutScores
from dear.tasks.audit.properties import check_properties, edit_tests
from dear.tasks.audit.result import Audit
from dear.tasks.audit.several_labels import label_set_numbers, label_view, rest_texts, scored_labels
from dear.tasks.audit.verdict import FALSE_ALARM_RATE, explain_away, judge
from dear.tasks.load import load_backbone, load_model
from dear.utils.files import PathLike, check_output
from dear.utils.notices import note
from dear.utils.progress import Progress, silent
from dear.utils.text import fill_template


@dataclass(frozen=True)
class _Settings:
    """How the audited images are examined."""

    concept: tuple[Concept, ...]
    examples: ImageSet | None
    roles: PathLike | RoleMap | None
    seed: int
    mode: str | None
    properties: bool


def audit(
    run: PathLike | Model | Method | None = None,
    data: PathLike | ImageSet | None = None,
    *,
    concept: str | Sequence[str] = (),
    examples: PathLike | Sequence[PathLike] = (),
    roles: PathLike | RoleMap | None = None,
    split: str = "train",
    shots: int = 0,
    seed: int = 1,
    mode: str | None = None,
    out: PathLike | None = None,
    data_root: PathLike | None = None,
    template: str | None = None,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    held_out: ImageSet | None = None,
    properties: bool = True,
    progress: Progress | None = None,
) -> Audit:
    """Find shortcuts in a dataset, and those that a model relies on.

    Args:
        run: run folder, archive, `hf://owner/name`, model or method to test; None: the data alone.
        data: what `open_data` takes, or an image set; None: the images that the run was trained on.
        concept: concepts to examine, by name or as "name: value, value"; empty: the known ones.
        examples: folders of images that show the values of a concept: one with a folder per value, or one
            folder per value.
        roles: role map; None: that of the backbone, where it has one.
        split: of `data`; a model is tested on the test split where this is "train".
        shots: images per class; 0: all.
        seed: of the draw and of the permutations.
        mode: of a method with several modes; None: its default mode.
        out: where to write the page; None: nowhere.
        data_root: folder of the benchmarks, for the name of a benchmark.
        template: prompt with `{}`; None: the dataset's.
        backbone: needed to examine concepts without a run; for a run whose backbone moved.
        device: "auto", "cpu", "cuda", …
        held_out: images to test the model on; None: the test split.
        properties: also measure properties of the images.
        progress: called with (stage, done, total).

    Raises:
        DearError: anything a user can correct.

    Example:
        >>> audit(data="photos/").to_frame()                       # doctest: +SKIP
        >>> audit("run", concept="background: lab bench, outdoors").write_page("audit.html")  # doctest: +SKIP
    """
    progress = progress or silent
    concepts = tuple(find_concept(text) for text in ([concept] if isinstance(concept, str) else concept))
    folders = [examples] if isinstance(examples, str | os.PathLike) else list(examples)
    if shots < 0:
        raise UsageError(f"shots must be at least 1, or 0 for all images, got {shots}")
    check_output(out)
    model = None if run is None else load_model(run, backbone, device)
    if model is not None:
        model.pick_mode(mode)
    images, tests = _open(model, data, split, data_root, template)
    held_out = tests if held_out is None else held_out
    if model is not None and model.method.several != (targets_of(images) is not None):
        kinds = ("one label per image", "several labels per image")
        expected, actual = kinds[int(model.method.several)], kinds[int(targets_of(images) is not None)]
        raise DataError(
            f"{images.name}: has {actual}, but the model answers with {expected}; name other images"
        )
    if shots:
        images = few_shot(images, shots, seed)
    if len(images.classes) < 2 and targets_of(images) is None:
        raise UsageError(f"{images.name}: has one class; an audit needs at least two")
    images = _without_copies(images)
    if targets_of(images) is not None and not scored_labels(images):
        raise DataError(
            f"{images.name}: no label is on {MIN_IMAGES} images and missing on {MIN_IMAGES}; add images"
        )
    settings = _Settings(concepts, _open_examples(folders), roles, seed, mode, properties)
    if model is None and backbone is None and not _is_world(images):
        if concepts or folders:
            raise UsageError("concepts are measured with a backbone; name one", hint="backbone")
        result = _with_properties(Audit((), images, held_out=held_out), None, settings, progress)
    else:
        clip = load_backbone(backbone, device) if model is None else model.clip
        _estimate(clip, images, held_out, model)
        result = _audit_concepts(images, held_out, clip, model, settings, progress)
    result = replace(result, run=_name(run), data=_name(data), backbone=_name(backbone))
    if out is not None:
        result.write_page(out, progress)
    return result


def _without_copies(images: ImageSet) -> ImageSet:
    """One image of each unit and label: copies would make chance look like a finding."""
    duplicates = find_duplicates(images)
    places = duplicates.distinct(label_set_numbers(images))
    if len(places) == len(images):
        return images
    note(f"{images.name}: {duplicates.sentence(images.key)}; of copies with the same label one is audited")
    return images.subset(places)


def _name(value: object) -> str | None:
    """What a command line takes; None for an object in memory."""
    return os.fspath(value) if isinstance(value, str | os.PathLike) else None


def _open(
    model: Model | None,
    data: PathLike | ImageSet | None,
    split: str,
    data_root: PathLike | None,
    template: str | None,
) -> tuple[ImageSet, ImageSet | None]:
    """The images to audit, and the test images of the same data, where there are others."""
    if isinstance(data, ImageSet):
        return data, None
    if data is None:
        if model is None:
            raise UsageError("audit needs a run or data, got neither; name a run folder, or images")
        if model.spec is None:
            raise UsageError(
                "data must name images, because the model does not know its training images; pass data"
            )
        if split != "train":
            return run_images(model.spec, split), None
        images, open_tests = training_images(model.spec), partial(run_images, model.spec)
    else:
        images = open_data(data, split, root=data_root, template=template)
        if split != "train":
            return images, None
        open_tests = partial(open_data, data, root=data_root, template=template)
    try:
        tests = open_tests(split=HELD_OUT_SPLIT)
    except DataError:
        if model is not None:
            note(f"{images.name}: has no test images; the model is tested on the audited images")
        return images, None
    return images, tests if len(tests) and tuple(tests.classes) == tuple(images.classes) else None


def _audit_concepts(
    images: ImageSet,
    held_out: ImageSet | None,
    clip: Clip,
    model: Model | None,
    settings: _Settings,
    progress: Progress,
) -> Audit:
    """The audit with a backbone: every image runs through it once."""
    roles = resolve_roles(settings.roles, clip)
    layers = clip.config.vision.last_third if roles is None else roles.layers
    collected = collect_contributions(
        clip, images, layers, progress=lambda done: progress("images", done, len(images))
    )
    tested = None
    if model is not None:
        tested = HeldOutScores.of(model, held_out or images, layers, settings.mode, progress)
    measured = _associations(clip, images, collected, settings)
    tests = sum(len(associations) for _, associations, _ in measured)
    findings, without, removals = list[ConceptFinding](), dict[str, Tensor](), dict[str, Removal]()
    for number, (concept, associations, _) in enumerate(measured):
        heads = () if roles is None or concept.role is None else roles.select(concept=concept.role)
        judged = [judge(one, None, heads, tests, images.classes) for one in associations]
        named = concept in settings.concept  # a concept that the caller names is always tested
        everything = named or (tested is not None and tested.quick)
        if tested is not None and (everything or any(one.verdict == ASSOCIATED for one in judged)):
            examples = None if concept.words else settings.examples
            ways = possible_removals(clip, concept, collected, roles, examples)
            scores = tested.scores_without(ways)
            for place, one in enumerate(judged):
                label = one.association.label
                if (everything or one.verdict == ASSOCIATED) and bool(tested.relevant(label).any()):
                    way, used, without[one.name] = tested.effect(scores, label)
                    removals[one.name] = ways[way]
                    judged[place] = judge(one.association, used, heads, tests, images.classes)
        associated = [one for one in judged if one.verdict != NOT_ASSOCIATED]
        findings += associated or [max(judged, key=lambda one: one.strength)]
        progress("concepts", number + 1, len(measured))
    spans = {one.name: directions for _, some, directions in measured for one in some}
    result = Audit(
        sort_findings(_explained_away(findings, spans, images, collected.features, settings.seed)),
        *(images, clip, model, roles, held_out),
    )
    if tested is not None:
        result = replace(
            result, model=tested.model, answers=tested.answers, without=without, removals=removals
        )
        if held_out is not None:
            result = replace(result, held_out=tested.images, worst_group=tested.worst_group)
    if not settings.properties or _is_world(images):
        return result
    return _with_properties(result, held_out, settings, progress)


def _explained_away(
    findings: Sequence[ConceptFinding],
    spans: Mapping[str, Tensor],
    images: ImageSet,
    features: Tensor,
    seed: int,
) -> list[Finding]:
    """`explain_away` of findings about the same labels; of several labels for each by itself."""
    groups: dict[str, list[ConceptFinding]] = {}
    for one in findings:
        groups.setdefault(one.association.label, []).append(one)
    judged: list[Finding] = []
    for label, some in groups.items():
        labels = label_view(images, images.classes.index(label)).labels if label else images.labels
        judged += explain_away(some, spans, features, labels, seed)
    return judged


def _with_properties(
    result: Audit, held_out: ImageSet | None, settings: _Settings, progress: Progress
) -> Audit:
    """The audit with properties of the images, tested by edits of held-out images where there is a model."""
    images = result.images
    held_out = held_out or result.held_out
    check = check_properties(images, held_out, progress)
    shortcuts, tests = check.search.shortcuts, {}
    if result.model is not None and held_out is not None and shortcuts:
        tests = edit_tests(shortcuts, result.model, images, held_out, settings.mode, progress)
    findings = [PropertyFinding(one, tests.get(one.class_name)) for one in shortcuts]
    return replace(result, check=check, findings=sort_findings([*findings, *result.findings]))


def _associations(
    clip: Clip, images: ImageSet, collected: HeadContributions, settings: _Settings
) -> list[tuple[Concept, list[Association], Tensor]]:
    """Every concept with its associations and the features of its values; that of examples has no words.

    There is one association with the labels; of several labels per image one with each of them.
    """
    texts = clip.encode_text([fill_template(images.template, name) for name in images.classes]).float().cpu()
    concepts, examples, seed = list(settings.concept), settings.examples, settings.seed
    if not concepts and examples is None:
        concepts = [one for one in known_concepts().values() if len(readable_words(clip, one.words)) > 1]
    tasks = [("", images.labels, texts)]
    if targets_of(images) is not None:
        views = [(label, label_view(images, label)) for label in scored_labels(images)]
        tasks = [(images.classes[label], view.labels, rest_texts(texts, label)) for label, view in views]
    count = len(tasks) * (len(concepts) + (examples is not None))
    enough = math.ceil(2 * count / FALSE_ALARM_RATE)  # permutations that can tell all of them from chance

    def each(name: str, words: Sequence[str], values: Tensor, features: Tensor) -> list[Association]:
        result = []
        for label, labels, names in tasks:
            one = associate(name, words, values, features, labels, names, seed=seed)
            if label and one.strong and enough > PERMUTATIONS:
                one = associate(name, words, values, features, labels, names, enough, seed)
            result.append(replace(one, label=label))
        return result

    measured = []
    for concept in concepts:
        words, values = value_features(clip, concept)
        measured.append((concept, each(concept.name, words, values, collected.features), values))
    if examples is not None:
        features = collect_contributions(clip, examples, clip.config.vision.last_third[-1:]).features
        center = features.mean(dim=0)
        means = [features[examples.labels == value].mean(dim=0) for value in examples.labels.unique()]
        values, centered = torch.stack(means) - center, collected.features - center
        measured.append(
            (Concept("examples", ()), each("examples", examples.classes, values, centered), values)
        )
    return measured


def _open_examples(folders: Sequence[PathLike]) -> ImageSet | None:
    """Images by value: from one folder with a folder per value, or from one folder per value."""
    if not folders:
        return None
    for folder in folders:
        if not Path(folder).is_dir():
            raise UsageError(f"{os.fspath(folder)}: no such folder of examples")
    if len(folders) == 1:
        return open_folder(folders[0], "all")
    files = [(path, value) for value, folder in enumerate(folders) for path in find_images([str(folder)])]
    names = tuple(Path(folder).name or str(folder) for folder in folders)
    labels = torch.tensor([value for _, value in files])
    return ListedImages(tuple(path for path, _ in files), labels, names, name="examples")


def _estimate(clip: Clip, images: ImageSet, held_out: ImageSet | None, model: Model | None) -> None:
    """Announce how long the audit takes, where that is more than a few seconds."""
    few = images.subset(range(min(8, len(images))))
    start = time.perf_counter()
    collect_contributions(clip, few, clip.config.vision.last_third)
    each = (time.perf_counter() - start) / len(few)
    count = len(images)
    if model is not None and held_out is not None:
        count += min(HELD_OUT, len(held_out))
    if model is not None and model.method.cut != "feature":
        count += 3 * INSIDE
    if count * each > 5:
        note(f"{count} images to run through {clip.name}: about {count * each:.0f} s")


def _is_world(images: ImageSet) -> bool:
    """Whether these are images of the attribute world, for which the embedded backbone was trained."""
    return not isinstance(images, FileImages) and images.name.startswith("world:")
