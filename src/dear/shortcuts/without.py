"""Removing concepts from a backbone before anything learns or answers: `without="location"`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dear.clip.model import Clip
from dear.data.folds import Places
from dear.data.images import ImageSet
from dear.data.open import open_folder
from dear.errors import UsageError
from dear.heads.ablate import Collected, collect
from dear.heads.concept_words import Concept, find_concept, readable_words, value_features
from dear.heads.known_roles import known_roles, read_roles
from dear.heads.names import CONCEPTS
from dear.heads.roles import RoleMap
from dear.shortcuts.choose import ORDER, Choice, choose
from dear.shortcuts.edits import KINDS
from dear.shortcuts.properties import PROPERTIES
from dear.shortcuts.removal import Repair, combine, remove_examples, remove_heads, remove_span
from dear.utils.files import PathLike
from dear.utils.pairs import split_names
from dear.utils.text import unknown_name

WAYS = ("auto", *ORDER, "directions", "copies")  #: the last two remove properties of images


@dataclass(frozen=True)
class Without:
    """Which concepts to remove, and how."""

    #: names of the twelve concepts, or `name: value, value`; with examples, any name
    concepts: tuple[str, ...]
    #: "auto" (chosen on the training images), "words", "heads", "examples", "leace", or several with a plus
    #: sign between ("heads+words")
    way: str = "auto"
    #: per concept a folder with one folder of images per value, or an image set whose classes are the values
    examples: Mapping[str, PathLike | ImageSet] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.concepts:
            raise UsageError("name at least one concept to remove")
        parts = self.way.split("+")
        wrong = [part for part in parts if part not in WAYS or (part == "auto" and len(parts) > 1)]
        if wrong:
            raise UsageError(
                f"no way to remove a concept is called {self.way!r}; choose from {', '.join(WAYS)}, or "
                f"several of {', '.join(ORDER)} with a plus sign between"
            )
        strange = [name for name in self.examples if name not in self.concepts]
        if strange:
            raise UsageError(f"examples of {strange[0]!r} are given, but that concept is not to be removed")
        if {"examples", "leace"} & set(parts) and not self.examples:
            raise UsageError(f"removal by {self.way} needs examples: one folder of images per value")

    @classmethod
    def of(
        cls,
        concepts: str | Sequence[str] | Without,
        way: str = "auto",
        examples: PathLike | ImageSet | Mapping[str, PathLike | ImageSet] | Sequence[str] | None = None,
    ) -> Without:
        """From what people write.

        Args:
            concepts: one name, several, or "location,color"; "background: lab bench, outdoors" has values.
            way: how to remove them.
            examples: images of the only concept; by concept for several; or texts such as "light=folder".

        Raises:
            UsageError: a concept is unknown and has no examples, or examples fit no concept.

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
            names += [text.strip()] if ":" in text else split_names(text)  # values keep their commas
        if examples is None:  # a concept of one's own may have any name
            titles = {each.title: each.edit for each in PROPERTIES if each.edit in KINDS}  # as audits print
            names = [name if name in KINDS else titles.get(name, name) for name in names]
        names = list(dict.fromkeys(names))
        shown = _examples_by_concept(names, examples)
        for name in names:
            if name not in shown and name not in KINDS:
                _check_name(name)
        return cls(tuple(names), way, shown)


def _check_name(name: str) -> None:
    """Check that a concept is known, or defined by its values; a misspelled property is named, too."""
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
            raise UsageError(f"examples: say which of the concepts {', '.join(names)} they show")
        return {names[0]: examples}
    shown: dict[str, PathLike | ImageSet] = {}
    for text in examples:
        name, sign, folder = text.partition("=")
        if sign and name in names:
            shown[name] = folder
        elif len(names) == 1:
            shown[names[0]] = text
        else:
            raise UsageError(f"examples: expected CONCEPT=FOLDER with a removed concept, got {text!r}")
    return shown


@dataclass(frozen=True, eq=False)
class Removal:
    """A backbone without some concepts, and how each was removed."""

    clip: Clip  #: the corrected backbone
    repair: Repair  #: what was removed
    choices: Mapping[str, Choice]  #: per concept the way taken, and the scores of the ways that were tried
    images: Collected  #: contributions of the training images in the plain backbone
    ways: Mapping[str, Mapping[str, Repair]]  #: per concept every way there was

    @property
    def title(self) -> str:
        """A few words for people: "Location by words (11 directions)"."""
        return self.repair.title

    @property
    def notices(self) -> tuple[str, ...]:
        """What to know before the removal is kept, one sentence each."""
        return tuple(
            f"Removing {name} by {choice.way} lowers cross-validated accuracy on the training images from "
            f"{choice.before:.0%} to {choice.after:.0%}: it takes away what the classes differ in."
            for name, choice in self.choices.items()
            if choice.costly
        )

    def facts(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "removed": self.repair.title,
            "heads": [list(head) for head in self.repair.heads],
            "directions": self.repair.rank,
            "folds_into_weights": self.repair.correction().foldable,
            "notices": list(self.notices),
            "choices": {
                name: {"way": choice.way, "scores": {way: round(s, 4) for way, s in choice.scores.items()}}
                for name, choice in self.choices.items()
            },
        }


def remove(
    clip: Clip,
    images: ImageSet,
    without: Without,
    roles: PathLike | RoleMap | None = None,
    heads_first: bool = False,
    units: Places | None = None,
) -> Removal:
    """Remove concepts from a backbone, with everything measured on the training images.

    A correction that the backbone has is replaced. Without `roles`, heads are those of its role map, if
    it has one. `heads_first` takes heads where they alone are as good as the best, for a method that learns
    inside the image tower. `units` [n]: copies of an image have the same; None: images with equal features
    are copies.
    """
    known = role_map(roles, clip)
    plans = {name: _concept(name, without) for name in without.concepts}  # all checked before any work
    examples = {name: _examples(source) for name, source in without.examples.items()}
    layers = known.layers if known is not None else clip.config.vision.last_third
    seen = collect(clip, images, layers)
    offers: dict[str, dict[str, Repair]] = {}
    choices: dict[str, Choice] = {}
    for name, concept in plans.items():
        offers[name] = ways_to_remove(clip, concept, seen, known, examples.get(name))
        if without.way != "auto":
            choices[name] = _named_way(concept.name, offers[name], without.way)
        elif offers[name]:
            choices[name] = choose(seen, images.labels, offers[name], heads_first=heads_first, units=units)
        else:
            raise UsageError(
                f"{concept.name}: this backbone reads none of its words and the role map has no head for it; "
                "give examples"
            )
    repair = combine(*(choice.repair for choice in choices.values()))
    return Removal(clip.corrected(repair.correction()), repair, choices, seen, offers)


def role_map(roles: PathLike | RoleMap | None, clip: Clip) -> RoleMap | None:
    """The role map given, checked; else the backbone's own, where it has one."""
    if roles is None:
        return known_roles(clip)
    checked = roles if isinstance(roles, RoleMap) else read_roles(roles)
    checked.check(clip)
    return checked


def _concept(name: str, without: Without) -> Concept:
    """The concept of a name; one that only examples show needs no words."""
    try:
        return find_concept(name)
    except UsageError:
        if name in without.examples and ":" not in name:
            return Concept(name, ())
        raise


def _examples(source: PathLike | ImageSet) -> ImageSet:
    """Images by value."""
    if isinstance(source, ImageSet):
        return source
    if not os.path.isdir(source):
        raise UsageError(f"{os.fspath(source)}: no such folder of examples; it needs one folder per value")
    return open_folder(source, "all")


def ways_to_remove(
    clip: Clip, concept: Concept, seen: Collected, roles: RoleMap | None, examples: ImageSet | None = None
) -> dict[str, Repair]:
    """Every way there is to remove a concept, by name."""
    ways: dict[str, Repair] = {}
    if len(readable_words(clip, concept.words)) > 1:
        ways["words"] = remove_span(seen, value_features(clip, concept)[1], concept.name)
    if examples is not None:
        features = collect(clip, examples, clip.config.vision.last_third[-1:]).features
        ways["examples"] = remove_examples(seen, features, examples.labels, concept.name)
        ways["leace"] = remove_examples(seen, features, examples.labels, concept.name, leace=True)
    heads = () if roles is None or concept.role is None else roles.select(concept=concept.role)
    if heads:
        ways["heads"] = remove_heads(seen, heads, concept.name)
    return ways


def _named_way(name: str, offers: Mapping[str, Repair], way: str) -> Choice:
    missing = [part for part in way.split("+") if part not in offers]
    if missing:
        reasons = {
            "heads": "the role map has no head for it",
            "words": "the backbone reads fewer than two of its words",
        }
        why = reasons.get(missing[0], "no examples of it are given")
        there = f"; there is {', '.join(offers)}" if offers else ""
        raise UsageError(f"{name} cannot be removed by {missing[0]}: {why}{there}")
    return Choice(way, combine(*(offers[part] for part in way.split("+"))), {})
