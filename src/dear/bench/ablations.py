"""Ablation studies: a method with one thing changed, as variants of a protocol, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dear.bench import published
from dear.bench.protocols import SEEDS_NOTE
from dear.bench.protocols.base_to_novel import column_headings, column_notes, entries, paper_entries
from dear.bench.tables import Line, Sheet, SheetRow, average
from dear.clip.config import last_third
from dear.errors import UsageError
from dear.utils.text import unknown_name


@dataclass(frozen=True)
class Variant:
    """One row of a study."""

    name: str  #: as in tables
    #: options of the method that differ from the preset's, whatever a user asks for
    options: Mapping[str, Any] = field(default_factory=dict)
    #: change of the role map, see `dear.heads.rules.derive_roles`; "{seed}" is replaced by the seed
    roles: str = ""
    mode: str | None = None  #: the way to predict; None: the study's
    #: parts of the training recipe that differ from the preset's
    recipe: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = "paper"  #: the setting that is changed; None: the recommended one


@dataclass(frozen=True)
class Study:
    """Variants that answer one question."""

    name: str  #: as in `dear ablate NAME`
    title: str  #: heading of the table
    question: str  #: what is asked, in a sentence
    variants: tuple[Variant, ...]  #: the rows; the paper's choice among them
    paper: str = ""  #: what the paper reports, in a sentence; empty where it reports nothing
    method: str = "dear"  #: the method that is studied
    protocol: str = "base-to-novel"  #: the protocol it is studied with
    mode: str | None = "fused"  #: the way to predict of variants that name none; None: the method's usual one

    def mode_of(self, lines: Sequence[Line]) -> dict[str, str]:
        """The mode that each variant is shown in: its own, or the first one of the lines."""
        return {variant.name: variant.mode or self.mode or lines[0].mode for variant in self.variants}

    def lines_in_mode(self, lines: Sequence[Line]) -> list[Line]:
        """The lines of each variant in its mode."""
        modes = self.mode_of(lines)
        return [line for line in lines if line.mode == modes[line.method]]


def _layer(layers: int, back: int) -> int:
    """The layer `back` before the last third's first, but a layer of the tower."""
    return min(max(last_third(layers)[0] - back, 1), layers)


def first_layers(layers: int) -> Study:
    """The study of J for a tower of `layers`: from two layers earlier to one later than the last third.

    >>> [variant.name for variant in first_layers(12).variants]
    ['J = 7', 'J = 8', 'J = 9', 'J = 10', 'J = 11']
    """
    usual = _layer(layers, 0)
    places = dict.fromkeys(_layer(layers, back) for back in (2, 1, 0, -1, -2))
    return Study(
        "first-layer",
        "First layer J of the tokens",
        "How early should attribute tokens enter?",
        tuple(
            Variant(f"J = {j}") if j == usual else Variant(f"J = {j}", {"first_layer": j}, f"from:{j}")
            for j in places
        ),
    )


MASKS = Study(
    "masks",
    "Role masks",
    "Does it matter which heads may read the attribute tokens?",
    (
        Variant("all-generalization", roles="uniform:generalization"),
        Variant("all-mixed", roles="uniform:mixed"),
        Variant("shuffle", roles="shuffled:{seed}"),
        Variant("dear"),
    ),
    "DeAR has the best HM; all-generalization the best novel and the worst base accuracy; all-mixed gives "
    "up novel accuracy; shuffled roles cost 3.88 HM on ImageNet (main Table 5, supplement Table 6).",
)
LOSSES = Study(
    "losses",
    "Loss parts",
    "What does each part of the loss add?",
    (
        Variant("ce", {"lambda_reg": 0.0, "lambda_fusion": 0.0}),
        Variant("ce+reg", {"lambda_fusion": 0.0}),
        Variant("ce+reg+fusion"),
    ),
    "L_reg adds 4.24 novel and costs 1.72 base accuracy; L_fusion adds 1.11 HM (main Table 6).",
)
INFERENCE = Study(
    "inference",
    "Inference strategy",
    "Do the attribute features help at test time?",
    (Variant("decoupled", mode="decoupled"), Variant("fused", mode="fused")),
    "Fusion adds 1.23 novel and 0.67 HM at equal base accuracy (supplement Table 5).",
)
THRESHOLD = Study(
    "threshold",
    "Entropy threshold (rule `quantile`)",
    "How many heads should be specialized, and how many isolated?",
    tuple(Variant(f"{percent}%", roles=f"quantile:{percent / 100}") for percent in (10, 20, 30, 40)),
    "Flat from 10% to 30%, a drop of 3.6 HM at 40% (supplement Table 6, ImageNet).",
)
CONCEPTS = Study(
    "concepts",
    "Number of core concepts",
    "How many attributes should have tokens?",
    tuple(Variant(str(count), roles=f"concepts:{count}") for count in (3, 5, 7)),
    "Five are best; three and seven cost 0.88 and 0.72 HM (supplement Table 6, ImageNet).",
)
SHUFFLE = Study(
    "shuffle",
    "Shuffled roles",
    "Do the roles belong to these heads, or is their number enough?",
    (Variant("shuffle", roles="shuffled:{seed}"), Variant("dear")),
    "Shuffling costs 3.88 HM on ImageNet (supplement Table 6).",
)
BETA = Study(
    "beta",
    "Knowledge anchoring beta",
    "How much of the raw token should enter each layer?",
    tuple(Variant(f"beta = {beta}", {"beta": beta}) for beta in (0.0, 0.5, 0.7, 0.9, 1.0)),
)
ISOLATION = Study(
    "isolation",
    "Direction of isolation",
    "May attribute tokens read the original tokens in isolated heads?",
    (
        Variant("bidirectional", {"isolation": "bidirectional"}),
        Variant("readonly", {"isolation": "readonly"}),
    ),
)


def _strong(name: str, options: Mapping[str, Any] | None = None, **changes: Any) -> Variant:
    """DeAR's preset `strong` with some options changed; `changes` are fields of `Variant`."""
    return Variant(name, options or {}, preset="strong", **changes)


STRONG = Study(
    "strong",
    "Parts of the recipe `strong`",
    "What is lost when one part of the recipe is as in the paper?",
    (
        _strong("strong"),
        _strong("free tokens", {"token_start": "free"}),
        _strong("beta = 0.9", {"beta": 0.9}),
        _strong("text beta = beta", {"text_beta": None}),
        _strong("cross-entropy on fused logits alone", {"class_ce": 0.0}),
        _strong("no early tokens", {"early_tokens": 0}),
        _strong("features as they are", {"center": 0.0}),
        _strong("one rate for tokens", {"token_rate": 1.0, "early_rate": 1.0}),
        _strong("one rate for text tokens", {"text_rate": 1.0}),
        _strong("one rate for the fusion weights", {"alpha_rate": 1.0, "lambda_fusion": 0.7}),
        _strong("batch 16", recipe={"batch": 16}),
        Variant("paper"),
    ),
)
STRONG_ROLES = Study(
    "strong-roles",
    "Roles under the recipe `strong`",
    "What do the roles of the heads add to the recipe `strong`?",
    (
        _strong("roles"),
        _strong("all-mixed", roles="uniform:mixed"),
        _strong("all-generalization", roles="uniform:generalization"),
        *(_strong(f"shuffle {draw}", roles=f"shuffled:{draw}") for draw in range(1, 6)),
    ),
)

STUDIES: Mapping[str, Study] = {
    study.name: study
    for study in (
        MASKS,
        LOSSES,
        INFERENCE,
        THRESHOLD,
        CONCEPTS,
        SHUFFLE,
        BETA,
        first_layers(12),
        ISOLATION,
        STRONG,
        STRONG_ROLES,
    )
}
"""Every study by name; `first-layer` as it is for twelve layers."""


def study(name: str, layers: int = 12) -> Study:
    """A study by name, for a tower of `layers`."""
    if name not in STUDIES:
        raise UsageError(unknown_name("study", name, [*STUDIES, "all"]))
    return first_layers(layers) if name == "first-layer" else STUDIES[name]


def table(study: Study, lines: Sequence[Line]) -> Sheet:
    """Variants of a study, on every dataset and on their average, each with the paper's row."""
    datasets = list(dict.fromkeys(line.dataset for line in lines))
    paper = published.for_study(study.name)
    chosen = study.lines_in_mode(lines)
    rows: list[SheetRow] = []
    for variant in study.variants:
        variant_lines = [line for line in chosen if line.method == variant.name]
        shown = ([average(variant_lines)] if len(variant_lines) == len(datasets) > 1 else []) + variant_lines
        rows += [SheetRow((line.dataset, variant.name), entries(line, chosen)) for line in shown]
    order = {name: place for place, name in enumerate(["Average", *datasets])}
    rows.sort(key=lambda row: order[row.labels[0]])  # stable: variants keep their order
    notes = [SEEDS_NOTE, study.question, *column_notes(chosen)]
    if study.paper:
        notes.append(f"The paper: {study.paper}")
    headings = column_headings(chosen)
    for row in paper.rows if paper is not None else ():
        where = next(iter(row.cells))[0]
        set_name = "eleven sets" if where == "Average" else where
        numbers = paper_entries(row, where, len(headings))
        rows.append(SheetRow((f"paper: {set_name}", row.variant or row.label), numbers, True))
    return Sheet(study.title, ("Dataset", "Variant"), headings, tuple(rows), tuple(notes))
