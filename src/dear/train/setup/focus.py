"""The focus of a training: which heads it learns with, named by the user or chosen on the training images."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dear.clip.model import Clip
from dear.data.folds import IntArray
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.heads.concept_words import find_attribute
from dear.heads.focus import (
    AUTO,
    FocusChoice,
    attribute_heads,
    choose_focus,
    choose_focus_weight,
    enough_to_measure,
    few_specialized_note,
    focus_by_names,
)
from dear.heads.roles import RoleMap
from dear.methods import METHODS
from dear.methods.base import Method
from dear.runs.feature_cache import FeatureCache
from dear.utils.progress import Progress


def check_focus(kind: type[Method]) -> None:
    """Refuse a focus for a method that cannot use it."""
    if not kind.can_focus:
        names = ", ".join(name for name, other in METHODS.items() if other.can_focus)
        raise UsageError(f"the method {kind.name!r} cannot focus on heads; these can: {names}")


def find_focus(
    clip: Clip,
    images: ImageSet,
    role: str,
    roles: RoleMap,
    progress: Progress | None = None,
    units: IntArray | None = None,
) -> FocusChoice:
    """The focus that a user names (a role of the map, in any case) with its weight, or what "auto" finds.

    `units` [n]: copies of an image have the same; None: images with equal features are copies.
    """
    heads = {
        name: present
        for name, heads_of_role in attribute_heads(roles).items()
        if (present := tuple(head for head in heads_of_role if head not in clip.visual.removed_heads))
    }
    if caveat := roles.caveat():
        if role != AUTO:
            raise UsageError(f"{caveat} It cannot choose heads for {role!r}; train without a focus")
        return FocusChoice(None, why=caveat.rstrip("."))
    if role != AUTO:
        name = find_attribute(role, heads)
        heads = {name: heads[name]}
    labels = images.labels
    if not heads:
        return FocusChoice(None, why="no head of the role map has an attribute role")
    if not enough_to_measure(labels, units):
        if role != AUTO:
            return FocusChoice(
                name, heads[name], 1.0, "one image per class is too few to measure what it gains"
            )
        return focus_by_names(clip, images.classes, heads)
    cache = FeatureCache()
    features, terms = cache.features_and_terms(clip, images, list(heads.values()), progress)  # [n, E] each
    by_role = dict(zip(heads, terms, strict=True))
    if role == AUTO:
        choice = choose_focus(features, by_role, labels, heads, units)
    else:
        choice = choose_focus_weight(features, by_role[name], labels, name, heads[name], units)
    if choice.role is not None:  # training reads them from the cache
        cache.remember(clip, images, features, choice.heads, by_role[choice.role])
    return choice


def focus_options(choice: FocusChoice, kind: type[Method]) -> dict[str, Any]:
    """The options of a method for a choice; some methods have no weight."""
    known = {option.name for option in fields(kind.Config)}
    options = {"focus": choice.heads, "focus_weight": choice.weight}
    return {name: value for name, value in options.items() if name in known}


def focus_notices(choice: FocusChoice, clip: Clip, roles: RoleMap, kind: type[Method]) -> list[str]:
    """What was chosen, why, and what to know about the backbone."""
    sentence = None if roles.caveat() else few_specialized_note(roles)  # `choice.why` has the caveat
    lines = [] if sentence is None else [f"{clip.name}: {sentence}, so a focus gains little or nothing here."]
    if choice.role is None:
        return [*lines, f"Focus: none; {choice.why}."]
    weight = f", weight {choice.weight:g}" if "focus_weight" in focus_options(choice, kind) else ""
    return [*lines, f"Focus: {choice.role} ({len(choice.heads)} heads{weight}); {choice.why}."]
