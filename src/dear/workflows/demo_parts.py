"""The parts of the demo: adaptation, attributes of heads, a shortcut removed, retrieval by heads.

`adapt_task` adapts DeAR to half of a task's classes and tests on both halves. `truth_rows` and
`retrieval_facts` compare heads with known attributes. `shortcut_facts` trains on animals shown at one place
each, finds the shortcut and removes it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dear import world
from dear._io.text import fill_template
from dear.bench.protocols.base_to_novel import harmonic_mean
from dear.clip.model import Clip
from dear.data import few_shot, halves, open_data
from dear.data.images import ImageSet, group_names
from dear.heads.ablate import Collected, Key, collect
from dear.heads.audit import ASSOCIATED, SHORTCUT, UNUSED, Finding, associate, judge, reliance
from dear.heads.neighbors import head_space, precision_at
from dear.heads.repair import Repair, remove_heads, remove_span
from dear.heads.roles import RoleMap
from dear.heads.truth import explained_variance
from dear.heads.values import known_concepts, readable_words, value_features
from dear.heads.without import ways_to_remove
from dear.methods import DeAR, build_method
from dear.report.demo_facts import (
    AccuracyRow,
    Changed,
    ConceptRow,
    PrecisionRow,
    RemovalRow,
    RetrievalFacts,
    ShortcutFacts,
    TaskFacts,
    TruthRow,
)
from dear.report.page import Thumbnail, thumbnail
from dear.report.run_facts import Compared
from dear.report.run_page import gallery
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.train.fit import fit
from dear.train.prepare import prepare
from dear.world import factors as vocabulary
from dear.world.measure import batches
from dear.world.tasks import find_task

_SEED = 77  # images that neither pretraining nor the discovery of roles used
_COLUMNS = {"Color": vocabulary.COLOR, "Texture": vocabulary.TEXTURE, "Location": vocabulary.PLACE}
"""Concepts whose value is drawn independently of all others, and where it stands among the factors."""
Answers = Callable[[Tensor], Tensor]  #: features [n, E] -> scores [n, C]

SHOTS, SEED = 16, 1
CHANGED = 5  #: images in a row whose answers changed


@dataclass(frozen=True)
class Size:
    """How much the demo does."""

    tasks: tuple[str, ...] = ("textures", "emblems")  #: tasks to adapt to
    epochs: int | None = None  #: of training; None: the recipe's
    views: int = 4  #: random views per training image
    test_images: int | None = None  #: of each class; None: all
    role_images: int = 2500  #: images that roles are discovered on
    known_images: int = 800  #: images whose attributes are known, for the truth about heads and for retrieval
    per_group: int = 20  #: test images per class and place of the shortcut


QUICK = Size(("textures",), 2, 1, 10, role_images=400, known_images=120, per_group=2)


def adapt_task(clip: Clip, roles: RoleMap, name: str, run: Path, size: Size) -> TaskFacts:
    """Adapt to the first half of a task's classes and test on both halves.

    Args:
        clip: the backbone.
        roles: its role map.
        name: of a task of the attribute world.
        run: run folder; one of an earlier demo with the same settings is continued or used as it is.
        size: how long to train, and how many images to test on.
    """
    whole, test = open_data(f"world:{name}", "train"), open_data(f"world:{name}", "test")
    base, novel = halves(whole.classes)
    changes = {"views": size.views} if size.epochs is None else {"views": size.views, "epochs": size.epochs}
    spec = Spec(method="dear", classes=base, shots=SHOTS, seed=SEED, recipe=changes, calibrate=False)
    trained = fit(prepare(spec, whole, clip=clip, roles=roles), run, resume=True)
    model = trained.method
    assert isinstance(model, DeAR)
    frozen = build_method("zeroshot", clip, base, template=whole.template)
    mode = model.pick_mode(None)
    known, new = (
        Compared(images, Model(model).evaluate(images), Model(frozen).evaluate(images), mode)
        for images in (_first(test.select_classes(half), size.test_images) for half in (base, novel))
    )
    return TaskFacts(
        name=name,
        about=find_task(name).about,
        classes=(len(base), len(novel)),
        images=(len(known.labels), len(new.labels)),
        shots=SHOTS,
        seconds=trained.seconds,
        rows=_rows(known, new, mode),
        weights=model.fusion_weights(),
        trained=_changed(known),
        new=_changed(new),
    )


def _first(images: ImageSet, count: int | None) -> ImageSet:
    """The first `count` images of each class."""
    if count is None:
        return images
    rows = [(images.labels == label).nonzero()[:count, 0] for label in range(len(images.classes))]
    return images.subset(torch.cat(rows).tolist())


def _rows(known: Compared, new: Compared, usual: str) -> tuple[AccuracyRow, ...]:
    """Zero-shot, then every mode of the adapted model."""
    on_known, on_new = known.accuracies(), new.accuracies()
    return tuple(
        AccuracyRow(
            name if name == "zero-shot" else f"DeAR, {name}",
            on_known[name],
            on_new[name],
            harmonic_mean(on_known[name], on_new[name]),
            name == usual,
        )
        for name in on_known
    )


def _changed(compared: Compared) -> Changed:
    groups = compared.changes()
    some = {name: rows[:: max(1, len(rows) // CHANGED)][:CHANGED] for name, rows in groups.items()}
    return Changed(
        fixed=tuple(gallery(compared, some["fixed"], before=True)),
        broken=tuple(gallery(compared, some["broken"], before=True)),
        counts=(len(groups["fixed"]), len(groups["broken"])),
        classes=tuple(compared.class_changes()),
    )


NEIGHBORS, DRAWS = 8, 5


@dataclass(frozen=True, eq=False)
class KnownImages:
    """Images of shapes whose attributes are known."""

    scenes: world.Scenes  #: what they show
    collected: Collected  #: their features and the heads' contributions
    values: Tensor  #: int [n, factors], -1 where an attribute is not visible


def known_images(clip: Clip, roles: RoleMap, number: int) -> KnownImages:
    """Draw images of single shapes and collect the contributions of the heads that have roles."""
    rng = torch.Generator().manual_seed(_SEED)
    scenes = world.sample(number, rng, kinds=(vocabulary.SHAPE,))
    return KnownImages(scenes, collect(clip, batches(clip, scenes), roles.layers), scenes.factors())


def truth_rows(known: KnownImages, roles: RoleMap) -> tuple[TruthRow, ...]:
    """How much of the variance of a concept's heads its attribute explains, beside all other heads."""
    rows = []
    for concept, column, heads in _concepts(roles):
        shown = known.values[:, column] >= 0
        part = known.collected
        share = explained_variance(part.outputs[shown], part.maps, known.values[shown, column])  # [L, H]
        own = torch.zeros_like(share, dtype=torch.bool)
        for layer, head in heads:
            own[part.layers.index(layer), head] = True
        rows.append(TruthRow(concept, len(heads), float(share[own].mean()), float(share[~own].mean())))
    return tuple(rows)


def retrieval_facts(known: KnownImages, roles: RoleMap) -> RetrievalFacts:
    """Precision of retrieval in each concept, with every image as the query."""
    rng, keys = random.Random(1), [key for key, _ in roles]
    whole = known.collected.features - known.collected.features.mean(dim=0)
    rows, spaces = [], {}
    for concept, column, heads in _concepts(roles):
        shown = (known.values[:, column] >= 0).nonzero()[:, 0]
        values = known.values[shown, column]

        def by(space: Tensor, shown: Tensor = shown, values: Tensor = values) -> float:
            return precision_at(space[shown], values, NEIGHBORS)

        spaces[concept], _ = head_space(known.collected, heads)
        draws = [by(head_space(known.collected, rng.sample(keys, len(heads)))[0]) for _ in range(DRAWS)]
        share = torch.bincount(values).double() / len(values)
        rows.append(
            PrecisionRow(
                concept,
                len(heads),
                by(spaces[concept]),
                by(F.normalize(whole, dim=-1)),
                sum(draws) / DRAWS,
                float((share**2).sum()),
            )
        )
    query = _typical(known, spaces, rows)
    found = {
        concept: tuple(_shown(known, place, query, concept) for place in _nearest(space, query))
        for concept, space in spaces.items()
    }
    return RetrievalFacts(len(known.scenes), NEIGHBORS, tuple(rows), _shown(known, query, query), found)


def _nearest(space: Tensor, query: int) -> list[int]:
    """The places of the images most similar to one of them."""
    near = space @ space[query]
    near[query] = -2.0  # not the query itself
    return near.topk(NEIGHBORS).indices.tolist()


def _typical(known: KnownImages, spaces: Mapping[str, Tensor], rows: Sequence[PrecisionRow]) -> int:
    """The image whose own precision is nearest to the means, among photos that show all attributes."""
    shown = (known.values[:, list(_COLUMNS.values())] >= 0).all(dim=1)
    candidates = (shown & (known.scenes.style == 0) & (known.scenes.count == 1)).nonzero()[:, 0].tolist()

    def distance(query: int) -> float:
        total = 0.0
        for row in rows:
            values = known.values[:, _COLUMNS[row.concept]]
            right = (values[_nearest(spaces[row.concept], query)] == values[query]).double().mean()
            total += abs(float(right) - row.by_heads)
        return total

    return int(min(candidates, key=distance))


def _concepts(roles: RoleMap) -> list[tuple[str, int, list[Key]]]:
    """(concept, column of its attribute, its heads) of the concepts that have heads."""
    found = [(name, column, list(roles.select("core", name))) for name, column in _COLUMNS.items()]
    return [row for row in found if row[2]]


def _word(known: KnownImages, place: int, concept: str) -> str:
    value = int(known.values[place, _COLUMNS[concept]])
    if value < 0:
        return "not visible"
    if concept == "Color":
        return vocabulary.COLORS[value].words[0]
    if concept == "Texture":
        return vocabulary.TEXTURES[value][0]
    return vocabulary.PLACES[value][0][0]


def _shown(known: KnownImages, place: int, query: int, concept: str | None = None) -> Thumbnail:
    """An image with its attributes; with a concept only that one, marked right where the query has it."""
    pixels = world.render(known.scenes[slice(place, place + 1)])[0]  # uint8 [3, S, S]
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy(), "RGB")
    words = {name: _word(known, place, name) for name in _COLUMNS}
    text = ", ".join(words.values())
    if concept is None:
        lines = tuple(("soft", f"{name.lower()}: {word}") for name, word in words.items())
        return Thumbnail(thumbnail(image), f"the query: {text}", lines)
    same = words[concept] == _word(known, query, concept)
    line = ("right", f"✓ {words[concept]}") if same else ("wrong", f"✗ {words[concept]}")
    return Thumbnail(thumbnail(image), text, (line,))


DATA, CONCEPT = "world:shortcut-place", "Location"
DRAWS = 5  #: of random heads
FIXED = 6  #: images shown that the repair answers rightly


@dataclass(frozen=True, eq=False)
class Seen:
    """The training and test images of the task, with the contributions of the heads."""

    train: ImageSet
    test: ImageSet
    train_heads: Collected
    test_heads: Collected


def shortcut_facts(clip: Clip, roles: RoleMap, per_group: int) -> ShortcutFacts:
    """Train a linear probe on animals at a place of their own each; audit, repair and test it everywhere.

    Args:
        clip: the backbone.
        roles: its role map.
        per_group: test images per class and place.
    """
    seen = _seen(clip, roles, per_group)
    untouched = probe(seen.train_heads.features, seen.train.labels)
    findings = _audit(clip, roles, seen, untouched)
    heads = roles.select(concept=CONCEPT)
    by_heads = remove_heads(seen.train_heads, heads, CONCEPT)
    by_words = remove_span(seen.train_heads, value_features(clip, known_concepts()[CONCEPT])[1], CONCEPT)
    rng, keys = random.Random(SEED), [key for key, _ in roles]
    draws = [remove_heads(seen.train_heads, rng.sample(keys, len(heads)), "random") for _ in range(DRAWS)]
    before, after = (_answers(seen, repair) for repair in (None, by_heads))
    rows = (
        _row(seen, "nothing removed", [before]),
        _row(seen, f"the {len(heads)} {CONCEPT} heads removed", [after], recommended=True),
        _row(seen, f"{len(heads)} random heads removed ({DRAWS} draws)", [_answers(seen, d) for d in draws]),
        _row(seen, f"the words of {CONCEPT} removed", [_answers(seen, by_words)]),
    )
    fixed = ((before != seen.test.labels) & (after == seen.test.labels)).nonzero()[:, 0].tolist()
    planted = next(one for one in findings if one.association.concept == CONCEPT)
    return ShortcutFacts(
        images=(len(seen.train), len(seen.test)),
        groups=len(set(group_names(seen.test) or ())),
        concepts=tuple(_concept_row(one) for one in findings),
        sentence=planted.sentence,
        heads=len(heads),
        rows=rows,
        examples=tuple(_example(seen.train, label) for label in range(len(seen.train.classes))),
        fixed=tuple(_fixed(seen.test, row, before) for row in fixed[:: max(1, len(fixed) // FIXED)][:FIXED]),
    )


def probe(features: Tensor, labels: Tensor) -> Answers:
    """A linear probe: logistic regression on unit features."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=100, max_iter=300).fit(F.normalize(features, dim=-1).numpy(), labels.numpy())
    weight, bias = torch.from_numpy(model.coef_).float(), torch.from_numpy(model.intercept_).float()
    return lambda rows: F.normalize(rows, dim=-1) @ weight.T + bias


def _seen(clip: Clip, roles: RoleMap, per_group: int) -> Seen:
    train, test = few_shot(open_data(DATA, "train"), SHOTS, SEED), open_data(DATA, "test")
    places: dict[str, list[int]] = {}
    for index, name in enumerate(group_names(test) or ()):
        places.setdefault(name, []).append(index)
    test = test.subset([index for rows in places.values() for index in rows[:per_group]])
    return Seen(train, test, collect(clip, train, roles.layers), collect(clip, test, roles.layers))


def _audit(clip: Clip, roles: RoleMap, seen: Seen, scores: Answers) -> list[Finding]:
    """The verdict on every concept whose words the backbone reads, suspects first."""
    images, labels = seen.train_heads, seen.train.labels
    prompts = [fill_template(seen.train.template, name) for name in seen.train.classes]
    texts = clip.encode_text(prompts).float().cpu()
    concepts = [one for one in known_concepts().values() if len(readable_words(clip, one.words)) > 1]
    own, findings = scores(images.features), []
    for concept in concepts:
        words, directions = value_features(clip, concept)
        found = associate(concept.name, words, directions, images.features, labels, texts, seed=SEED)
        ways = ways_to_remove(clip, concept, images, roles)
        heads = roles.select(concept=concept.name)
        used = [reliance(own, scores(repair.apply(images)), labels, way) for way, repair in ways.items()]
        findings.append(judge(found, max(used, key=lambda r: max(r.lost, r.changed)), heads, len(concepts)))
    rank = (SHORTCUT, ASSOCIATED, UNUSED)
    return sorted(
        findings,
        key=lambda one: (
            rank.index(one.verdict) if one.verdict in rank else len(rank),
            -one.association.excess,
        ),
    )


def _answers(seen: Seen, repair: Repair | None) -> Tensor:
    """Answers [n] of a probe trained and tested with something removed."""
    parts = (seen.train_heads, seen.test_heads)
    learn, test = (part.features if repair is None else repair.apply(part) for part in parts)
    return probe(learn, seen.train.labels)(test).argmax(dim=1)


def _row(seen: Seen, title: str, draws: Sequence[Tensor], recommended: bool = False) -> RemovalRow:
    """Accuracies, means over the draws."""
    home = _homes(seen)
    worst, everywhere, at_home = [], [], []
    for answers in draws:
        right = (answers == seen.test.labels).double()
        groups: dict[str, list[float]] = {}
        for name, hit in zip(group_names(seen.test) or (), right.tolist(), strict=True):
            groups.setdefault(name, []).append(hit)
        worst.append(min(sum(hits) / len(hits) for hits in groups.values()))
        everywhere.append(float(right.mean()))
        at_home.append(float(right[home].mean()))
    number = len(draws)
    spread = (min(worst), max(worst)) if number > 1 else None
    return RemovalRow(
        title, sum(worst) / number, sum(everywhere) / number, sum(at_home) / number, spread, recommended
    )


def _homes(seen: Seen) -> Tensor:
    """A mask [n]: the test images that show a class at its place of training."""
    trained = set(group_names(seen.train) or ())
    return torch.tensor([name in trained for name in group_names(seen.test) or ()])


def _concept_row(one: Finding) -> ConceptRow:
    found = one.association
    return ConceptRow(found.concept, found.information, found.expected, one.verdict)


def _example(images: ImageSet, label: int) -> Thumbnail:
    """The first training image of a class."""
    row = int((images.labels == label).nonzero()[0])
    name = (group_names(images) or ())[row]
    return Thumbnail(thumbnail(images.image(row)), name, (("name", name),))


def _fixed(images: ImageSet, row: int, before: Tensor) -> Thumbnail:
    """A test image that the untouched classifier takes for another class."""
    name = (group_names(images) or ())[row]
    truth, wrong = images.classes[int(images.labels[row])], images.classes[int(before[row])]
    lines = (("name", name), ("right", f"✓ {truth}"), ("soft", f"before: {wrong}"))
    return Thumbnail(thumbnail(images.image(row)), f"{name}, first answered as {wrong}", lines)
