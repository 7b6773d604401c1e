"""The whole story on the embedded backbone and world: roles, adaptation, comparison, a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dear._io.files import write_json
from dear.bench.published import harmonic_mean
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data import few_shot, halves, open_data
from dear.data.images import ImageSet
from dear.heads.roles import RoleMap
from dear.methods import DeAR, build_method
from dear.report.demo_page import AccuracyRow, DemoFacts, TaskFacts
from dear.report.page import Thumbnail, thumbnail
from dear.report.run_facts import Compared
from dear.report.run_page import CHANGED, gallery
from dear.train import Recipe, evaluate, train
from dear.workflows.examine import recommended_modes
from dear.workflows.retrieve import gallery_features, rank
from dear.world.measure import mini_roles

Tell = Callable[[str], None]
TASKS = ("textures", "emblems")
SHOTS, SEED = 16, 1


@dataclass(frozen=True)
class Row:
    """One way to answer on one task: accuracy on trained and on new classes, and their harmonic mean."""

    title: str
    base: float
    novel: float

    @property
    def hm(self) -> float:
        """Harmonic mean of base and novel."""
        return harmonic_mean(self.base, self.novel)


@dataclass(frozen=True)
class Story:
    """What happened on one task."""

    task: str
    classes: tuple[str, ...]
    rows: tuple[Row, ...]
    weights: dict[str, float]  #: fusion weights
    seconds: float
    base: ImageSet
    novel: ImageSet
    model: DeAR
    compared: Compared  #: on the images of the trained classes


def demo(out: str | Path, quick: bool = False, tell: Tell = print) -> list[Story]:
    """Tell the story; `out` then has `roles.json`, a run folder for each task, `results.json`, `index.html`.

    Args:
        out: folder to write.
        quick: one task, fewer images and epochs, to see that everything works.
        tell: called with sentences for the reader.
    """
    from dear.report.demo_page import write_demo_page

    folder = Path(out)
    clip = load("mini")
    parameters = sum(p.numel() for p in clip.parameters())
    tell(
        f"1. mini: a CLIP of {parameters / 1e6:.1f} million parameters, trained on the attribute world alone"
    )
    roles = mini_roles(clip, 600 if quick else 2500)
    roles.save(folder / "roles.json")
    counts = ", ".join(f"{number} {kind}" for kind, number in roles.counts().items())
    tell(f"2. roles of its {len(roles)} heads in layers {roles.layers[0]}-{roles.layers[-1]}: {counts}")
    stories = []
    for number, name in enumerate(TASKS[: 1 if quick else None], start=3):
        story = adapt_task(clip, roles, name, folder / f"run-{name}", epochs=2 if quick else None)
        stories.append(story)
        tell(f"{number}. world:{name}, {SHOTS} images per class, {story.seconds:.0f} s of training")
        for row in story.rows:
            tell(f"   {row.title:22} base {row.base:6.1%}   novel {row.novel:6.1%}   HM {row.hm:6.1%}")
    write_json(
        folder / "results.json",
        {
            story.task: {
                "rows": {
                    row.title: {"base": row.base, "novel": row.novel, "hm": row.hm} for row in story.rows
                },
                "fusion_weights": story.weights,
                "seconds": story.seconds,
            }
            for story in stories
        },
    )
    write_demo_page(folder / "index.html", demo_facts(roles, stories))
    return stories


def adapt_task(clip: Clip, roles: RoleMap, name: str, run: Path, epochs: int | None = None) -> Story:
    """Adapt to the base half of a task's classes and test on both halves."""
    whole, test = open_data(f"world:{name}", "train"), open_data(f"world:{name}", "test")
    base, novel = halves(whole.classes)
    known, fresh = test.select_classes(base), test.select_classes(novel)
    preset = DeAR.preset()
    model = build_method(
        "dear", clip, base, roles=roles, template=whole.template, seed=SEED, **preset.options
    )
    assert isinstance(model, DeAR)
    asked = {} if epochs is None else {"epochs": epochs}
    recipe = Recipe.of(model, **{**preset.recipe, "seed": SEED, **asked})
    shots = few_shot(whole.select_classes(base), SHOTS, SEED)
    trained = train(
        model, shots, recipe, run, resume=True, preset=model.recommended()
    )  # a second demo goes on where the first was
    frozen = build_method("zeroshot", clip, base, template=whole.template)
    rows = []
    on_base = {"zero-shot": evaluate(frozen, known), "DeAR": evaluate(model, known)}
    for method, title in ((frozen, "zero-shot"), (model, "DeAR")):
        on_novel = evaluate(method, fresh).accuracy
        for mode, accuracy in on_base[title].accuracy.items():
            label = title if mode == "default" else f"{title}, {mode}"
            rows.append(Row(label, accuracy, on_novel[mode]))
    compared = Compared(known, on_base["DeAR"], on_base["zero-shot"], recommended_modes(model)[0])
    weights = model.fusion_weights()
    return Story(name, base, tuple(rows), weights, trained.seconds, known, fresh, model, compared)


def demo_facts(roles: RoleMap, stories: Sequence[Story], top: int = 6) -> DemoFacts:
    """What the page shows: the tasks, and a retrieval with one query in every attribute."""
    first = stories[0]
    images = first.base.subset(range(0, len(first.base), 2))
    query = first.base.image(1)
    name = first.base.classes[int(first.base.labels[1])]
    found = rank(first.model, query, gallery_features(first.model, images), images, top)
    similar = {
        one.attribute: tuple(
            Thumbnail(
                thumbnail(images.image(index)),
                images.classes[int(images.labels[index])],
                (("soft", f"{similarity:.2f}"),),
            )
            for index, similarity in zip(one.indices, one.similarity, strict=True)
        )
        for one in found
    }
    shown = Thumbnail(thumbnail(query), f"the query: {name}", (("soft", name),))
    return DemoFacts(roles, tuple(_task_facts(story) for story in stories), shown, similar)


def _task_facts(story: Story) -> TaskFacts:
    trained, new = recommended_modes(story.model)
    good_for = {f"DeAR, {trained}": "trained", f"DeAR, {new}": "new"}
    if trained == new:
        good_for = {f"DeAR, {trained}": "trained and new"}
    rows = tuple(
        AccuracyRow(row.title, row.base, row.novel, row.hm, good_for.get(row.title, "")) for row in story.rows
    )
    groups = story.compared.changes()
    some = {name: rows[:: max(1, len(rows) // CHANGED)][:CHANGED] for name, rows in groups.items()}
    return TaskFacts(
        name=story.task,
        classes=(len(story.classes), len(story.novel.classes)),
        shots=SHOTS,
        seconds=story.seconds,
        rows=rows,
        weights=story.weights,
        fixed=tuple(gallery(story.compared, some["fixed"], before=True)),
        broken=tuple(gallery(story.compared, some["broken"], before=True)),
        counts=(len(groups["fixed"]), len(groups["broken"])),
    )
