"""The page about one adapted model: how good it is, where it is wrong, what got better and what got worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dear.report import figures
from dear.report.head_figures import gates_figure
from dear.report.page import MODE_TERMS, Table, Thumbnail, percent, render, thumbnail
from dear.tasks.run_report.facts import Compared, RunFacts

WRONG, CHANGED, CLASSES = 18, 8, 5  #: wrong answers, changed answers, and changed classes that are shown
TERMS = {
    "trained classes": "the classes the adapter was trained on",
    "new classes": "classes it was not trained on; the model knows only their names",
    "zero-shot": "the frozen backbone, before adaptation: it compares an image with a prompt for each class",
    **MODE_TERMS,
    "accuracy": "the share of images with the right answer",
    "points": "differences of accuracies in percent",
}
"""Words of the reports, in the order in which they are explained."""


def run_page(
    facts: RunFacts,
    log: Sequence[Mapping[str, float | int]] = (),
    notes: Mapping[str, str] | None = None,
) -> str:
    """The page as one HTML text that needs nothing else.

    Args:
        facts: what `dear.tasks.run_report.examine.examine` measured.
        log: lines of the training log.
        notes: how the model came about, name -> value.
    """
    trained = facts.trained
    groups = trained.changes()
    after = None if facts.zero_shot else trained.adapted.per_class[trained.mode]
    return render(
        "run.html",
        title=f"{facts.method} on {trained.images.name}",
        facts=facts,
        trained=trained,
        tiles=_tiles(facts),
        terms=_terms(facts),
        modes=_modes(facts),
        several_modes=len(trained.adapted.accuracy) > 1,
        accuracy=figures.class_accuracy(trained.frozen.per_class["default"], after),
        classes=_class_table(trained, facts.zero_shot),
        gained=changed_classes(trained, better=True),
        lost=changed_classes(trained, better=False),
        changes={name: len(rows) for name, rows in groups.items()},
        changes_figure=figures.changes({name: len(rows) for name, rows in groups.items()}),
        galleries={
            name: gallery(trained, spread_rows(groups[name]), "before") for name in ("fixed", "broken")
        },
        confusion=figures.confusion(trained.confusion(), trained.adapted.classes),
        mistakes=_mistakes(trained),
        most_wrong=gallery(trained, trained.most_wrong(WRONG)),
        new=_new(facts),
        tree=_tree(trained),
        fusion=figures.fusion_weights(facts.fusion_weights) if facts.fusion_weights else None,
        fusion_words=", ".join(f"{name} {value:.3f}" for name, value in facts.fusion_weights.items()),
        gates=None if facts.gates is None else gates_figure(facts.gates),
        curve=figures.training_curve(log) if log else None,
        notes={
            "method": facts.method,
            "backbone": facts.backbone,
            "prompt": facts.template,
            "learned parameters": f"{facts.parameters:,}",
            **({"new classes": facts.why_no_new} if facts.why_no_new else {}),
            **(notes or {}),
        },
    )


def _terms(facts: RunFacts) -> dict[str, str]:
    """The words that the page uses: no modes that the method does not have."""
    unused = set(MODE_TERMS) - set(facts.trained.adapted.answers)
    if facts.zero_shot:
        unused |= {"trained classes", "new classes", "points"}
    return {word: meaning for word, meaning in TERMS.items() if word not in unused}


def _tiles(facts: RunFacts) -> list[tuple[str, str]]:
    """The key figures."""
    accuracy, mode = facts.trained.accuracies(), facts.trained.mode
    if facts.zero_shot:
        images = len(facts.trained.labels)
        return [(percent(accuracy[mode]), "accuracy of the frozen model"), (f"{images:,}", "test images")]
    gain = 100 * (accuracy[mode] - accuracy["zero-shot"])
    tiles = [
        (percent(accuracy[mode]), "accuracy on trained classes"),
        (f"{gain:+.1f}", f"points compared with zero-shot’s {percent(accuracy['zero-shot'])}"),
    ]
    if facts.new is not None:
        alone = facts.new.alone
        new = alone.accuracies()
        delta = 100 * (new[alone.mode] - new["zero-shot"])
        tiles.append((percent(new[alone.mode]), f"accuracy on new classes ({delta:+.1f} points)"))
    return [*tiles, (f"{facts.parameters:,}", "learned parameters")]


def _modes(facts: RunFacts) -> Table:
    """Accuracy of zero-shot and every mode; recommended modes are marked."""
    trained = facts.trained.accuracies()
    new = facts.new.alone.accuracies() if facts.new else {}
    good_for: dict[str, list[str]] = {facts.trained.mode: ["trained"]}
    if facts.new:
        good_for.setdefault(facts.new.alone.mode, []).append("new")
    rows, classes = [], []
    for mode, value in trained.items():
        kinds = good_for.get(mode, [])
        name = f"{mode} (recommended for {' and '.join(kinds)} classes)" if kinds else mode
        rows.append((name, percent(value), *((percent(new[mode]),) if new else ())))
        classes.append("best" if kinds else "")
    columns = ("mode", "trained classes", *(("new classes",) if new else ()))
    return Table(columns, tuple(rows), classes=tuple(classes))


def _class_table(trained: Compared, zero_shot: bool) -> Table:
    before, counts = trained.frozen.per_class["default"], trained.confusion().sum(dim=1).tolist()
    places = {name: place for place, name in enumerate(trained.adapted.classes)}
    modes = {} if zero_shot else trained.adapted.per_class
    rows = tuple(
        (
            name,
            str(int(counts[places[name]])),
            percent(before[name]),
            *(percent(values[name]) for values in modes.values()),
        )
        for name in sorted(before, key=str.casefold)
    )
    return Table(("class", "images", "zero-shot", *modes), rows)


def changed_classes(trained: Compared, better: bool, names: tuple[str, str] = ("before", "after")) -> Table:
    """The classes that gained, or lost, most; `names` are those of the two models."""
    rows = trained.class_changes()
    shown = [row for row in reversed(rows) if row[2] > row[1]] if better else rows
    shown = [row for row in shown if (row[2] > row[1]) == better and row[2] != row[1]][:CLASSES]
    return Table(
        ("class", *names, "points"),
        tuple((name, percent(b), percent(a), f"{100 * (a - b):+.1f}") for name, b, a in shown),
    )


def _mistakes(trained: Compared) -> Table:
    pairs = trained.confused_pairs(10)
    rows = tuple((f"{truth} → {answer}", f"{count} of {total}") for truth, answer, count, total in pairs)
    return Table(("truth → answer", "images"), rows)


def _tree(trained: Compared) -> Table | None:
    """Accuracy by level of the class tree, and which level is answered; None without a tree."""
    if trained.adapted.tree is None:
        return None
    levels = trained.adapted.tree[trained.mode]
    rows = [
        (f"{level} (top)" if level == 1 else str(level), percent(accuracy), percent(share))
        for level, (accuracy, share) in enumerate(zip(levels.levels, levels.named, strict=True), 1)
    ]
    rows.append(("none is certain", "", percent(levels.unnamed)))
    return Table(("level", "accuracy at this level", "images answered at this level"), tuple(rows))


def spread_rows(rows: Sequence[int], count: int = CHANGED) -> Sequence[int]:
    """At most `count` of the rows, spread evenly."""
    return rows[:: max(1, len(rows) // count)][:count]


def gallery(compared: Compared, rows: Sequence[int], before: str = "") -> list[Thumbnail]:
    """Images with truth and answers in words; with `before`, the name of the first model, also its answer."""
    items = []
    names, sure = compared.adapted.classes, compared.adapted.confidence[compared.mode]
    for row in rows:
        truth, answer = names[int(compared.labels[row])], names[int(compared.answers[row])]
        good = truth == answer
        lines = [
            ("name", truth),
            (
                "right" if good else "wrong",
                f"{'✓' if good else '✗'} {answer} ({percent(float(sure[row]))})",
            ),
        ]
        if before:
            lines.append(("soft", f"{before}: {names[int(compared.before[row])]}"))
        text = f"{truth}, answered {'rightly' if good else 'as ' + answer}"
        items.append(Thumbnail(thumbnail(compared.images.image(row)), text, tuple(lines)))
    return items


def _new(facts: RunFacts) -> dict[str, object]:
    """The section about new classes."""
    if facts.new is None:
        return {"figure": None}
    alone, among_all = facts.new.alone, facts.new.among_all
    groups = {"trained classes": facts.trained.accuracies(), "new classes": alone.accuracies()}
    if among_all is not None:
        groups["new classes, all offered"] = among_all.accuracies()
    before, now = (groups["new classes"][name] for name in ("zero-shot", alone.mode))
    count = len(alone.adapted.classes)
    sentence = (
        f"On {len(alone.labels)} images of {count} new class{'' if count == 1 else 'es'} the adapter "
        f"{'loses' if now < before else 'gains'} {abs(100 * (now - before)):.1f} points compared with "
        f"zero-shot ({percent(before)} to {percent(now)}, mode {alone.mode})."
    )
    shares = ", ".join(f"{name} {percent(share)}" for name, share in facts.new.taken_for_trained().items())
    more = f"Images of new classes answered as a trained class when all names are offered: {shares}."
    return {"sentence": sentence, "figure": figures.accuracy_bars(groups), "more": more if shares else ""}
