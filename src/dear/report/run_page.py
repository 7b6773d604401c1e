"""The page about one adapted model: how good it is, where it errs, what the adaptation changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from dear._io.files import write_atomic
from dear.report import figures
from dear.report.gates import gates_figure
from dear.report.page import Figures, document, percent, section, table, thumbnail

if TYPE_CHECKING:
    from dear.report.run_facts import Compared, RunFacts

WRONG, CHANGED = 18, 6


def write_run_page(
    facts: RunFacts,
    path: str | os.PathLike[str],
    log: Sequence[Mapping[str, float | int]] = (),
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write the page, whole or not at all."""
    write_atomic(path, run_page(facts, log, notes))


def run_page(
    facts: RunFacts,
    log: Sequence[Mapping[str, float | int]] = (),
    notes: Mapping[str, str] | None = None,
) -> str:
    """The page as one HTML text that needs nothing else.

    Args:
        facts: what `examine` measured.
        log: lines of the training log.
        notes: how the model came about, name -> value.
    """
    method, seen = facts.method, facts.seen
    show = Figures()
    accuracy = seen.accuracies()
    gain = accuracy[facts.mode] - accuracy["zero-shot"]
    title = f"{method.title} on {seen.images.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{len(method.classes)} classes, {len(seen.labels)} test images, answers in mode '
        f"“{escape(facts.mode)}”, against the frozen {escape(method.clip.name)}.</p>",
        _tiles(facts, gain),
        section(
            "Accuracy of each class",
            "Grey is the frozen model, blue the adapted one."
            + (" The classes that changed most are shown." if len(method.classes) > 40 else ""),
            show.html(
                figures.class_accuracy(seen.frozen.per_class["default"], seen.adapted.per_class[facts.mode]),
                "Accuracy of each class before and after adaptation",
            ),
            _class_table(seen),
        ),
        _confusion(seen, show),
        section(
            "The most wrong images",
            "Wrong answers the model was surest of. Often the label is at fault, or the image shows both.",
            _images(seen, seen.most_wrong(WRONG)) or "<p>There is none: every answer was right.</p>",
        ),
        _changed(seen, show),
        _unseen(facts, show),
    ]
    if facts.fusion_weights:
        parts.append(
            section(
                "What the decision listens to",
                "Learned weights of the class token and of each attribute’s own feature; all started at the "
                "dotted line.",
                show.html(figures.fusion_weights(facts.fusion_weights), _spoken(facts.fusion_weights)),
            )
        )
    history = dict(method.named_buffers()).get("history")
    if history is not None and history.numel():
        parts.append(
            section(
                "Which heads were strengthened",
                "Head purification weighs every head of the image tower; white is as before. Move the slider "
                "to see how training came to these gates.",
                show.html(gates_figure(history), "Gates of all heads, layer by layer"),
            )
        )
    if log:
        parts.append(
            section(
                "Training",
                "The loss and its parts, unweighted.",
                show.html(figures.training_curve(log), "Loss over training steps"),
            )
        )
    parts.append(_notes(facts, notes or {}))
    return document(title, parts)


def _tiles(facts: RunFacts, gain: float) -> str:
    """The few numbers to take away."""
    accuracy = facts.seen.accuracies()
    tiles = [(percent(accuracy[facts.mode]), "right answers now")]
    tiles.append((f"{100 * gain:+.1f}", f"points against zero-shot’s {percent(accuracy['zero-shot'])}"))
    if facts.unseen is not None:
        unseen = facts.unseen.alone.accuracies()
        delta = 100 * (unseen[facts.mode] - unseen["zero-shot"])
        tiles.append((percent(unseen[facts.mode]), f"on classes never trained ({delta:+.1f} points)"))
    tiles.append((f"{facts.method.trainable_parameters:,}", "learned numbers"))
    items = "".join(
        f"<li><b>{escape(number)}</b><span>{escape(words)}</span></li>" for number, words in tiles
    )
    return f'<ul class="tiles">{items}</ul>'


def _class_table(seen: Compared) -> str:
    before, counts = seen.frozen.per_class["default"], seen.confusion().sum(dim=1).tolist()
    places = {name: place for place, name in enumerate(seen.adapted.classes)}
    modes = list(seen.adapted.per_class)
    rows = []
    for name in sorted(before, key=str.casefold):
        after = [seen.adapted.per_class[mode][name] for mode in modes]
        rows.append(
            [
                name,
                str(int(counts[places[name]])),
                percent(before[name]),
                *(percent(value) for value in after),
            ]
        )
    return (
        f"<details><summary>All {len(rows)} classes as a table</summary>"
        + table(["class", "images", "zero-shot", *modes], rows)
        + "</details>"
    )


def _confusion(seen: Compared, show: Figures) -> str:
    pairs = seen.confused_pairs(10)
    if not pairs:
        return section("What is taken for what", "Nothing is: no image was answered wrongly.")
    many = len(seen.adapted.classes) > 30
    words = "Rows are the truth, columns the answer, in per cent of the row’s images."
    rows = [[f"{truth} → {answer}", f"{count} of {total}"] for truth, answer, count, total in pairs]
    return section(
        "What is taken for what",
        words + (" The thirty classes with most mistakes are shown." if many else ""),
        show.html(
            figures.confusion(seen.confusion(), seen.adapted.classes), "Confusion matrix; see the table below"
        ),
        "<h3>The commonest mistakes</h3>",
        table(["truth → answer", "images"], rows),
    )


def _images(seen: Compared, rows: Sequence[int], before: bool = False) -> str:
    """A grid of images with truth and answers in words."""
    items = []
    names, sure = seen.adapted.classes, seen.adapted.confidence[seen.mode]
    for row in rows:
        truth, answer = names[int(seen.labels[row])], names[int(seen.answers[row])]
        good = truth == answer
        words = f"{truth}" if good else f"{truth}, not {answer}"
        lines = [f"<b>{escape(truth)}</b>"]
        lines.append(
            f'<span class="{"right" if good else "wrong"}">{"✓" if good else "✗"} {escape(answer)} '
            f"({100 * float(sure[row]):.0f}\N{NO-BREAK SPACE}%)</span>"
        )
        if before:
            lines.append(f'<span class="soft">before: {escape(names[int(seen.before[row])])}</span>')
        items.append(
            f'<li><img alt="{escape(words)}" src="{thumbnail(seen.images.image(row))}" loading="lazy">'
            f"<p>{'<br>'.join(lines)}</p></li>"
        )
    return f'<ul class="images">{"".join(items)}</ul>' if items else ""


def _changed(seen: Compared, show: Figures) -> str:
    groups = seen.changes()
    counts = {name: len(rows) for name, rows in groups.items()}
    spoken = ", ".join(f"{name} {count}" for name, count in counts.items())
    parts = [show.html(figures.changes(counts), f"Images by what adaptation did to them: {spoken}")]
    for name, words in (("fixed", "Fixed"), ("broken", "Broken")):
        if groups[name]:
            chosen = groups[name][:: max(1, len(groups[name]) // CHANGED)][:CHANGED]
            parts.append(f"<h3>{words}: {counts[name]}</h3>{_images(seen, chosen, before=True)}")
    sentence = (
        f"Of {len(seen.labels)} images the adaptation put {counts['fixed']} right that zero-shot got wrong "
        f"and {counts['broken']} wrong that it got right."
    )
    return section("What changed against zero-shot", sentence, *parts)


def _unseen(facts: RunFacts, show: Figures) -> str:
    heading = "Classes it was not trained on"
    if facts.unseen is None:
        return section(heading, facts.why_no_unseen)
    unseen = facts.unseen
    groups = {"trained classes": facts.seen.accuracies(), "unseen classes": unseen.alone.accuracies()}
    if unseen.among_all is not None:
        groups["unseen, among all classes"] = unseen.among_all.accuracies()
    before, now = (groups["unseen classes"][name] for name in ("zero-shot", facts.mode))
    verdict, count = "loses" if now < before else "gains", len(unseen.alone.adapted.classes)
    classes = "1 class" if count == 1 else f"{count} classes"
    sentence = (
        f"On {len(unseen.alone.labels)} images of {classes} the adapter "
        f"has never met, it {verdict} {abs(100 * (now - before)):.1f} points against zero-shot "
        f"({percent(before)} to {percent(now)})."
    )
    drawn = unseen.drawn_to_trained()
    more = ""
    if drawn:
        shares = ", ".join(f"{name} {percent(share)}" for name, share in drawn.items())
        more = f"<p>Taken for a trained class when all are on offer: {escape(shares)}.</p>"
    return section(heading, sentence, show.html(figures.accuracy_bars(groups), sentence), more)


def _notes(facts: RunFacts, notes: Mapping[str, str]) -> str:
    method = facts.method
    rows: dict[str, Any] = {
        "method": method.title,
        "backbone": f"{method.clip.name} ({method.clip.fingerprint[:19]}…)",
        "prompt": method.template,
        "learned numbers": f"{method.trainable_parameters:,}",
        **notes,
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows.items())
    return f"<section><h2>How it was made</h2><dl>{items}</dl></section>"


def _spoken(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())
