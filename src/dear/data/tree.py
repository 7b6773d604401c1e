"""A tree of classes: each class, and each inner node, has at most one parent.

It comes from the column `parent` of a table ("cat", or "animal/cat" for two levels), from labels that are
paths ("cat/siamese" in every row), or from a JSON file: nested (`{"cat": ["siamese", "persian"]}`, any depth)
or a mapping from child to parent (`{"siamese": "cat"}`). Classes without a parent are at the top.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dear.errors import DataError, InputError
from dear.utils.files import read_mapping
from dear.utils.text import check_name, fold_name

SEPARATOR = "/"  #: between the levels of a path
Parents = dict[str, str]


def read_tree(source: str | os.PathLike[str] | Mapping[str, Any]) -> Parents:
    """The parent of each node that has one.

    Args:
        source: a JSON file, or the same as a mapping.

    Raises:
        DataError: names the node with two parents, the cycle, or the entry that is neither name nor list.

    >>> read_tree({"animal": {"cat": ["siamese"], "dog": []}, "car": []})
    {'cat': 'animal', 'siamese': 'cat', 'dog': 'animal'}
    >>> read_tree({"siamese": "cat"})
    {'siamese': 'cat'}
    """
    where, content = read_mapping(source, "tree", example="{'cat': ['siamese', 'persian']}")
    parents: Parents = {}
    if all(isinstance(value, str) for value in content.values()):
        for child, parent in content.items():
            _add(parents, child, parent, where)
    else:
        _collect_parents(content, None, parents, where)
    check_tree(parents, where)
    return parents


def add_path(parents: Parents, path: str, child: str, where: str) -> None:
    """Add a child below a path of nodes ("animal/cat"), which may exist already; "" is the top.

    Raises:
        DataError: names a node with two parents, or a cycle.
    """
    names = [part.strip() for part in path.split(SEPARATOR) if part.strip()]
    for upper, lower in zip(names, [*names[1:], child][: len(names)], strict=True):
        _add(parents, lower, upper, where)
    _check_path(parents, child, where)


def check_tree(parents: Mapping[str, str], where: str) -> None:
    """Raise a DataError that names a cycle."""
    for start in parents:
        _check_path(parents, start, where)


def _check_path(parents: Mapping[str, str], start: str, where: str) -> None:
    """Raise a DataError if a node is its own ancestor."""
    path = [start]
    while path[-1] in parents:
        path.append(parents[path[-1]])
        if path[-1] in path[:-1]:
            cycle = " < ".join(path[path.index(path[-1]) :])
            raise DataError(f"{where}: the tree has a cycle: {cycle}; remove one of these parents")


def resolve_tree(parents: Mapping[str, str], classes: Sequence[str], where: str = "tree") -> Parents:
    """The tree with the spelling of `classes`.

    Raises:
        DataError: names a leaf that is no class, or a class that is a parent.

    >>> resolve_tree({"Siamese_cat": "cat"}, ["siamese cat", "beagle"])
    {'siamese cat': 'cat'}
    """
    known = {fold_name(name): name for name in classes}
    renamed: Parents = {}
    for child, parent in parents.items():
        _add(renamed, known.get(fold_name(child), child), parent, where)
    parent_names = set(renamed.values())
    both = next((name for name in classes if name in parent_names), None)
    if both is not None:
        raise DataError(
            f"{where}: {both!r} is a class and a parent; rename the parent, or leave the class out"
        )
    names = set(classes)
    leaf = next((child for child in renamed if child not in names and child not in parent_names), None)
    if leaf is not None:
        close = difflib.get_close_matches(leaf, classes, 1) or classes[:3]
        raise DataError(
            f"{where}: {leaf!r} is neither a class nor a parent; a leaf must be a class, such as "
            f"{', '.join(map(repr, close))}"
        )
    used: Parents = {}
    for name in classes:
        node = name
        while node in renamed and node not in used:
            used[node] = renamed[node]
            node = renamed[node]
    return used


def _collect_parents(content: Any, parent: str | None, parents: Parents, where: str) -> None:
    """Collect the parents of a nested tree."""
    children = content.items() if isinstance(content, dict) else [(child, None) for child in content]
    for child, grandchildren in children:
        if not isinstance(child, str):
            raise DataError(f"{where}: every entry below {parent!r} must be a name, got {child!r}")
        if parent is not None:
            _add(parents, child, parent, where)
        if grandchildren is None or grandchildren == "":
            continue
        if not isinstance(grandchildren, dict | list):
            raise DataError(
                f"{where}: {child!r} must have a list or an object of children, got {grandchildren!r}"
            )
        _collect_parents(grandchildren, child, parents, where)


def _add(parents: Parents, child: str, parent: str, where: str) -> None:
    try:
        check_name(child)
        check_name(parent)
    except InputError as error:
        raise DataError(f"{where}: {error}") from None
    if parents.setdefault(child, parent) != parent:
        raise DataError(f"{where}: {child!r} has two parents, {parents[child]!r} and {parent!r}; keep one")
