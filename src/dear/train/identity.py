"""`RunIdentity`: everything that determines a training run, compared on resuming and hashed for keys."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from dear.data.images import ImageSet
from dear.heads.roles import RoleMap
from dear.methods.base import Method
from dear.train.recipe import Recipe


def plain(value: Any) -> Any:
    """Tuples as lists, all the way down: what JSON gives back."""
    return json.loads(json.dumps(value))


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values: sorted keys, no spaces, tuples as lists.

    >>> canonical({"b": (1, 2), "a": 0.5})
    '{"a":0.5,"b":[1,2]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def roles_digest(roles: RoleMap) -> str:
    """Hash of what a method sees of a role map: the kind of each head and, of core heads, the concept."""
    heads = [[*key, role.kind, role.concept if role.kind == "core" else None] for key, role in roles]
    return digest({"core": roles.core, "heads": heads})


def data_digest(images: ImageSet) -> str:
    """Hash of the labels and names of all images, in their order."""
    keys = hashlib.sha256()
    for index, label in enumerate(images.labels.tolist()):
        keys.update(f"{label} {images.key(index)}\n".encode("utf-8", "surrogatepass"))
    return keys.hexdigest()


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Everything that decides what a run learns; runs with equal identities learn the same.

    Attributes:
        method: name of the method.
        options: its options, all of them.
        recipe: the training recipe, all of it.
        classes: class names in the order of the labels.
        template: the prompt around a class name.
        ids: token ids that were given instead of prompts.
        fingerprint: hash of the backbone's weights.
        roles: hash of the role map; None where none is used.
        data: hash of the training images' names and labels.
        correction: hash of the correction of the image feature; None where there is none.
        preset: name of the setting that options and recipe were taken from.
    """

    method: str
    options: Mapping[str, Any]
    recipe: Mapping[str, Any]
    classes: tuple[str, ...]
    template: str
    ids: tuple[tuple[int, ...], ...] | None
    fingerprint: str
    roles: str | None
    data: str
    correction: str | None = None
    preset: str | None = None

    @classmethod
    def of(cls, method: Method, recipe: Recipe, images: ImageSet, preset: str | None = None) -> RunIdentity:
        """The identity of a run that is to train `method` on `images`."""
        ids = method.prompts.given
        used = method.roles if method.uses_roles else None
        return cls(
            method=method.name,
            options=plain(dataclasses.asdict(method.config)),
            recipe=plain(dataclasses.asdict(recipe)),
            classes=method.classes,
            template=method.template,
            ids=None if ids is None else tuple(map(tuple, ids.tolist())),
            fingerprint=method.clip.fingerprint,
            roles=None if used is None else roles_digest(used),
            data=data_digest(images),
            correction=None if method.clip.correction is None else method.clip.correction.digest,
            preset=preset,
        )

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that change with any part, but for the preset's name."""
        parts = dataclasses.asdict(self)
        del parts["preset"]  # the options and the recipe say what it stands for
        return digest(parts)[:16]

    def differences(self, other: RunIdentity) -> list[str]:
        """What differs, in words: the parts, and of options and recipe the names in them.

        >>> one = RunIdentity("coop", {"context": 4}, {"lr": 1.0}, ("a",), "{}", None, "sha256:0", None, "0")
        >>> one.differences(dataclasses.replace(one, options={"context": 8}, template="a {}"))
        ['options (context)', 'template']
        """
        found = []
        for field in dataclasses.fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "preset" or ours == theirs:
                continue
            words = _WORDS.get(field.name, field.name)
            if isinstance(ours, Mapping):
                names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
                words = f"{words} ({', '.join(names)})"
            found.append(words)
        return found


_WORDS = {"roles": "role map", "fingerprint": "backbone", "data": "training images", "ids": "token ids"}
