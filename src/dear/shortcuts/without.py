"""Removing concepts from a backbone before training and prediction: `without="location"`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dear.clip.model import Clip
from dear.data.folds import IntArray
from dear.data.images import ImageSet
from dear.data.open import open_folder
from dear.errors import UsageError
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.concept_words import Concept, find_concept, readable_words, value_features
from dear.heads.known_roles import resolve_roles
from dear.heads.names import CONCEPTS
from dear.heads.roles import RoleMap
from dear.shortcuts.concept_trials import ORDER, ConceptChoice, choose_concept_removal
from dear.shortcuts.edits import KINDS
from dear.shortcuts.properties import PROPERTIES
from dear.shortcuts.removal import Removal, combine, remove_examples, remove_heads, remove_span
from dear.utils.files import PathLike
from dear.utils.pairs import split_names
from dear.utils.text import unknown_name

WAYS = ("auto", *ORDER, "directions", "copies")  #: the last two remove properties of images


@dataclass(frozen=True)
class Without:
    """Which concepts to remove, and how."""

    #: names of the twelve concepts, or `name: value, value`; with examples, any name
    concepts: tuple[str, ...]
    #: "auto" (chosen on the training images), "words", "heads", "examples", "leace", or several joined by
    #: plus signs ("heads+words")
    way: str = "auto"
    #: per concept a folder with one folder of images per value, or an image set whose classes are the values
    examples: Mapping[str, PathLike | ImageSet] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.concepts:
            raise UsageError("concepts must contain at least one concept to remove, got none")
        parts = self.way.split("+")
        invalid = [part for part in parts if part not in WAYS or (part == "auto" and len(parts) > 1)]
        if invalid:
            raise UsageError(
                f"way must be one of {', '.join(WAYS)}, or several of {', '.join(ORDER)} joined by plus "
                f"signs, got {self.way!r}"
            )
        unused = [name for name in self.examples if name not in self.concepts]
        if unused:
            raise UsageError(
                f"examples must be of a concept to remove ({', '.join(self.concepts)}), got {unused[0]!r}"
            )
        if {"examples", "leace"} & set(parts) and not self.examples:
            raise UsageError(
                f"way {self.way!r} needs examples, got none; pass one folder of images per value"
            )

    @classmethod
    def of(
        cls,
        concepts: str | Sequence[str] | Without,
        way: str = "auto",
        examples: PathLike | ImageSet | Mapping[str, PathLike | ImageSet] | Sequence[str] | None = None,
    ) -> Without:
        """Parse names, as on the command line.

        Args:
            concepts: one name, several, or "location,color"; "background: lab bench, outdoors" has values.
            way: how to remove them.
            examples: images of the concept; with several concepts a mapping, or strings "light=folder".

        Raises:
            UsageError: a concept is unknown and has no examples, or examples belong to no concept.

        >>> Without.of("location,color").concepts
        ('location', 'color')
        >>> Without.of("color cast").concepts
        ('cast',)
        >>> Without.of("background: lab bench, outdoors").concepts
        ('background: lab bench, outdoors',)
        >>> Without.of(["location", "light"], examples=["light=lamps"]).examples
        {'light': 'lamps'}
        """
        if isinstance(concepts, Without):
            return concepts
        names: list[str] = []
        for text in [concepts] if isinstance(concepts, str) else concepts:
            names += [text.strip()] if ":" in text else split_names(text)  # commas separate values
        if examples is None:  # a concept defined by examples may have any name
            titles = {each.title: each.edit for each in PROPERTIES if each.edit in KINDS}  # as audits print
            names = [name if name in KINDS else titles.get(name, name) for name in names]
        names = list(dict.fromkeys(names))
        by_concept = _examples_by_concept(names, examples)
        for name in names:
            if name not in by_concept and name not in KINDS:
                _check_name(name)
        return cls(tuple(names), way, by_concept)


def _check_name(name: str) -> None:
    """Check that a concept is known or defined by its values; the error also suggests image properties."""
    try:
        find_concept(name)
    except UsageError:
        if ":" in name:
            raise
        choices = [*(concept.lower() for concept in CONCEPTS), *KINDS]
        raise UsageError(unknown_name("concept or image property", name, choices)) from None


def _examples_by_concept(
    names: Sequence[str],
    examples: PathLike | ImageSet | Mapping[str, PathLike | ImageSet] | Sequence[str] | None,
) -> dict[str, PathLike | ImageSet]:
    if examples is None or isinstance(examples, Mapping):
        return dict(examples or {})
    if isinstance(examples, str | os.PathLike | ImageSet):
        if len(names) != 1:
            raise UsageError(
                f"examples must be a mapping by concept for several concepts ({', '.join(names)}), "
                f"got {examples}"
            )
        return {names[0]: examples}
    by_concept: dict[str, PathLike | ImageSet] = {}
    for text in examples:
        name, sign, folder = text.partition("=")
        if sign and name in names:
            by_concept[name] = folder
        elif len(names) == 1:
            by_concept[names[0]] = text
        else:
            raise UsageError(f"examples must be CONCEPT=FOLDER with a removed concept, got {text!r}")
    return by_concept


@dataclass(frozen=True, eq=False)
class RemovedConcepts:
    """A backbone without some concepts, and how each was removed."""

    clip: Clip  #: the corrected backbone
    removal: Removal  #: what was removed
    choices: Mapping[str, ConceptChoice]  #: per concept, the chosen way and the scores of all
    images: HeadContributions  #: contributions of the training images in the plain backbone
    ways: Mapping[str, Mapping[str, Removal]]  #: per concept, all possible removals by way

    @property
    def title(self) -> str:
        """Short description, such as "Location by words (11 directions)"."""
        return self.removal.title

    @property
    def notices(self) -> tuple[str, ...]:
        """Warnings about removals that cost accuracy."""
        return tuple(
            f"Removing {name} by {choice.way} lowers cross-validated accuracy on the training images from "
            f"{choice.before:.0%} to {choice.after:.0%}: the classes differ in what it removes."
            for name, choice in self.choices.items()
            if choice.costly
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "removed": self.removal.title,
            "heads": [list(head) for head in self.removal.heads],
            "directions": self.removal.rank,
            "folds_into_weights": self.removal.correction().foldable,
            "notices": list(self.notices),
            "choices": {
                name: {"way": choice.way, "scores": {way: round(s, 4) for way, s in choice.scores.items()}}
                for name, choice in self.choices.items()
            },
        }


def remove_concepts(
    clip: Clip,
    images: ImageSet,
    without: Without,
    roles: PathLike | RoleMap | None = None,
    heads_first: bool = False,
    units: IntArray | None = None,
) -> RemovedConcepts:
    """Remove concepts from a backbone, with means and choices from the training images.

    Args:
        clip: the backbone; its correction, if it has one, is replaced.
        images: the training images.
        without: the concepts, and how to remove them.
        roles: a role map; None: the packaged one of the backbone, if there is one.
        heads_first: prefer heads if they alone score as well as the best, for a method that learns inside the
            image tower.
        units: [n], equal for copies of an image; None: images with equal features are copies.
    """
    checked_roles = resolve_roles(roles, clip)
    concepts = {name: _find_concept(name, without) for name in without.concepts}  # checked before any work
    examples = {name: _open_examples(source) for name, source in without.examples.items()}
    layers = checked_roles.layers if checked_roles is not None else clip.config.vision.last_third
    collected = collect_contributions(clip, images, layers)
    ways: dict[str, dict[str, Removal]] = {}
    choices: dict[str, ConceptChoice] = {}
    for name, concept in concepts.items():
        ways[name] = possible_removals(clip, concept, collected, checked_roles, examples.get(name))
        if without.way != "auto":
            choices[name] = _choose_named_way(concept.name, ways[name], without.way)
        elif ways[name]:
            choices[name] = choose_concept_removal(
                collected, images.labels, ways[name], heads_first=heads_first, units=units
            )
        else:
            raise UsageError(
                f"{concept.name} cannot be removed: the tokenizer reads none of its words, and the role map "
                "has no head for it; pass examples"
            )
    removal = combine(*(choice.removal for choice in choices.values()))
    return RemovedConcepts(clip.with_correction(removal.correction()), removal, choices, collected, ways)


def _find_concept(name: str, without: Without) -> Concept:
    """The concept with this name; one that examples define needs no words."""
    try:
        return find_concept(name)
    except UsageError:
        if name in without.examples and ":" not in name:
            return Concept(name, ())
        raise


def _open_examples(source: PathLike | ImageSet) -> ImageSet:
    """Example images, whose classes are the values of a concept."""
    if isinstance(source, ImageSet):
        return source
    if not os.path.isdir(source):
        raise UsageError(
            f"examples must be a folder with one folder of images per value, got {os.fspath(source)}, "
            "which does not exist"
        )
    return open_folder(source, "all")


def possible_removals(
    clip: Clip,
    concept: Concept,
    collected: HeadContributions,
    roles: RoleMap | None,
    examples: ImageSet | None = None,
) -> dict[str, Removal]:
    """All possible removals of a concept, by way."""
    ways: dict[str, Removal] = {}
    if len(readable_words(clip, concept.words)) > 1:
        ways["words"] = remove_span(collected, value_features(clip, concept)[1], concept.name)
    if examples is not None:
        features = collect_contributions(clip, examples, clip.config.vision.last_third[-1:]).features
        ways["examples"] = remove_examples(collected, features, examples.labels, concept.name)
        ways["leace"] = remove_examples(collected, features, examples.labels, concept.name, leace=True)
    heads = () if roles is None or concept.role is None else roles.select(concept=concept.role)
    if heads:
        ways["heads"] = remove_heads(collected, heads, concept.name)
    return ways


def _choose_named_way(name: str, ways: Mapping[str, Removal], way: str) -> ConceptChoice:
    """The removal by `way`, which the user named; no scores."""
    missing = [part for part in way.split("+") if part not in ways]
    if missing:
        reasons = {
            "heads": "the role map has no head for it",
            "words": "the tokenizer reads fewer than two of its words",
        }
        reason = reasons.get(missing[0], "it has no examples")
        remedy = f"; use {' or '.join(ways)}" if ways else ""
        raise UsageError(f"{name} cannot be removed by {missing[0]}: {reason}{remedy}")
    return ConceptChoice(way, combine(*(ways[part] for part in way.split("+"))), {})
